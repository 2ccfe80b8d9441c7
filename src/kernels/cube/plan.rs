//! [`CubePlan`]: copies that are ready to run on a device.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bands::{bands, ranges};
use super::block::{vector_lanes, vectors};
use super::kernel;
use super::table::table;
use super::tuning::UNITS;
use super::{BlockLayout, CubeError, SharedAllocation};
use crate::kernels::{CopyPlan, StridedCopy};

/// A [`CopyPlan`] with its tables on a device. Each run is one launch, or as few as the device's
/// bindings allow.
pub(crate) struct CubePlan {
    client: Client,
    device: CubeDevice,
    dtype: DType,
    /// Elements of each source.
    lens: Vec<usize>,
    /// Layout of the targets.
    layout: BlockLayout,
    /// Type in which the kernel reads and writes elements, and its bytes.
    lane: (ElemType, usize),
    /// Lanes of a vector.
    width: usize,
    limits: DeviceLimits,
    launches: Vec<KernelLaunch>,
    /// Elements that are copied, and elements that are set to zero.
    copied: usize,
    padding: usize,
}

struct KernelLaunch {
    sources: Vec<usize>,
    table: Handle,
    words: usize,
    tasks: usize,
}

/// Buffers of a kernel other than the sources: table, target, and the kernel's own arguments.
const OTHERS: usize = 3;

/// Limits of a device for one launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceLimits {
    /// Maximum number of buffers of a kernel.
    pub bindings: usize,
    /// Maximum number of cubes in one dimension of the grid.
    pub cubes: usize,
}

impl DeviceLimits {
    /// Returns the limits of the device.
    pub(super) fn of(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        Self {
            bindings: hardware.max_bindings as usize,
            cubes: hardware.max_cube_count.0 as usize,
        }
    }
}

impl CubePlan {
    /// Creates a plan for copies of tensors of `dtype`.
    ///
    /// # Errors
    /// A [`CubeError`] if the device's kernels cannot execute the copies.
    pub fn new(device: &CubeDevice, copies: &CopyPlan, dtype: DType) -> Result<Self, CubeError> {
        Self::within(DeviceLimits::of(&device.client()), device, copies, dtype)
    }

    /// Like [`new`](Self::new), but with launches within these `limits`.
    pub fn within(
        limits: DeviceLimits,
        device: &CubeDevice,
        copies: &CopyPlan,
        dtype: DType,
    ) -> Result<Self, CubeError> {
        let client = device.client();
        let layout = BlockLayout::new(&client, &copies.targets, dtype);
        let bytes = layout.size;
        let most = client.properties().memory.max_page_size;
        if bytes as u64 > most {
            return Err(CubeError::Allocation { bytes, most });
        }
        let (lane, counted) = lane(&client, copies, dtype)?;
        let total = layout.size / lane.1;
        let longest = counted
            .sources
            .iter()
            .map(|shape| shape.num_elements())
            .fold(total, usize::max);
        if longest >= u32::MAX as usize {
            return Err(CubeError::TooLarge { len: longest });
        }
        let offsets: Vec<_> = layout
            .offsets
            .iter()
            .map(|offset| offset / lane.1)
            .collect();
        let bands = bands(&counted, &offsets, total);
        let width = vector_lanes(&client, lane.1);
        let limit = limits.bindings.saturating_sub(OTHERS).max(1);
        let ranges =
            ranges(&bands, width, limit).map_err(|needed| CubeError::Bindings { needed, limit })?;
        let launch = |range| {
            let (words, tasks) = table(&bands, &range, width);
            let table = client.create_from_slice(bytemuck::cast_slice(&words));
            KernelLaunch {
                sources: range.sources,
                table,
                words: words.len(),
                tasks,
            }
        };
        let launches = ranges.into_iter().map(launch).collect();
        let copied = copies.copied();
        let padding = copies
            .targets
            .iter()
            .map(|shape| shape.num_elements())
            .sum::<usize>()
            - copied;
        let device = device.clone();
        let lens = copies
            .sources
            .iter()
            .map(|shape| shape.num_elements())
            .collect();
        Ok(Self {
            client,
            device,
            dtype,
            lens,
            layout,
            lane,
            width,
            limits,
            launches,
            copied,
            padding,
        })
    }

