//! [`OptimizerState`]: the state that an optimizer keeps for each parameter, by path.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::optim::StateSink;
use burn::tensor::{DType, Shape, TensorData};
use burn_pack::Scalar;

use super::OptimError;
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, DynDTensor};
use crate::placement::Layout;

/// State of an optimizer for each parameter: DTensors in host memory, and numbers. Names consist of
/// the parameter's path and burn's field name, such as `blocks.0.weight.momentum.moment_1`.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    pub(super) params: BTreeMap<String, ParameterState>,
    /// Specs of the model's other parameters, for which the optimizer has no state.
    pub(super) stateless: BTreeMap<String, Arc<DTensorSpec>>,
}

/// State of one parameter.
#[derive(Debug, Clone)]
pub(crate) struct ParameterState {
    /// Spec of the parameter.
    pub(super) spec: Arc<DTensorSpec>,
    pub(crate) tensors: BTreeMap<String, DynDTensor>,
    pub(crate) scalars: BTreeMap<String, Scalar>,
    /// True if an optimizer may hold the tensors in another float dtype.
    pub(super) in_any_dtype: bool,
}

impl OptimizerState {
    /// Returns the paths of the parameters with state.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }

    /// Returns the spec of every parameter of the model by path, and its state, if it has any.
    pub(crate) fn parameters(
        &self,
    ) -> impl Iterator<Item = (&str, &DTensorSpec, Option<&ParameterState>)> {
        let stateless = self
            .stateless
            .iter()
            .map(|(path, spec)| (path.as_str(), &**spec, None));
        self.params
            .iter()
            .map(|(path, state)| (path.as_str(), &*state.spec, Some(state)))
            .chain(stateless)
    }

