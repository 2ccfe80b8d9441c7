//! Values that must be identical on several ranks: shards on replicas, parameters that are
//! replicated or ignored, and buffers.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::module::{Module, Param, Parameter};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::ranks::Ranks;
use super::report::Finding;
use crate::Result;
use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};
use crate::comm::{Vote, vote};
use crate::dtensor::Kind;
use crate::param::{ModelScan, ScannedParam};

/// A value, and the place of a shard in it: for each mesh dimension, the coordinate of the rank, or
/// `None` if the dimension replicates the value. Ranks that hold the same place of a value hold
/// identical values.
type ValueId = (String, Vec<Option<usize>>);

/// Returns the first value that ranks must hold identically and do not.
///
/// # Collective
/// Every rank.
pub(super) fn differing<M: Module>(model: &M, ranks: &Ranks) -> Result<Option<Finding>> {
    let held = ranks.gather("compare, digests", &held(model))?;
    let by_value: Vec<HashMap<&ValueId, u64>> = held
        .iter()
        .map(|held| {
            held.iter()
                .map(|(value, digest)| (value, *digest))
                .collect()
        })
        .collect();
    let found = held
        .iter()
        .flatten()
        .map(|(value, _)| value)
        .unique()
        .find_map(|value| {
            let Vote {
                member,
                other,
                majority,
            } = vote(by_value.iter().map(|held| held.get(value).copied()))?;
            let rank = ranks.rank_at(member);
            let other = ranks.rank_at(other);
            Some(Finding::Replica {
                param: value.0.clone(),
                rank,
                other,
                majority,
            })
        });
    Ok(found)
}

/// Returns digests of this rank's values, in burn's order.
fn held<M: Module>(model: &M) -> Vec<(ValueId, u64)> {
    let ModelScan {
        params, buffers, ..
    } = ModelScan::of(model);
    let place = |found: &ScannedParam| {
        let spec = found
            .distributed
            .as_ref()
            .map(|param| param.spec(found.dtype));
        spec.map_or(Vec::new(), |spec| {
            let dims = spec.placements().iter().zip(spec.coordinate());
            dims.map(|(placement, &at)| (!placement.is_replicate()).then_some(at))
                .collect()
        })
    };
    let places = params
        .iter()
        .map(|found| (found.path(), place(found)))
        .collect();
    let of_kind = |running| {
        buffers
            .iter()
            .filter(move |buffer| buffer.running == running)
            .map(|buffer| buffer.path.join("."))
    };
    let mut read = ReadDigests {
        places,
        buffers: of_kind(false).collect(),
        running: of_kind(true).collect(),
        trains: false,
        held: Vec::new(),
    };
    visit_tensors(model, &mut read);
    let ReadDigests {
        running,
        trains,
        mut held,
        ..
    } = read;
    // In training, a rank's running statistics follow its own batches, and forward does not read
    // them.
    held.retain(|((path, _), _)| !trains || !running.contains(path));
    held
}

struct ReadDigests {
    /// Parameters by path.
    places: HashMap<String, Vec<Option<usize>>>,
    buffers: HashSet<String>,
    running: HashSet<String>,
    /// True if the model is on a device with autodiff.
    trains: bool,
    held: Vec<(ValueId, u64)>,
}

impl TensorVisitor for ReadDigests {
    fn tensor<const D: usize, K: Kind>(&mut self, path: &ModulePath, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        let path = path.join();
        let place = self.places.get(&path).cloned();
        let is_buffer = self.buffers.contains(&path) || self.running.contains(&path);
        // Reading a lazy parameter would draw its values.
        if (place.is_none() && !is_buffer) || !param.is_initialized() {
            return;
        }
        self.trains |= place.is_some() && param.base().device().is_autodiff();
        let data = param.base().without_autodiff().into_data();
        let mut digest = DefaultHasher::new();
        (data.shape().as_slice(), data.as_bytes()).hash(&mut digest);
        self.held
            .push(((path, place.unwrap_or_default()), digest.finish()));
    }
}
