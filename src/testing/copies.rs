//! Copies before and after a unit's collectives, for the benchmark `copy_kernels`.

#[cfg(feature = "cube")]
use burn::tensor::DType;
use burn::tensor::Shape;
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cube")]
use crate::kernels::cube::CubePlan;
#[cfg(feature = "flex")]
use crate::kernels::flex::Sources;
use crate::kernels::{CopyPlan, FlatLayout, ShardedTensorSpec};
use crate::placement::ShardSizes;

/// Kind of copy. Copies for one rank are those of rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitCopy {
    /// Copy-in of an all-gather: from the rank's shards to its row.
    GatherIn,
    /// Copy-out of an all-gather: from the rows of all ranks to the full tensors.
    GatherOut,
    /// Copy-in of a reduce-scatter: from the full tensors to a row for each rank.
    ScatterIn,
    /// Copy-out of a reduce-scatter: from the rank's row to its shards.
    ScatterOut,
}

/// Plan of one kind of copy, which runs on any backend.
#[derive(Debug)]
pub struct UnitCopies(CopyPlan);

impl UnitCopies {
    /// Creates the plan for full tensors of `shapes`, sharded in chunks along `dim` over `ranks`
    /// ranks.
    pub fn new(copy: UnitCopy, ranks: usize, shapes: Vec<Shape>, dim: usize) -> Self {
        let layout = FlatLayout::new(
            ranks,
            shapes
                .into_iter()
                .map(|shape| ShardedTensorSpec {
                    sizes: ShardSizes::Chunked(shape[dim]),
                    shape,
                    dim,
                })
                .collect(),
            1,
        );
        Self(match copy {
            UnitCopy::GatherIn => layout.pack_parts(0),
            UnitCopy::GatherOut => layout.unpack_full(),
            UnitCopy::ScatterIn => layout.pack_full(),
            UnitCopy::ScatterOut => layout.unpack_parts(0),
        })
    }

    /// Returns the shapes of the tensors that are read.
    pub fn sources(&self) -> &[Shape] {
        self.0.sources()
    }

    /// Returns the shapes of the tensors that are created.
    pub fn targets(&self) -> &[Shape] {
        self.0.targets()
    }

    /// Returns the number of elements that are copied.
    pub fn copied(&self) -> usize {
        self.0.copied()
    }

    /// Runs the copies on Flex tensors.
    #[cfg(feature = "flex")]
    pub fn run_flex(
        &self,
        sources: &[burn::backend::flex::FlexTensor],
    ) -> Vec<burn::backend::flex::FlexTensor> {
        crate::kernels::flex::run(&self.0, &Sources::of(sources))
    }

    /// Prepares the copies on a Cube device, of tensors of `dtype`.
    ///
    /// # Panics
    /// If the device does not support them.
    #[cfg(feature = "cube")]
    pub fn on_cube(&self, device: &burn::tensor::Device, dtype: DType) -> CubeCopies {
        CubeCopies::new(&self.0, device, dtype)
    }
}

/// Copies on a Cube device, and a plain copy of the same number of bytes for comparison.
#[cfg(feature = "cube")]
pub struct CubeCopies {
    plan: CubePlan,
    sources: Vec<CubeTensor>,
    block: CubeTensor,
}

#[cfg(feature = "cube")]
impl CubeCopies {
    fn new(copies: &CopyPlan, device: &burn::tensor::Device, dtype: DType) -> Self {
        let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() else {
            panic!("{device:?} is not a Cube device")
        };
        let client = device.client();
        let tensor = |len: usize, dtype: DType| {
            let memory = client.empty((len * dtype.size()).max(1));
            CubeTensor::new_contiguous(
                client.clone(),
                device.clone(),
                Shape::new([len]),
                memory,
                dtype,
            )
        };
        let plan = CubePlan::new(device, copies, dtype).unwrap_or_else(|error| panic!("{error}"));
        let sources = copies
            .sources()
            .iter()
            .map(|shape| tensor(shape.num_elements(), dtype))
            .collect();
        let made: usize = copies.targets().iter().map(Shape::num_elements).sum();
        let bytes = (copies.copied() + made) * dtype.size();
        Self {
            plan,
            sources,
            block: tensor(bytes / 2 / size_of::<f32>(), DType::F32),
        }
    }

    /// Returns the number of kernels that the copies launch.
    pub fn launches(&self) -> usize {
        self.plan.launches()
    }

    /// Runs the copies and waits for the device.
    pub fn copy(&self) {
        drop(self.plan.run(&self.sources));
        self.sync();
    }

    /// Runs burn's copy of one tensor of the same number of bytes, and waits for the device.
    pub fn plain(&self) {
        drop(self.block.copy());
        self.sync();
    }

    fn sync(&self) {
        cubecl::future::block_on(self.block.client.sync()).expect("the device completes its work");
    }
}
