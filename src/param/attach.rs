//! [`attach_shards`]: replaces a model's parameters by this rank's shards, also lazy ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::Tensor;

use super::ParamError;
use super::distributed::copying;
use super::distributed::{DistributedParameter, replace_next};
use super::read::stored;
use crate::burn_compat::{ADAPTER, undrawn};
use crate::comm::{self, Call, Communicator, TensorMeta};
use crate::dtensor::{DTensorSpec, associate, own, send_parts};
use crate::mesh::DeviceMesh;
use crate::{Error, Result, memory};

/// A parameter, and the distributed parameter that it becomes.
pub(crate) struct ShardAssignment {
    pub(crate) param: DistributedParameter,
    /// Present distribution of the parameter. `Some` if its value is gathered before it is sharded.
    pub(crate) gathered: Option<DistributedParameter>,
    /// Shardings that are applied to the value one after the other. For each, the first rank of its
    /// mesh has the value. Empty if the value is already this rank's shard.
    pub(crate) data_specs: Vec<Arc<DTensorSpec>>,
    /// Group whose first rank broadcasts its shard to the others.
    pub(crate) copies: Option<Communicator>,
    /// True if the parameter was distributed before.
    pub(crate) again: bool,
}

/// Replaces each of these parameters, given in burn's order, by this rank's shard. The value is
/// that of the first rank of the mesh, or this rank's own if there are no shardings. All other
/// parameters get new autodiff leaves.
///
/// If `one_by_one` is true, all ranks complete a parameter before the next one, so that no rank
/// holds two full values at once. Otherwise each rank proceeds as soon as its own transfers are
/// complete. `label` names the calls.
///
/// # Collective
/// Every rank of the shardings' meshes. Local without shardings.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a parameter that the model's `map` does not visit.
pub(crate) fn attach_shards<M: Module>(
    model: M,
    attachments: impl IntoIterator<Item = ShardAssignment>,
    one_by_one: bool,
    label: &'static str,
) -> Result<M> {
    let queue = attachments.into_iter().collect();
    let mut attach = Attach {
        queue,
        leaves: HashMap::new(),
        inside: String::new(),
        one_by_one,
        label,
        failed: None,
    };
    let model = copying(|| model.apply_reparameterization(&mut attach));
    match (attach.failed, attach.queue.pop_front()) {
        (Some(error), _) => Err(error),
        (None, Some(next)) => Err(ParamError::ParamNotVisited {
            param: next.param.info().path.to_string(),
        }
        .into()),
        (None, None) => Ok(model),
    }
}

