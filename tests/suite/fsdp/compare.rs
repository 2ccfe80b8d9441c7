//! `fsdp::compare`: each trap is found and named, and right models agree.

use burn::module::{Lora, Module, ModuleMapper, Param, ParamId};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_dtensor::fsdp::{
    Cause, Comparison, Finding, FsdpError, FsdpModule, OffloadPolicy, ParamError, Side, compare,
};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{on_device, tensor, values};
use crate::parallel::support as tp;

const WORDS: usize = 11;
const WIDTH: usize = 6;
const ROWS: usize = 4;
const SEQ: usize = 3;

/// A table tied to the head, blocks of which one runs twice, a part that may be missing, and a
/// frozen one.
#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    blocks: Vec<Block>,
    norm: Option<LayerNorm>,
    frozen: Linear,
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    inner: Inner,
    /// Added to the positions; no parameter.
    steps: Param<Tensor<1, Int>>,
}

/// The second step of a block.
#[derive(Module, Debug)]
enum Inner {
    Nothing(Linear),
    /// Divides by the root of the number of its weight's rows, as they are stored.
    StoredRoot(Linear),
    /// Puts the activations into as many columns as its weight has rows, as they are stored.
    StoredColumns(Linear),
    /// Adds a constant of single precision.
    Constant(Linear),
    BatchNorm(BatchNorm),
    Dropout(Dropout),
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        unit(self, x, |block, x| {
            let x = block.linear.forward(x);
            let x = match &block.inner {
                Inner::Nothing(linear) => linear.forward(x),
                Inner::StoredRoot(linear) => {
                    linear.forward(x) / (linear.weight.dims()[0] as f32).sqrt()
                }
                Inner::StoredColumns(linear) => {
                    let [rows, seq, _] = x.dims();
                    linear
                        .forward(x)
                        .reshape([rows, seq, linear.weight.dims()[0]])
                }
                Inner::Constant(linear) => {
                    let y = linear.forward(x);
                    let one = Tensor::from_data(
                        TensorData::ones::<f32, _>([1, 1, WIDTH]),
                        (&y.device(), DType::F32),
                    );
                    y + one
                }
                Inner::BatchNorm(norm) => norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2),
                Inner::Dropout(dropout) => dropout.forward(x),
            };
            x.tanh()
        })
    }
}

impl Net {
    /// Returns the model with `inner` in its second block, the same on every rank.
    fn new(inner: impl FnOnce(&Device) -> Inner) -> Self {
        let device = Device::flex();
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
        let block = |inner| Block {
            linear: linear(),
            inner,
            steps: Param::initialized(ParamId::new(), Tensor::from_data([1, 2, 3], &device)),
        };
        let net = Self {
            table: EmbeddingConfig::new(WORDS, WIDTH).init(&device),
            blocks: vec![block(Inner::Nothing(linear())), block(inner(&device))],
            norm: Some(LayerNormConfig::new(WIDTH).init(&device)),
            frozen: linear(),
        };
        net.map(&mut Fill(Vec::new()))
    }

    fn right() -> Self {
        Self::new(|device| Inner::Nothing(LinearConfig::new(WIDTH, WIDTH).init(device)))
    }

    fn on(&self, device: &Device) -> Self {
        let net = on_device(self, device);
        Self {
            frozen: net.frozen.no_grad(),
            ..net
        }
    }

    /// Returns the mean cross entropy of the next words; both `[batch, seq]`.
    fn loss(&self, (words, next): (Tensor<2, Int>, Tensor<2, Int>)) -> Tensor<1> {
        let logits = unit(self, words, |net, words| {
            let mut x = net.table.forward(words);
            for block in net.blocks.iter().chain(&net.blocks[..1]) {
                x = block.forward(x);
            }
            let x = net.norm.iter().fold(x, |x, norm| norm.forward(x));
            net.frozen
                .forward(x)
                .matmul(net.table.weight.val().transpose().unsqueeze())
        });
        log_softmax(logits, 2)
            .gather(2, next.unsqueeze_dim::<3>(2))
            .mean()
            .neg()
    }
}

/// Fills parameters by their paths.
struct Fill(Vec<String>);

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.0.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.0.join(".");
        let seed = path
            .bytes()
            .fold(7u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte));
        let shift = if path.ends_with("gamma") || path.contains("running_var") {
            1.0
        } else {
            0.0
        };
        param.map(|base| tensor(seed, base.dims(), &base.device()) + shift)
    }
}

