//! Sizes by which the device data plane divides work and keeps plans. What depends on the device,
//! its bindings, grids and vectors, is asked of the device
//! ([`DeviceLimits`](super::plan::DeviceLimits), [`vector_lanes`](super::vector_lanes)).

use std::num::NonZeroUsize;

/// Units of a cube. Every device allows 256, WebGPU's default limit; kernels are compiled with it.
pub(super) const UNITS: usize = 256;

/// Number of vectors that one cube writes. It does not depend on the lengths of segments, so the
/// load is balanced. With four a unit, looking up the cube's first band takes little of its time.
pub(super) const TASK_VECTORS: usize = 4 * UNITS;

/// Maximum number of layouts whose plans are kept: more than one for each unit of a large model and
/// each direction.
pub(super) const LAYOUTS: NonZeroUsize = NonZeroUsize::new(1024).expect("more than none");
