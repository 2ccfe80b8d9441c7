//! Layers with fewer features than tensor-parallel ranks: some ranks hold an empty shard of them.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{distribute_with, full_grads};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

/// Length of the input and the output.
const DIM: usize = 3;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    head: Linear,
}

impl Net {
    fn new(features: usize, frozen: bool, device: &Device) -> Self {
        let layer = |seed, from, to| {
            let layer = LinearConfig::new(from, to).with_bias(false).init(device);
            Linear {
                weight: Param::from_tensor(tensor(seed, [from, to], device)),
                ..layer
            }
        };
        let net = Self {
            first: layer(1, DIM, DIM),
            second: layer(2, DIM, features),
            head: layer(3, features, DIM),
        };
        if frozen {
            Self {
                second: net.second.no_grad(),
                ..net
            }
        } else {
            net
        }
    }

    fn plain(&self, x: Tensor<3>) -> Tensor<1> {
        self.head
            .forward(self.second.forward(self.first.forward(x)))
            .square()
            .mean()
    }

    fn parallel(&self, x: DTensor<3>) -> DTensor<3> {
        unit(self, x, |net, x| {
            let x = unit(&net.first, x, |layer, x| layer.forward_dtensor(x));
            let x = unit(&net.second, x, |layer, x| layer.forward_dtensor(x));
            unit(&net.head, x, |layer, x| layer.forward_dtensor(x))
        })
    }
}

/// Whether the graph keeps a weight decides the order of backward's collectives: a rank with an
/// empty shard decides as the others do.
#[test]
fn a_layer_that_is_frozen_may_leave_ranks_without_a_shard() {
    use ReshardAfterForward::{Always, Auto, Never};
    for (tp, features) in [(2, 1), (3, 2), (3, 4)] {
        for (frozen, reshard) in [(false, Always), (true, Always), (true, Auto), (true, Never)] {
            let model = Net::new(features, frozen, &Device::flex());
            let x = |device: &Device| tensor(4, [2, 2, DIM], device);
            let device = Device::flex().autodiff();
            let reference = on_device(&model, &device);
            let grads =
                GradientsParams::from_grads(reference.plain(x(&device)).backward(), &reference);
            let expected = values(&reference, Some(&grads));
            MeshTest::new([2, tp], ["dp", "tp"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let plan = Plan::new().with_style("second", Style::colwise()).with_style("head", Style::rowwise());
                let config = FullyShard::new().with_units(["*"]).with_reshard_after_forward(reshard);
                let net = distribute_with(on_device(&model, &device), mesh, plan, config)?;
                let x = DTensor::distribute_replicated(x(&device), &mesh.slice("tp")?, &[Placement::Replicate])?;
                let loss = net.parallel(x).square().mean().full_tensor()?;
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                let diff = max_diff(&full_grads(&net, &grads)?, &expected);
                assert!(
                    diff < 1e-5,
                    "gradients are off by {diff} on {mesh}, {features} features, {frozen}, {reshard:?}"
                );
                Ok(())
            });
        }
    }
}
