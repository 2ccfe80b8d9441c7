//! `clip_grad_norm` over data-parallel and tensor-parallel dimensions.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::prelude::*;

use super::support::{Net, data_rank, devices, distribute, full_grads, meshes, plan};
use crate::fsdp::support::{max_diff, on_device, values};

#[test]
fn the_norm_is_that_of_the_full_gradients() {
    let model = Net::new(&Device::flex());
    for (mesh, dims) in meshes().into_iter().zip([1, 2, 2, 2]) {
        for (norm, p) in [
            (NormType::L2, 2.0),
            (NormType::L1, 1.0),
            (NormType::Inf, f64::INFINITY),
        ] {
            let totals = mesh.run(|mesh| {
                let [device, _] = devices(mesh);
                let (rank, ranks) = data_rank(mesh);
                let plain = on_device(&model, &device);
                let losses = (0..ranks).map(|rank| plain.loss_on(0, rank, &device));
                let loss = losses.reduce(|a, b| a + b).expect("a rank") / ranks as f32;
                let full = values(
                    &plain,
                    Some(&GradientsParams::from_grads(loss.backward(), &plain)),
                );
                let elements = full.values().flatten().map(|x| x.abs() as f64);
                let expected = match p {
                    f64::INFINITY => elements.fold(0.0, f64::max),
                    p => elements.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
                };
                let model = distribute(plain, mesh, plan(), ReshardAfterForward::Auto)?;
                let loss = model.loss_on(0, rank, &device);
                let mut grads = GradientsParams::from_grads(loss.backward(), &model);
                assert!(max_diff(&full_grads(&model, &grads)?, &full) < 1e-5);
                let ledger = mesh.world().ledger();
                ledger.reset();
                let max_norm = expected / 4.0;
                let total = clip_grad_norm(&model, &mut grads, max_norm, norm)?;
                assert_eq!(
                    ledger.calls(Op::AllReduce),
                    dims,
                    "one a mesh dimension that shards, on {mesh}"
                );
                assert!(
                    (total - expected).abs() < 1e-4 * expected,
                    "{norm:?} on {mesh}: {total} for {expected}"
                );
                let clipped = clip_grad_norm(&model, &mut grads, f64::MAX, norm)?;
                assert!(
                    (clipped - max_norm).abs() < 1e-3 * max_norm,
                    "{norm:?} on {mesh}: {clipped} for {max_norm}"
                );
                Ok(total.to_bits())
            });
            assert!(
                totals.iter().all(|total| *total == totals[0]),
                "{norm:?} on {mesh}: every rank has one total"
            );
        }
    }
}

struct Scale<'a>(&'a mut GradientsParams, f64);

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.remove::<D>(param.id) {
            self.0.register(param.id, grad * self.1);
        }
    }
}

/// Also of gradients whose squares single precision does not hold.
#[test]
fn the_norm_of_scaled_gradients_is_scaled() {
    let model = Net::new(&Device::flex());
    for (mesh, dims) in meshes().into_iter().zip([1, 2, 2, 2]) {
        for norm in [NormType::L1, NormType::L2, NormType::P(3.0), NormType::Inf] {
            mesh.run(|mesh| {
                let [device, _] = devices(mesh);
                let model = distribute(
                    on_device(&model, &device),
                    mesh,
                    plan(),
                    ReshardAfterForward::Auto,
                )?;
                let grads = || {
                    let loss = model.loss_on(0, data_rank(mesh).0, &device);
                    GradientsParams::from_grads(loss.backward(), &model)
                };
                let ordinary = clip_grad_norm(&model, &mut grads(), f64::MAX, norm)?;
                for factor in [100.0, -100.0].map(f64::exp2) {
                    let mut grads = grads();
                    model.visit(&mut Scale(&mut grads, factor));
                    let ledger = mesh.world().ledger();
                    ledger.reset();
                    let scaled = clip_grad_norm(&model, &mut grads, f64::MAX, norm)?;
                    assert_eq!(
                        ledger.calls(Op::AllReduce),
                        dims,
                        "one a mesh dimension that shards, on {mesh}"
                    );
                    let apart = (scaled / factor / ordinary - 1.0).abs();
                    assert!(
                        apart < 1e-5,
                        "{norm:?} on {mesh}: {scaled:e} for {:e}",
                        factor * ordinary
                    );
                }
                Ok(())
            });
        }
    }
}
