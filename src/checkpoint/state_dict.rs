//! [`StateDict`]: the tensors of a model or of an optimizer, by path.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::TensorData;
use burn_pack::Scalar;
use itertools::Itertools;

use super::capture::capture;
use super::matching::{self, SavedTensor};
use super::weight_source::WeightSource;
use super::{CheckpointError, KeyReport, LoadKind, LoadOptions, StateDTypes};
use crate::Result;
use crate::comm::Call;
use crate::dtensor::{DTensor, DTensorSpec, DynDTensor, Kind};
use crate::mesh::DeviceMesh;
use crate::optim::{OptimizerState, owner, parameter_specs};
use crate::param::NewValue;
use crate::placement::Layout;

/// The tensors of a model or of an optimizer by path, as DTensors, without files. It has the values
/// of the moment at which it was taken: it shares the memory of the model, and later steps, which
/// write to new memory, do not change it.
///
/// A model's state dict contains its parameters and buffers. The key is burn's path, such as
/// `blocks.0.weight`, and the factors of LoRA adapters are at `weight.lora.a` and `weight.lora.b`.
/// The values are those that the model stores: the parameter's own dtype under mixed precision,
/// host memory for offloaded parameters.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn_dtensor::checkpoint::{LoadOptions, StateDict};
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
///     let linear = || LinearConfig::new(8, 6).init(world.device());
///     let rows = fully_shard(linear(), &mesh, FullyShard::new())?;
///     let state = StateDict::of_model(&rows, &mesh)?;
///     let weight: DTensor<2> = state.get("weight").expect("it is a matrix");
///     assert_eq!(weight.placements(), [Placement::Replicate, Placement::Shard(0)]);
///
///     // Loaded into a model of another layout, the values are redistributed.
///     let columns = parallelize(linear(), &mesh.slice("tp")?, Plan::new().with_style("", Style::colwise()))?;
///     let (columns, report) = state.load_model(columns, &mesh, &LoadOptions::new())?;
///     assert_eq!(report.loaded, ["bias", "weight"]);
///     assert_eq!(full_model(&columns)?.weight.val().into_data(), full_model(&rows)?.weight.val().into_data());
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct StateDict {
    tensors: BTreeMap<String, DynDTensor>,
    scalars: BTreeMap<String, Scalar>,
}

impl StateDict {
    /// Takes the tensors of `model`. Each has the layout of its parameter. A tensor that is not
    /// distributed counts as replicated over `mesh`: a buffer, a parameter that `fully_shard`
    /// ignored, any parameter of an ordinary model. A lazy parameter is drawn.
    ///
    /// Local: nothing is copied, sent or compared. If slices of a mesh were distributed separately,
    /// from different initial values, each rank takes those of its slice. Running statistics may
    /// differ between ranks until [`sync_buffers`](crate::fsdp::sync_buffers) makes them equal.
    ///
    /// # Errors
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced
    /// after it was distributed; [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember)
    /// outside `mesh`.
    pub fn of_model<M: Module>(model: &M, mesh: &DeviceMesh) -> Result<Self> {
        Ok(Self {
            tensors: capture(model, mesh)?,
            scalars: BTreeMap::new(),
        })
    }

    /// Takes the tensors and numbers of an optimizer's state. The key is the parameter's path and
    /// burn's field, such as `blocks.0.weight.momentum.moment_1`. Local: nothing is copied or sent.
    pub fn of_optimizer(state: &OptimizerState) -> Self {
        let tensors = state
            .tensors()
            .map(|(name, tensor)| (name, tensor.clone()))
            .collect();
        Self {
            tensors,
            scalars: state.scalars().collect(),
        }
    }

