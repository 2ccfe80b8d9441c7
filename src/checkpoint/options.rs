//! [`LoadOptions`] and [`KeyReport`]: which saved tensors a load gives to which parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::dtensor::{DTensorSpec, is_castable};

/// Options of a load into a model. By default every parameter and buffer of the model must be saved under its path, and
/// everything that is saved must be in the model.
///
/// The model's dtypes win: values of another dtype are cast.
#[derive(Clone, Default)]
pub struct LoadOptions {
    partial: bool,
    renamed: Option<Arc<RenameFn>>,
}

/// Function from the path of a parameter to the key under which it is saved.
type RenameFn = dyn Fn(&str) -> Option<String> + Send + Sync;

impl LoadOptions {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows that parameters are not saved, which then keep their values, and that saved tensors are not in the model.
    /// The [`KeyReport`] lists both. Shapes must still fit.
    #[must_use]
    pub fn with_partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }

    /// Reads each parameter from another key. `key` receives the path of a parameter or buffer in the model and returns
    /// the key under which it is saved, or `None` to leave it as it is. Several parameters may read the same key.
    ///
    /// ```
    /// use burn_dtensor::checkpoint::LoadOptions;
    ///
    /// // `encoder` was saved under the name `backbone`. The head is new.
    /// let options = LoadOptions::new().with_renamed(|path| match path.strip_prefix("encoder.") {
    ///     Some(rest) => Some(format!("backbone.{rest}")),
    ///     None => None,
    /// });
    /// # let _ = options;
    /// ```
    #[must_use]
    pub fn with_renamed(mut self, key: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        self.renamed = Some(Arc::new(key));
        self
    }

    /// Decides which saved tensor each target gets: pairs of a path of `targets` and a key of `saved`, in the order of the
    /// paths.
    ///
    /// # Errors
    /// [`CheckpointError::Keys`] with everything that does not fit.
    pub(crate) fn matched(
        &self,
        targets: &BTreeMap<String, Arc<DTensorSpec>>,
        saved: &BTreeMap<String, SavedTensor>,
    ) -> Result<(Vec<(String, String)>, KeyReport), CheckpointError> {
        let (mut pairs, mut report, mut mismatched) = (Vec::new(), KeyReport::default(), Vec::new());
        for (path, target) in targets {
            let Some(key) = self.key(path) else {
                report.skipped.push(path.clone());
                continue;
            };
            let Some(saved) = saved.get(&key) else {
                report.missing.push(path.clone());
                continue;
            };
            if saved.shape != *target.shape() || !is_castable(saved.dtype, target.dtype()) {
                let own = SavedTensor::of(target);
                mismatched.push(format!("`{path}` is {own} in the model, but {saved} in what was saved"));
                continue;
            }
            if saved.dtype != target.dtype() {
                report.cast.push(path.clone());
            }
            report.loaded.push(path.clone());
            pairs.push((path.clone(), key));
        }
        // A parameter that is left out may well be saved.
        let asked: BTreeSet<_> = targets.keys().map(|path| self.key(path).unwrap_or_else(|| path.clone())).collect();
        report.unexpected = saved.keys().filter(|key| !asked.contains(*key)).cloned().collect();
        let fits = self.partial || report.missing.is_empty() && report.unexpected.is_empty();
        if fits && mismatched.is_empty() {
            return Ok((pairs, report));
        }
        let KeyReport { missing, unexpected, .. } = report;
        let (missing, unexpected) = if self.partial { Default::default() } else { (missing, unexpected) };
        Err(CheckpointError::Keys { missing, unexpected, mismatched })
    }

    fn key(&self, path: &str) -> Option<String> {
        match &self.renamed {
            Some(renamed) => renamed(path),
            None => Some(path.to_owned()),
        }
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { partial, renamed } = self;
        f.debug_struct("LoadOptions").field("partial", partial).field("renamed", &renamed.is_some()).finish()
    }
}

/// Global shape and dtype of a saved tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedTensor {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
}

impl SavedTensor {
    pub(crate) fn of(spec: &DTensorSpec) -> Self {
        Self { shape: spec.shape().clone(), dtype: spec.dtype() }
    }
}

impl fmt::Display for SavedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.shape.as_slice(), self.dtype.name())
    }
}

/// Report of a load into a model, identical on every rank. Paths are those of parameters and buffers in the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyReport {
    /// Paths that were loaded.
    pub loaded: Vec<String>,
    /// Those of them whose values had another dtype and were cast.
    pub cast: Vec<String>,
    /// Paths that were not saved and keep their values. Empty unless the load is
    /// [partial](LoadOptions::with_partial).
    pub missing: Vec<String>,
    /// Paths that [`LoadOptions::with_renamed`] left out.
    pub skipped: Vec<String>,
    /// Saved keys that no parameter reads. Empty unless the load is [partial](LoadOptions::with_partial).
    pub unexpected: Vec<String>,
}
