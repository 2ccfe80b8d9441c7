//! State of a burn `ModuleOptimizer` for a distributed model, by path.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, StateSink};
use burn::store::RecordError;
use burn::tensor::{Bytes, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};

use super::state::{ParameterState, StateFields, field, join, layout_error};
use super::state_exchange::{StateExchange, States};
use super::{OptimError, OptimizerState};
use crate::burn_compat::undrawn;
use crate::dtensor::DTensorSpec;
use crate::param::{ModelScan, Visited, check_not_replaced, copying, walk_with_paths};
use crate::placement::Layout;
use crate::{Error, Result};

/// Field name under which burn stores a parameter's number of dimensions.
const RANK: &str = "__rank";

/// Returns the specs of a distributed model's parameters, by path. One that is not distributed
/// counts as replicated over the mesh of the first that is.
/// [`FullOptimizerState::distribute`](super::FullOptimizerState::distribute) and
/// [`OptimizerState::redistribute`] take them. Local: no communication.
///
/// # Errors
/// Like [`optimizer_state`].
pub fn parameter_specs<M: Module>(model: &M) -> Result<BTreeMap<String, Arc<DTensorSpec>>> {
    Ok(parameters(model)?
        .into_iter()
        .map(|(path, ModelParameter { spec, .. })| (path, spec))
        .collect())
}

/// Returns a copy of the state that burn's `optim` has for the parameters of a distributed `model`,
/// by path. It supports every optimizer whose state of a shard is the shard of its state of the
/// full parameter. The state of a parameter that is not distributed is this rank's own. Local: no
/// communication.
///
/// # Errors
/// [`OptimError::Shape`] if the optimizer's state of a shard is not a shard of its state of the
/// full parameter, such as `Adafactor`'s state of a matrix. It does not occur for replicated
/// parameters. [`OptimError::Undistributed`] if no parameter of the model is distributed, but the
/// optimizer has a state. Also [`ParamError::Replaced`](crate::param::ParamError::Replaced), like
/// [`named_parameters`](crate::fsdp::named_parameters).
pub fn optimizer_state<M: Module>(optim: &ModuleOptimizer, model: &M) -> Result<OptimizerState> {
    recorded_state(model, || optim.into_bytes())
}

/// Returns the state of an optimizer whose record, as bytes, `record` asks the optimizer for on the
/// calling thread. Otherwise like [`optimizer_state`].
pub(crate) fn recorded_state<M: Module>(
    model: &M,
    record: impl FnOnce() -> Result<Bytes, RecordError>,
) -> Result<OptimizerState> {
    let mut states = OptimizerRecord::of(record, BTreeSet::new())?.states;
    let mut state = OptimizerState::default();
    let parameters = parameters(model)?;
    if parameters.is_empty() && !states.is_empty() {
        return Err(OptimError::Undistributed.into());
    }
    for (path, ModelParameter { id, spec, .. }) in parameters {
        match states.remove(&id) {
            Some((_, sink)) => {
                _ = state.params.insert(
                    path.clone(),
                    ParameterState::new(&path, &spec, sink, false)?,
                )
            }
            None => _ = state.stateless.insert(path, spec),
        }
    }
    Ok(state)
}

/// Returns `optim` with `state` in place of its state of all distributed parameters of `model`, and
/// of the others that `state` contains. Local: no communication.
///
/// # Errors
/// [`OptimError::NoParameter`] for a path that the model does not contain, [`OptimError::Layout`]
/// for state of a parameter with another layout, [`OptimError::Shape`] for a tensor whose shape
/// differs from that of its sharded parameter (such as `Adafactor`'s means over rows and columns),
/// [`OptimError::Foreign`] for the state of another optimizer, [`OptimError::ElementType`], and the
/// errors of [`optimizer_state`].
pub fn load_optimizer_state<M: Module>(
    optim: ModuleOptimizer,
    model: &M,
    state: OptimizerState,
) -> Result<ModuleOptimizer> {
    let parameters = parameters(model)?;
    let replaced = parameters
        .iter()
        .filter(|(path, param)| param.is_distributed || state.params.contains_key(*path));
    let mut record = OptimizerRecord::of(
        || optim.into_bytes(),
        replaced.map(|(_, param)| param.id).collect(),
    )?;
    let mut given = Vec::new();
    for (path, state) in state.params {
        let param = parameters
            .get(&path)
            .ok_or_else(|| OptimError::no_parameter(&path, parameters.keys()))?;
        let ModelParameter { id, spec, .. } = param;
        if state.spec != *spec {
            return Err(layout_error(&path, &state.spec, spec).into());
        }
        let in_any_dtype = state.in_any_dtype;
        let state = state.into_parts(&path)?;
        given.push((path.clone(), *id, StateFields::of(&state), in_any_dtype));
        record.paths.insert(id.to_string(), path);
        record
            .states
            .insert(*id, (Scalar::from(spec.shape().num_dims()), state));
    }
    let (optim, loaded, exchanged) = record.load_into(optim)?;
    // burn silently ignores state that it cannot read.
    for (path, id, fields, in_any_dtype) in given {
        // Optimizers of this crate step in the dtype of their state.
        let fields = match in_any_dtype && exchanged.contains(&id) {
            true => fields.without_dtypes(),
            false => fields,
        };
        fields.check_loaded(&path, loaded.get(&id))?;
    }
    Ok(optim)
}

