//! [`State`]: what a checkpoint contains.

use std::cmp::Ordering;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use burn::module::Module;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::optimizer::StoredOptimizer;
use super::{CheckpointError, StateDict};
use crate::Result;
use crate::dtensor::DynDTensor;
use crate::mesh::DeviceMesh;
use crate::optim::OptimizerState;
use crate::param::sync_buffers;

/// State to be saved: tensors and values by key.
///
/// A state shares the memory of the tensors that are added to it: adding copies nothing, and a
/// later training step does not change what it contains. A model's old shards are freed once both
/// the model and the state have dropped them.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::State;
///
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// # let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
/// let state = State::new(&mesh).with_step(100).with_model("model", &model)?.with_value("learning_rate", &1e-3)?;
/// assert_eq!(state.keys().collect::<Vec<_>>(), ["model.bias", "model.weight", "learning_rate"]);
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct State {
    pub(super) mesh: DeviceMesh,
    pub(super) step: Option<u64>,
    pub(super) tensors: BTreeMap<String, DynDTensor>,
    /// Keys of models, optimizers and state dicts: what is loaded together has a key below one of
    /// them.
    pub(super) groups: BTreeSet<String>,
    /// Values that are the same on all ranks.
    pub(super) values: BTreeMap<String, String>,
    /// Values of this rank.
    pub(super) rank_values: BTreeMap<String, String>,
}

impl State {
    /// Creates an empty state of the ranks of `mesh`. Pass the mesh with all ranks that hold
    /// something, such as the mesh of which the model's meshes are slices. Local: no communication.
    pub fn new(mesh: &DeviceMesh) -> Self {
        Self {
            mesh: mesh.clone(),
            step: None,
            tensors: BTreeMap::new(),
            groups: BTreeSet::new(),
            values: BTreeMap::new(),
            rank_values: BTreeMap::new(),
        }
    }

    /// Sets the number of training steps after which the state was taken.
    #[must_use]
    pub fn with_step(self, step: u64) -> Self {
        Self {
            step: Some(step),
            ..self
        }
    }

    /// Returns the number of training steps.
    pub fn step(&self) -> Option<u64> {
        self.step
    }

    /// Adds the parameters and buffers of a model, each under `key` and its path.
    ///
    /// [`sync_buffers`] runs first, so that all ranks have the same running statistics. What is not
    /// distributed counts as replicated on all ranks of the mesh.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// [`CheckpointError::Nested`], those of [`StateDict::of_model`] and of [`sync_buffers`].
    pub fn with_model<M: Module>(self, key: &str, model: &M) -> Result<Self> {
        sync_buffers(model)?;
        let dict = StateDict::of_model(model, &self.mesh)?;
        self.with_state_dict(key, &dict)
    }

    /// Adds the state of an optimizer, each tensor under `key` and its name, and the paths of all
    /// parameters of its model. Local: no communication.
    ///
    /// # Errors
    /// [`CheckpointError::Nested`], and [`CheckpointError::Duplicate`] for the key of a value.
    pub fn with_optimizer(self, key: &str, optimizer: &OptimizerState) -> Result<Self> {
        let state = self.with_tensors(key, &StateDict::of_optimizer(optimizer))?;
        state.with_value(key, &StoredOptimizer::of(optimizer))
    }

    /// Adds tensors, each under `key` and its path. Local: no communication.
    ///
    /// # Errors
    /// [`CheckpointError::Nested`] if `key` is that of another model, optimizer or state dict, or
    /// one of both keys is below the other, as `model.ema` is below `model`; or if a tensor has a
    /// key below `key`. What was saved under one of them would be part of the other.
    /// [`CheckpointError::Numbers`] for the state of an optimizer that has numbers: add it with
    /// [`with_optimizer`](Self::with_optimizer).
    pub fn with_state_dict(self, key: &str, tensors: &StateDict) -> Result<Self> {
        match tensors.scalars().next() {
            Some((number, _)) => Err(CheckpointError::Numbers {
                key: key.into(),
                number: number.into(),
            }
            .into()),
            None => self.with_tensors(key, tensors),
        }
    }

    fn with_tensors(mut self, key: &str, tensors: &StateDict) -> Result<Self> {
        let groups = self
            .groups
            .iter()
            .find(|group| *group == key || is_below(group, key) || is_below(key, group));
        let other = groups.or_else(|| self.tensors.keys().find(|tensor| is_below(tensor, key)));
        if let Some(other) = other {
            return Err(CheckpointError::Nested {
                key: key.into(),
                other: other.clone(),
            }
            .into());
        }
        self.groups.insert(key.into());
        for (path, tensor) in tensors.tensors() {
            insert(&mut self.tensors, format!("{key}.{path}"), tensor.clone())?;
        }
        Ok(self)
    }

