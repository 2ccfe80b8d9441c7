//! [`describe`]: a table of a model's parameters, globally and on this rank.

use std::fmt;

use burn::module::Module;
use burn::tensor::DType;
use itertools::Itertools;

use crate::param::{ModelScan, ScannedParam};

/// A table of a model's parameters. Print it to see the global shapes and counts: burn's own
/// `{model}` and [`num_params`](Module::num_params) show only this rank's shards.
///
/// ```text
/// on DeviceMesh(shard=4; ranks 0..4)
/// parameter  global   placed  local   unit  dtype  parameters  here
/// weight     [6, 16]  [S(0)]  [2, 16]  root  f32            96    32
/// ```
#[derive(Debug, Clone)]
pub struct Description(Vec<ParamRow>);

/// A parameter in the table.
#[derive(Debug, Clone)]
struct ParamRow {
    path: String,
    global: Vec<usize>,
    local: Vec<usize>,
    dtype: DType,
    /// Placements, mesh and unit; `None` if the parameter is not distributed.
    placed: Option<(String, String, String)>,
}

/// Describes the parameters of `model` in burn's order, distributed or not: global and local
/// shapes, placements, units and counts.
///
/// Local: no communication. No parameter is gathered, and no lazy parameter is initialized.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(6, 16).init(world.device()), &mesh, FullyShard::new())?;
///     let description = describe(&model);
///     assert_eq!(description.global_count(), 6 * 16 + 16);
///     if world.rank() == 3 {
///         assert_eq!(description.local_count(), 4); // it has none of the 6 rows of `weight`
///         println!("{description}");
///     }
///     Ok(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
pub fn describe<M: Module>(model: &M) -> Description {
    let row = |found: ScannedParam| {
        let path = found.path();
        let dtype = found.dtype;
        let local = found.shape;
        let Some(param) = found.distributed else {
            return ParamRow {
                path,
                global: local.clone(),
                local,
                dtype,
                placed: None,
            };
        };
        let spec = param.spec(dtype);
        let placed = (
            spec.layout().to_string(),
            spec.mesh().to_string(),
            param.unit.label().to_string(),
        );
        ParamRow {
            path,
            global: spec.shape().to_vec(),
            local,
            dtype,
            placed: Some(placed),
        }
    };
    Description(ModelScan::of(model).params.into_iter().map(row).collect())
}

impl Description {
    /// Returns the number of elements of all parameters.
    pub fn global_count(&self) -> usize {
        self.0.iter().map(|row| count(&row.global)).sum()
    }

    /// Returns the number of elements that this rank stores.
    pub fn local_count(&self) -> usize {
        self.0.iter().map(|row| count(&row.local)).sum()
    }
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meshes: Vec<_> = self
            .0
            .iter()
            .filter_map(|row| Some(&row.placed.as_ref()?.1))
            .unique()
            .collect();
        let mut lines = vec![
            [
                "parameter",
                "global",
                "placed",
                "local",
                "unit",
                "dtype",
                "parameters",
                "here",
            ]
            .map(String::from),
        ];
        for ParamRow {
            path,
            global,
            local,
            dtype,
            placed,
        } in &self.0
        {
            let (placements, mesh, unit) = match placed {
                Some((placements, mesh, unit)) => {
                    (placements.as_str(), mesh.as_str(), unit.as_str())
                }
                None => ("-", "", "-"),
            };
            let mesh = if meshes.len() > 1 && !mesh.is_empty() {
                format!(" on {mesh}")
            } else {
                String::new()
            };
            lines.push([
                path.clone(),
                format!("{global:?}"),
                format!("{placements}{mesh}"),
                format!("{local:?}"),
                unit.into(),
                dtype.name().into(),
                count(global).to_string(),
                count(local).to_string(),
            ]);
        }
        let all = self.global_count().to_string();
        let here = self.local_count().to_string();
        lines.push(["total", "", "", "", "", "", &all, &here].map(String::from));
        let width = |column: usize| {
            lines
                .iter()
                .map(|line| line[column].len())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; 8] = std::array::from_fn(width);
        if let [mesh] = meshes[..] {
            writeln!(f, "on {mesh}")?;
        }
        for (at, line) in lines.iter().enumerate() {
            let (text, numbers) = line.split_at(6);
            let text = text
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:width$}"))
                .join("  ");
            let numbers = numbers
                .iter()
                .zip(&widths[6..])
                .map(|(cell, width)| format!("{cell:>width$}"))
                .join("  ");
            write!(f, "{text}  {numbers}")?;
            if at + 1 < lines.len() {
                writeln!(f)?;
            }
        }
        Ok(())
    }
}
