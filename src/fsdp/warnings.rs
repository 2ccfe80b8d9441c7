//! Warnings about layers that compute something else on several ranks than on one device.

use itertools::Itertools;

use super::config::FullyShard;
use crate::burn_compat::BurnLayer;
use crate::mesh::DeviceMesh;
use crate::param::{Layer, warn};

/// Maximum number of paths that a warning lists.
const LISTED: usize = 4;

/// Warns about batch norms if `ranks`, the number of ranks with distinct data, is above 1, and
/// about burn's dropout if several ranks of this process draw its masks, as far as `config` does not
/// turn the warnings off. `layers` are those of the model `origin`. Only the first rank of the mesh
/// from which `mesh` was sliced warns.
pub(super) fn warn_about(
    layers: &[Layer],
    origin: &str,
    mesh: &DeviceMesh,
    ranks: usize,
    config: &FullyShard,
) {
    let is_first = mesh.root().ranks().first() == Some(&mesh.rank());
    if !is_first || !config.layer_warnings {
        return;
    }
    let paths = |kind: BurnLayer| {
        let paths: Vec<_> = layers
            .iter()
            .filter(|layer| layer.kind == kind)
            .map(|layer| &layer.path)
            .unique()
            .collect();
        let named = |path: &&String| {
            if path.is_empty() {
                "the model itself".into()
            } else {
                format!("`{path}`")
            }
        };
        let listed = paths
            .iter()
            .take(LISTED)
            .copied()
            .map(|path| named(&path))
            .join(", ");
        let more = paths.len().saturating_sub(LISTED);
        (!paths.is_empty()).then(|| {
            if more > 0 {
                format!("{listed} and {more} more")
            } else {
                listed
            }
        })
    };
    if let Some(paths) = paths(BurnLayer::BatchNorm).filter(|_| ranks > 1) {
        warn(&format!(
            "each of the {ranks} data-parallel ranks normalizes with the statistics of its own batch in {paths} ({origin}), \
             so the model trains differently than on one device. Call \
             `nn::sync_batch_norm` in place of its forward, or `forward_dtensor` with a batch that is one DTensor; `GroupNorm` \
             and `LayerNorm` need neither. `with_layer_warnings(false)` turns this warning off"
        ));
    }
    let share_a_state = ranks > 1 && mesh.world().ranks_here() > 1;
    if let Some(paths) =
        paths(BurnLayer::Dropout).filter(|_| config.dropout_warning && share_a_state)
    {
        warn(&format!(
            "the masks of burn's `Dropout` in {paths} ({origin}) depend on timing, unless its probability is 0, because \
             all ranks of a process draw from one random state. Call `burn_dtensor::nn::dropout` instead, or run one rank \
             per process. `with_dropout_warning(false)` turns this warning off"
        ));
    }
}
