//! A module with parameters in two units: a group unit of several modules, and a unit of the module
//! alone.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard, unit};
use burn_dtensor::{Error, Result};

use super::net::mesh;
use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

const WIDTH: usize = 5;
const RANKS: usize = 2;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    last: Linear,
}

impl Net {
    fn init() -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&Device::flex());
        let net = Self {
            first: linear(),
            last: linear(),
        };
        let _ = values(&net, None);
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |net, x| {
            let x = unit(&net.first, x, |first, x| first.forward(x).tanh());
            unit(&net.last, x, |last, x| last.forward(x))
        })
    }

    /// Gradients of one step on the data of `rank`.
    fn step(&self, rank: usize, device: &Device) -> GradientsParams {
        let x = tensor(rank as u64 + 1, [3, WIDTH], device);
        GradientsParams::from_grads(self.forward(x).square().sum().backward(), self)
    }
}

/// The module that is a unit of its own, too.
#[derive(Clone, Copy, Debug)]
enum Twice {
    First,
    Last,
    Both,
}

/// Shards `twice` with a unit of its own, which lacks the parameter `grouped`, and then all other
/// parameters as one group unit.
fn sharded(net: &Net, world: &World, device: &Device, twice: Twice, grouped: &str) -> Result<Net> {
    let (mut net, mesh) = (on_device(net, device), mesh(world)?);
    let config = || FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
    let own = |linear: Linear| fully_shard(linear, &mesh, config().with_ignored([grouped]));
    if matches!(twice, Twice::First | Twice::Both) {
        net.first = own(net.first)?;
    }
    if matches!(twice, Twice::Last | Twice::Both) {
        net.last = own(net.last)?;
    }
    fully_shard(net, &mesh, config().with_group_unit(["first", "last"]))
}

/// The parameter `weight` is visited before `bias`, so the group unit is the module's first unit or
/// its second.
#[test]
fn each_unit_is_gathered_and_reduced_once() {
    let net = Net::init();
    let device = Device::flex().autodiff();
    let plain = on_device(&net, &device);
    let of_rank = |rank| values(&plain, Some(&plain.step(rank, &device)));
    let expected = mean((0..RANKS).map(of_rank).collect::<Vec<_>>().iter());
    for (twice, units) in [(Twice::First, 2), (Twice::Last, 2), (Twice::Both, 3)] {
        for grouped in ["weight", "bias"] {
            let all = launch(Launch::threads(RANKS), |world| {
                let device = world.device().clone().autodiff();
                let model = sharded(&net, world, &device, twice, grouped)?;
                // Twice, because the second forward prefetches what followed in the first.
                drop(model.step(world.rank(), &device));
                world.ledger().reset();
                let mut grads = model.step(world.rank(), &device);
                let calls = (
                    world.ledger().calls(Op::AllGather),
                    world.ledger().calls(Op::ReduceScatter),
                );
                let full = full_model(&model.clone().map(&mut Holder(&mut grads)))?;
                Ok::<_, Error>((calls, values(&full, None)))
            });
            for (calls, grads) in launched::values(all.unwrap()) {
                assert_eq!(
                    calls,
                    (2 * units, units),
                    "{twice:?}, {grouped} in the group"
                );
                let diff = max_diff(&grads, &expected);
                assert!(diff < 1e-5, "{twice:?}, {grouped} in the group: {diff}");
            }
        }
    }
}