    /// Creates a state dict from full values that every rank of `mesh` holds. Local: nothing is
    /// sent. For values that only one rank holds, see
    /// [`load_model_from_first`](Self::load_model_from_first).
    ///
    /// # Errors
    /// [`CheckpointError::Dims`] for values with no or with more than 8 dimensions, and
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside `mesh`.
    pub fn from_full(
        values: impl IntoIterator<Item = (String, TensorData)>,
        mesh: &DeviceMesh,
    ) -> Result<Self> {
        let layout = Layout::replicate(mesh.shape())?;
        let tensor = |(key, data): (String, TensorData)| {
            SavedTensor::of_data(&data).check_dims(&key)?;
            Ok((key, DynDTensor::from_full_data(data, mesh, layout.clone())?))
        };
        Ok(Self {
            tensors: values.into_iter().map(tensor).collect::<Result<_>>()?,
            scalars: BTreeMap::new(),
        })
    }

    /// Returns the number of tensors and numbers.
    pub fn len(&self) -> usize {
        self.tensors.len() + self.scalars.len()
    }

    /// Returns true if it contains nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tensors by key, in the same order on all ranks. Local.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &DynDTensor)> {
        self.tensors
            .iter()
            .map(|(key, tensor)| (key.as_str(), tensor))
    }

    /// Returns the numbers by key, such as an optimizer's number of steps.
    pub fn scalars(&self) -> impl Iterator<Item = (&str, Scalar)> {
        self.scalars
            .iter()
            .map(|(key, scalar)| (key.as_str(), *scalar))
    }

    /// Returns the tensor with this key; `None` if it does not exist, does not have `D` dimensions
    /// or is not of kind `K`. Local.
    pub fn get<const D: usize, K: Kind>(&self, key: &str) -> Option<DTensor<D, K>> {
        self.tensors.get(key)?.dtensor()
    }

    /// Keeps only what has a key for which `keep` returns true, for instance the LoRA factors.
    /// Local; `keep` must return the same on all ranks.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.tensors.retain(|key, _| keep(key));
        self.scalars.retain(|key, _| keep(key));
    }

    /// Gathers the full tensors on every rank.
    ///
    /// # Collective
    /// Every rank of the tensors' meshes.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn full(&self) -> Result<BTreeMap<String, TensorData>> {
        Ok(self
            .full_if(true)?
            .expect("it is returned if `keep` is true"))
    }

    /// Gathers the full tensors one after the other, and returns them on the ranks where `keep` is
    /// true. The other ranks hold one full tensor at a time, and get `None`.
    ///
    /// # Collective
    /// Every rank of the tensors' meshes.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn full_if(&self, keep: bool) -> Result<Option<BTreeMap<String, TensorData>>> {
        let mut full = BTreeMap::new();
        for (key, tensor) in &self.tensors {
            let gathered = tensor.clone().replicated()?;
            if keep {
                full.insert(key.clone(), gathered.local_data());
            }
        }
        Ok(keep.then_some(full))
    }

    /// Returns the model with the values of this state dict, and a report. Keys are the model's
    /// paths, unless `options` rename them. A parameter with the same layout takes the tensor as it
    /// is and shares its memory; others get it redistributed, one tensor after the other. Lazy
    /// parameters are not drawn.
    ///
    /// `mesh` is the one of which the model's meshes are slices. Distribution, training state,
    /// devices and dtypes of the model are kept. Running statistics are the model's own then:
    /// clones keep theirs. The model's old shards are freed first, unless a clone or a state
    /// dict has them.
    ///
    /// # Collective
    /// Every rank of `mesh` and of the tensors' meshes, which must have the same ranks.
    ///
    /// # Errors
    /// On every rank, and before anything is loaded: [`CheckpointError::Keys`] with all missing,
    /// unexpected and misshapen keys. Also
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced) like
    /// [`of_model`](Self::of_model), and [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn load_model<M: Module>(
        &self,
        model: M,
        mesh: &DeviceMesh,
        options: &LoadOptions,
    ) -> Result<(M, KeyReport)> {
        let saved = self
            .tensors
            .iter()
            .map(|(key, tensor)| (key.clone(), SavedTensor::of(tensor.spec())))
            .collect();
        matching::load_model(
            model,
            mesh,
            &options.matching(LoadKind::Model),
            &saved,
            |pairs, targets| {
                let value = |(path, source): &(String, WeightSource)| {
                    let target = &targets[path];
                    let value = self.tensors[source.key()]
                        .clone()
                        .redistribute_onto(target.mesh(), target.layout())?;
                    Ok((
                        path.clone(),
                        NewValue::Tensor(Box::new(value.local().clone())),
                    ))
                };
                pairs.iter().map(value).collect()
            },
        )
    }

    /// Returns the model with full values that only the first rank of `mesh` passes, by key, and a
    /// report. Each tensor is sent to the ranks as their shards, or as a full tensor where its mesh
    /// has only some of the ranks; no other rank holds more than one full tensor. Everything else
    /// is as in [`load_model`](Self::load_model).
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn_dtensor::checkpoint::{LoadOptions, StateDict};
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    ///     let model = || fully_shard(LinearConfig::new(8, 6).init(world.device()), &mesh, FullyShard::new());
    ///     let (one, other) = (model()?, model()?);
    ///     let full = StateDict::of_model(&one, &mesh)?.full_if(mesh.rank() == 0)?; // `None` on the other rank
    ///     let (other, _) = StateDict::load_model_from_first(full, other, &mesh, &LoadOptions::new())?;
    ///     assert_eq!(other.weight.base().into_data(), one.weight.base().into_data());
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Every rank of `mesh`.
    ///
    /// # Errors
    /// Those of [`load_model`](Self::load_model), and [`CheckpointError::NoValues`] on every rank
    /// if the first rank passes `None`.
    pub fn load_model_from_first<M: Module>(
        values: Option<BTreeMap<String, TensorData>>,
        model: M,
        mesh: &DeviceMesh,
        options: &LoadOptions,
    ) -> Result<(M, KeyReport)> {
        let first = mesh.ranks()[0];
        let mut values = values.filter(|_| mesh.rank() == first);
        let described = values.as_ref().map(|values| {
            values
                .iter()
                .map(|(key, data)| (key.clone(), SavedTensor::of_data(data)))
                .collect::<BTreeMap<_, _>>()
        });
        let saved = mesh.all()?.broadcast_object(call(), Some(&described), 0)?;
        let saved = saved.ok_or(CheckpointError::NoValues { rank: first })?;
        matching::load_model(
            model,
            mesh,
            &options.matching(LoadKind::Model),
            &saved,
            |pairs, targets| {
                // A value that several parameters read is kept until the last of them.
                let mut uses = pairs.iter().map(|(_, source)| source.key()).counts();
                let value = |(path, source): &(String, WeightSource)| {
                    let uses = uses.get_mut(source.key()).expect("every key was counted");
                    *uses -= 1;
                    let full = values.as_mut().and_then(|values| match *uses {
                        0 => values.remove(source.key()),
                        _ => values.get(source.key()).cloned(),
                    });
                    let value = send(full, &targets[path], mesh)?;
                    Ok((
                        path.clone(),
                        NewValue::Tensor(Box::new(value.local().clone())),
                    ))
                };
                pairs.iter().map(value).collect()
            },
        )
    }

    /// Returns the state for the optimizer of `model`, laid out like the model's parameters, and a
    /// report. Pass the state to
    /// [`ShardedOptimizer::load_state`](crate::optim::ShardedOptimizer::load_state).
    ///
    /// `options` are those with which the model was loaded: [`LoadOptions::with_renamed`] receives
    /// the path of a parameter and returns the path under which this state dict has its state. A
    /// parameter of which it has none starts without state. In a
    /// [partial](LoadOptions::with_partial) load, state of parameters that the model does not have
    /// is left out.
    ///
    /// # Collective
    /// Every rank of both the tensors' and the model's meshes. Local if the layouts are equal.
    ///
    /// # Errors
    /// [`CheckpointError::Keys`] with all state of parameters that the model does not have, unless
    /// `options` allow it; [`ParamError::Replaced`](crate::param::ParamError::Replaced), and
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn optimizer_state<M: Module>(
        &self,
        model: &M,
        options: &LoadOptions,
    ) -> Result<(OptimizerState, KeyReport)> {
        let params = parameter_specs(model)?;
        let matching = options.matching(LoadKind::Optimizer);
        let mut report = KeyReport::default();
        // Paths of the model by the path under which their state is: of none for a parameter that
        // is left out.
        let mut paths: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for path in params.keys() {
            match (matching.source)(path) {
                Some(source) => paths.entry(source.key().to_owned()).or_default().push(path),
                None => {
                    paths.entry(path.clone()).or_default();
                    report.skipped.push(path.clone());
                }
            }
        }
        // Names of the state for the model by their keys here.
        let mut names: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for key in self.tensors.keys().chain(self.scalars.keys()) {
            let mut parts = key
                .rmatch_indices('.')
                .map(|(at, _)| (&key[..at], &key[at + 1..]));
            match parts.find_map(|(path, field)| Some((paths.get(path)?, field))) {
                Some((paths, field)) => {
                    report
                        .loaded
                        .extend(paths.iter().map(|path| (*path).to_owned()));
                    names.insert(
                        key,
                        paths.iter().map(|path| format!("{path}.{field}")).collect(),
                    );
                }
                None => report.unexpected.push(key.clone()),
            }
        }
        report.loaded.sort_unstable();
        report.loaded.dedup();
        if !report.unexpected.is_empty() && !matching.allows_unexpected {
            let missing = Vec::new();
            let unexpected = report.unexpected;
            let mismatched = Vec::new();
            return Err(CheckpointError::Keys {
                of: LoadKind::Optimizer,
                missing,
                unexpected,
                mismatched,
            }
            .into());
        }
        let of = |key: &str| names.get(key).into_iter().flatten();
        let tensors = self
            .tensors
            .iter()
            .flat_map(|(key, tensor)| of(key).map(move |name| (name, tensor)));
        let tensors: Vec<_> = tensors.collect();
        let described = tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor.spec().shape(), tensor.spec().dtype()));
        let targets = OptimizerState::targets(&params, described)?;
        let tensors = tensors.into_iter().map(|(name, tensor)| {
            let target = &targets[name];
            let mut tensor = tensor.clone();
            let (path, param, _) = owner(&params, name)?;
            // Fields that are laid out like their parameter are of its dtype.
            if tensor.spec().shape() == param.shape()
                && tensor.spec().dtype().is_float()
                && tensor.spec().dtype() != param.dtype()
            {
                match options.state_dtypes {
                    StateDTypes::Keep => {}
                    StateDTypes::Refuse => {
                        let saved = tensor.spec().dtype();
                        let error = CheckpointError::state_dtype(path, saved, param.dtype());
                        return Err(error.into());
                    }
                    StateDTypes::Convert => {
                        tensor = tensor.cast(param.dtype());
                        report.cast.push(path.clone());
                    }
                }
            }
            let tensor = tensor.redistribute_onto(target.mesh(), target.layout())?;
            Ok((name.clone(), tensor))
        });
        let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
        report.cast.dedup();
        let scalars = self
            .scalars
            .iter()
            .flat_map(|(key, scalar)| of(key).map(move |name| (name.clone(), *scalar)));
        let state = OptimizerState::from_parts(&params, [], tensors, scalars)?;
        let state = match options.state_dtypes {
            StateDTypes::Refuse => state,
            StateDTypes::Convert | StateDTypes::Keep => state.in_any_dtype(),
        };
        Ok((state, report))
    }
}

fn call() -> Call {
    Call::new("StateDict::load_model")
}

/// Sends a full value from the first rank of `mesh`, which passes it, to all others. Returns the
/// tensor laid out like `target`, and with its dtype.
fn send(
    full: Option<TensorData>,
    target: &Arc<DTensorSpec>,
    mesh: &DeviceMesh,
) -> Result<DynDTensor> {
    let first = mesh.ranks()[0];
    if mesh
        .ranks()
        .iter()
        .all(|rank| target.mesh().ranks().contains(rank))
    {
        return DynDTensor::distribute_from(first, full, target.clone(), &call());
    }
    let replicate = Layout::replicate(mesh.shape())?;
    let full_spec =
        DTensorSpec::new(mesh, replicate, target.shape().clone(), target.dtype())?.shared();
    DynDTensor::distribute_from(first, full, full_spec, &call())?
        .redistribute_onto(target.mesh(), target.layout())
}