/// Checks that `state` has the fields that `optim` makes for the parameters of `model`. burn would
/// ignore others, or miss them. Local: it steps a model of one element for each parameter.
///
/// # Errors
/// [`OptimError::Foreign`], and the errors of [`optimizer_state`].
pub(super) fn check_fields<M: Module>(
    optim: &ModuleOptimizer,
    model: &M,
    state: &OptimizerState,
) -> Result<()> {
    let parameters = parameters(model)?;
    let stepped = parameters
        .iter()
        .filter(|(path, _)| state.params.contains_key(*path))
        .map(|(_, ModelParameter { id, spec, .. })| (*id, spec.clone()));
    let mut probe = OneElement {
        params: stepped.collect(),
        grads: GradientsParams::new(),
    };
    if probe.params.is_empty() {
        return Ok(());
    }
    let empty = OptimizerRecord {
        states: BTreeMap::new(),
        paths: BTreeMap::new(),
    };
    let mut optim = optim.clone().from_bytes(empty.into_bytes()?)?;
    let mut made: BTreeMap<u64, Vec<StateFields>> = BTreeMap::new();
    // Some fields are only there after the second step.
    for _ in 0..2 {
        let model = copying(|| model.clone().map(&mut probe));
        let grads = std::mem::take(&mut probe.grads);
        copying(|| optim.step(0.0, model, grads));
        for (id, (_, fields)) in OptimizerRecord::of(|| optim.into_bytes(), BTreeSet::new())?.states
        {
            made.entry(id).or_default().push(StateFields::of(&fields));
        }
    }
    for (path, param) in &parameters {
        if let (Some(state), Some(made)) = (state.params.get(path), made.get(&param.id)) {
            state.fields().check_made(path, made)?;
        }
    }
    Ok(())
}

/// Mapper that leaves one element of some parameters, and registers gradients for them.
struct OneElement {
    params: BTreeMap<u64, Arc<DTensorSpec>>,
    grads: GradientsParams,
}

impl ModuleMapper for OneElement {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Clones of a model share other tensors, its running statistics, and draw those that are
        // not initialized.
        let Some(spec) = self.params.get(&param.id.val()) else {
            return match param.is_initialized() {
                true => param,
                false => undrawn(param),
            };
        };
        let (device, dtype) = (spec.mesh().device().clone(), spec.dtype());
        self.grads
            .register(param.id, Tensor::<D>::zeros([1; D], (&device, dtype)));
        // burn's optimizers step tensors of an autodiff device.
        let tensor = Tensor::zeros([1; D], (&device.autodiff(), dtype));
        Param::initialized(param.id, tensor)
    }
}

/// A parameter of a distributed model.
struct ModelParameter {
    /// burn's parameter id.
    id: u64,
    spec: Arc<DTensorSpec>,
    is_distributed: bool,
}

/// Returns the parameters of a distributed model, by path; none of a model without distributed
/// parameters.
fn parameters<M: Module>(model: &M) -> Result<BTreeMap<String, ModelParameter>> {
    let walk = walk_with_paths(model);
    check_not_replaced(model, &walk)?;
    let Some(first) = walk.distributed.first() else {
        return Ok(BTreeMap::new());
    };
    let mesh = first.param.info().spec.mesh().clone();
    let replicate = Layout::replicate(mesh.shape())?;
    let others = ModelScan::of(model)
        .params
        .into_iter()
        .filter(|found| found.distributed.is_none())
        .map(|found| {
            let spec = DTensorSpec::new(
                &mesh,
                replicate.clone(),
                found.shape.clone().into(),
                found.dtype,
            )?
            .shared();
            Ok((
                found.path(),
                ModelParameter {
                    id: found.id.val(),
                    spec,
                    is_distributed: false,
                },
            ))
        });
    let mut parameters: BTreeMap<_, _> = others.collect::<Result<_>>()?;
    parameters.extend(walk.distributed.into_iter().map(
        |Visited {
             id,
             param,
             base,
             path,
             ..
         }| {
            let spec = param.spec(base.dtype());
            let path = path.expect("the walk records paths");
            (
                path,
                ModelParameter {
                    id: id.val(),
                    spec,
                    is_distributed: true,
                },
            )
        },
    ));
    Ok(parameters)
}