fn units() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}

fn bf16() -> FullyShard {
    let bf16 = MixedPrecisionPolicy::new()
        .with_param_dtype(DType::BF16)
        .with_reduce_dtype(DType::F32);
    units()
        .with_mixed_precision(bf16.clone().with_output_dtype(DType::F32))
        .with_mixed_precision_for(["blocks.*"], bf16)
}

/// Words of this rank, and the next ones.
fn batch(mesh: &DeviceMesh, rows: usize, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let words = |shift: usize| {
        let words = (0..rows * SEQ).map(|at| ((at * 5 + mesh.rank() * 7 + shift) % WORDS) as i64);
        Tensor::from_data(
            TensorData::new(words.collect::<Vec<_>>(), [rows, SEQ]),
            device,
        )
    };
    (words(0), words(1))
}

/// Returns the comparison, which must be equal on all ranks.
fn compared(test: &MeshTest, net: &Net, config: FullyShard) -> Comparison {
    let mut ranks = test.run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(net.on(&device), mesh, config.clone())?;
        compare(&net, batch(mesh, ROWS, &device), Net::loss)
    });
    let first = ranks.remove(0);
    ranks.iter().for_each(|other| assert_eq!(*other, first));
    first
}

fn two() -> MeshTest {
    MeshTest::new([2], ["shard"])
}

/// The trainable parameters of [`Net::right`].
const PARAMETERS: usize = 1 + 2 * 4 + 2;

#[test]
fn right_models_agree() {
    let net = Net::right();
    let three = MeshTest::new([3], ["shard"]);
    let hsdp = MeshTest::new([2, 2], ["replicate", "shard"]);
    for (test, config) in [
        (two(), units()),
        (three.clone(), units()),
        (three, bf16()),
        (
            hsdp.clone(),
            units().with_replica_check_every(1).with_weight_check(true),
        ),
        (hsdp, bf16()),
        (MeshTest::new([1], ["shard"]), units()),
        (two(), FullyShard::new()),
        (two(), units().with_offload(OffloadPolicy::Cpu)),
        (
            two(),
            units().with_reshard_after_forward(ReshardAfterForward::Never),
        ),
        (
            two(),
            FullyShard::new().with_group_unit(["blocks.0", "blocks.1"]),
        ),
    ] {
        let found = compared(&test, &net, config);
        assert!(
            found.agrees() && found.parameters() == PARAMETERS,
            "on {test}: {found}"
        );
        assert_eq!(
            found.largest() > 0.0,
            test.ranks() > 1,
            "on {test}: sums are ordered differently"
        );
        assert!(
            found
                .to_string()
                .contains(&format!("gradients of {PARAMETERS} parameters")),
            "{found}"
        );
        found.into_result().unwrap();
    }
    assert_eq!(
        compared(&two(), &net, units()).units(),
        3,
        "the blocks and the root"
    );
}

#[test]
fn a_scale_by_a_stored_shape_is_found_in_its_unit() {
    let net = Net::new(|device| Inner::StoredRoot(LinearConfig::new(WIDTH, WIDTH).init(device)));
    for config in [units(), bf16()] {
        let found = compared(&two(), &net, config);
        let Finding::Output {
            unit,
            relative,
            cause,
        } = &found.findings()[0]
        else {
            panic!("{found}")
        };
        assert_eq!((unit.as_deref(), *cause), (Some("blocks.1"), Cause::Shards));
        assert!(*relative > 0.1, "{found}");
        let text = found.to_string();
        assert!(
            text.contains("unit `blocks.1` returns other values")
                && text.contains("self.weight.val().dims()"),
            "{text}"
        );
        assert!(
            text.contains("the gradient of `blocks.1.inner.StoredRoot.weight` differs"),
            "{text}"
        );
        let error = found.clone().into_result().unwrap_err();
        assert!(
            matches!(&error, Error::Fsdp(FsdpError::Differs(report)) if **report == found),
            "{error}"
        );
    }
}

#[test]
fn a_stored_shape_that_makes_a_panic_is_found_in_its_unit() {
    let net = Net::new(|device| Inner::StoredColumns(LinearConfig::new(WIDTH, WIDTH).init(device)));
    let found = compared(&two(), &net, units());
    let [
        Finding::Panic {
            unit,
            side: Side::Sharded,
            rank: 0,
            ..
        },
    ] = found.findings()
    else {
        panic!("{found}")
    };
    assert_eq!(unit.as_deref(), Some("blocks.1"));
    assert!(
        found.to_string().contains("self.weight.val().dims()"),
        "{found}"
    );
}