    /// Returns every tensor with its name, in the same order on all ranks. Local.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &DynDTensor)> {
        self.params.iter().flat_map(|(path, state)| {
            state
                .tensors
                .iter()
                .map(move |(field, tensor)| (join(path, field), tensor))
        })
    }

    /// Returns every number with its name, such as the number of steps.
    pub fn scalars(&self) -> impl Iterator<Item = (String, Scalar)> {
        self.params.iter().flat_map(|(path, state)| {
            state
                .scalars
                .iter()
                .map(move |(field, scalar)| (join(path, field), *scalar))
        })
    }

    /// Returns the tensor with this name; `None` if it does not exist or does not have `D`
    /// dimensions. Local.
    pub fn tensor<const D: usize>(&self, name: &str) -> Option<DTensor<D>> {
        owners(&self.params, name)
            .find_map(|(_, state, field)| state.tensors.get(field))?
            .dtensor()
    }

    /// Returns the number with this name. Local.
    pub fn scalar(&self, name: &str) -> Option<Scalar> {
        owners(&self.params, name)
            .find_map(|(_, state, field)| state.scalars.get(field))
            .copied()
    }

    /// Redistributes the state to the layouts of `specs`, the specs of the parameters by path, on
    /// the same mesh or on another.
    ///
    /// On the same mesh a tensor is redistributed like its parameter. To another mesh it is sent by
    /// way of the full tensor.
    ///
    /// # Collective
    /// Every rank of both meshes must call it. The meshes must have the same ranks.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`] for state of a path that `specs` does not contain,
    /// [`OptimError::Layout`] for a parameter of another shape, and
    /// [`Error::Comm`](crate::Error::Comm) if a collective fails.
    pub fn redistribute(
        self,
        specs: impl IntoIterator<Item = (String, Arc<DTensorSpec>)>,
    ) -> Result<Self> {
        let specs: BTreeMap<_, _> = specs.into_iter().collect();
        let find = |path: &String| {
            specs
                .get(path)
                .ok_or_else(|| OptimError::no_parameter(path, specs.keys()))
        };
        // Check all parameters before anything is sent.
        for (path, state) in &self.params {
            if state.spec.shape() != find(path)?.shape() {
                return Err(layout_error(path, &state.spec, find(path)?).into());
            }
        }
        let moved = self.params.into_iter().map(|(path, state)| {
            let spec = &specs[&path];
            let tensors = state.tensors.into_iter().map(|(field, tensor)| {
                let layout = layout_of(tensor.spec().shape(), spec)?;
                Ok((field, tensor.redistribute_onto(spec.mesh(), &layout)?))
            });
            let state = ParameterState {
                spec: spec.clone(),
                tensors: tensors.collect::<Result<_>>()?,
                ..state
            };
            Ok((path, state))
        });
        let params = moved.collect::<Result<_>>()?;
        Ok(Self::of(params, &specs))
    }

    /// Returns the specs of state tensors with these names, global shapes and dtypes, for
    /// parameters with the specs `params` by path.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`] for a name that does not begin with a path of `params`.
    pub(crate) fn targets<'a>(
        params: &BTreeMap<String, Arc<DTensorSpec>>,
        tensors: impl IntoIterator<Item = (&'a str, &'a Shape, DType)>,
    ) -> Result<BTreeMap<String, Arc<DTensorSpec>>> {
        let target = |(name, shape, dtype): (&str, &Shape, DType)| {
            let (_, param, _) = owner(params, name)?;
            let spec =
                DTensorSpec::new(param.mesh(), layout_of(shape, param)?, shape.clone(), dtype)?
                    .shared();
            Ok((name.to_owned(), spec))
        };
        tensors.into_iter().map(target).collect()
    }

    /// Creates the state of parameters with the specs `params` by path. The tensors must have the
    /// specs that [`targets`](Self::targets) returns. The parameters in `paths` have state, even if
    /// it has no tensors and no numbers.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`] for a name that does not begin with a path of `params`.
    pub(crate) fn from_parts<'a>(
        params: &BTreeMap<String, Arc<DTensorSpec>>,
        paths: impl IntoIterator<Item = &'a String>,
        tensors: impl IntoIterator<Item = (String, DynDTensor)>,
        scalars: impl IntoIterator<Item = (String, Scalar)>,
    ) -> Result<Self, OptimError> {
        let mut states = BTreeMap::new();
        for path in paths {
            let spec = params
                .get(path)
                .ok_or_else(|| OptimError::no_parameter(path, params.keys()))?;
            state_of(&mut states, path, spec);
        }
        for (name, tensor) in tensors {
            let (path, spec, field) = owner(params, &name)?;
            state_of(&mut states, path, spec)
                .tensors
                .insert(field.to_owned(), tensor);
        }
        for (name, scalar) in scalars {
            let (path, spec, field) = owner(params, &name)?;
            state_of(&mut states, path, spec)
                .scalars
                .insert(field.to_owned(), scalar);
        }
        Ok(Self::of(states, params))
    }

    /// Returns the state, whose tensors an optimizer may hold in another float dtype than theirs.
    pub(crate) fn in_any_dtype(mut self) -> Self {
        self.params
            .values_mut()
            .for_each(|state| state.in_any_dtype = true);
        self
    }

    /// Creates the state of some of the parameters with the specs `specs` by path.
    fn of(
        params: BTreeMap<String, ParameterState>,
        specs: &BTreeMap<String, Arc<DTensorSpec>>,
    ) -> Self {
        let others = specs.iter().filter(|(path, _)| !params.contains_key(*path));
        let stateless = others
            .map(|(path, spec)| (path.clone(), spec.clone()))
            .collect();
        Self { params, stateless }
    }
}

/// Returns the state of a parameter, which is empty at first.
fn state_of<'a>(
    states: &'a mut BTreeMap<String, ParameterState>,
    path: &str,
    spec: &Arc<DTensorSpec>,
) -> &'a mut ParameterState {
    states
        .entry(path.to_owned())
        .or_insert_with(|| ParameterState {
            spec: spec.clone(),
            tensors: BTreeMap::new(),
            scalars: BTreeMap::new(),
            in_any_dtype: false,
        })
}

