//! A small model that has everything a model may have, and ways to distribute it over a mesh of 2 x
//! 2 ranks.

use std::collections::BTreeMap;

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::dtensor::Kind;
use burn_dtensor::fsdp::{MixedPrecisionPolicy, OffloadPolicy};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{fill, tensor};

/// Not a multiple of the ranks, and for some of the parameters smaller than their number.
pub const WIDTH: usize = 5;
const HIDDEN: usize = 7;

#[derive(Module, Debug)]
pub struct Net {
    pub norm: BatchNorm,
    pub up: Linear,
    pub down: Linear,
    pub experts: Experts,
    /// It does not require gradients.
    pub frozen: Linear,
    /// `fully_shard` ignores it.
    pub spare: Param<Tensor<1>>,
    pub steps: Param<Tensor<1, Int>>,
    pub mask: Param<Tensor<2, Bool>>,
}

#[derive(Module, Debug)]
pub struct Experts {
    /// `[experts, width, width]`.
    pub weight: Param<Tensor<3>>,
}

impl Net {
    /// Values that depend on `seed` alone.
    pub fn new(seed: u64, device: &Device) -> Self {
        let net = Self {
            norm: BatchNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).init(device),
            experts: Experts {
                weight: Param::from_tensor(Tensor::zeros([3, WIDTH, WIDTH], device)),
            },
            frozen: LinearConfig::new(WIDTH, 1).init(device).no_grad(),
            spare: Param::from_tensor(Tensor::zeros([WIDTH], device)),
            steps: Param::initialized(ParamId::new(), Tensor::zeros([2], device)),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::from_data([[false], [false], [false], [false], [false]], device),
            ),
        };
        filled(net, seed)
    }

    /// The loss of rank `rank`'s batch.
    pub fn loss(&self, step: u64, rank: usize, device: &Device) -> Tensor<1> {
        let x = tensor(1000 + 10 * step + rank as u64, [4, WIDTH], device);
        let y = unit(self, x, |net, x| {
            let x = net.norm.forward(x) + net.spare.val().unsqueeze();
            let h = unit(&net.up, x.clone(), |up, x| up.forward(x)).tanh();
            let y = unit(&net.down, h, |down, h| down.forward(h));
            let expert = net.experts.weight.val().sum_dim(0).squeeze_dim::<2>(0);
            y + x.clone().matmul(expert) + net.frozen.forward(x)
        });
        y.square().mean()
    }

    pub fn grads(&self, step: u64, rank: usize, device: &Device) -> GradientsParams {
        GradientsParams::from_grads(self.loss(step, rank, device).backward(), self)
    }
}

/// The model with values that depend on `seed` and the order of its tensors alone.
pub fn filled<M: Module>(model: M, seed: u64) -> M {
    struct Fill(u64);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            param.map(|old| {
                tensor(self.0, old.dims(), &old.device())
                    .cast(old.dtype())
                    .set_require_grad(old.is_require_grad())
            })
        }

        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            self.0 += 1;
            param.map(|old| (tensor(self.0, old.dims(), &old.device()).inner() * 100.0).int())
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Bool>>,
        ) -> Param<Tensor<D, Bool>> {
            self.0 += 1;
            let ints = |old: &Tensor<D, Bool>| {
                (tensor(self.0, old.dims(), &old.device()).inner() * 1000.0).int()
            };
            param.map(|old| ints(&old).remainder_scalar(2).equal_elem(0))
        }
    }
    model.map(&mut Fill(seed * 100))
}

/// The values of an ordinary model by path: parameters and buffers, read without this crate.
pub fn values<M: Module>(model: &M) -> BTreeMap<String, TensorData> {
    let mut visit = Visit::default();
    model.visit(&mut visit);
    visit.values
}

#[derive(Default)]
struct Visit {
    path: Vec<String>,
    values: BTreeMap<String, TensorData>,
}

