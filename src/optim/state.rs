//! [`OptimizerState`]: what an optimizer remembers of parameters, by path.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::optim::StateSink;
use burn::tensor::{Tensor, TensorData};
use burn_pack::Scalar;

use super::OptimError;
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec};
use crate::memory;
use crate::placement::Layout;

/// Runs an expression with a number of dimensions as a constant.
macro_rules! with_dims {
    ($dims:expr, $D:ident => $run:expr) => {{
        macro_rules! of {
            ($n:literal) => {{
                const $D: usize = $n;
                $run
            }};
        }
        match $dims {
            1 => of!(1),
            2 => of!(2),
            3 => of!(3),
            4 => of!(4),
            5 => of!(5),
            6 => of!(6),
            7 => of!(7),
            8 => of!(8),
            dims => unreachable!("burn's optimizers step tensors of 1 to 8 dimensions, not {dims}"),
        }
    }};
}

/// What an optimizer remembers of each parameter: DTensors, in host memory, and numbers, by the parameter's path and burn's name of the
/// field, such as `blocks.0.weight.momentum.moment_1`.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    pub(super) params: BTreeMap<String, ParameterState>,
}

/// What it remembers of one.
#[derive(Debug, Clone)]
pub(super) struct ParameterState {
    /// The parameter's.
    pub(super) spec: Arc<DTensorSpec>,
    pub(super) tensors: BTreeMap<String, StateTensor>,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

/// One tensor of an [`OptimizerState`].
#[derive(Debug, Clone)]
pub struct StateTensor {
    spec: Arc<DTensorSpec>,
    local: DispatchTensor,
}

impl OptimizerState {
    /// Paths of the parameters that the optimizer remembers something of.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }

    /// Every tensor, with its name; on all ranks in one order.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &StateTensor)> {
        self.params
            .iter()
            .flat_map(|(path, state)| state.tensors.iter().map(move |(field, tensor)| (join(path, field), tensor)))
    }

    /// Every number, such as how many steps were made, with its name.
    pub fn scalars(&self) -> impl Iterator<Item = (String, Scalar)> {
        self.params
            .iter()
            .flat_map(|(path, state)| state.scalars.iter().map(move |(field, scalar)| (join(path, field), *scalar)))
    }

    /// The tensor of this name; `None` if there is none, or it has not `D` dimensions.
    pub fn tensor<const D: usize>(&self, name: &str) -> Option<DTensor<D>> {
        owners(&self.params, name).find_map(|(_, state, field)| state.tensors.get(field))?.dtensor()
    }

    /// The number of this name.
    pub fn scalar(&self, name: &str) -> Option<Scalar> {
        owners(&self.params, name).find_map(|(_, state, field)| state.scalars.get(field)).copied()
    }

    /// Lays the state out as parameters are now, on the same mesh or on another: `specs` are the parameters', by path.
    ///
    /// On one mesh a tensor takes the steps that its parameter takes; to another it goes by way of the whole.
    ///
    /// # Collective
    /// Every rank of both meshes, which must have the same ranks.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`] for state of a path that `specs` have not, [`OptimError::Layout`] for a parameter of
    /// another shape, and [`Error::Comm`](crate::Error::Comm) if a collective fails.
    pub fn redistribute(self, specs: impl IntoIterator<Item = (String, Arc<DTensorSpec>)>) -> Result<Self> {
        let specs: BTreeMap<_, _> = specs.into_iter().collect();
        let find = |path: &String| specs.get(path).ok_or_else(|| OptimError::no_parameter(path, specs.keys()));
        // Before anything is sent.
        for (path, state) in &self.params {
            if state.spec.shape() != find(path)?.shape() {
                return Err(layout_error(path, &state.spec, find(path)?).into());
            }
        }
        let moved = self.params.into_iter().map(|(path, state)| {
            let spec = &specs[&path];
            let tensors = state.tensors.into_iter().map(|(field, tensor)| Ok((field, tensor.redistribute(spec)?)));
            let state = ParameterState { spec: spec.clone(), tensors: tensors.collect::<Result<_>>()?, ..state };
            Ok((path, state))
        });
        Ok(Self { params: moved.collect::<Result<_>>()? })
    }