impl ParameterState {
    /// Creates the state of a parameter from burn's flattened state. If `full` is true, `sink` is
    /// the state of the full parameter, otherwise that of this rank's shard.
    pub(super) fn new(
        path: &str,
        spec: &Arc<DTensorSpec>,
        sink: StateSink,
        full: bool,
    ) -> Result<Self> {
        let tensors = sink.tensors.into_iter().map(|(field, data)| {
            let tensor = if full || is_unsharded(spec) {
                shard_of(data, spec)?
            } else if data.shape() == &spec.local_shape() {
                DynDTensor::from_local_data(data, spec)
            } else {
                let found = data.shape().to_vec();
                let expected = spec.local_shape().to_vec();
                return Err(OptimError::Shape {
                    name: join(path, &field),
                    found,
                    expected,
                }
                .into());
            };
            Ok((field, tensor))
        });
        Ok(Self {
            spec: spec.clone(),
            tensors: tensors.collect::<Result<_>>()?,
            scalars: sink.scalars.into_iter().collect(),
            in_any_dtype: false,
        })
    }

    /// Returns the names of the fields.
    pub(super) fn fields(&self) -> StateFields {
        let tensors = self.tensors.keys();
        let fields = tensors.chain(self.scalars.keys());
        StateFields(fields.map(|field| (field.clone(), None)).collect())
    }

    /// Returns the state for an optimizer that steps this rank's shard of the parameter at `path`.
    ///
    /// # Errors
    /// [`OptimError::Shape`] if the parameter is sharded and a tensor is not laid out like it.
    pub(super) fn into_parts(self, path: &str) -> Result<StateSink, OptimError> {
        let Self {
            spec: param,
            tensors,
            scalars,
            in_any_dtype: _,
        } = self;
        let part = |(field, tensor): (String, DynDTensor)| {
            let spec = tensor.spec();
            let laid_out = spec.layout() == param.layout() && spec.shape() == param.shape();
            if laid_out || is_unsharded(&param) && is_unsharded(spec) {
                return Ok((field, tensor.into_local_data()));
            }
            let found = spec.local_shape().to_vec();
            let expected = param.local_shape().to_vec();
            Err(OptimError::Shape {
                name: join(path, &field),
                found,
                expected,
            })
        };
        let tensors = tensors.into_iter().map(part).collect::<Result<_, _>>()?;
        Ok(StateSink {
            tensors,
            scalars: scalars.into_iter().collect(),
        })
    }
}

/// Names of the fields of a state, and the dtypes of tensors among them.
#[derive(Debug, Default)]
pub(super) struct StateFields(BTreeMap<String, Option<DType>>);

impl StateFields {
    pub(super) fn of(StateSink { tensors, scalars }: &StateSink) -> Self {
        let tensors = tensors
            .iter()
            .map(|(field, data)| (field.clone(), Some(data.dtype())));
        Self(
            tensors
                .chain(scalars.iter().map(|(field, _)| (field.clone(), None)))
                .collect(),
        )
    }

    /// Forgets the dtypes, so that others are not found.
    pub(super) fn without_dtypes(mut self) -> Self {
        self.0.values_mut().for_each(|dtype| *dtype = None);
        self
    }

    /// Checks that an optimizer has loaded all of these fields of the parameter at `path`
    /// unchanged. `loaded` are those of its state after loading.
    pub(super) fn check_loaded(&self, path: &str, loaded: Option<&Self>) -> Result<(), OptimError> {
        let nothing = Self::default();
        let Self(found) = loaded.unwrap_or(&nothing);
        for (field, dtype) in found {
            if let (Some(Some(given)), Some(loaded)) = (self.0.get(field), dtype)
                && given != loaded
            {
                return Err(OptimError::element_type(join(path, field), *given, *loaded));
            }
        }
        match loaded.is_some() && self.0.keys().eq(found.keys()) {
            true => Ok(()),
            false => Err(self.foreign(path, loaded.unwrap_or(&nothing))),
        }
    }

