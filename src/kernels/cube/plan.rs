//! [`CubePlan`]: copies that are ready to run on a device.

use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bands::{bands, ranges};
use super::block::vectors;
use super::kernel::{self, CUBE};
use super::lanes::Lanes;
use super::table::table;
use super::{BlockLayout, CubeError, SharedAllocation};
use crate::kernels::{Convert, CopyPlan};

/// A [`CopyPlan`] with its tables on a device. Each run is one launch, or as few as the device's bindings allow.
pub(crate) struct CubePlan {
    client: Client,
    device: CubeDevice,
    from: DType,
    /// Elements of each source.
    lens: Vec<usize>,
    /// Layout of the targets.
    layout: BlockLayout,
    convert: Convert,
    /// True if sources are added to existing targets.
    onto: bool,
    lanes: Lanes,
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

/// Buffers of a kernel other than the sources: table, target, the values that are added to, and the kernel's own
/// arguments.
const OTHERS: usize = 4;

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
    fn of(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        Self { bindings: hardware.max_bindings as usize, cubes: hardware.max_cube_count.0 as usize }
    }
}

impl CubePlan {
    /// Creates a plan for copies of tensors of dtype `from`. If `onto`, a run adds them to the targets of an
    /// earlier run.
    ///
    /// # Errors
    /// A [`CubeError`] if the device's kernels cannot execute the copies.
    pub fn new(
        device: &CubeDevice,
        copies: &CopyPlan,
        from: DType,
        convert: Convert,
        onto: bool,
    ) -> Result<Self, CubeError> {
        Self::within(DeviceLimits::of(&device.client()), device, copies, from, convert, onto)
    }

    /// Like [`new`](Self::new), but with launches within these `limits`.
    pub fn within(
        limits: DeviceLimits,
        device: &CubeDevice,
        copies: &CopyPlan,
        from: DType,
        convert: Convert,
        onto: bool,
    ) -> Result<Self, CubeError> {
        let client = device.client();
        let layout = BlockLayout::new(&client, &copies.targets, convert.dtype);
        let (lanes, counted) = Lanes::of(&client, copies, from, convert, onto)?;
        let total = layout.size() / lanes.bytes.1;
        let longest = counted.sources.iter().map(|shape| shape.num_elements()).fold(total, usize::max);
        if longest >= u32::MAX as usize {
            return Err(CubeError::TooLarge { len: longest });
        }
        let offsets: Vec<_> = layout.offsets().iter().map(|offset| offset / lanes.bytes.1).collect();
        let bands = bands(&counted, &offsets, total);
        let (width, limit) = (lanes.per_vector(&client), limits.bindings.saturating_sub(OTHERS).max(1));
        let ranges = ranges(&bands, width, limit).map_err(|needed| CubeError::Bindings { needed, limit })?;
        let launch = |range| {
            let (words, tasks) = table(&bands, &range, width);
            let table = client.create_from_slice(bytemuck::cast_slice(&words));
            KernelLaunch { sources: range.sources, table, words: words.len(), tasks }
        };
        let launches = ranges.into_iter().map(launch).collect();
        let copied = copies.copied();
        let padding = copies.targets.iter().map(|shape| shape.num_elements()).sum::<usize>() - copied;
        let (device, lens) = (device.clone(), copies.sources.iter().map(|shape| shape.num_elements()).collect());
        Ok(Self { client, device, from, lens, layout, convert, onto, lanes, width, limits, launches, copied, padding })
    }

    /// Returns the number of kernels that a run launches.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    /// Returns the bytes of targets that a run copies.
    pub fn copied(&self) -> usize {
        self.copied * self.convert.dtype.size()
    }

    /// Returns the bytes of targets that a run sets to zero.
    pub fn padding(&self) -> usize {
        self.padding * self.convert.dtype.size()
    }

    /// Copies `sources` to new targets in one allocation.
    ///
    /// # Panics
    /// If the sources do not match the copies, or `onto` is not a result of this plan.
    pub fn run(&self, sources: &[CubeTensor], onto: Option<&SharedAllocation>) -> SharedAllocation {
        assert_eq!(self.onto, onto.is_some(), "`onto` must be passed exactly if the plan adds to targets");
        assert!(onto.is_none_or(|onto| onto.memory.size() >= self.layout.size() as u64), "`onto` is of another plan");
        let lens = sources.iter().map(|source| source.meta.num_elements());
        assert!(lens.eq(self.lens.iter().copied()), "the plan's sources have {:?} elements", self.lens);
        assert!(sources.iter().all(|source| source.dtype == self.from), "the plan's sources are {:?}", self.from);
        let block = self.layout.allocate(&self.client, &self.device);
        for launch in &self.launches {
            self.launch(launch, sources, onto, &block);
        }
        block
    }

    fn launch(
        &self,
        launch: &KernelLaunch,
        sources: &[CubeTensor],
        onto: Option<&SharedAllocation>,
        block: &SharedAllocation,
    ) {
        let Lanes { source, target, sum, bytes } = self.lanes;
        let read = |index: &usize| vectors(&into_contiguous(sources[*index].clone()).handle, self.width * bytes.0);
        let full = |memory: &Handle| vectors(memory, self.width * bytes.1);
        // SAFETY: the table has `words` words.
        let table = unsafe { BufferArg::from_raw_parts(launch.table.clone(), launch.words) };
        let rows = launch.tasks.div_ceil(self.limits.cubes);
        let count = CubeCount::Static(launch.tasks.div_ceil(rows) as u32, rows as u32, 1);
        // SAFETY: all offsets in the table are inside the sources and the target, as `CopyPlan` and `run` have
        // checked.
        unsafe {
            kernel::copy::launch_unchecked(
                &self.client,
                count,
                CubeDim::new_1d(CUBE as u32),
                self.width,
                launch.sources.iter().map(read).collect(),
                onto.iter().map(|onto| full(&onto.memory)).collect(),
                table,
                full(&block.memory),
                InputScalar::new(self.convert.scale, sum),
                self.convert.scale != 1.0,
                [source, target, sum],
            );
        }
    }
}