#[test]
fn a_norm_over_the_batch_is_found_in_its_unit() {
    let net = Net::new(|device| Inner::BatchNorm(BatchNormConfig::new(WIDTH).init(device)));
    for config in [units(), units().with_units(["blocks.1.inner.BatchNorm"])] {
        let found = compared(&two(), &net, config);
        let Finding::Output {
            unit,
            cause: Cause::Rows,
            ..
        } = &found.findings()[0]
        else {
            panic!("{found}")
        };
        assert_eq!(unit.as_deref(), Some("blocks.1"));
        assert!(found.to_string().contains("`BatchNorm`"), "{found}");
    }
}

/// In training each rank's own, which forward does not read; in validation they must be equal.
#[test]
fn running_statistics_that_differ_are_found_in_validation() {
    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = Net::new(|device| Inner::BatchNorm(BatchNormConfig::new(WIDTH).init(device)));
        let net = fully_shard(net.on(&device), mesh, units())?;
        let _ = net.loss(batch(mesh, ROWS, &device));
        let found = compare(&net, batch(mesh, ROWS, &device), Net::loss)?;
        assert!(
            matches!(
                &found.findings()[0],
                Finding::Output {
                    cause: Cause::Rows,
                    ..
                }
            ),
            "{found}"
        );
        let found = compare(&net.valid(), batch(mesh, ROWS, mesh.device()), Net::loss)?;
        let [Finding::Replica { param, .. }] = found.findings() else {
            panic!("{found}")
        };
        assert_eq!(param, "blocks.1.inner.BatchNorm.running_mean");
        sync_buffers(&net)?;
        compare(&net.valid(), batch(mesh, ROWS, mesh.device()), Net::loss)?.into_result()
    });
}

#[test]
fn a_constant_of_another_dtype_is_found_in_its_unit() {
    let net = Net::new(|device| Inner::Constant(LinearConfig::new(WIDTH, WIDTH).init(device)));
    assert!(compared(&two(), &net, units()).agrees());
    let found = compared(&two(), &net, bf16());
    let [
        Finding::Panic {
            unit,
            side: Side::Full,
            message,
            ..
        },
    ] = found.findings()
    else {
        panic!("{found}")
    };
    assert_eq!(unit.as_deref(), Some("blocks.1"));
    assert!(
        message.contains("dtype") && found.to_string().contains("x.dtype()"),
        "{found}"
    );
}

#[test]
fn a_random_forward_cannot_be_compared() {
    let net = |prob| Net::new(move |_| Inner::Dropout(DropoutConfig::new(prob).init()));
    let found = compared(&two(), &net(0.5), units());
    assert_eq!(
        found.findings(),
        [Finding::Nondeterministic {
            unit: Some("blocks.1".into())
        }]
    );
    assert!(
        found.to_string().contains("cannot be compared") && found.to_string().contains("`Dropout`"),
        "{found}"
    );
    assert!(compared(&two(), &net(0.0), units()).agrees());
    // Outside units, the loss is all that is known.
    let found = two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let dropout = DropoutConfig::new(0.5).init();
        // No two sums of some of these are equal.
        let scales = tensor(1, [64], &device);
        compare(&net, batch(mesh, ROWS, &device), |net, batch| {
            dropout
                .forward(net.loss(batch).expand([64]) * scales.clone())
                .mean()
        })
    });
    found
        .iter()
        .for_each(|found| assert_eq!(found.findings(), [Finding::Nondeterministic { unit: None }]));
}

/// A model in validation draws nothing, and has no gradients.
#[test]
fn of_a_model_in_validation_the_forward_is_compared() {
    let net = |inner: fn(&Device) -> Inner| Net::new(inner);
    let dropout = net(|_| Inner::Dropout(DropoutConfig::new(0.5).init()));
    let stored = net(|device| Inner::StoredRoot(LinearConfig::new(WIDTH, WIDTH).init(device)));
    let norm = net(|device| Inner::BatchNorm(BatchNormConfig::new(WIDTH).init(device)));
    for (net, unit) in [(dropout, None), (norm, None), (stored, Some("blocks.1"))] {
        two().run(|mesh| {
            let device = mesh.device().clone();
            let net = fully_shard(net.on(&device.clone().autodiff()), mesh, units())?.valid();
            let found = compare(&net, batch(mesh, ROWS, &device), Net::loss)?;
            assert_eq!(found.parameters(), 0);
            match (found.findings(), unit) {
                ([], None) => assert!(found.to_string().contains("no gradients"), "{found}"),
                (
                    [
                        Finding::Output {
                            unit: Some(found), ..
                        },
                    ],
                    Some(unit),
                ) => assert_eq!(found, unit),
                _ => panic!("{found}"),
            }
            Ok(())
        });
    }
}