    /// Adds a tensor. [`Checkpoint::load_tensor`](super::Checkpoint::load_tensor) loads it. Local:
    /// no communication.
    ///
    /// ```
    /// # use burn::tensor::Tensor;
    /// # use burn_dtensor::prelude::*;
    /// use burn_dtensor::checkpoint::{self, Checkpoint, State};
    ///
    /// # let folder = std::env::temp_dir().join(format!("checkpoint-tensor-{}", std::process::id()));
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
    ///     let ones = Tensor::<2>::ones([4, 3], world.device());
    ///     let rows = DTensor::distribute_replicated(ones, &mesh, &[Placement::Shard(0)])?;
    ///     checkpoint::save(&folder, &State::new(&mesh).with_tensor("cache", &rows)?)?;
    ///     let columns = rows.zeros_like().redistribute(&[Placement::Shard(1)])?;
    ///     let columns = Checkpoint::open(&folder, &mesh)?.load_tensor("cache", &columns)?;
    ///     assert_eq!(columns.full_tensor()?.into_data(), Tensor::<2>::ones([4, 3], world.device()).into_data());
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`CheckpointError::Duplicate`], and [`CheckpointError::Nested`] for a key below that of a
    /// model, an optimizer or a state dict.
    pub fn with_tensor(mut self, key: &str, tensor: impl Into<DynDTensor>) -> Result<Self> {
        if let Some(group) = self.groups.iter().find(|group| is_below(key, group)) {
            return Err(CheckpointError::Nested {
                key: key.into(),
                other: group.clone(),
            }
            .into());
        }
        insert(&mut self.tensors, key.into(), tensor.into())?;
        Ok(self)
    }

    /// Adds a value that is the same on all ranks, such as a scheduler's record or a sampler's
    /// position. [`save`](super::save) compares the values of the ranks. Maps are stored in the
    /// order of their keys, because that of a `HashMap` differs between ranks. Local: no
    /// communication.
    ///
    /// # Errors
    /// [`CheckpointError::Duplicate`], and [`CheckpointError::Value`] if serde cannot serialize it.
    pub fn with_value<T: Serialize>(mut self, key: &str, value: &T) -> Result<Self> {
        insert(&mut self.values, key.into(), encode(key, value)?)?;
        Ok(self)
    }

    /// Adds a value that each rank has of its own, such as the state of a random stream.
    /// [`Checkpoint::rank_values`](super::Checkpoint::rank_values) returns those of all ranks.
    /// Local: no communication.
    ///
    /// # Errors
    /// [`CheckpointError::Duplicate`], and [`CheckpointError::Value`] if serde cannot serialize it.
    pub fn with_rank_value<T: Serialize>(mut self, key: &str, value: &T) -> Result<Self> {
        insert(&mut self.rank_values, key.into(), encode(key, value)?)?;
        Ok(self)
    }

    /// Returns the keys of the tensors, of the values and of the values of each rank.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors
            .keys()
            .chain(self.values.keys())
            .chain(self.rank_values.keys())
            .map(String::as_str)
    }
}

/// Returns true if `key` consists of `above`, a dot and more.
fn is_below(key: &str, above: &str) -> bool {
    key.strip_prefix(above)
        .is_some_and(|rest| rest.starts_with('.'))
}

fn insert<T>(map: &mut BTreeMap<String, T>, key: String, value: T) -> Result<(), CheckpointError> {
    match map.entry(key) {
        Entry::Occupied(taken) => Err(CheckpointError::Duplicate {
            key: taken.key().clone(),
        }),
        Entry::Vacant(place) => {
            place.insert(value);
            Ok(())
        }
    }
}

/// Serializes a value as CBOR in hexadecimal digits. JSON has no infinities, and its numbers may
/// lose their last bit.
fn encode<T: Serialize>(key: &str, value: &T) -> Result<String, CheckpointError> {
    let mut bytes = Vec::new();
    let mut value = ciborium::Value::serialized(value).map_err(|error| value_error(key, error))?;
    sort_maps(&mut value);
    ciborium::into_writer(&value, &mut bytes).map_err(|error| value_error(key, error))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Sorts the entries of all maps: a `HashMap` has an order of its own on each rank.
fn sort_maps(value: &mut ciborium::Value) {
    match value {
        ciborium::Value::Map(entries) => {
            entries.sort_by(|(a, _), (b, _)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
            entries.iter_mut().for_each(|(_, value)| sort_maps(value));
        }
        ciborium::Value::Array(values) => values.iter_mut().for_each(sort_maps),
        ciborium::Value::Tag(_, value) => sort_maps(value),
        _ => {}
    }
}

/// Deserializes what [`encode`] returned.
pub(super) fn decode<T: DeserializeOwned>(key: &str, digits: &str) -> Result<T, CheckpointError> {
    let bytes: Option<Vec<u8>> = digits
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok())
        .collect();
    let bytes = bytes.ok_or_else(|| value_error(key, "it is not in hexadecimal digits"))?;
    ciborium::from_reader(&bytes[..]).map_err(|error| value_error(key, error))
}

fn value_error(key: &str, reason: impl ToString) -> CheckpointError {
    CheckpointError::Value {
        key: key.into(),
        reason: reason.to_string(),
    }
}
