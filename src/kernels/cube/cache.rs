//! Cache of plans for the copies around collectives, one entry per layout.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use lru::LruCache;
use parking_lot::Mutex;

use super::tuning::LAYOUTS;
use super::{CubeError, CubePlan};
use crate::kernels::{CopyPlan, FlatLayout};

/// Selects one of a [`FlatLayout`]'s copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CopySide {
    /// All-gather's copy-in of this rank.
    PackParts(usize),
    /// All-gather's copy-out, from one buffer per rank.
    UnpackRows,
    /// All-gather without copy-in, from the shards of all ranks.
    JoinParts,
    /// Reduce-scatter's copy-in.
    PackFull,
}

impl CopySide {
    fn copies(self, layout: &FlatLayout) -> CopyPlan {
        match self {
            Self::PackParts(rank) => layout.pack_parts(rank),
            Self::UnpackRows => layout.unpack_rows(),
            Self::JoinParts => layout.join_parts(),
            Self::PackFull => layout.pack_full(),
        }
    }
}

type PlanResult = Result<Arc<CubePlan>, CubeError>;

/// Plans by layout, so that a lookup does not need to copy its key.
type Plans = LruCache<FlatLayout, HashMap<(CubeDevice, CopySide, DType), PlanResult>>;

static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(|| Mutex::new(LruCache::new(LAYOUTS)));

/// Returns the plan of one side's copies. When the cache is full, the plans of the layout that was
/// used least recently are dropped.
///
/// # Errors
/// The reason why kernels cannot copy on the device. Errors are cached too.
pub(crate) fn plan(
    device: &CubeDevice,
    layout: &FlatLayout,
    side: CopySide,
    dtype: DType,
) -> PlanResult {
    let mut plans = PLANS.lock();
    let of_layout = plans.get_or_insert_mut_ref(layout, HashMap::new);
    of_layout
        .entry((device.clone(), side, dtype))
        .or_insert_with(|| CubePlan::new(device, &side.copies(layout), dtype).map(Arc::new))
        .clone()
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use burn::tensor::Shape;

    use super::*;
    use crate::kernels::ShardedTensorSpec;
    use crate::kernels::cube::tests::device;
    use crate::placement::ShardSizes;

    fn layout(len: usize) -> FlatLayout {
        FlatLayout::new(
            2,
            vec![ShardedTensorSpec {
                shape: Shape::new([len]),
                dim: 0,
                sizes: ShardSizes::Chunked(len),
            }],
            8,
        )
    }

    #[test]
    fn a_layouts_plans_are_made_once_for_each_side_and_dtype() {
        let made = |layout: &FlatLayout, side, dtype| plan(&device(), layout, side, dtype).unwrap();
        let first = made(&layout(6), CopySide::PackParts(0), DType::F32);
        assert!(Arc::ptr_eq(
            &first,
            &made(&layout(6), CopySide::PackParts(0), DType::F32)
        ));
        for other in [
            made(&layout(7), CopySide::PackParts(0), DType::F32),
            made(&layout(6), CopySide::PackParts(1), DType::F32),
            made(&layout(6), CopySide::PackFull, DType::F32),
            made(&layout(6), CopySide::PackParts(0), DType::I32),
        ] {
            assert!(!Arc::ptr_eq(&first, &other));
        }
        // A layout that is used outlives any number of others.
        for len in 0..LAYOUTS.get() {
            made(&layout(1000 + len), CopySide::PackParts(0), DType::F32);
            if len % 100 == 0 {
                made(&layout(6), CopySide::PackParts(0), DType::F32);
            }
        }
        assert_eq!(PLANS.lock().len(), LAYOUTS.get());
        assert!(Arc::ptr_eq(
            &first,
            &made(&layout(6), CopySide::PackParts(0), DType::F32)
        ));
        assert!(
            !PLANS.lock().contains(&layout(7)),
            "it was used least recently"
        );
    }
}
