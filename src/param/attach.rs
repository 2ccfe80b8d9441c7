//! [`attach_shards`]: puts this rank's shards in the place of a model's parameters.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::Tensor;

use super::ParamError;
use super::adapter;
use super::distributed::{DistributedParameter, replace_next};
use super::lazy::undrawn;
use super::read::stored;
use super::states::copying;
use crate::comm::{Call, Communicator, TensorMeta};
use crate::dtensor::{DTensorSpec, send_parts};
use crate::{Error, Result, memory};

/// A parameter and what becomes of it.
pub(crate) struct ShardAssignment {
    pub(crate) path: Arc<str>,
    pub(crate) param: DistributedParameter,
    /// How it is distributed so far, where its value is gathered first.
    pub(crate) gathered: Option<DistributedParameter>,
    /// How the value is cut, and over which ranks: the first of them has it. One cut after the other; none if it is this
    /// rank's part already.
    pub(crate) data_specs: Vec<Arc<DTensorSpec>>,
    /// Ranks that then have the part of the first of them.
    pub(crate) copies: Option<Communicator>,
    /// Whether it was distributed before.
    pub(crate) again: bool,
}

/// Replaces each of these parameters, given in burn's order, by this rank's part of the value that
/// the first rank has, or that it has itself. All others get leaves of their own.
///
/// `one_by_one`, a parameter is through on all ranks before the next: so no rank holds two that are whole. Else those that
/// have values already move as ranks come. `label` names the calls.
///
/// # Collective
/// Every rank of the cuts' meshes; local without cuts.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a parameter that the model's `map` does not show.
pub(crate) fn attach_shards<M: Module>(
    model: M,
    attachments: impl IntoIterator<Item = ShardAssignment>,
    one_by_one: bool,
    label: &'static str,
) -> Result<M> {
    let queue = attachments.into_iter().collect();
    let mut attach = Attach { queue, leaves: HashMap::new(), inside: String::new(), one_by_one, label, failed: None };
    let model = copying(|| model.apply_reparameterization(&mut attach));
    match (attach.failed, attach.queue.pop_front()) {
        (Some(error), _) => Err(error),
        (None, Some(ShardAssignment { path: param, .. })) => {
            Err(ParamError::ParamNotVisited { param: param.to_string() }.into())
        }
        (None, None) => Ok(model),
    }
}

struct Attach {
    queue: VecDeque<ShardAssignment>,
    /// The new leaves of parameters that stay as they are.
    leaves: HashMap<ParamId, DispatchTensor>,
    one_by_one: bool,
    /// Before the paths of an adapter's factors, while they are met.
    inside: String,
    label: &'static str,
    failed: Option<Error>,
}

impl Reparameterizer for &mut Attach {
    type Reparam = DistributedParameter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<DistributedParameter>) {
        if self.failed.is_some() {
            return (param, None);
        }
        let path = format!("{}{path}", self.inside);
        let Some(next) = self.queue.pop_front_if(|next| *next.path == *path) else {
            return (self.own_leaf(param), None);
        };
        match self.shard(&next, param.clone()) {
            Ok(param) => {
                if next.again {
                    replace_next(&next.param);
                }
                let distributed = next.param.with_adapter(|adapter| {
                    // Its factors come next.
                    self.inside = format!("{path}.{}.", adapter::NAME);
                    let adapter = adapter.apply_reparameterization(&mut **self);
                    self.inside.clear();
                    adapter
                });
                (param, Some(distributed))
            }
            Err(error) => {
                self.failed = Some(error);
                (param, None)
            }
        }
    }
}

impl Attach {
    /// The parameter with a leaf of this model's own in the graph; clones inside the model share it.
    ///
    /// Clones of a model share their leaves. Of one made before `launch` that would be all ranks: their
    /// graphs would be one, behind one lock, which a rank holds while its backward waits for the others.
    fn own_leaf<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_initialized() || !param.is_require_grad() {
            return param;
        }
        let known = self.leaves.entry(param.id);
        param.map(|leaf| {
            let own = || leaf.detach().require_grad().into_dispatch();
            Tensor::from_dispatch(known.or_insert_with(own).clone())
        })
    }

    fn shard<const D: usize>(&self, next: &ShardAssignment, param: Param<Tensor<D>>) -> Result<Param<Tensor<D>>> {
        if next.data_specs.is_empty() {
            let (part, require_grad) = (param.base().detach(), param.is_require_grad());
            return Ok(param.map(|_| part.set_require_grad(require_grad)));
        }
        let device = param.lazy_device();
        let mut held = next.gathered.as_ref().map(|before| stored(before, param.base())).transpose()?;
        let is_copy = next.copies.as_ref().is_some_and(|copies| copies.group().rank() > 0);
        for data_spec in next.data_specs.iter().filter(|_| !is_copy) {
            let first = vec![0; data_spec.coordinate().len()];
            // Reading a lazy parameter draws its values: only the rank they are taken from does.
            let is_first = *data_spec.coordinate() == *first;
            let full = held.take().filter(|_| is_first).or_else(|| is_first.then(|| param.base().inner()));
            held = Some(self.part(full, data_spec, &first, next)?);
        }
        if let (Some(copies), Some(data_spec)) = (&next.copies, next.data_specs.last()) {
            let metas = vec![TensorMeta { shape: data_spec.local_shape(), dtype: data_spec.dtype() }];
            let part = held.take().map(|part| vec![part.into_dispatch()]);
            held = Some(copies.broadcast(self.call(next), part, metas, 0).single()?);
        }
        let is_offloaded = next.param.unit.offloaded().is_some();
        let home = if is_offloaded { memory::host() } else { next.data_specs[0].mesh().device().clone() };
        let mut shard = held.expect("a cut, or another rank's").to_device(&home);

        let strategy = Tensor::<1>::empty([0], &device).gradient_checkpointing_strategy();
        if let Some(strategy) = strategy {
            shard = shard.autodiff().with_gradient_checkpointing_strategy(strategy);
        }
        // A parameter that is still lazy must not be initialized to be replaced: that would draw
        // random numbers. Loading a value keeps its id, mappers and training state.
        let param = if param.is_initialized() { param } else { undrawn(param) };
        let require_grad = param.is_require_grad();
        Ok(param.map(|_| shard.set_require_grad(require_grad)))
    }

    fn call(&self, ShardAssignment { path, .. }: &ShardAssignment) -> Call {
        Call::new(format!("{} {path}", self.label))
    }

    /// This rank's part of what the rank at `first` has.
    fn part<const D: usize>(
        &self,
        full: Option<Tensor<D>>,
        data_spec: &DTensorSpec,
        first: &[usize],
        next: &ShardAssignment,
    ) -> Result<Tensor<D>> {
        let call = self.call(next);
        let part = send_parts(full, data_spec, first, &call)?;
        if self.one_by_one {
            // Ranks read their parts where the whole is, which then goes.
            let mesh = data_spec.mesh();
            mesh.communicator_over(&(0..mesh.ndim()).collect::<Vec<_>>())?.barrier(call).wait()?;
        }
        Ok(part)
    }
}