#[test]
fn a_loss_that_is_no_mean_is_found() {
    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let found = compare(&net, batch(mesh, ROWS, &device), |net, (words, next)| {
            let rows = words.dims()[0];
            net.loss((words, next)) * rows as f32
        })?;
        let Finding::Output {
            unit: None,
            cause: Cause::Rows,
            ..
        } = found.findings()[0]
        else {
            panic!("{found}")
        };
        assert_eq!(found.findings().len(), 1 + PARAMETERS, "all gradients");
        assert!(
            found
                .to_string()
                .contains(&format!("of {} more", PARAMETERS - 8)),
            "{found}"
        );
        Ok(())
    });
}

/// Outputs are right, and only the gradient of one parameter is not.
#[test]
fn a_gradient_alone_that_differs_is_found() {
    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let found = compare(&net, batch(mesh, ROWS, &device), |net, (words, next)| {
            let alone = words.dims()[0] == ROWS;
            let loss = net.loss((words, next));
            let bias = unit(&net.blocks[1], (), |block, ()| {
                block.linear.bias.as_ref().expect("it has one").val().mean()
            });
            if alone {
                loss + bias.clone() - bias.detach()
            } else {
                loss
            }
        })?;
        let [Finding::Gradient { param, relative }] = found.findings() else {
            panic!("{found}")
        };
        assert!(
            param == "blocks.1.linear.bias" && *relative > 0.1,
            "{found}"
        );
        Ok(())
    });
}

/// Next to gradients of another unit that are larger by far.
#[test]
fn a_small_gradient_that_differs_is_found() {
    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let found = compare(&net, batch(mesh, ROWS, &device), |net, (words, _)| {
            let is_sharded = words.dims()[0] == ROWS;
            let scale = if is_sharded { 2e-9 } else { 1e-9 };
            unit(net, (), |net, ()| {
                let [large, small] = [0, 1].map(|at| {
                    unit(&net.blocks[at], (), |block, ()| {
                        block.linear.weight.val().square().mean()
                    })
                });
                large + small * scale
            })
        })?;
        let [Finding::Gradient { param, relative }] = found.findings() else {
            panic!("{found}")
        };
        assert!(
            param == "blocks.1.linear.weight" && *relative > 0.1,
            "{found}"
        );
        Ok(())
    });
}

/// The sharded model does not read a parameter that the full one reads.
#[test]
fn a_gradient_that_is_missing_is_found() {
    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let found = compare(&net, batch(mesh, ROWS, &device), |net, (words, _)| {
            let is_sharded = words.dims()[0] == ROWS;
            unit(net, words, |net, words| {
                let loss = net.table.forward(words).square().mean();
                if is_sharded {
                    return loss;
                }
                let gamma = &net.norm.as_ref().expect("it has one").gamma;
                loss + gamma.val().mean() - gamma.val().mean().detach()
            })
        })?;
        let [Finding::Gradient { param, relative }] = found.findings() else {
            panic!("{found}")
        };
        // The difference is all of it.
        assert!(
            param == "norm.gamma" && (relative - 1.0).abs() < 0.1,
            "{found}"
        );
        Ok(())
    });
}

struct Alter<'a>(Vec<String>, &'a str);

impl ModuleMapper for Alter<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.0.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.0.join(".") != self.1 {
            return param;
        }
        param.map(|base| (base.inner() * 1.0001).autodiff().require_grad())
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        if self.0.join(".") == self.1 {
            param.map(|base| base + 1)
        } else {
            param
        }
    }
}

