//! [`OptimError`]: errors of optimizer steps and of optimizer state.

use burn::tensor::DType;
use itertools::Itertools;

/// Reason why a distributed parameter could not be stepped, or optimizer state could not be read or
/// loaded.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A parameter or gradient has a partial placement.
    #[error(
        "{what} of `{path}` is {layout}, which is partial. `redistribute` it to Replicate or Shard first"
    )]
    Partial {
        /// Path of the parameter.
        path: String,
        /// `the value` or `the gradient`.
        what: &'static str,
        /// Layout of that tensor.
        layout: String,
    },
    /// The layout of a gradient differs from that of its parameter.
    #[error(
        "the gradient of `{path}` is {gradient}, but the parameter is {param}. `redistribute` the gradient"
    )]
    Gradient {
        /// Path of the parameter.
        path: String,
        /// Layout, shape and dtype of the gradient.
        gradient: String,
        /// Layout, shape and dtype of the parameter.
        param: String,
    },
    /// The state was made for a parameter with another layout.
    #[error(
        "the optimizer's state of `{path}` is for a parameter {state}, but the parameter is {param}. Redistribute the \
         state with `OptimizerState::redistribute`, then load it"
    )]
    Layout {
        /// Path of the parameter.
        path: String,
        /// Layout, shape and dtype of the parameter for which the state was made.
        state: String,
        /// Layout, shape and dtype of the parameter now.
        param: String,
    },
    /// A state tensor of a sharded parameter is not laid out like the parameter, so the optimizer
    /// cannot use it to step shards.
    #[error(
        "the optimizer's `{name}` has shape {found:?} on this rank, but the rank's shard of the parameter has shape \
         {expected:?}: this optimizer needs the full parameter. Keep the parameter `Replicate`, or step it as a \
         DTensor with a `DTensorOptimizer` (for a custom optimizer, call `with_full_parameters`)"
    )]
    Shape {
        /// Path and field of the state tensor.
        name: String,
        /// Shape of the state tensor.
        found: Vec<usize>,
        /// Shape of this rank's shard of the parameter.
        expected: Vec<usize>,
    },
    /// Parameters cannot be stepped in backward, one by one.
    #[error(
        "the parameters cannot be stepped in backward: {problem}. Call `loss.backward()`, and then `step`"
    )]
    InBackward {
        /// Reason: a step needs something that is not there in backward.
        problem: String,
    },
    /// The optimizer of a model that is not distributed has a state.
    #[error(
        "the optimizer has a state, but no parameter of the model is distributed, so the state has no layout. Call \
         `fully_shard` on one rank, too: it sends nothing there. Or save burn's record of the optimizer"
    )]
    Undistributed,
    /// The average and the model have different parameters or layouts.
    #[error(
        "`{path}` is {average} in the average, but {model} in the model. Create the average as a clone of the model, \
         and distribute both in the same way"
    )]
    Average {
        /// Path of the parameter.
        path: String,
        /// Layout in the average.
        average: String,
        /// Layout in the model.
        model: String,
    },
    /// A step has no gradient of any parameter of the model.
    #[error(
        "this step would change nothing: of the {trained} parameters of the model that are trained, such as `{path}`, \
         none has a gradient among the {grads} that were passed. Pass the gradients of this model, \
         `GradientsParams::from_grads(loss.backward(), &model)`, of a loss that depends on it; or allow such steps with \
         `with_empty_steps_allowed(true)`"
    )]
    NoGradients {
        /// Path of the first trained parameter.
        path: String,
        /// Number of trained parameters.
        trained: usize,
        /// Number of gradients that were passed.
        grads: usize,
    },
    /// Muon's group contains a parameter that is not a matrix.
    #[error(
        "Muon steps only matrices, but its group contains `{path}`, which has {dims} dimensions. Step `{path}` with \
         another optimizer: select only matrices, or exclude it by `ParamGroup::exclude`"
    )]
    NotAMatrix {
        /// Path of the parameter.
        path: String,
        /// Number of dimensions of the parameter.
        dims: usize,
    },
    /// A state belongs to a parameter that does not exist.
    #[error("the state `{name}` belongs to no parameter. The parameters include {paths:?}")]
    NoParameter {
        /// Path and field of the state, or only the path.
        name: String,
        /// Paths of some of the parameters.
        paths: Vec<String>,
    },
    /// A state was made by another optimizer, or with other settings.
    #[error(
        "the state of `{path}` does not match the optimizer: {}. Load the state into the optimizer that made it, with the \
         same settings",
        describe_fields(missing, extra)
    )]
    Foreign {
        /// Path of the parameter.
        path: String,
        /// Fields that the optimizer needs and the state lacks.
        missing: Vec<String>,
        /// Fields of the state that the optimizer does not know.
        extra: Vec<String>,
    },
    /// The state has another dtype than the device's default, in which burn loads optimizer state.
    #[error(
        "the state `{name}` is {found}, but burn loads optimizer state in the device's default float dtype, {loaded}. \
         Make {found} the device's default; or load the state with `StateDTypes::Keep`, and the steps compute in {loaded}"
    )]
    ElementType {
        /// Path and field of the state tensor.
        name: String,
        /// Dtype of the state tensor.
        found: String,
        /// Dtype in which burn would load it.
        loaded: String,
    },
}

fn describe_fields(missing: &[String], extra: &[String]) -> String {
    let listed = |what: &str, fields: &[String]| {
        let fields = fields.iter().map(|field| format!("`{field}`")).join(", ");
        (!fields.is_empty()).then(|| format!("{what}: {fields}"))
    };
    let parts = [
        listed("missing or of another kind", missing),
        listed("unknown to it", extra),
    ];
    match parts.iter().flatten().join("; ") {
        text if text.is_empty() => "it keeps none of such a parameter".into(),
        text => text,
    }
}

impl OptimError {
    pub(super) fn no_parameter<'a>(name: &str, paths: impl Iterator<Item = &'a String>) -> Self {
        Self::NoParameter {
            name: name.into(),
            paths: paths.take(8).cloned().collect(),
        }
    }

    pub(super) fn element_type(name: String, found: DType, loaded: DType) -> Self {
        Self::ElementType {
            name,
            found: found.name().into(),
            loaded: loaded.name().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_optimizer_is_described_without_empty_lists() {
        let fields = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let text = |missing: &[&str], extra: &[&str]| {
            let path = "weight".into();
            let (missing, extra) = (fields(missing), fields(extra));
            OptimError::Foreign {
                path,
                missing,
                extra,
            }
            .to_string()
        };
        let all = text(&["a", "b"], &["c"]);
        assert!(all.contains("missing or of another kind: `a`, `b`; unknown to it: `c`"));
        for (other, part) in [
            (
                text(&["a"], &[]),
                "optimizer: missing or of another kind: `a`. Load",
            ),
            (text(&[], &["c"]), "optimizer: unknown to it: `c`. Load"),
            (
                text(&[], &[]),
                "optimizer: it keeps none of such a parameter. Load",
            ),
        ] {
            assert!(other.contains(part), "{other}");
        }
    }
}
