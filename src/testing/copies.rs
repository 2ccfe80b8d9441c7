//! The copies around a unit's collectives, for the benchmark `copy_kernels`.

use burn::tensor::Shape;

use crate::kernels::{Copies, CutTensor, FlatLayout};
use crate::placement::Cut;

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
pub struct UnitCopies(Copies);

impl UnitCopies {
    /// Of wholes of `shapes`, cut in chunks along `dim` over `ranks` ranks.
    pub fn new(copy: UnitCopy, ranks: usize, shapes: Vec<Shape>, dim: usize) -> Self {
        let tensor = |shape: Shape| CutTensor { cut: Cut::Chunks(shape[dim]), shape, dim };
        let layout = FlatLayout::new(ranks, shapes.into_iter().map(tensor).collect(), 1);
        Self(match copy {
            UnitCopy::GatherIn => layout.pack_parts(0),
            UnitCopy::GatherOut => layout.unpack_wholes(),
            UnitCopy::ScatterIn => layout.pack_wholes(),
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
        dtype: burn::tensor::DType,
        scale: f32,
    ) -> Vec<burn::backend::flex::FlexTensor> {
        let sources: Vec<_> = sources.iter().collect();
        crate::kernels::flex::run(&self.0, &sources, crate::kernels::Convert { dtype, scale })
    }
}
