//! [`visualize_model`]: which rank holds what of a model's parameters.

use std::fmt;

use burn::module::Module;

use super::page;
use super::parameter::{HeldParameter, Holders};
use crate::dtensor::visualize_sharding;
use crate::param::{ModelScan, ScannedParam};

/// Which rank holds which part of each parameter of `model`, to be looked at. Local: no parameter is gathered
/// or drawn.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::{debug::visualize_model, prelude::*};
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(6, 16).init(world.device()), &mesh, FullyShard::new())?;
///     let layout = visualize_model(&model);
///     world.run_on(0, || -> Result<()> {
///         println!("{layout}");
///         std::fs::write(std::env::temp_dir().join("layout.html"), layout.to_html())?;
///         Ok(())
///     });
///     Ok(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
pub fn visualize_model<M: Module>(model: &M) -> ModelSharding {
    let parameter = |found: ScannedParam| {
        let path = found.path();
        let place = match &found.distributed {
            Some(param) => Holders::Distributed { spec: param.spec(found.dtype), unit: param.unit.label() },
            None => Holders::Own { shape: found.shape },
        };
        HeldParameter { path, place }
    };
    ModelSharding(ModelScan::of(model).params.into_iter().map(parameter).collect())
}

/// Where a model's parameters lie.
///
/// Displays as a [`visualize_sharding`] of each:
///
/// ```text
/// weight: [6, 16] f32 on DeviceMesh(shard=4; ranks 0..4): [S(0)]
///
///        0..16
///      +-------+
/// 0..2 | 0     |
///      +-------+
/// 2..4 | 1     |
///      +-------+
/// 4..6 | 2     |
///      +-------+
/// empty: 3
/// ```
#[derive(Debug, Clone)]
pub struct ModelSharding(Vec<HeldParameter>);

impl ModelSharding {
    /// A page for a browser, on its own: of each parameter a picture to scale, coloured by rank, and of each rank
    /// how much it holds.
    pub fn to_html(&self) -> String {
        page::page(&self.0)
    }
}

impl fmt::Display for ModelSharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, HeldParameter { path, place }) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { "\n" };
            match place {
                Holders::Distributed { spec, .. } => write!(f, "{separator}{path}: {}", visualize_sharding(spec))?,
                Holders::Own { shape } => writeln!(f, "{separator}{path}: {shape:?}, of every rank its own")?,
            }
        }
        Ok(())
    }
}