/// Shards of replicas, parameters that are stored in full, ignored ones, and buffers.
#[test]
fn a_value_altered_on_one_rank_is_named() {
    let replicas = MeshTest::new([3, 2], ["replicate", "shard"]);
    let full = || {
        units().with_shard_placement_fn(|param| {
            (param.path == "norm.gamma").then_some(Placement::Replicate)
        })
    };
    for (test, config, path, other, majority) in [
        (replicas, units(), "blocks.0.linear.weight", 1, true),
        (two(), full(), "norm.gamma", 0, false),
        (
            two(),
            units().with_ignored(["frozen.**"]),
            "frozen.bias",
            0,
            false,
        ),
        (two(), units(), "blocks.1.steps", 0, false),
    ] {
        for altered in [1, test.ranks() - 1] {
            let net = Net::right();
            let found = test.run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let mut net = fully_shard(net.on(&device), mesh, config.clone())?;
                if mesh.rank() == altered {
                    net = net.map(&mut Alter(Vec::new(), path));
                }
                compare(&net, batch(mesh, ROWS, &device), Net::loss)
            });
            for found in found {
                let [
                    Finding::Replica {
                        param,
                        rank,
                        other: of,
                        majority: most,
                    },
                ] = found.findings()
                else {
                    panic!("{path}: {found}")
                };
                let expected_other = if altered == other { 3 } else { other };
                assert_eq!(
                    (&**param, *rank, *of, *most),
                    (path, altered, expected_other, majority),
                    "{found}"
                );
                assert!(
                    found
                        .to_string()
                        .contains(&format!("rank {altered} holds other values of `{path}`")),
                    "{found}"
                );
            }
        }
    }
}

/// In the middle of accumulation, before and after other comparisons, and with a batch norm.
#[test]
fn the_model_stays_as_it_is() {
    let net = Net::right();
    let test = MeshTest::new([2, 2], ["replicate", "shard"]);
    let trained = |comparing: bool| {
        test.run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let net = fully_shard(net.on(&device), mesh, units())?;
            let module = FsdpModule::of(&net)?;
            let compared = || match comparing {
                true => compare(&net, batch(mesh, ROWS, &device), Net::loss)?.into_result(),
                false => Ok(()),
            };
            compared()?;
            module.set_requires_gradient_sync(false);
            let _ = net.loss(batch(mesh, ROWS, &device)).backward();
            compared()?;
            module.set_requires_gradient_sync(true);
            compared()?;
            let grads = net.loss(batch(mesh, 2, &device)).backward();
            let grads = GradientsParams::from_grads(grads, &net);
            compared()?;
            Ok((values(&net, Some(&grads)), values(&net, None)))
        })
    };
    assert_eq!(trained(true), trained(false));

    two().run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = Net::new(|device| Inner::BatchNorm(BatchNormConfig::new(WIDTH).init(device)));
        let net = fully_shard(net.on(&device), mesh, units())?;
        let mean = || match &net.blocks[1].inner {
            Inner::BatchNorm(norm) => norm.running_mean.value_sync().into_data(),
            _ => unreachable!("the second block has a batch norm"),
        };
        let before = mean();
        compare(&net, batch(mesh, ROWS, &device), Net::loss)?;
        assert_eq!(mean(), before);
        Ok(())
    });
}

#[test]
fn checkpointed_blocks_and_adapters_agree() {
    fn checkpointed(net: &Net, (words, next): (Tensor<2, Int>, Tensor<2, Int>)) -> Tensor<1> {
        let logits = unit(net, words, |net, words| {
            let x = net
                .blocks
                .iter()
                .fold(net.table.forward(words), |x, block| {
                    checkpoint_activations(block, x, |block: &Block, x| block.forward(x))
                });
            x.matmul(net.table.weight.val().transpose().unsqueeze())
        });
        log_softmax(logits, 2)
            .gather(2, next.unsqueeze_dim::<3>(2))
            .mean()
            .neg()
    }
    let found = MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        let found = compare(&net, batch(mesh, ROWS, &device), checkpointed)?;
        assert!(found.agrees() && found.parameters() == 9, "{found}");
        let adapted = Net::right()
            .apply_lora(Lora::new(2, 3.0))
            .map(&mut Fill(Vec::new()))
            .on(&device);
        compare(
            &fully_shard(adapted, mesh, units())?,
            batch(mesh, ROWS, &device),
            Net::loss,
        )
    });
    found
        .iter()
        .for_each(|found| assert!(found.agrees() && found.parameters() > 0, "{found}"));
}

