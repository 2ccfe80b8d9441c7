//! A loss that is computed chunk by chunk, over a part of a model: the head's weights are gathered
//! once and its gradients reduced once, and a chunk's activations are gone before the next one's
//! are there. Units of several modules of which only some run.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{FsdpModule, MixedPrecisionPolicy};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Holder, furthest, on_device, tensor, values};

/// No multiple of the ranks.
const WORDS: usize = 11;
const WIDTH: usize = 5;
const SEQ: usize = 6;
const BATCH: usize = 2;
const CHUNKS: usize = 3;

/// A language model.
#[derive(Module, Debug)]
struct Lm {
    table: Embedding,
    blocks: Vec<Linear>,
    norm: LayerNorm,
    /// None if the table is the head, too.
    head: Option<Linear>,
}

type Values = BTreeMap<String, Vec<f32>>;

impl Lm {
    fn init() -> Self {
        let device = Device::flex();
        let linear = |width| LinearConfig::new(WIDTH, width).init(&device);
        let lm = Self {
            table: EmbeddingConfig::new(WORDS, WIDTH).init(&device),
            blocks: vec![linear(WIDTH), linear(WIDTH)],
            norm: LayerNormConfig::new(WIDTH).init(&device),
            head: Some(linear(WORDS)),
        };
        let _ = values(&lm, None);
        lm
    }

    fn tied() -> Self {
        Self {
            head: None,
            ..Self::init()
        }
    }

    fn head(&self) -> &Linear {
        self.head.as_ref().expect("it is not tied")
    }

    /// What the head reads, `[batch, seq, width]`.
    fn hidden(&self, words: Tensor<2, Int>) -> Tensor<3> {
        unit(self, words, |lm, words| {
            let x = unit(&lm.table, words, |table, words| table.forward(words));
            lm.blocks.iter().fold(x, |x, block| {
                unit(block, x, |block, x| block.forward(x).tanh())
            })
        })
    }

    /// The sum of the losses of some positions.
    fn loss(&self, hidden: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        let x = unit(&self.norm, hidden, |norm, x| norm.forward(x));
        let logits = match &self.head {
            Some(head) => unit(head, x, |head, x| head.forward(x)),
            None => unit(&self.table, x, |table, x| {
                x.matmul(table.weight.val().transpose().unsqueeze())
            }),
        };
        let [batch, seq, words] = logits.dims();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(
            logits.reshape([batch * seq, words]),
            next.reshape([batch * seq]),
        ) * (batch * seq) as f64
    }

    /// In one piece: the loss of all positions.
    fn step(&self, [words, next]: [Tensor<2, Int>; 2]) -> GradientsParams {
        let loss = self.loss(self.hidden(words), next) / (BATCH * SEQ) as f64;
        GradientsParams::from_grads(loss.backward(), self)
    }

    /// Chunk by chunk, each with a backward of its own, which leaves the head's gradients with its
    /// units except for the last. Then the trunk's, by what the chunks have made of its output; it
    /// reduces the gradients of a table that is the head, too.
    fn chunked(&self, [words, next]: [Tensor<2, Int>; 2]) -> Result<GradientsParams> {
        let norm = FsdpModule::of(&self.norm)?;
        let head = match &self.head {
            Some(head) => FsdpModule::of(head)?,
            None => FsdpModule::of(&self.table)?,
        };
        for units in [&norm, &head] {
            units.set_reshard_after_forward(ReshardAfterForward::Never)?;
            units.set_reshard_after_backward(false);
        }
        let complete = |units: &FsdpModule, is_last: bool| {
            units.set_requires_gradient_sync(is_last);
            units.set_reshard_after_backward(is_last);
        };
        let hidden = self.hidden(words);
        let (mut grads, mut of_hidden) = (GradientsParams::new(), Vec::new());
        for chunk in 0..CHUNKS {
            let at = chunk * SEQ / CHUNKS..(chunk + 1) * SEQ / CHUNKS;
            let part = hidden
                .clone()
                .detach()
                .slice([0..BATCH, at.clone()])
                .require_grad();
            complete(&norm, chunk + 1 == CHUNKS);
            complete(&head, chunk + 1 == CHUNKS && self.head.is_some());
            let loss =
                self.loss(part.clone(), next.clone().slice([0..BATCH, at])) / (BATCH * SEQ) as f64;
            let mut own = loss.backward();
            let of_part = part
                .grad_remove(&mut own)
                .expect("it is in the loss")
                .into_data();
            of_hidden.push(Tensor::<3>::from_data(of_part, &hidden.device()));
            if chunk + 1 == CHUNKS {
                grads = GradientsParams::from_grads(own, self);
            }
        }
        complete(&head, true);
        let trunk = (hidden * Tensor::cat(of_hidden, 1)).sum().backward();
        take(&mut grads, GradientsParams::from_grads(trunk, self), self);
        Ok(grads)
    }
}