/// The states of burn's optimizer. Its record has private fields, but its bytes can be read. States
/// of this crate's optimizers are [exchanged](StateExchange) without them.
struct OptimizerRecord {
    /// Number of dimensions and state of each parameter, by the parameter's id.
    states: BTreeMap<u64, (Scalar, StateSink)>,
    /// Path by which burn finds the group of a parameter, by the parameter's id.
    paths: BTreeMap<String, String>,
}

impl OptimizerRecord {
    /// Returns the states of all parameters apart from `except`. `record` asks the optimizer for
    /// its record, on this thread.
    fn of(
        record: impl FnOnce() -> Result<Bytes, RecordError>,
        except: BTreeSet<u64>,
    ) -> Result<Self> {
        let (bytes, exchange) = StateExchange::Take {
            except,
            taken: States::new(),
        }
        .during(record);
        let StateExchange::Take { except, taken } = exchange else {
            unreachable!("an exchange stays of its kind")
        };
        let reader = Reader::from_bytes(bytes?).map_err(Error::other)?;
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
        let unknown = |name: &str| {
            Error::other(format!(
                "burn's optimizer record has no parameter for `{name}`"
            ))
        };
        for (name, scalar) in scalars {
            let (id, field) = split(&name)?;
            states
                .get_mut(&id)
                .ok_or_else(|| unknown(&name))?
                .1
                .scalars
                .push((field, scalar));
        }
        for tensor in reader.into_tensors().map_err(Error::other)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(Error::other)?;
            let (id, field) = split(&name)?;
            let state = states.get_mut(&id).ok_or_else(|| unknown(&name))?;
            state
                .1
                .tensors
                .push((field, TensorData::from_bytes(bytes, shape, dtype)));
        }
        for (id, fields) in taken {
            states
                .get_mut(&id)
                .ok_or_else(|| unknown(&id.to_string()))?
                .1 = fields;
        }
        states.retain(|id, _| !except.contains(id));
        Ok(Self { states, paths })
    }

    /// Returns the optimizer with these states, the fields that it has made of them, and the
    /// parameters whose states were exchanged.
    fn load_into(
        mut self,
        optim: ModuleOptimizer,
    ) -> Result<(ModuleOptimizer, BTreeMap<u64, StateFields>, BTreeSet<u64>)> {
        let nothing = self
            .states
            .iter()
            .map(|(id, (dims, _))| (*id, (*dims, StateSink::default())))
            .collect();
        let nothing = Self {
            states: nothing,
            paths: self.paths.clone(),
        }
        .into_bytes()?;
        let (probed, exchange) =
            StateExchange::Probe(BTreeSet::new()).during(|| optim.clone().from_bytes(nothing));
        probed?;
        let StateExchange::Probe(ids) = exchange else {
            unreachable!("an exchange stays of its kind")
        };
        let given = ids
            .iter()
            .filter_map(|id| Some((*id, std::mem::take(&mut self.states.get_mut(id)?.1))))
            .collect();
        let by_bytes = self.states.len() > ids.len();
        let bytes = self.into_bytes()?;
        let (optim, exchange) = StateExchange::Give {
            given,
            loaded: BTreeMap::new(),
        }
        .during(|| optim.from_bytes(bytes));
        let (optim, StateExchange::Give { mut loaded, .. }) = (optim?, exchange) else {
            unreachable!("an exchange stays of its kind")
        };
        if by_bytes {
            let others = Self::of(|| optim.into_bytes(), ids.clone())?.states;
            loaded.extend(
                others
                    .iter()
                    .map(|(id, (_, state))| (*id, StateFields::of(state))),
            );
        }
        Ok((optim, loaded, ids))
    }

    fn into_bytes(self) -> Result<Bytes> {
        let mut tensors = Vec::new();
        let mut scalars = Vec::new();
        for (id, (dims, state)) in self.states {
            let name = |field: &str| join(&id.to_string(), field);
            scalars.push((name(RANK), dims));
            tensors.extend(state.tensors.into_iter().map(|(field, data)| {
                let (bytes, shape, dtype) = data.into_parts();
                burn_pack::Tensor::new(name(&field), dtype, shape, Some(id), bytes)
            }));
            scalars.extend(
                state
                    .scalars
                    .into_iter()
                    .map(|(field, scalar)| (name(&field), scalar)),
            );
        }
        let writer = scalars
            .iter()
            .fold(Writer::new(tensors), |writer, (name, scalar)| {
                writer.with_scalar(name, *scalar)
            });
        let writer = self
            .paths
            .iter()
            .fold(writer, |writer, (id, path)| writer.with_metadata(id, path));
        writer.into_bytes().map_err(Error::other)
    }
}

/// Splits a name in burn's record into parameter id and field.
fn split(name: &str) -> Result<(u64, String)> {
    let id = name
        .split('.')
        .next()
        .expect("`split` yields at least one item");
    let field = field(name, id)
        .ok_or_else(|| Error::other(format!("`{name}` is not a name in burn's record")))?;
    Ok((id.parse()?, field.to_owned()))
}