struct Attach {
    queue: VecDeque<ShardAssignment>,
    /// New leaves of the parameters that are not distributed.
    leaves: HashMap<ParamId, DispatchTensor>,
    one_by_one: bool,
    /// Prefix of the paths of an adapter's factors while they are visited; empty otherwise.
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
        let Some(next) = self
            .queue
            .pop_front_if(|next| *next.param.info().path == *path)
        else {
            return (self.own_leaf(param), None);
        };
        match self.shard(&next, param.clone()) {
            Ok(param) => {
                if next.again {
                    replace_next(&next.param);
                }
                let distributed = next.param.with_adapter(|adapter| {
                    // The factors of the adapter are the next entries of the queue.
                    self.inside = format!("{path}.{}.", ADAPTER);
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
    /// Returns the parameter with an autodiff leaf that belongs to this model only. Clones inside
    /// the model share it.
    ///
    /// Clones of a model share their leaves. If all ranks used clones of one model that was made
    /// before `launch`, their graphs would be connected and would share one lock, which a rank
    /// holds while its backward waits for the other ranks.
    fn own_leaf<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_initialized() || !param.is_require_grad() {
            return param;
        }
        let known = self.leaves.entry(param.id);
        param.map(|leaf| {
            Tensor::from_dispatch(
                known
                    .or_insert_with(|| leaf.detach().require_grad().into_dispatch())
                    .clone(),
            )
        })
    }

    fn shard<const D: usize>(
        &self,
        next: &ShardAssignment,
        param: Param<Tensor<D>>,
    ) -> Result<Param<Tensor<D>>> {
        if next.data_specs.is_empty() {
            let part = param.base().detach();
            let require_grad = param.is_require_grad();
            return Ok(param.map(|_| part.set_require_grad(require_grad)));
        }
        let device = param.lazy_device();
        let mut held = next
            .gathered
            .as_ref()
            .map(|before| stored(before, param.base()))
            .transpose()?;
        let is_copy = next
            .copies
            .as_ref()
            .is_some_and(|copies| copies.group().rank() > 0);
        for data_spec in next.data_specs.iter().filter(|_| !is_copy) {
            let first = vec![0; data_spec.coordinate().len()];
            // Reading a lazy parameter draws its values, so only the rank that provides the values
            // reads it.
            let is_first = *data_spec.coordinate() == *first;
            let full = held
                .take()
                .filter(|_| is_first)
                .or_else(|| is_first.then(|| param.base().inner()));
            held = Some(self.part(full, data_spec, &first, next)?);
        }
        if let (Some(copies), Some(data_spec)) = (&next.copies, next.data_specs.last()) {
            let metas = vec![TensorMeta {
                shape: data_spec.local_shape(),
                dtype: data_spec.dtype(),
            }];
            let part = held.take().map(|part| vec![part.into_dispatch()]);
            held = Some(copies.broadcast(self.call(next), part, metas, 0).single()?);
        }
        let is_offloaded = next.param.unit.spec().offloaded().is_some();
        let home = if is_offloaded {
            memory::host()
        } else {
            next.data_specs[0].mesh().device().clone()
        };
        let shard = held
            .expect("the value was sharded here or received from another rank")
            .to_device(&home);
        // Data of a GPU that is moved to the host is read later, and keeps its memory there.
        let shard = if is_offloaded {
            Tensor::from_dispatch(own(shard.into_dispatch()))
        } else {
            shard
        };

        let shard = associate(
            shard,
            Tensor::<1>::empty([0], &device).gradient_checkpointing_strategy(),
        );
        // A parameter that is still lazy must not be initialized only to be replaced: that would
        // draw random numbers. Loading a value keeps the parameter's id, mappers and training
        // state.
        let param = if param.is_initialized() {
            param
        } else {
            undrawn(param)
        };
        let require_grad = param.is_require_grad();
        Ok(param.map(|_| shard.set_require_grad(require_grad)))
    }

    fn call(&self, next: &ShardAssignment) -> Call {
        Call::new(format!("{} {}", self.label, next.param.info().path))
    }

    /// Returns this rank's local tensor of the value that the rank at coordinate `first` passes in
    /// `full`.
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
            // Ranks may copy their shards directly from the full value, so wait before it is freed.
            let mesh = data_spec.mesh();
            mesh.all()?.barrier(call).wait()?;
        }
        Ok(part)
    }
}

/// [Attaches](attach_shards) the shards of a model of which this rank has `lazy` parameters, or
/// none. If any rank of the mesh that `mesh` was sliced from has lazy ones, only the first rank of
/// `mesh` draws them, and the next one after every rank has received its shard of the one before.
/// So no rank ever holds more than one full parameter, and the other ranks hold only shards:
///
/// ```text
///   first rank    draw a │ send    │ drop a │ draw b │ send ...
///   other ranks          │ receive │ shard  │        │ receive ...
/// ```
///
/// Each slice of a mesh has a first rank. The slices draw one after the other, in the order of
/// their indices. burn's random state may be shared by all of them, so concurrent draws would give
/// values that depend on timing. A run on one device draws the values that the first slice draws.
/// Along mesh dimensions that do not shard a parameter, the ranks receive copies of the shards of
/// the ranks with index 0.
///
/// # Collective
/// Every rank of the mesh that `mesh` was sliced from.
///
/// # Errors
/// Those of [`attach_shards`], and a failure of another rank.
pub(crate) fn attach_drawn<M: Module>(
    model: M,
    attachments: impl IntoIterator<Item = ShardAssignment>,
    mesh: &DeviceMesh,
    lazy: bool,
    label: &'static str,
) -> Result<M> {
    let root = mesh.root();
    let all = mesh.world().group(root.ranks())?;
    let lazy = if root.size() == 1 {
        lazy
    } else {
        all.any(Call::new(format!("{label}, lazy parameters")), lazy)?
    };
    let attach = || attach_shards(model, attachments, lazy, label);
    let slices = root.size() / mesh.size();
    if !lazy || slices == 1 {
        return attach();
    }
    comm::in_turn(&all, label, mesh.slice_index() % slices, slices, attach)
}