/// Adds what `from` has of parameters that `to` has nothing of.
fn take(to: &mut GradientsParams, from: GradientsParams, model: &Lm) {
    struct Take<'a>(&'a mut GradientsParams, GradientsParams);
    impl burn::module::ModuleVisitor for Take<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            if let Some(grad) = self.1.remove::<D>(param.id) {
                assert!(
                    self.0.get::<D>(param.id).is_none(),
                    "the head and the trunk share no parameter"
                );
                self.0.register::<D>(param.id, grad);
            }
        }
    }
    model.visit(&mut Take(to, from));
}

fn batch(rank: usize, step: usize, device: &Device) -> [Tensor<2, Int>; 2] {
    let words = |shift: usize| {
        let words = (0..BATCH * SEQ)
            .map(|at| ((at * 7 + rank * 5 + step * 3 + shift * 2) % WORDS) as i64)
            .collect();
        Tensor::from_data(TensorData::new::<i64, _>(words, [BATCH, SEQ]), device)
    };
    [words(0), words(1)]
}

fn config(lm: &Lm, group: bool) -> FullyShard {
    let config = FullyShard::new()
        .with_reshard_after_forward(ReshardAfterForward::Always)
        .with_units(["table", "blocks.*"]);
    match (group, &lm.head) {
        (true, _) => config.with_group_unit(["norm", "head"]),
        (false, Some(_)) => config.with_units(["norm", "head"]),
        (false, None) => config.with_units(["norm"]),
    }
}

fn mean(lm: &Lm, ranks: usize, step: usize, device: &Device) -> GradientsParams {
    let losses = (0..ranks).map(|rank| {
        let [words, next] = batch(rank, step, device);
        lm.loss(lm.hidden(words), next)
    });
    let loss = losses.reduce(|a, b| a + b).expect("a rank") / (ranks * BATCH * SEQ) as f64;
    GradientsParams::from_grads(loss.backward(), lm)
}

fn trains_as_one_device(lm: &Lm, mesh: &DeviceMesh) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let optim = || AdamWConfig::new().with_epsilon(1e-5).init();
    let (mut plain, mut alone) = (on_device(lm, &device), optim());
    let (mut sharded, mut own) = (
        fully_shard(on_device(lm, &device), mesh, config(lm, false))?,
        optim(),
    );
    for step in 0..10 {
        let grads = mean(&plain, mesh.size(), step, &device);
        plain = alone.step(1e-2, plain, grads);
        let grads = sharded.chunked(batch(mesh.rank(), step, &device))?;
        sharded = own.step(1e-2, sharded, grads);
    }
    let (found, expected) = (values(&full_model(&sharded)?, None), values(&plain, None));
    // The values of a table, and so the gradients of one that is the head, are larger.
    let most = if lm.head.is_some() { 2e-5 } else { 1e-4 };
    for (path, expected) in expected {
        let off = furthest(&found[&path], &expected);
        assert!(off < most, "`{path}` is off by {off} on {mesh}");
    }
    Ok(())
}

#[test]
fn a_chunked_loss_trains_as_the_unchunked_one() {
    let lm = Lm::init();
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| trains_as_one_device(&lm, mesh));
    }
    MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| trains_as_one_device(&lm, mesh));
}

/// Each chunk adds to the gradients of the table, and so does the trunk.
#[test]
fn a_chunked_loss_with_a_tied_head_trains_as_the_unchunked_one() {
    let lm = Lm::tied();
    for ranks in [1, 2, 3] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| trains_as_one_device(&lm, mesh));
    }
    MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| trains_as_one_device(&lm, mesh));
}

#[cfg(feature = "mpi")]
#[test]
fn a_chunked_loss_trains_as_the_unchunked_one_in_processes() {
    let lm = Lm::init();
    let lm = lm.map(&mut Same);
    let _ = MeshTest::new([2], ["shard"])
        .with_processes(2)
        .run(|mesh| trains_as_one_device(&lm, mesh));
}

/// Values that are the same in every process.
#[cfg(feature = "mpi")]
struct Same;

#[cfg(feature = "mpi")]
impl burn::module::ModuleMapper for Same {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<D>>,
    ) -> burn::module::Param<Tensor<D>> {
        param.map(|base| {
            tensor(
                base.dims().iter().sum::<usize>() as u64,
                base.dims(),
                &base.device(),
            )
        })
    }
}

