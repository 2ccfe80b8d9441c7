//! The state of burn's optimizer of a distributed model, by path.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::module::Module;
use burn::optim::{ModuleOptimizer, StateSink};
use burn::tensor::{Bytes, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use super::state::{ParameterState, field, join, layout_error};
use super::{OptimError, OptimizerState};
use crate::dtensor::DTensorSpec;
use crate::param::{Visited, check_not_replaced, walk_with_paths};
use crate::{Error, Result};

/// Under which burn keeps a parameter's number of dimensions.
const RANK: &str = "__rank";

/// Paths, and how the parameters are laid out, of a distributed model: what
/// [`FullOptimizerState::distribute`](super::FullOptimizerState::distribute) and [`OptimizerState::redistribute`] go
/// by.
///
/// # Errors
/// As [`optimizer_state`].
pub fn parameter_specs<M: Module>(model: &M) -> Result<BTreeMap<String, Arc<DTensorSpec>>> {
    Ok(parameters(model)?.into_iter().map(|(path, ModelParameter { spec, .. })| (path, spec)).collect())
}

/// What burn's `optim` remembers of the distributed parameters of `model`, by path: of every optimizer whose state of a
/// rank's part is a part of its state of the whole. A copy, as burn's own records are. Local: no communication.
///
/// Of parameters that are not distributed burn's record says all there is to say.
///
/// # Errors
/// [`OptimError::Shape`] for an optimizer that has made something else of a shard than a part of what it makes of the
/// whole, as `Adafactor` does of a matrix; of a parameter that every rank holds whole there is no such thing. And
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced) as [`named_parameters`](crate::fsdp::named_parameters).
pub fn optimizer_state<M: Module>(optim: &ModuleOptimizer, model: &M) -> Result<OptimizerState> {
    let mut states = OptimizerRecord::of(optim)?.states;
    let mut params = BTreeMap::new();
    for (path, ModelParameter { id, spec }) in parameters(model)? {
        if let Some((_, sink)) = states.remove(&id) {
            let state = ParameterState::new(&path, &spec, sink, false)?;
            params.insert(path, state);
        }
    }
    Ok(OptimizerState { params })
}

/// `optim` with `state` in the place of all that it remembers of the distributed parameters of `model`. Local: no
/// communication.
///
/// # Errors
/// [`OptimError::NoParameter`] for a path that the model has not, [`OptimError::Layout`] for state of a parameter that
/// is laid out otherwise, [`OptimError::Shape`] for a tensor of another shape than its parameter's, such as
/// `Adafactor`'s means over rows and columns, where the parameter is cut, [`OptimError::Foreign`] for the state of
/// another optimizer, [`OptimError::ElementType`], and as [`optimizer_state`].
pub fn load_optimizer_state<M: Module>(
    optim: ModuleOptimizer,
    model: &M,
    state: OptimizerState,
) -> Result<ModuleOptimizer> {
    let parameters = parameters(model)?;
    let mut record = OptimizerRecord::of(&optim)?;
    parameters.values().for_each(|parameter| drop(record.states.remove(&parameter.id)));
    let find = |path: &String| parameters.get(path).ok_or_else(|| OptimError::no_parameter(path, parameters.keys()));
    for (path, state) in &state.params {
        let ModelParameter { id, spec } = find(path)?;
        if state.spec != *spec {
            return Err(layout_error(path, &state.spec, spec).into());
        }
        let scalars = state.scalars.iter().map(|(field, scalar)| (field.clone(), *scalar));
        let sink = StateSink { tensors: state.parts(path)?, scalars: scalars.collect() };
        record.paths.insert(id.to_string(), path.clone());
        record.states.insert(*id, (Scalar::from(spec.shape().num_dims()), sink));
    }
    let optim = optim.from_bytes(record.into_bytes()?)?;
    // burn leaves out what it cannot read.
    let loaded = OptimizerRecord::of(&optim)?.states;
    for (path, state) in &state.params {
        state.check_loaded(path, loaded.get(&parameters[path].id).map(|(_, sink)| sink))?;
    }
    Ok(optim)
}

/// A distributed parameter of a model.
struct ModelParameter {
    /// burn's.
    id: u64,
    spec: Arc<DTensorSpec>,
}

/// By path.
fn parameters<M: Module>(model: &M) -> Result<BTreeMap<String, ModelParameter>> {
    let walk = walk_with_paths(model);
    check_not_replaced(model, &walk)?;
    let parameter = |Visited { id, param, base, path, .. }: Visited| {
        (path.expect("paths were asked for"), ModelParameter { id: id.val(), spec: param.spec(base.dtype()) })
    };
    Ok(walk.distributed.into_iter().map(parameter).collect())
}

/// A record of burn's optimizer, opened: its fields are private, its bytes are not.
struct OptimizerRecord {
    /// Numbers of dimensions and states, by the parameter's id.
    states: BTreeMap<u64, (Scalar, StateSink)>,
    /// Paths by which burn knows the group of a parameter, by id.
    paths: BTreeMap<String, String>,
}

impl OptimizerRecord {
    fn of(optim: &ModuleOptimizer) -> Result<Self> {
        let reader = Reader::from_bytes(optim.into_bytes()?).map_err(Error::other)?;
        let paths = reader.metadata().clone();
        let mut states: BTreeMap<u64, (Scalar, StateSink)> = BTreeMap::new();
        let (ranks, scalars): (Vec<_>, Vec<_>) = reader
            .scalars()
            .iter()
            .map(|(name, scalar)| (name.clone(), *scalar))
            .partition(|(name, _)| name.ends_with(RANK));
        for (name, dims) in ranks {
            states.insert(split(&name)?.0, (dims, StateSink::default()));
        }
        let unknown = |name: &str| Error::other(format!("burn's record of an optimizer says not what `{name}` is of"));
        for (name, scalar) in scalars {
            let (id, field) = split(&name)?;
            states.get_mut(&id).ok_or_else(|| unknown(&name))?.1.scalars.push((field, scalar));
        }
        for tensor in reader.into_tensors().map_err(Error::other)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(Error::other)?;
            let (id, field) = split(&name)?;
            let state = states.get_mut(&id).ok_or_else(|| unknown(&name))?;
            state.1.tensors.push((field, TensorData::from_bytes(bytes, shape, dtype)));
        }
        Ok(Self { states, paths })
    }

    fn into_bytes(self) -> Result<Bytes> {
        let mut tensors = Vec::new();
        let mut scalars = Vec::new();
        for (id, (dims, state)) in self.states {
            let name = |field: &str| join(&id.to_string(), field);
            scalars.push((name(RANK), dims));
            tensors.extend(state.tensors.into_iter().map(|(field, data)| {
                let (bytes, shape, dtype) = data.into_parts();
                Tensor::new(name(&field), dtype, shape, Some(id), bytes)
            }));
            scalars.extend(state.scalars.into_iter().map(|(field, scalar)| (name(&field), scalar)));
        }
        let writer =
            scalars.iter().fold(Writer::new(tensors), |writer, (name, scalar)| writer.with_scalar(name, *scalar));
        let writer = self.paths.iter().fold(writer, |writer, (id, path)| writer.with_metadata(id, path));
        writer.into_bytes().map_err(Error::other)
    }
}

/// The id and the field of a name in burn's record.
fn split(name: &str) -> Result<(u64, String)> {
    let id = name.split('.').next().expect("a first part");
    let field = field(name, id).ok_or_else(|| Error::other(format!("`{name}` is no name of an optimizer's record")))?;
    Ok((id.parse()?, field.to_owned()))
}
