//! [`CrossEntropyLossConfig`].

/// Reduction of the losses of the samples to one loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Their sum divided by the sum of their weights. Without weights, each sample has weight 1.
    #[default]
    Mean,
    /// The sum.
    Sum,
}

/// Configuration of a [`CrossEntropyLoss`](super::CrossEntropyLoss).
///
/// ```
/// # use burn::tensor::Device;
/// # use burn_dtensor::dtensor::ops::loss::CrossEntropyLossConfig;
/// let loss = CrossEntropyLossConfig::new().with_ignore_index(-100).with_smoothing(0.1).init(&Device::flex());
/// ```
#[derive(Debug, Clone, Default)]
pub struct CrossEntropyLossConfig {
    pub(super) weights: Option<Vec<f32>>,
    pub(super) smoothing: f32,
    pub(super) ignore_index: Option<i64>,
    pub(super) reduction: Reduction,
    pub(super) log_probs: bool,
}

impl CrossEntropyLossConfig {
    /// Configures the mean over all samples of unweighted, hard targets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a weight for each class.
    #[must_use]
    pub fn with_weights(mut self, weights: impl Into<Vec<f32>>) -> Self {
        self.weights = Some(weights.into());
        self
    }

    /// Sets label smoothing: this fraction of each target is spread evenly over all classes.
    #[must_use]
    pub fn with_smoothing(mut self, smoothing: f32) -> Self {
        self.smoothing = smoothing;
        self
    }

    /// Ignores samples with this target, which need not be a class.
    #[must_use]
    pub fn with_ignore_index(mut self, ignore_index: i64) -> Self {
        self.ignore_index = Some(ignore_index);
        self
    }

    /// Sets the reduction of the losses of the samples. Default: their mean.
    #[must_use]
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Declares that the scores are log-probabilities. Default: they are logits of any scale.
    #[must_use]
    pub fn with_log_probs(mut self, log_probs: bool) -> Self {
        self.log_probs = log_probs;
        self
    }
}
