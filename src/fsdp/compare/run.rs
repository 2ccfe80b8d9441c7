//! [`run`]: one forward and backward of a model, with what its units return.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};
use crate::comm::{error_behind, panic_text};
use crate::param::{HostTensor, Probe, probe};
use crate::{Error, Result};

/// Values of one run.
pub(super) struct Run {
    pub(super) outputs: Vec<RunOutput>,
    /// Gradients by path. `None` without a backward.
    pub(super) grads: Option<HashMap<String, HostTensor>>,
}

/// Output of a unit, or the loss, which is the last of all.
pub(super) struct RunOutput {
    /// Label of the unit; `None` for the loss.
    pub(super) unit: Option<Arc<str>>,
    pub(super) tensors: Vec<HostTensor>,
}

impl Run {
    /// Returns the unit whose output is at this place; `None` for the loss.
    pub(super) fn unit(&self, at: usize) -> Option<String> {
        self.outputs.get(at)?.name()
    }
}

impl RunOutput {
    /// Returns the unit; `None` for the loss.
    pub(super) fn name(&self) -> Option<String> {
        self.unit.as_deref().map(String::from)
    }
}

/// A panic of this rank in one of the models.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Panicked {
    pub(super) unit: Option<String>,
    pub(super) message: String,
}

/// Passes to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    /// Forward, and backward if the loss is tracked.
    Backward,
}

/// Ranges of gradients to keep: by path, a dimension and a range of it.
pub(super) type ShardRanges<'a> = HashMap<&'a str, (usize, Range<usize>)>;

/// Runs `forward`. Gradients are limited to these `shards`; those of other parameters are kept in
/// full.
///
/// # Errors
/// The failure of a collective. A panic is the inner error.
pub(super) fn run<M: Module, I>(
    model: &M,
    input: I,
    forward: &impl Fn(&M, I) -> Tensor<1>,
    pass: Pass,
    shards: &ShardRanges<'_>,
) -> Result<Result<Run, Panicked>> {
    let (
        loss,
        Probe {
            outputs,
            panicked_in,
        },
    ) = probe(|| forward(model, input));
    let loss = match loss {
        Ok(loss) => loss,
        Err(payload) => return panicked(&*payload, panicked_in),
    };
    let tracked = Dispatch::is_tracked(&loss.clone().into_dispatch());
    let value = HostTensor::of(loss.clone().into_dispatch());
    let outputs = outputs.into_iter().map(|(unit, tensors)| RunOutput {
        unit: Some(unit),
        tensors,
    });
    let outputs = outputs
        .chain([RunOutput {
            unit: None,
            tensors: vec![value],
        }])
        .collect();
    if pass == Pass::Forward || !tracked {
        return Ok(Ok(Run {
            outputs,
            grads: None,
        }));
    }
    let (grads, Probe { panicked_in, .. }) =
        probe(|| GradientsParams::from_grads(loss.backward(), model));
    match grads {
        Ok(grads) => {
            let mut read = ReadGrads {
                grads: &grads,
                shards,
                values: HashMap::new(),
            };
            visit_tensors(model, &mut read);
            Ok(Ok(Run {
                outputs,
                grads: Some(read.values),
            }))
        }
        Err(payload) => panicked(&*payload, panicked_in),
    }
}

/// Returns the description of a panic, or the error of the collective that caused it.
fn panicked<T>(payload: &(dyn Any + Send), unit: Option<Arc<str>>) -> Result<Result<T, Panicked>> {
    let message = match error_behind(payload) {
        Some(error @ Error::Comm(_)) => return Err(error),
        Some(error) => error.to_string(),
        None => panic_text(payload).into(),
    };
    Ok(Err(Panicked {
        unit: unit.map(|unit| unit.to_string()),
        message,
    }))
}

/// Collects gradients by path.
struct ReadGrads<'a> {
    grads: &'a GradientsParams,
    shards: &'a ShardRanges<'a>,
    values: HashMap<String, HostTensor>,
}

impl TensorVisitor for ReadGrads<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.get::<D>(param.id) else {
            return;
        };
        let path = path.join();
        let grad = match self.shards.get(&*path) {
            Some((dim, range)) => grad.slice_dim(*dim, range.clone()),
            None => grad,
        };
        self.values
            .insert(path, HostTensor::of(grad.into_dispatch()));
    }
}
