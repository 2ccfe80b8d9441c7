//! Policies of single units and parameters, to the bit as the model that is cast by hand.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::fsdp::{FullyShard, MixedPrecisionPolicy, full_model, fully_shard, unit};
use burn_dtensor::testing::MeshTest;

use super::reference::{average, with_weights_in};
use crate::fsdp::support::{Holder, on_device, tensor, values};

const WIDTH: usize = 5;
const BLOCKS: usize = 3;

/// Its layers cast their inputs for themselves where no unit does it.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    blocks: Vec<Linear>,
    scale: Param<Tensor<1>>,
    last: Linear,
}

fn net() -> Net {
    let device = Device::flex();
    device.seed(5);
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let scale = Param::from_tensor(tensor(5, [WIDTH], &device));
    let net = Net {
        first: linear(),
        blocks: (0..BLOCKS).map(|_| linear()).collect(),
        scale,
        last: linear(),
    };
    let _ = values(&net, None);
    net
}

/// What a unit computes in.
#[derive(Debug, Clone, Copy, Default)]
struct Policy {
    param: Option<DType>,
    reduce: Option<DType>,
    output: Option<DType>,
}

impl Policy {
    fn mixed(self) -> MixedPrecisionPolicy {
        let policy = self.param.into_iter().fold(
            MixedPrecisionPolicy::new(),
            MixedPrecisionPolicy::with_param_dtype,
        );
        let policy = self
            .reduce
            .into_iter()
            .fold(policy, MixedPrecisionPolicy::with_reduce_dtype);
        self.output
            .into_iter()
            .fold(policy, MixedPrecisionPolicy::with_output_dtype)
    }
}

/// Policies of the root and of the blocks.
#[derive(Debug, Clone, Copy, Default)]
struct Policies {
    root: Policy,
    blocks: [Policy; BLOCKS],
}

impl Policies {
    fn config(&self) -> FullyShard {
        let config = FullyShard::new()
            .with_units(["blocks.*"])
            .with_mixed_precision(self.root.mixed().with_excluded(["scale"]));
        let blocks = self.blocks.iter().enumerate();
        blocks.fold(config, |config, (i, policy)| {
            config.with_mixed_precision_for([format!("blocks.{i}")], policy.mixed())
        })
    }

    fn of(&self, path: &str) -> Policy {
        match path.strip_prefix("blocks.") {
            Some(rest) => self.blocks[rest[..1].parse::<usize>().unwrap()],
            None => self.root,
        }
    }

    /// The element type that a weight is computed with in; `None`: the stored one.
    fn compute(&self, path: &str) -> Option<DType> {
        self.of(path).param.filter(|_| path != "scale")
    }

    fn reduce(&self, path: &str) -> DType {
        self.of(path).reduce.unwrap_or(DType::F32)
    }
}

fn cast<const D: usize>(x: Tensor<D>, dtype: Option<DType>) -> Tensor<D> {
    match dtype {
        Some(dtype) => x.cast(dtype),
        None => x,
    }
}

/// A unit's forward, or, by hand, what its policy makes of it.
fn around<M: Module>(
    by_hand: Option<Policy>,
    module: &M,
    x: Tensor<2>,
    forward: impl FnOnce(&M, Tensor<2>) -> Tensor<2>,
) -> Tensor<2> {
    match by_hand {
        None => unit(module, x, forward),
        Some(policy) => cast(forward(module, cast(x, policy.param)), policy.output),
    }
}

impl Net {
    /// With the blocks opened by the program, or else by reads.
    fn forward(&self, x: Tensor<2>, by_hand: Option<&Policies>, opened: bool) -> Tensor<2> {
        around(by_hand.map(|policies| policies.root), self, x, |net, x| {
            let mut x = net.first.forward(x).tanh();
            for (i, block) in net.blocks.iter().enumerate() {
                let policy = by_hand.map(|policies| policies.blocks[i]);
                x = match opened {
                    true => around(policy, block, x, |block, x| block.forward(x).tanh()),
                    false => block.forward(x).tanh(),
                };
            }
            let scale = net.scale.val();
            let x = x.cast(scale.dtype()) * scale.unsqueeze();
            net.last.forward(x.cast(net.last.weight.val().dtype()))
        })
    }
}

/// The output, the gradient of the input, and those of the weights.
type Passed = (Vec<f32>, Vec<f32>, BTreeMap<String, Vec<f32>>);

fn to_the_bit(policies: Policies) {
    passes_to_the_bit(policies, true);
}