    /// Checks that the state of the parameter at `path` has the fields that its optimizer makes.
    /// `made` are those of its state after each of its first steps.
    pub(super) fn check_made(&self, path: &str, made: &[Self]) -> Result<(), OptimError> {
        let same = |made: &Self| self.0.keys().eq(made.0.keys());
        match made.last() {
            Some(last) if !made.iter().any(same) => Err(self.foreign(path, last)),
            _ => Ok(()),
        }
    }

    /// Error of a state with these fields for an optimizer that has others.
    fn foreign(&self, path: &str, Self(found): &Self) -> OptimError {
        let without = |a: &BTreeMap<String, _>, b: &BTreeMap<String, _>| {
            a.keys()
                .filter(|field| !b.contains_key(*field))
                .cloned()
                .collect()
        };
        OptimError::Foreign {
            path: path.into(),
            missing: without(found, &self.0),
            extra: without(&self.0, found),
        }
    }
}

/// Creates a state tensor from a full tensor that every rank holds, laid out for the parameter with
/// this spec.
fn shard_of(data: TensorData, param: &DTensorSpec) -> Result<DynDTensor> {
    let layout = layout_of(data.shape(), param)?;
    DynDTensor::from_full_data(data, param.mesh(), layout)
}

/// Returns the layout of a state tensor of this shape: that of its parameter if the shapes are
/// equal, otherwise replicated (invariant 2).
fn layout_of(shape: &Shape, param: &DTensorSpec) -> Result<Layout> {
    Ok(if shape == param.shape() {
        param.layout().clone()
    } else {
        Layout::replicate(param.mesh().shape())?
    })
}

/// Returns true if every rank holds the full parameter. An optimizer of local tensors then steps
/// full parameters.
fn is_unsharded(spec: &DTensorSpec) -> bool {
    spec.placements()
        .iter()
        .all(|placement| placement.is_replicate())
}

pub(super) fn layout_error(path: &str, state: &DTensorSpec, param: &DTensorSpec) -> OptimError {
    OptimError::Layout {
        path: path.into(),
        state: describe(state),
        param: describe(param),
    }
}

/// Describes a spec in an error text.
pub(super) fn describe(spec: &DTensorSpec) -> String {
    format!(
        "{:?} {} as {} on {}",
        spec.shape().to_vec(),
        spec.dtype().name(),
        spec.layout(),
        spec.mesh()
    )
}

pub(super) fn join(path: &str, field: &str) -> String {
    format!("{path}.{field}")
}

/// Returns the field of `name`, the text after `path` and a dot.
pub(super) fn field<'a>(name: &'a str, path: &str) -> Option<&'a str> {
    #[cfg(test)]
    LOOKUPS.set(LOOKUPS.get() + 1);
    name.strip_prefix(path)?.strip_prefix('.')
}

/// Returns the entries of `by_path` to which `name`, a path and a field, may belong, longest path
/// first, each with the field. It looks up only the few prefixes of `name`, so the cost does not
/// depend on the size of the map.
fn owners<'a, 'n, T>(
    by_path: &'a BTreeMap<String, T>,
    name: &'n str,
) -> impl Iterator<Item = (&'a String, &'a T, &'n str)> {
    name.rmatch_indices('.').filter_map(|(at, _)| {
        let (path, value) = by_path.get_key_value(&name[..at])?;
        Some((path, value, field(name, path)?))
    })
}

/// Returns the parameter of `params` to which the state with this name belongs, and the field.
pub(crate) fn owner<'a, 'n, T>(
    params: &'a BTreeMap<String, T>,
    name: &'n str,
) -> Result<(&'a String, &'a T, &'n str), OptimError> {
    owners(params, name)
        .next()
        .ok_or_else(|| OptimError::no_parameter(name, params.keys()))
}

#[cfg(test)]
thread_local! {
    /// Number of comparisons of a name with a path on this thread.
    pub(super) static LOOKUPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