impl ModuleVisitor for Visit {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.values
            .insert(self.path.join("."), param.base().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.values
            .insert(self.path.join("."), param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.values
            .insert(self.path.join("."), param.val().into_data());
    }
}

/// Describes every float tensor of a model as a load must keep it, by path: id, training state,
/// dtype, device, layout.
pub fn kept<M: Module>(model: &M) -> BTreeMap<String, String> {
    #[derive(Default)]
    struct Kept(Vec<String>, BTreeMap<String, String>);
    impl ModuleVisitor for Kept {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let base = param.base();
            let (grad, dtype, shape) = (param.is_require_grad(), base.dtype(), base.dims());
            let kept = format!(
                "{} {grad} {dtype:?} {:?} {shape:?} {:?}",
                param.id,
                base.device(),
                param.shard()
            );
            self.1.insert(self.0.join("."), kept);
        }
    }
    let mut kept = Kept::default();
    model.visit(&mut kept);
    kept.1
}

/// The address of a CPU tensor's memory.
pub fn address<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> usize {
    match tensor.inner().into_dispatch().kind {
        DispatchTensorKind::Flex(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => tensor.bytes().as_ptr().addr(),
        other => panic!("not on the CPU: {other:?}"),
    }
}

/// A way to distribute the model over a mesh of two dimensions, `dp` and `tp`.
pub type Distribute = fn(Net, &DeviceMesh) -> Result<Net>;

pub const LAYOUTS: [(&str, Distribute); 8] = [
    ("ordinary", |net, _| Ok(net)),
    ("sharded over one dimension", |net, mesh| {
        fully_shard(net, &mesh.slice("dp")?, config())
    }),
    ("sharded over both", |net, mesh| {
        fully_shard(net, mesh, config().with_shard_dims(["dp", "tp"]))
    }),
    ("replicated and sharded", |net, mesh| {
        fully_shard(net, mesh, config())
    }),
    ("parallelized", |net, mesh| {
        parallelize(net, &mesh.slice("tp")?, plan())
    }),
    ("parallelized and sharded", |net, mesh| {
        fully_shard(
            parallelize(net, &mesh.slice("tp")?, plan())?,
            &mesh.slice("dp")?,
            config(),
        )
    }),
    ("offloaded, in bf16", |net, mesh| {
        let precision = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_output_dtype(DType::F32);
        let config = config().with_offload(OffloadPolicy::Cpu);
        fully_shard(
            net,
            mesh,
            config.with_mixed_precision_for(["up", "down"], precision),
        )
    }),
    ("experts", |net, mesh| {
        let placed = Plan::new().with_style("*", Style::placed(Placement::Shard(0)));
        let experts = parallelize(net.experts.clone(), &mesh.slice("tp")?, placed)?;
        fully_shard(
            Net { experts, ..net },
            mesh,
            config().with_shard_dims(["dp", "tp"]),
        )
    }),
];

pub fn config() -> FullyShard {
    FullyShard::new()
        .with_units(["up", "down"])
        .with_ignored(["spare"])
        .with_layer_warnings(false)
}

fn plan() -> Plan {
    Plan::new()
        .with_style("up", Style::colwise())
        .with_style("down", Style::rowwise())
        .with_style("experts", Style::placed(Placement::Shard(0)))
}

/// The mesh of [`LAYOUTS`].
pub fn test() -> MeshTest {
    MeshTest::new([2, 2], ["dp", "tp"])
}

/// A device of the mesh with autodiff.
pub fn device(mesh: &DeviceMesh) -> Device {
    mesh.device().clone().autodiff()
}

#[test]
fn models_of_two_seeds_share_no_value() {
    let device = Device::flex();
    let [one, other] = [1, 2].map(|seed| values(&Net::new(seed, &device)));
    assert_eq!(one, values(&Net::new(1, &device.autodiff())));
    assert_eq!(one.len(), 14);
    assert!(one.iter().all(|(path, value)| *value != other[path]));
    assert_eq!(fill(101, &[WIDTH]), one["norm.gamma"].clone());
}
