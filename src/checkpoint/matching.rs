//! [`Matching`]: which saved tensor each parameter of a model gets. [`load_model`] gives it to them, for loads from
//! checkpoints, from files of other frameworks and from state dicts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Shape, TensorData};
use serde::{Deserialize, Serialize};

use super::capture::targets;
use super::weight_source::WeightSource;
use super::{CheckpointError, LoadKind};
use crate::Result;
use crate::comm::agree_on_success;
use crate::dtensor::{DTensorSpec, is_castable};
use crate::mesh::DeviceMesh;
use crate::param::{NewValue, release_shards, replace_tensors, unshared};

/// Specs of the tensors of a model by path.
pub(super) type Targets = BTreeMap<String, Arc<DTensorSpec>>;

/// Paths of a model, each with the values that it gets.
pub(super) type Pairs = Vec<(String, WeightSource)>;

/// Report of a load of a model or of an optimizer's state, identical on every rank. Paths are those
/// of parameters and buffers in the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyReport {
    /// Paths that were loaded.
    pub loaded: Vec<String>,
    /// Those of them whose values had another dtype and were cast.
    pub cast: Vec<String>,
    /// Paths that were not saved and keep their values, or start without state. Empty unless the
    /// load is [partial](super::LoadOptions::with_partial).
    pub missing: Vec<String>,
    /// Paths that [`LoadOptions::with_renamed`](super::LoadOptions::with_renamed) left out.
    pub skipped: Vec<String>,
    /// Saved keys that no parameter reads. Empty unless the load is
    /// [partial](super::LoadOptions::with_partial).
    pub unexpected: Vec<String>,
}

/// Global shape and dtype of a saved tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedTensor {
    pub shape: Shape,
    /// Dtype of burn, or the name of one that burn does not have.
    pub dtype: Result<DType, String>,
}

impl SavedTensor {
    pub fn of(spec: &DTensorSpec) -> Self {
        Self {
            shape: spec.shape().clone(),
            dtype: Ok(spec.dtype()),
        }
    }

    pub fn of_data(data: &TensorData) -> Self {
        Self {
            shape: data.shape().clone(),
            dtype: Ok(data.dtype()),
        }
    }

    /// Checks that burn has tensors with so many dimensions.
    pub fn check_dims(&self, key: &str) -> Result<(), CheckpointError> {
        match self.shape.num_dims() {
            1..=8 => Ok(()),
            dims => Err(CheckpointError::Dims {
                key: key.into(),
                dims,
            }),
        }
    }
}

impl fmt::Display for SavedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = self
            .dtype
            .as_ref()
            .map_or_else(String::as_str, |dtype| dtype.name());
        write!(f, "{:?} {dtype}", self.shape.as_slice())
    }
}

/// Function from the path of a parameter to the source of its values.
type SourceOf<'a> = dyn Fn(&str) -> Option<WeightSource> + 'a;

/// Rules by which parameters are matched with saved tensors.
pub(super) struct Matching<'a> {
    /// The load that an error describes.
    pub of: LoadKind,
    /// Returns the values of the parameter with a path; `None` to leave it as it is.
    pub source: Box<SourceOf<'a>>,
    /// Parameters that are not saved keep their values.
    pub allows_missing: bool,
    /// Saved tensors may be read by no parameter.
    pub allows_unexpected: bool,
}

impl Matching<'_> {
    /// Decides which saved tensor each target gets, in the order of the paths. Local: no
    /// communication.
    ///
    /// # Errors
    /// [`CheckpointError::Keys`] with everything that does not fit.
    pub fn pairs(
        &self,
        targets: &Targets,
        saved: &BTreeMap<String, SavedTensor>,
    ) -> Result<(Pairs, KeyReport), CheckpointError> {
        let mut pairs = Pairs::new();
        let mut report = KeyReport::default();
        let mut asked = BTreeSet::new();
        let mut missing = Vec::new();
        let mut mismatched = Vec::new();
        for (path, target) in targets {
            let Some(source) = (self.source)(path) else {
                report.skipped.push(path.clone());
                // It may well be saved.
                asked.insert(path.clone());
                continue;
            };
            let key = source.key().to_owned();
            asked.insert(key.clone());
            let Some(saved) = saved.get(&key) else {
                report.missing.push(path.clone());
                missing.push(if key == *path {
                    key
                } else {
                    format!("{path} (key {key})")
                });
                continue;
            };
            let dtype = saved
                .dtype
                .as_ref()
                .ok()
                .filter(|dtype| is_castable(**dtype, target.dtype()));
            let Some(dtype) =
                dtype.filter(|_| source.shape(&saved.shape).as_ref() == Some(target.shape()))
            else {
                let own = SavedTensor::of(target);
                mismatched.push(format!(
                    "`{path}` is {own}, but `{key}` was saved as {saved}{source}"
                ));
                continue;
            };
            if *dtype != target.dtype() {
                report.cast.push(path.clone());
            }
            report.loaded.push(path.clone());
            pairs.push((path.clone(), source));
        }
        report.unexpected = saved
            .keys()
            .filter(|key| !asked.contains(*key))
            .cloned()
            .collect();
        let missing = if self.allows_missing {
            Vec::new()
        } else {
            missing
        };
        let unexpected = if self.allows_unexpected {
            Vec::new()
        } else {
            report.unexpected.clone()
        };
        match missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() {
            true => Ok((pairs, report)),
            false => Err(CheckpointError::Keys {
                of: self.of,
                missing,
                unexpected,
                mismatched,
            }),
        }
    }
}

/// Returns the model with the values that `values` returns for the pairs of its paths and what is
/// `saved`, and a report. All other tensors stay as they are. No rank gets values if one cannot
/// match them. The model owns its running statistics: clones keep theirs.
///
/// # Collective
/// Every rank of `mesh`.
///
/// # Errors
/// On every rank: [`CheckpointError::Keys`] of the first rank on which something does not fit, and
/// the errors of [`targets`]. Those of `values`.
pub(super) fn load_model<M: Module>(
    model: M,
    mesh: &DeviceMesh,
    matching: &Matching<'_>,
    saved: &BTreeMap<String, SavedTensor>,
    values: impl FnOnce(&Pairs, &Targets) -> Result<BTreeMap<String, NewValue>>,
) -> Result<(M, KeyReport)> {
    let run = || -> Result<_> {
        let targets = targets(&model, mesh)?;
        let (pairs, report) = matching.pairs(&targets, saved)?;
        Ok((targets, pairs, report))
    };
    let (targets, pairs, report) =
        agree_on_success(&mesh.all()?, "checkpoint_match", run(), CheckpointError::of)?;
    // Clones of the model keep their running statistics.
    let model = unshared(model)?;
    // The old shards and the new ones are not in memory at once.
    let paths: BTreeSet<_> = pairs.iter().map(|(path, _)| path.as_str()).collect();
    let model = release_shards(model, |path| paths.contains(path));
    Ok((replace_tensors(model, values(&pairs, &targets)?)?, report))
}