    /// What is remembered of a parameter, nothing at first.
    pub(super) fn of(&mut self, path: &str, spec: &Arc<DTensorSpec>) -> &mut ParameterState {
        let nothing = || ParameterState { spec: spec.clone(), tensors: BTreeMap::new(), scalars: BTreeMap::new() };
        self.params.entry(path.to_owned()).or_insert_with(nothing)
    }
}

impl ParameterState {
    /// Of what a state was flattened to. `whole` says that it is of the whole parameter, not of this rank's part.
    pub(super) fn new(path: &str, spec: &Arc<DTensorSpec>, sink: StateSink, full: bool) -> Result<Self> {
        let tensors = sink.tensors.into_iter().map(|(field, data)| {
            let tensor = if full || is_unsharded(spec) {
                StateTensor::shard_of(data, spec)?
            } else if data.shape() == &spec.local_shape() {
                StateTensor::part(data, spec)
            } else {
                let (found, expected) = (data.shape().to_vec(), spec.local_shape().to_vec());
                return Err(OptimError::Shape { name: join(path, &field), found, expected }.into());
            };
            Ok((field, tensor))
        });
        Ok(Self {
            spec: spec.clone(),
            tensors: tensors.collect::<Result<_>>()?,
            scalars: sink.scalars.into_iter().collect(),
        })
    }

    /// Its tensors as an optimizer has them that steps this rank's part of the parameter at `path`.
    ///
    /// # Errors
    /// [`OptimError::Shape`] for one that is no part of a tensor of the parameter's shape, where the parameter is cut.
    pub(super) fn parts(&self, path: &str) -> Result<Vec<(String, TensorData)>, OptimError> {
        let part = |(field, tensor): (&String, &StateTensor)| {
            let laid_out = tensor.spec.layout() == self.spec.layout() && tensor.spec.shape() == self.spec.shape();
            if laid_out || is_unsharded(&self.spec) && is_unsharded(&tensor.spec) {
                return Ok((field.clone(), tensor.local_data()));
            }
            let (found, expected) = (tensor.spec.local_shape().to_vec(), self.spec.local_shape().to_vec());
            Err(OptimError::Shape { name: join(path, field), found, expected })
        };
        self.tensors.iter().map(part).collect()
    }

    /// Whether an optimizer has taken all of it, as it is: `loaded` is what it has then.
    pub(super) fn check_loaded(&self, path: &str, loaded: Option<&StateSink>) -> Result<(), OptimError> {
        let nothing = StateSink::default();
        let StateSink { tensors, scalars } = loaded.unwrap_or(&nothing);
        for (field, data) in tensors {
            if let Some(given) = self.tensors.get(field)
                && given.spec.dtype() != data.dtype()
            {
                return Err(OptimError::element_type(join(path, field), given.spec.dtype(), data.dtype()));
            }
        }
        let given: BTreeSet<&String> = self.tensors.keys().chain(self.scalars.keys()).collect();
        let fields = tensors.iter().map(|(field, _)| field).chain(scalars.iter().map(|(field, _)| field));
        let loaded_fields: BTreeSet<&String> = fields.collect();
        if loaded.is_some() && given == loaded_fields {
            return Ok(());
        }
        let without =
            |a: &BTreeSet<&String>, b: &BTreeSet<&String>| a.difference(b).map(|name| name.to_string()).collect();
        let (missing, extra) = (without(&loaded_fields, &given), without(&given, &loaded_fields));
        Err(OptimError::Foreign { path: path.into(), missing, extra })
    }
}

impl StateTensor {
    /// Mesh, layout, global shape and type.
    pub fn spec(&self) -> &Arc<DTensorSpec> {
        &self.spec
    }

    /// The tensor; `None` if it has not `D` dimensions. Local: no communication.
    pub fn dtensor<const D: usize>(&self) -> Option<DTensor<D>> {
        (self.spec.shape().num_dims() == D).then(|| self.typed())
    }