#[test]
fn chunks_gather_the_head_once_and_reduce_it_once() {
    for (lm, head) in [(Lm::init(), "head"), (Lm::tied(), "table")] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let lm = fully_shard(on_device(&lm, &device), mesh, config(&lm, false))?;
            // Once for what was asked of the units to hold.
            drop(lm.chunked(batch(mesh.rank(), 0, &device))?);
            let ledger = mesh.world().ledger();
            ledger.reset();
            drop(lm.chunked(batch(mesh.rank(), 1, &device))?);
            for unit in ["norm", head] {
                let calls = |op| {
                    ledger
                        .total(|key| &*key.label == unit && key.op == op)
                        .calls
                };
                assert_eq!(
                    (calls(Op::AllGather), calls(Op::ReduceScatter)),
                    (1, 1),
                    "{unit}"
                );
            }
            Ok(())
        });
    }
}

/// The norm alone, of a unit that the head is of too; with one forward or two before the backward,
/// whatever is kept between, and with the head by itself after the model's forward.
#[test]
fn a_part_of_a_group_runs_alone() {
    let lm = Lm::init();
    let partial = |lm: &Lm, x: &Tensor<3>| {
        unit(lm, x.clone(), |lm, x| {
            unit(&lm.norm, x, |norm, x| norm.forward(x).tanh())
        })
    };
    let head = |lm: &Lm, x: &Tensor<3>| {
        unit(lm.head(), x.clone(), |head, x| head.forward(x))
            .square()
            .sum()
    };
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = on_device(&lm, &device);
        let sharded = fully_shard(on_device(&lm, &device), mesh, config(&lm, true))?;
        // All ranks have one batch: means are what each has.
        let x = tensor(4, [1, 2, WIDTH], &device);
        let ways: [&dyn Fn(&Lm) -> Tensor<1>; 4] = [
            &|lm| partial(lm, &x).sum(),
            &|lm| partial(lm, &x).sum() + partial(lm, &(x.clone() * 2.0)).square().sum(),
            &|lm| head(lm, &partial(lm, &x)),
            &|lm| head(lm, &x) + partial(lm, &x).sum(),
        ];
        for reshard in [
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            ReshardAfterForward::Always,
        ] {
            FsdpModule::of(&sharded)?.set_reshard_after_forward(reshard)?;
            for (at, loss) in ways.iter().enumerate() {
                let expected = GradientsParams::from_grads(loss(&plain).backward(), &plain);
                let expected: Values = values(&plain, Some(&expected));
                let mut grads = GradientsParams::from_grads(loss(&sharded).backward(), &sharded);
                let found = values(
                    &full_model(&sharded.clone().map(&mut Holder(&mut grads)))?,
                    None,
                );
                for (path, expected) in expected {
                    let off = furthest(&found[&path], &expected);
                    assert!(
                        off < 1e-5,
                        "`{path}` is off by {off} in way {at}, {reshard:?}"
                    );
                }
            }
        }
        Ok(())
    });
}

/// Also where the head runs without the norm.
#[test]
fn inputs_of_each_module_of_a_group_are_cast() {
    let lm = Lm::init();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_output_dtype(DType::F32);
        let lm = fully_shard(
            on_device(&lm, &device),
            mesh,
            config(&lm, true).with_mixed_precision(policy),
        )?;
        let x = tensor(4, [1, 2, WIDTH], &device);
        let y = unit(&lm, x, |lm, x| {
            unit(lm.head(), x, |head, x| {
                assert_eq!(x.dtype(), DType::BF16);
                head.forward(x)
            })
        });
        assert_eq!(y.dtype(), DType::F32);
        Ok(())
    });
}

/// In one piece, too: the tail is a part of the model's forward.
#[test]
fn the_unchunked_loss_has_the_gradients_of_one_device() {
    let lm = Lm::init();
    for group in [false, true] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let plain = on_device(&lm, &device);
            let sharded = fully_shard(on_device(&lm, &device), mesh, config(&lm, group))?;
            let expected = values(&plain, Some(&mean(&plain, 2, 0, &device)));
            let mut grads = sharded.step(batch(mesh.rank(), 0, &device));
            let found = values(&full_model(&sharded.map(&mut Holder(&mut grads)))?, None);
            for (path, expected) in expected {
                assert!(furthest(&found[&path], &expected) < 1e-5, "{path}");
            }
            Ok(())
        });
    }
}