/// Layers that read tensor-parallel weights in full, and layers on DTensors.
#[test]
fn tensor_parallel_models_agree() {
    #[derive(Module, Debug)]
    struct Mlp {
        up: Linear,
        down: Linear,
    }
    let model = tp::Net::new(&Device::flex());
    for test in [
        MeshTest::new([2, 2], ["shard", "tp"]),
        MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]),
    ] {
        test.run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let net = tp::distribute_with(on_device(&model, &device), mesh, tp::plan(), units())?;
            let data = tp::data_rank(mesh).0;
            let words = |shift: i64| {
                Tensor::<2, Int>::from_data(
                    TensorData::from([[shift, 2, 5], [7, shift, 3]]),
                    &device,
                )
            };
            let input = (words(data as i64), words(data as i64 + 1));
            let found = compare(&net, input, |net, (words, next)| net.loss(words, next))?;
            assert!(found.agrees() && found.units() == 3, "{found}");

            let tp = mesh.slice("tp")?;
            let linear = |seed, shape: [usize; 2]| Linear {
                weight: Param::from_tensor(tensor(seed, shape, &device)),
                bias: None,
            };
            let mlp = Mlp {
                up: linear(1, [WIDTH, 8]),
                down: linear(2, [8, WIDTH]),
            };
            let plan = Plan::new()
                .with_style("up", Style::colwise())
                .with_style("down", Style::rowwise());
            let mlp = tp::distribute_with(mlp, mesh, plan, FullyShard::new())?;
            let x = tensor(3 + data as u64, [ROWS, WIDTH], &device);
            let x = DTensor::from_local(x, &tp, &[Placement::Replicate])?;
            let found = compare(&mlp, x, |mlp, x| {
                let y = unit(mlp, x.clone(), |mlp, x| {
                    mlp.down.forward_dtensor(mlp.up.forward_dtensor(x).tanh())
                });
                (y - x).square().mean().full_tensor().unwrap()
            })?;
            assert!(found.agrees() && found.parameters() == 2, "{found}");
            Ok(())
        });
    }
}

#[test]
fn what_cannot_be_compared_is_an_error_on_every_rank() {
    let test = two();
    test.run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = Net::right().on(&device);
        let error = compare(&plain, batch(mesh, ROWS, &device), Net::loss).unwrap_err();
        assert!(
            matches!(error, Error::Param(ParamError::NotSharded)),
            "{error}"
        );
        let net = fully_shard(plain, mesh, units())?;
        let error = compare(&net, batch(mesh, ROWS + mesh.rank(), &device), Net::loss).unwrap_err();
        let Error::Fsdp(FsdpError::UnevenRows {
            first_rank: 0,
            first,
            other_rank: 1,
            other,
        }) = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (&first[0][..], &other[0][..]),
            (&[ROWS, SEQ][..], &[ROWS + 1, SEQ][..])
        );
        // All ranks have failed, and can continue.
        compare(&net, batch(mesh, ROWS, &device), Net::loss)?.into_result()
    });
}

/// Along `ep`, ranks have distinct rows and distinct parameters.
#[test]
fn experts_cannot_be_compared() {
    MeshTest::new([2, 2], ["efsdp", "ep"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let linear = |seed| Linear {
            weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], &device)),
            bias: None,
        };
        let plan = Plan::new().with_style("weight", Placement::Shard(0));
        let experts = parallelize(linear(1), &mesh.slice("ep")?, plan)?;
        let config = FullyShard::new().with_shard_dims(["efsdp", "ep"]);
        let net = fully_shard(vec![linear(2), experts], mesh, config)?;
        let x = tensor::<2>(3, [ROWS, WIDTH], &device);
        let error = compare(&net, x, |_, _| panic!("no forward")).unwrap_err();
        let Error::Fsdp(FsdpError::NotComparable { param, problem }) = &error else {
            panic!("{error}")
        };
        assert!(
            param == "1.weight" && problem.contains("experts"),
            "{error}"
        );
        Ok(())
    });
}

/// No rank waits for one that panics alone in the sharded model.
#[test]
fn a_panic_of_one_rank_ends_all() {
    let error = two().run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(Net::right().on(&device), mesh, units())?;
        compare(&net, batch(mesh, ROWS, &device), |net, (words, next)| {
            unit(&net.blocks[0], words.dims()[0], |_, rows| {
                assert!(mesh.rank() == 0 || rows > ROWS, "out of luck")
            });
            net.loss((words, next))
        })
    });
    let text = error.to_string();
    assert!(
        text.contains("panicked in unit `blocks.0` on rank 1: out of luck"),
        "{text}"
    );
}
