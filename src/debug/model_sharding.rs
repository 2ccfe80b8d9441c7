//! [`visualize_model`]: which rank holds which shards of a model's parameters.

use std::fmt;

use burn::module::Module;

use super::page;
use super::parameter::{HeldParameter, Holders};
use crate::dtensor::visualize_sharding;
use crate::param::{ModelScan, ScannedParam};

/// Returns a description of which rank holds which shard of each parameter of `model`, as text or
/// HTML. Local: no parameter is gathered or initialized.
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
            Some(param) => Holders::Distributed {
                spec: param.spec(found.dtype),
                unit: param.unit.label(),
            },
            None => Holders::Own { shape: found.shape },
        };
        HeldParameter { path, place }
    };
    ModelSharding(
        ModelScan::of(model)
            .params
            .into_iter()
            .map(parameter)
            .collect(),
    )
}

/// Layout of a model's parameters, as [`visualize_model`] returns it.
///
/// [`Display`](fmt::Display) writes a [`visualize_sharding`] of each parameter:
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
    /// Returns a self-contained HTML page. It draws each parameter to scale, colored by rank, and
    /// shows the number of elements that each rank holds.
    pub fn to_html(&self) -> String {
        page::page(&self.0)
    }
}

impl fmt::Display for ModelSharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, HeldParameter { path, place }) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { "\n" };
            match place {
                Holders::Distributed { spec, .. } => {
                    write!(f, "{separator}{path}: {}", visualize_sharding(spec))?
                }
                Holders::Own { shape } => {
                    writeln!(f, "{separator}{path}: {shape:?}, separate on every rank")?
                }
            }
        }
        Ok(())
    }
}