fn passes_to_the_bit(policies: Policies, opened: bool) {
    let model = net();
    for shape in [&[2][..], &[3], &[2, 2]] {
        let names = &["replicate", "shard"][2 - shape.len()..];
        MeshTest::new(shape, names).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let plain = on_device(&model, &device);
            let by_hand = with_weights_in(plain.clone(), |path| policies.compute(path));
            let sharded = fully_shard(plain, mesh, policies.config())?;
            let pass = |model: &Net, by_hand: Option<&Policies>| {
                let x = tensor::<2>(mesh.rank() as u64 + 1, [4, WIDTH], &device).require_grad();
                let output = model.forward(x.clone(), by_hand, opened);
                let dtype = output.dtype();
                let grads = output.clone().cast(DType::F32).square().sum().backward();
                let grad = x.grad(&grads).expect("it is tracked");
                assert_eq!(grad.dtype(), DType::F32);
                let numbers =
                    |x: Tensor<2>| x.cast(DType::F32).into_data().try_to_vec::<f32>().unwrap();
                (
                    dtype,
                    numbers(output),
                    numbers(grad),
                    GradientsParams::from_grads(grads, model),
                )
            };
            let (dtype, output, input, mut grads) = pass(&sharded, None);
            let full = values(
                &full_model(&sharded.clone().map(&mut Holder(&mut grads)))?,
                None,
            );
            let (dtype_by_hand, output_by_hand, input_by_hand, grads) =
                pass(&by_hand, Some(&policies));
            let grads = average(&by_hand, grads, mesh, |path| policies.reduce(path));
            let expected: Passed = (
                output_by_hand,
                input_by_hand,
                values(&by_hand, Some(&grads)),
            );
            assert_eq!((output, input, full), expected, "{policies:?}");
            assert_eq!(dtype, dtype_by_hand, "{policies:?}");
            Ok(())
        });
    }
}

const BF16: Policy = Policy {
    param: Some(DType::BF16),
    reduce: Some(DType::F32),
    output: None,
};
const F16: Policy = Policy {
    param: Some(DType::F16),
    reduce: Some(DType::F16),
    output: None,
};
/// Its gradients are reduced as its weights are stored.
const AS_STORED: Policy = Policy {
    reduce: None,
    ..BF16
};
/// Its weights stay as they are stored, and its inputs are what they are.
const F32: Policy = Policy {
    param: Some(DType::F32),
    reduce: Some(DType::BF16),
    output: None,
};

#[test]
fn each_unit_has_a_policy_of_its_own() {
    to_the_bit(Policies {
        root: BF16,
        blocks: [
            F16,
            F32,
            Policy {
                output: Some(DType::F64),
                ..BF16
            },
        ],
    });
    to_the_bit(Policies {
        root: Policy {
            output: Some(DType::F32),
            ..F16
        },
        blocks: [BF16, AS_STORED, BF16],
    });
}

#[test]
fn a_policy_for_some_units_leaves_the_others_as_they_are() {
    let single = Policy {
        param: Some(DType::F32),
        ..Policy::default()
    };
    to_the_bit(Policies {
        root: Policy::default(),
        blocks: [BF16, single, F16],
    });
}

/// Outputs of a unit without weights of half precision, and gradients reduced in another type.
#[test]
fn outputs_and_reductions_have_types_of_their_own() {
    let wide = Policy {
        param: None,
        reduce: Some(DType::F64),
        output: Some(DType::F64),
    };
    to_the_bit(Policies {
        root: wide,
        blocks: [Policy::default(); BLOCKS],
    });
}

/// They cast neither inputs nor outputs: activations are in the type that the model casts its own
/// to.
#[test]
fn units_that_reads_open_follow_one_policy_for_the_model_and_them() {
    passes_to_the_bit(
        Policies {
            root: BF16,
            blocks: [BF16; BLOCKS],
        },
        false,
    );
    passes_to_the_bit(
        Policies {
            root: F16,
            blocks: [Policy {
                reduce: Some(DType::F32),
                ..F16
            }; BLOCKS],
        },
        false,
    );
}

/// Of two that take a unit.
#[test]
fn the_last_policy_for_a_unit_counts() {
    let model = net();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let bf16 = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
        let config = FullyShard::new()
            .with_units(["blocks.*"])
            .with_mixed_precision_for(["blocks.*"], bf16)
            .with_mixed_precision_for(
                ["blocks.1"],
                MixedPrecisionPolicy::new().with_param_dtype(DType::F16),
            );
        let model = fully_shard(model.clone(), mesh, config)?;
        let dtypes = [&model.first, &model.blocks[0], &model.blocks[1]]
            .map(|layer| layer.weight.val().dtype());
        assert_eq!(dtypes, [DType::F32, DType::BF16, DType::F16]);
        Ok(())
    });
}
