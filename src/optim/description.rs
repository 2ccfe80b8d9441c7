//! [`OptimizerDescription`]: a table of what steps each group of a model's parameters.

use std::fmt;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::fused;
use super::sharded::{OptimizerGroup, ShardedOptimizer};
use crate::autodiff;
use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};

/// A table of what steps each group of a model's parameters, which
/// [`ShardedOptimizer::describe`] returns.
///
/// ```text
/// group  optimizer  parameters  elements here  step
///     0  AdamW               4            120  fused
///     1  Muon                2            512  momentum of shards, then full matrices
///     2  RmsProp             1              5  burn's operations
/// ```
#[derive(Debug, Clone)]
pub struct OptimizerDescription(Vec<GroupRow>);

/// A group in the table.
#[derive(Debug, Clone)]
struct GroupRow {
    optimizer: String,
    step: &'static str,
    parameters: usize,
    /// Elements of this rank's shards.
    elements: usize,
}

impl ShardedOptimizer {
    /// Describes what steps each group of the parameters of `model`: the optimizer, and whether it
    /// makes one pass over memory (*fused*) or burn's operations one after another. Print it to see
    /// which group a parameter's path has selected.
    ///
    /// Local: no communication.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::module::ParamGroup;
    /// # use burn::optim::{AdamWConfig, RmsPropConfig};
    /// # use burn_dtensor::optim::sharded;
    /// # use burn_dtensor::prelude::*;
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// # let device = world.device().clone().autodiff();
    /// let model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
    /// let optim = sharded(AdamWConfig::new())
    ///     .with_group(ParamGroup::from_predicate("bias"), RmsPropConfig::new());
    /// let table = optim.describe(&model).to_string();
    /// assert_eq!(
    ///     table.lines().collect::<Vec<_>>(),
    ///     [
    ///         "group  optimizer  parameters  elements here  step",
    ///         "    0  AdamW               1             24  fused",
    ///         "    1  RmsProp             1              3  burn's operations",
    ///     ]
    /// );
    /// # Ok(())
    /// # })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn describe<M: Module>(&self, model: &M) -> OptimizerDescription {
        let row = |group: &OptimizerGroup| GroupRow {
            optimizer: group.kind.name.clone(),
            step: match group.kind.is_fused {
                _ if group.muon.is_some() => "momentum of shards, then full matrices",
                true => "fused",
                false => "burn's operations",
            },
            parameters: 0,
            elements: 0,
        };
        let mut count = CountGroups {
            groups: &self.groups,
            rows: self.groups.iter().map(row).collect(),
        };
        visit_tensors(model, &mut count);
        OptimizerDescription(count.rows)
    }
}

struct CountGroups<'a> {
    groups: &'a [OptimizerGroup],
    rows: Vec<GroupRow>,
}

impl TensorVisitor for CountGroups<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let of_param = OptimizerGroup::of(self.groups, param.id, &path.join());
        let row = &mut self.rows[of_param];
        let shard = param.base();
        let plain = Tensor::<D>::from_dispatch(autodiff::plain(shard.clone().into_dispatch()));
        row.parameters += 1;
        row.elements += shard.shape().num_elements();
        if row.step == "fused" && shard.shape().num_elements() > 0 && !fused::is_taken(&plain) {
            row.step = "burn's operations";
        }
    }
}

impl fmt::Display for OptimizerDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.iter().map(|row| row.optimizer.len()).chain([9]);
        let width = width.max().expect("the heading has a width");
        let heading = format!(
            "group  {:<width$}  parameters  elements here  step",
            "optimizer"
        );
        let rows = self.0.iter().enumerate().map(|(group, row)| {
            let GroupRow {
                optimizer,
                step,
                parameters,
                elements,
            } = row;
            format!("{group:>5}  {optimizer:<width$}  {parameters:>10}  {elements:>13}  {step}")
        });
        f.write_str(&[heading].into_iter().chain(rows).join("\n"))
    }
}
