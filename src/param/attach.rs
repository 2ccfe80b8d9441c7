//! [`attach`]: puts this rank's shards in the place of a model's parameters.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::Tensor;

use super::ParamError;
use super::distributed::{DistributedParameter, replace_next};
use crate::comm::Call;
use crate::dtensor::{DTensorSpec, send_parts};
use crate::{Error, Result};

/// A parameter and what becomes of it.
pub(crate) struct Attachment {
    pub(crate) path: Arc<str>,
    pub(crate) param: DistributedParameter,
    /// How the stored value is cut, and over which ranks: the first of them has the values. `None`: it is this rank's
    /// part already.
    pub(crate) cut: Option<Arc<DTensorSpec>>,
    /// Whether it was distributed before.
    pub(crate) again: bool,
}

/// Replaces each of these parameters, given in burn's order, by this rank's part of the value that
/// the first rank has, or that it has itself. All others get leaves of their own.
///
/// `label` names the calls.
///
/// # Collective
/// Every rank of the cuts' meshes; local without cuts.
///
/// # Errors
/// [`ParamError::NotMet`] for a parameter that the model's `map` does not show.
pub(crate) fn attach<M: Module>(
    model: M,
    attachments: impl IntoIterator<Item = Attachment>,
    label: &'static str,
) -> Result<M> {
    let mut attach = Attach { queue: attachments.into_iter().collect(), leaves: HashMap::new(), label, failed: None };
    let model = model.apply_reparameterization(&mut attach);
    match (attach.failed, attach.queue.pop_front()) {
        (Some(error), _) => Err(error),
        (None, Some(Attachment { path: param, .. })) => Err(ParamError::NotMet { param: param.to_string() }.into()),
        (None, None) => Ok(model),
    }
}

struct Attach {
    queue: VecDeque<Attachment>,
    /// The new leaves of parameters that stay as they are.
    leaves: HashMap<ParamId, DispatchTensor>,
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
        if self.queue.front().is_none_or(|next| *next.path != *path) {
            return (self.own_leaf(param), None);
        }
        let next = self.queue.pop_front().expect("the front was just looked at");
        match self.shard(&next, param.clone()) {
            Ok(param) => {
                if next.again {
                    replace_next(&next.param);
                }
                (param, Some(next.param))
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

    fn shard<const D: usize>(&self, next: &Attachment, param: Param<Tensor<D>>) -> Result<Param<Tensor<D>>> {
        let Attachment { path, cut, .. } = next;
        let Some(cut) = cut else {
            let (part, require_grad) = (param.base().detach(), param.is_require_grad());
            return Ok(param.map(|_| part.set_require_grad(require_grad)));
        };
        let device = param.lazy_device();
        // Reading a lazy parameter draws its values: only the rank they are taken from does.
        let first = vec![0; cut.coordinate().len()];
        let whole = (*cut.coordinate() == *first).then(|| param.base().inner());
        let mut shard = send_parts(whole, cut, &first, &Call::new(format!("{} {path}", self.label)))?;

        let strategy = Tensor::<1>::empty([0], &device).gradient_checkpointing_strategy();
        if let Some(strategy) = strategy {
            shard = shard.autodiff().with_gradient_checkpointing_strategy(strategy);
        }
        // A parameter that is still lazy must not be initialized to be replaced: that would draw
        // random numbers. Loading a value keeps its id, mappers and training state.
        let param = if param.is_initialized() {
            param
        } else {
            let id = param.id;
            param.transform_for_load(Tensor::zeros(cut.shape().clone(), &device), id)
        };
        let require_grad = param.is_require_grad();
        Ok(param.map(|_| shard.set_require_grad(require_grad)))
    }
}
