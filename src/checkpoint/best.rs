//! [`Best`]: which checkpoint of a run is the best, by a value that was saved with each.

use std::path::Path;

use super::fs::FileSystem;
use super::load::{no_value, read_manifest};
use super::run_folder::name;
use super::state::decode;
use super::{CheckpointError, State};

/// Which value of a metric is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Best {
    /// The lowest, as of a loss.
    Lowest,
    /// The highest, as of an accuracy.
    Highest,
}

/// Key of a metric's value in checkpoints, and which is the best.
#[derive(Debug, Clone)]
pub(super) struct BestBy {
    pub key: String,
    pub best: Best,
}

impl BestBy {
    /// Checks that the state has the value.
    ///
    /// # Errors
    /// [`CheckpointError::NoValue`] and [`CheckpointError::Value`].
    pub fn check(&self, state: &State) -> Result<(), CheckpointError> {
        let value = state.values.get(&self.key);
        let value = value.ok_or_else(|| no_value(&self.key, state.values.keys()))?;
        decode::<f64>(&self.key, value).map(drop)
    }

    /// Returns the step with the best value, the first of those that are equal; `None` if none of
    /// the checkpoints has a value that is a number. A checkpoint that is removed meanwhile, or
    /// cannot be loaded, has none.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn find(
        &self,
        fs: &dyn FileSystem,
        path: &Path,
        steps: &[u64],
        rank: usize,
    ) -> Result<Option<u64>, CheckpointError> {
        let mut found: Option<(u64, f64)> = None;
        for step in steps {
            let manifest = match read_manifest(fs, &path.join(name(*step)), rank) {
                Ok((manifest, _)) => manifest,
                Err(error @ CheckpointError::Io { .. }) => return Err(error),
                Err(_) => continue,
            };
            let value = manifest.values.get(&self.key);
            let Some(value) = value.and_then(|value| decode::<f64>(&self.key, value).ok()) else {
                continue;
            };
            let is_better = |than: f64| match self.best {
                Best::Lowest => value < than,
                Best::Highest => value > than,
            };
            if !value.is_nan() && found.is_none_or(|(_, than)| is_better(than)) {
                found = Some((*step, value));
            }
        }
        Ok(found.map(|(step, _)| step))
    }
}
