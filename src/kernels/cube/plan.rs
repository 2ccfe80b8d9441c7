//! [`CubePlan`]: copies, ready to run on a device.

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

/// [`CopyPlan`] with their tables on a device: each run is one launch, or the fewest that its bindings allow.
pub(crate) struct CubePlan {
    client: Client,
    device: CubeDevice,
    from: DType,
    /// Elements of each source.
    lens: Vec<usize>,
    /// Of the targets.
    layout: BlockLayout,
    convert: Convert,
    /// Whether targets are added to.
    onto: bool,
    lanes: Lanes,
    /// Lanes of a vector.
    width: usize,
    limits: DeviceLimits,
    launches: Vec<KernelLaunch>,
    /// Elements copied, and elements set to zero.
    copied: usize,
    padding: usize,
}

struct KernelLaunch {
    sources: Vec<usize>,
    table: Handle,
    words: usize,
    tasks: usize,
}

/// Buffers of a kernel beside the sources: table, target, what is added to, and the arguments' own.
const OTHERS: usize = 4;

/// What a device allows a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceLimits {
    /// Buffers of a kernel.
    pub bindings: usize,
    /// Cubes in one dimension of the grid.
    pub cubes: usize,
}

impl DeviceLimits {
    /// Those of the device.
    fn of(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        Self { bindings: hardware.max_bindings as usize, cubes: hardware.max_cube_count.0 as usize }
    }
}

impl CubePlan {
    /// Copies of tensors of dtype `from`; `onto` adds them to the targets of an earlier run.
    ///
    /// # Errors
    /// What the device's kernels cannot do: see [`CubeError`].
    pub fn new(
        device: &CubeDevice,
        copies: &CopyPlan,
        from: DType,
        convert: Convert,
        onto: bool,
    ) -> Result<Self, CubeError> {
        Self::within(DeviceLimits::of(&device.client()), device, copies, from, convert, onto)
    }

    /// The same, in launches of at most these `limits`.
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

    /// How many kernels a run launches.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }

    /// Bytes of targets that a run copies.
    pub fn copied(&self) -> usize {
        self.copied * self.convert.dtype.size()
    }

    /// Bytes of targets that a run sets to zero.
    pub fn padding(&self) -> usize {
        self.padding * self.convert.dtype.size()
    }

    /// Copies `sources` to new targets, in one block of memory.
    ///
    /// # Panics
    /// If the sources are not those of the copies, or what they are added `onto` is no result of this plan.
    pub fn run(&self, sources: &[CubeTensor], onto: Option<&SharedAllocation>) -> SharedAllocation {
        assert_eq!(self.onto, onto.is_some(), "a plan adds to a block or it does not");
        assert!(onto.is_none_or(|onto| onto.memory.size() >= self.layout.size() as u64), "a block of another plan");
        let lens = sources.iter().map(|source| source.meta.num_elements());
        assert!(lens.eq(self.lens.iter().copied()), "sources have {:?} elements", self.lens);
        assert!(sources.iter().all(|source| source.dtype == self.from), "sources are {:?}", self.from);
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
        // SAFETY: tables have as many words as they were made of.
        let table = unsafe { BufferArg::from_raw_parts(launch.table.clone(), launch.words) };
        let rows = launch.tasks.div_ceil(self.limits.cubes);
        let count = CubeCount::Static(launch.tasks.div_ceil(rows) as u32, rows as u32, 1);
        // SAFETY: the table's places lie inside the sources and the target, as `CopyPlan` and `run` have made sure.
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
