//! The copies around a unit's collectives, for the benchmark `copy_kernels`.

use burn::tensor::{DType, Shape};
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cube")]
use crate::kernels::cube::CubePlan;
#[cfg(feature = "flex")]
use crate::kernels::flex::Sources;
use crate::kernels::{Convert, CopyPlan, FlatLayout, ShardedTensorSpec};
use crate::placement::ShardSizes;

/// Which of the four, on the first rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitCopy {
    /// The rank's parts into its row.
    GatherIn,
    /// The rows of all ranks into the wholes.
    GatherOut,
    /// The wholes into a row for each rank.
    ScatterIn,
    /// The rank's row into its parts.
    ScatterOut,
}

/// One of them, ready to run on any backend.
#[derive(Debug)]
pub struct UnitCopies(CopyPlan);

impl UnitCopies {
    /// Of wholes of `shapes`, cut in chunks along `dim` over `ranks` ranks.
    pub fn new(copy: UnitCopy, ranks: usize, shapes: Vec<Shape>, dim: usize) -> Self {
        let tensor = |shape: Shape| ShardedTensorSpec { sizes: ShardSizes::Chunked(shape[dim]), shape, dim };
        let layout = FlatLayout::new(ranks, shapes.into_iter().map(tensor).collect(), 1);
        Self(match copy {
            UnitCopy::GatherIn => layout.pack_parts(0),
            UnitCopy::GatherOut => layout.unpack_full(),
            UnitCopy::ScatterIn => layout.pack_full(),
            UnitCopy::ScatterOut => layout.unpack_parts(0),
        })
    }

    /// What is read.
    pub fn sources(&self) -> &[Shape] {
        self.0.sources()
    }

    /// What is made.
    pub fn targets(&self) -> &[Shape] {
        self.0.targets()
    }

    /// Elements copied.
    pub fn copied(&self) -> usize {
        self.0.copied()
    }

    /// The targets of Flex tensors, `cast(element * scale)` to `dtype`.
    #[cfg(feature = "flex")]
    pub fn run_flex(
        &self,
        sources: &[burn::backend::flex::FlexTensor],
        dtype: DType,
        scale: f32,
    ) -> Vec<burn::backend::flex::FlexTensor> {
        let sources = Sources::of(sources);
        crate::kernels::flex::run(&self.0, &sources, Convert { dtype, scale })
    }

    /// `onto` with what the sources bring added: `cast(there + element * scale)`.
    #[cfg(feature = "flex")]
    pub fn add_flex(
        &self,
        sources: &[burn::backend::flex::FlexTensor],
        onto: Vec<burn::backend::flex::FlexTensor>,
        dtype: DType,
        scale: f32,
    ) -> Vec<burn::backend::flex::FlexTensor> {
        let sources = Sources::of(sources);
        crate::kernels::flex::add(&self.0, &sources, Convert { dtype, scale }, onto)
    }

    /// The copies on a Cube device, from sources of dtype `from`.
    ///
    /// # Panics
    /// If the device cannot do them.
    #[cfg(feature = "cube")]
    pub fn on_cube(&self, device: &burn::tensor::Device, from: DType, dtype: DType, scale: f32) -> CubeCopies {
        CubeCopies::new(&self.0, device, from, Convert { dtype, scale })
    }
}

/// Copies on a Cube device, and as many bytes that are copied as they are.
#[cfg(feature = "cube")]
pub struct CubeCopies {
    plan: CubePlan,
    sources: Vec<CubeTensor>,
    block: CubeTensor,
}

#[cfg(feature = "cube")]
impl CubeCopies {
    fn new(copies: &CopyPlan, device: &burn::tensor::Device, from: DType, convert: Convert) -> Self {
        let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() else {
            panic!("{device:?} is no Cube device")
        };
        let client = device.client();
        let tensor = |len: usize, dtype: DType| {
            let memory = client.empty((len * dtype.size()).max(1));
            CubeTensor::new_contiguous(client.clone(), device.clone(), Shape::new([len]), memory, dtype)
        };
        let plan = CubePlan::new(device, copies, from, convert, false).unwrap_or_else(|error| panic!("{error}"));
        let sources = copies.sources().iter().map(|shape| tensor(shape.num_elements(), from)).collect();
        let made: usize = copies.targets().iter().map(Shape::num_elements).sum();
        let bytes = copies.copied() * from.size() + made * convert.dtype.size();
        Self { plan, sources, block: tensor(bytes / 2 / size_of::<f32>(), DType::F32) }
    }

    /// How many kernels the copies are.
    pub fn launches(&self) -> usize {
        self.plan.launches()
    }

    /// Copies, and waits for the device.
    pub fn copy(&self) {
        drop(self.plan.run(&self.sources, None));
        self.sync();
    }

    /// burn's copy of one tensor of as many bytes; waits for the device.
    pub fn plain(&self) {
        drop(self.block.copy());
        self.sync();
    }

    fn sync(&self) {
        cubecl::future::block_on(self.block.client.sync()).expect("the device works");
    }
}
