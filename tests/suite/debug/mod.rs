//! Watching from outside.

mod layout;
mod watched;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::prelude::*;

/// Two layers, split over tensor-parallel ranks: up by columns, down by rows.
#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    const WIDTH: usize = 8;
    const HIDDEN: usize = 12;

    /// Parallelized over `tp` and sharded over `dp`, a unit of its own for `up`.
    fn on(mesh: &DeviceMesh, device: &Device) -> Result<Self> {
        let mlp = Self {
            up: LinearConfig::new(Self::WIDTH, Self::HIDDEN).init(device),
            down: LinearConfig::new(Self::HIDDEN, Self::WIDTH)
                .with_bias(false)
                .init(device),
        };
        let plan = Plan::new()
            .with_style("up", Style::colwise())
            .with_style("down", Style::rowwise());
        let mlp = parallelize(mlp, &mesh.slice("tp")?, plan)?;
        fully_shard(
            mlp,
            &mesh.slice("dp")?,
            FullyShard::new().with_units(["up"]),
        )
    }

    /// A rank's loss, and its backward.
    fn step(&self, mesh: &DeviceMesh, device: &Device) -> Result<f32> {
        let x = Tensor::<2>::ones([5, Self::WIDTH], device);
        let x = DTensor::distribute_replicated(x, &mesh.slice("tp")?, &[Placement::Replicate])?;
        let loss = unit(self, (), |mlp, ()| {
            let x = unit(&mlp.up, (), |up, ()| {
                up.forward_dtensor(x).tanh().to_local()
            });
            let x = DTensor::from_local(
                x,
                &mesh.slice("tp").expect("a dimension"),
                &[Placement::Shard(1)],
            );
            mlp.down
                .forward_dtensor(x.expect("fits"))
                .to_local()
                .square()
                .sum()
        });
        loss.backward();
        Ok(loss.into_scalar::<f32>())
    }
}
