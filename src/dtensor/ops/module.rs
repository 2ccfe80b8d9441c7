//! Operators that burn provides as functions in [`burn::tensor::module`], and related ones.

pub use super::attention::{attention, attention_fallback};
pub use super::batch_norm::{BatchNormTrainOutput, batch_norm, batch_norm_train};
pub use super::conv::{
    conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d, conv3d,
};
pub use super::ctc::ctc_loss;
pub use super::deform_conv::deform_conv2d;
pub use super::dropout::dropout;
pub use super::embedding::embedding;
pub use super::interpolate::interpolate;
pub use super::linear::linear;
pub(crate) use super::norm::layer_norm_by;
pub use super::norm::{group_norm, layer_norm, rms_norm};
pub use super::pool::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d, avg_pool1d, avg_pool2d,
    max_pool1d, max_pool1d_with_indices, max_pool2d, max_pool2d_with_indices,
};
pub use super::unfold::{fold4d, unfold4d};