    fn typed<const D: usize>(&self) -> DTensor<D> {
        DTensor::from_parts(Tensor::from_dispatch(self.local.clone()), self.spec.clone())
    }

    fn of<const D: usize>(tensor: DTensor<D>) -> Self {
        let spec = tensor.spec().clone();
        Self { spec, local: tensor.to_local().into_dispatch() }
    }

    /// This rank's part of a tensor as the parameter of `spec` is laid out.
    fn part(data: TensorData, spec: &DTensorSpec) -> Self {
        let spec = spec.with_dtype(data.dtype()).shared();
        let local = with_dims!(spec.shape().num_dims(), D => tensor::<D>(data).into_dispatch());
        Self { spec, local }
    }

    /// A whole tensor, which every rank has, cut as the parameter of `spec` if it has its shape.
    pub(super) fn shard_of(data: TensorData, spec: &DTensorSpec) -> Result<Self> {
        let layout =
            if data.shape() == spec.shape() { spec.layout().clone() } else { Layout::replicate(spec.mesh().shape())? };
        with_dims!(data.shape().num_dims(), D => {
            Ok(Self::of(DTensor::distribute_replicated_to(tensor::<D>(data), spec.mesh(), layout)?))
        })
    }

    fn redistribute(self, spec: &DTensorSpec) -> Result<Self> {
        if self.spec.mesh() != spec.mesh() {
            return Self::shard_of(self.full_data()?, spec);
        }
        if self.spec.shape() != spec.shape() {
            return Ok(self);
        }
        with_dims!(spec.shape().num_dims(), D => Ok(Self::of(self.typed::<D>().redistribute_to(spec.layout())?)))
    }

    /// This rank's part.
    pub(super) fn local_data(&self) -> TensorData {
        with_dims!(self.spec.shape().num_dims(), D => self.typed::<D>().to_local().into_data())
    }

    pub(super) fn full_data(&self) -> Result<TensorData> {
        with_dims!(self.spec.shape().num_dims(), D => Ok(self.typed::<D>().full_tensor()?.into_data()))
    }
}

/// Whether every rank holds all of it, so that an optimizer sees the whole in what it takes for a part.
fn is_unsharded(spec: &DTensorSpec) -> bool {
    spec.placements().iter().all(|placement| placement.is_replicate())
}

/// In its own element type, not the device's default, and in host memory, where records are: an optimizer's state need
/// not fit the device twice, or at all.
fn tensor<const D: usize>(data: TensorData) -> Tensor<D> {
    let dtype = data.dtype();
    Tensor::from_data(data, (&memory::host(), dtype))
}

pub(super) fn layout_error(path: &str, state: &DTensorSpec, param: &DTensorSpec) -> OptimError {
    OptimError::Layout { path: path.into(), state: describe(state), param: describe(param) }
}

/// A spec, for messages.
pub(super) fn describe(spec: &DTensorSpec) -> String {
    format!("{:?} {} as {} on {}", spec.shape().to_vec(), spec.dtype().name(), spec.layout(), spec.mesh())
}

pub(super) fn join(path: &str, field: &str) -> String {
    format!("{path}.{field}")
}

/// What comes after `path` in `name`.
pub(super) fn field<'a>(name: &'a str, path: &str) -> Option<&'a str> {
    #[cfg(test)]
    LOOKUPS.set(LOOKUPS.get() + 1);
    name.strip_prefix(path)?.strip_prefix('.')
}

/// Returns the entries of `by_path` that `name`, a path and a field, may belong to, the longest path first, each with the
/// field. Looks up the few paths that the name begins with, so its cost does not depend on the size of the map.
pub(super) fn owners<'a, 'n, T>(
    by_path: &'a BTreeMap<String, T>,
    name: &'n str,
) -> impl Iterator<Item = (&'a String, &'a T, &'n str)> {
    name.rmatch_indices('.').filter_map(|(at, _)| {
        let (path, value) = by_path.get_key_value(&name[..at])?;
        Some((path, value, field(name, path)?))
    })
}

#[cfg(test)]
thread_local! {
    /// The number of comparisons of a name with a path on this thread.
    pub(super) static LOOKUPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