    /// Returns the number of kernels that a run launches.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    /// Returns the bytes of targets that a run copies.
    pub fn copied(&self) -> usize {
        self.copied * self.dtype.size()
    }

    /// Returns the bytes of targets that a run sets to zero.
    pub fn padding(&self) -> usize {
        self.padding * self.dtype.size()
    }

    /// Copies `sources` to new targets in one allocation.
    ///
    /// # Panics
    /// If the sources do not match the copies.
    pub fn run(&self, sources: &[CubeTensor]) -> SharedAllocation {
        let lens = sources.iter().map(|source| source.meta.num_elements());
        assert!(
            lens.eq(self.lens.iter().copied()),
            "the plan's sources have {:?} elements",
            self.lens
        );
        assert!(
            sources.iter().all(|source| source.dtype == self.dtype),
            "the plan's sources are {:?}",
            self.dtype
        );
        let block = self.layout.allocate(&self.client, &self.device);
        for launch in &self.launches {
            self.launch(launch, sources, &block);
        }
        block
    }

    fn launch(&self, launch: &KernelLaunch, sources: &[CubeTensor], block: &SharedAllocation) {
        let (lane, bytes) = (self.lane.0, self.width * self.lane.1);
        let read = |index: &usize| vectors(&into_contiguous(sources[*index].clone()).handle, bytes);
        // SAFETY: the table has `words` words.
        let table = unsafe { BufferArg::from_raw_parts(launch.table.clone(), launch.words) };
        let rows = launch.tasks.div_ceil(self.limits.cubes);
        let count = CubeCount::Static(launch.tasks.div_ceil(rows) as u32, rows as u32, 1);
        // SAFETY: all offsets in the table are inside the sources and the target, as `CopyPlan` and
        // `run` have checked.
        unsafe {
            kernel::copy::launch_unchecked(
                &self.client,
                count,
                CubeDim::new_1d(UNITS as u32),
                self.width,
                launch.sources.iter().map(read).collect(),
                table,
                vectors(&block.memory, bytes),
                lane,
            );
        }
    }
}

/// Bytes of a word.
const WORD: usize = 4;

/// Returns the type of the lanes of a kernel's vectors and its bytes, and the copies counted in
/// lanes. A lane is a word, or an element if two runs share a word.
///
/// # Errors
/// A [`CubeError`] if the device does not support the type.
fn lane(
    client: &Client,
    copies: &CopyPlan,
    dtype: DType,
) -> Result<((ElemType, usize), CopyPlan), CubeError> {
    if let Some(words) = in_words(copies, dtype.size()) {
        return Ok(((dtype_to_storage_type(DType::U32), WORD), words));
    }
    let lane = dtype_to_storage_type(dtype);
    if !client
        .properties()
        .type_usage(lane)
        .is_superset(TypeUsage::Buffer | TypeUsage::Conversion)
    {
        return Err(CubeError::Dtype { dtype });
    }
    Ok(((lane, dtype.size()), copies.clone()))
}

/// Returns the copies counted in words, or `None` if a word contains elements of two runs.
fn in_words(copies: &CopyPlan, bytes: usize) -> Option<CopyPlan> {
    let words = |elements: usize| {
        (elements * bytes)
            .is_multiple_of(WORD)
            .then_some(elements * bytes / WORD)
    };
    let segment = |segment: &StridedCopy| {
        let StridedCopy {
            source,
            target,
            from,
            to,
            rows,
            run,
            from_stride,
            to_stride,
        } = *segment;
        let stride = |stride| if rows == 1 { Some(0) } else { words(stride) };
        let from = words(from)?;
        let to = words(to)?;
        let run = words(run)?;
        let from_stride = stride(from_stride)?;
        let to_stride = stride(to_stride)?;
        Some(StridedCopy {
            source,
            target,
            from,
            to,
            rows,
            run,
            from_stride,
            to_stride,
        })
    };
    let shapes = |shapes: &[Shape]| {
        shapes
            .iter()
            .map(|shape| Shape::new([(shape.num_elements() * bytes).div_ceil(WORD)]))
            .collect()
    };
    let segments = copies.segments.iter().map(segment).collect::<Option<_>>()?;
    Some(CopyPlan::new(
        shapes(&copies.sources),
        shapes(&copies.targets),
        segments,
    ))
}
