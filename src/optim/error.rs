//! [`OptimError`]: why parameters could not be stepped, or a state not be taken or loaded.

use burn::tensor::DType;

/// Why an optimizer could not step a distributed parameter, or its state not be taken or loaded.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A parameter or gradient is yet to be reduced.
    #[error("{what} of `{path}` is {layout}, yet to be reduced; `redistribute` it to Replicate or Shard first")]
    Partial {
        /// The parameter.
        path: String,
        /// `the value` or `the gradient`.
        what: &'static str,
        /// Its layout.
        layout: String,
    },
    /// A gradient is not laid out as its parameter.
    #[error("the gradient of `{path}` is {gradient}, the parameter {param}; `redistribute` it there")]
    Gradient {
        /// The parameter.
        path: String,
        /// Layout, shape and type of the gradient.
        gradient: String,
        /// Those of the parameter.
        param: String,
    },
    /// A state is not laid out as the parameter it is of.
    #[error(
        "the optimizer's state of `{path}` is of a parameter {state}, but the parameter is {param}; bring the state \
         there with `OptimizerState::redistribute`, and load it"
    )]
    Layout {
        /// The parameter.
        path: String,
        /// Layout, shape and type of the parameter that the state is of.
        state: String,
        /// Those of the parameter.
        param: String,
    },
    /// What is remembered of a parameter that is cut is no part of a tensor of its shape: an optimizer that steps parts
    /// has made it of one, or would have to make one of it.
    #[error(
        "the optimizer's `{name}` has shape {found:?} on this rank, whose part of the parameter is {expected:?}: such a \
         state goes with the whole parameter alone; keep the parameter `Replicate`, or step it as a DTensor, with a \
         `DTensorOptimizer`, to be told `with_full_parameters` if the optimizer is your own"
    )]
    Shape {
        /// Path and field.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape of this rank's part of the parameter.
        expected: Vec<usize>,
    },
    /// An average is of another model, or of one that lies otherwise.
    #[error(
        "`{path}` is {average} in the average, and {model} in the model: an average begins as a clone of the model, and \
         is distributed again where the model is"
    )]
    Average {
        /// The parameter.
        path: String,
        /// How it lies in the average.
        average: String,
        /// How it lies in the model.
        model: String,
    },
    /// Muon was given a parameter that is no matrix.
    #[error(
        "Muon steps matrices, and `{path}`, which its group has, has {dims} dimensions: leave it to another optimizer, \
         with a group of the matrices alone, or of all but `{path}` by `ParamGroup::exclude`"
    )]
    NotAMatrix {
        /// The parameter.
        path: String,
        /// How many dimensions it has.
        dims: usize,
    },
    /// A state is of a parameter that is not there.
    #[error("the state `{name}` belongs to no parameter; there are {paths:?}")]
    NoParameter {
        /// Path and field, or path.
        name: String,
        /// Some of the parameters.
        paths: Vec<String>,
    },
    /// A state was made by another optimizer, or by one with other settings.
    #[error(
        "the optimizer keeps other things of `{path}` than the state has: {missing:?} are missing or of another kind, \
         and it has no place for {extra:?}; load it into the optimizer that made it, with the same settings"
    )]
    Foreign {
        /// The parameter.
        path: String,
        /// What the optimizer needs.
        missing: Vec<String>,
        /// What it does not know.
        extra: Vec<String>,
    },
    /// burn loads the state of optimizers in the device's default element type.
    #[error(
        "the state `{name}` is {found}, but burn loads optimizers' states as the device's default float, {loaded}; \
         make {found} the device's default, or `cast` the model"
    )]
    ElementType {
        /// Path and field.
        name: String,
        /// The type it has.
        found: String,
        /// The type it would get.
        loaded: String,
    },
}

impl OptimError {
    pub(super) fn no_parameter<'a>(name: &str, paths: impl Iterator<Item = &'a String>) -> Self {
        Self::NoParameter { name: name.into(), paths: paths.take(8).cloned().collect() }
    }

    pub(super) fn element_type(name: String, found: DType, loaded: DType) -> Self {
        Self::ElementType { name, found: found.name().into(), loaded: loaded.name().into() }
    }
}
