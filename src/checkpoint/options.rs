//! [`LoadOptions`]: which saved tensors a load gives to which parameters.

use std::fmt;
use std::sync::Arc;

use super::LoadKind;
use super::matching::Matching;
use super::weight_source::WeightSource;

/// Options of a load into a model. By default every parameter and buffer of the model must be saved
/// under its path, and everything that is saved must be in the model.
///
/// The model's dtypes win: values of another dtype are cast.
#[derive(Clone, Default)]
pub struct LoadOptions {
    partial: bool,
    pub(super) state_dtypes: StateDTypes,
    renamed: Option<Arc<RenameFn>>,
}

/// Treatment of an optimizer's state that was saved for a parameter of another dtype, such as that
/// of an `F32` model for one that is `BF16` now.
///
/// burn holds loaded state in the device's default float dtype. If that is not the dtype of the
/// parameter, a [`sharded`](crate::optim::sharded) optimizer steps in the dtype of the state, and
/// casts the parameter and its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StateDTypes {
    /// It is an error, because the steps would differ.
    #[default]
    Refuse,
    /// It is converted to the parameter's dtype, and listed in the report.
    Convert,
    /// It is loaded as it was saved.
    Keep,
}

/// Function from the path of a parameter to the key under which it is saved.
type RenameFn = dyn Fn(&str) -> Option<String> + Send + Sync;

impl LoadOptions {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows that parameters are not saved, which then keep their values, and that saved tensors
    /// are not in the model. The [`KeyReport`](super::KeyReport) lists both. Shapes must still fit.
    #[must_use]
    pub fn with_partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }

    /// Sets what becomes of an optimizer's state that was saved for a parameter of another dtype.
    #[must_use]
    pub fn with_state_dtypes(mut self, dtypes: StateDTypes) -> Self {
        self.state_dtypes = dtypes;
        self
    }

    /// Reads each parameter from another key. `key` receives the path of a parameter or buffer in
    /// the model and returns the key under which it is saved, or `None` to leave it as it is.
    /// Several parameters may read the same key.
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
    pub fn with_renamed(
        mut self,
        key: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.renamed = Some(Arc::new(key));
        self
    }

    /// Returns the rules of a load of this kind.
    pub(super) fn matching(&self, of: LoadKind) -> Matching<'_> {
        let source = move |path: &str| match &self.renamed {
            Some(renamed) => renamed(path).map(WeightSource::new),
            None => Some(WeightSource::new(path)),
        };
        Matching {
            of,
            source: Box::new(source),
            allows_missing: self.partial,
            allows_unexpected: self.partial,
        }
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            partial,
            state_dtypes,
            renamed,
        } = self;
        f.debug_struct("LoadOptions")
            .field("partial", partial)
            .field("state_dtypes", state_dtypes)
            .field("renamed", &renamed.is_some())
            .finish()
    }
}
