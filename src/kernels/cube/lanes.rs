//! [`Lanes`]: types in which a kernel reads and writes elements.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::ir::features::TypeUsage;

use super::CubeError;
use super::block::vector_lanes;
use crate::kernels::{Convert, CopyPlan, StridedCopy};

/// Types of the elements of a kernel's vectors: the dtypes, or words of 4 bytes if nothing is converted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lanes {
    pub source: ElemType,
    pub target: ElemType,
    /// Type of the arithmetic during the copy.
    pub sum: ElemType,
    /// Bytes of a lane of a source, and of a target.
    pub bytes: (usize, usize),
}

const WORD: usize = 4;

impl Lanes {
    /// Returns the lanes for copies of dtype `from`, and the copies counted in lanes.
    ///
    /// # Errors
    /// A [`CubeError`] if the device does not support a type or its arithmetic.
    pub fn of(
        client: &Client,
        copies: &CopyPlan,
        from: DType,
        convert: Convert,
        onto: bool,
    ) -> Result<(Self, CopyPlan), CubeError> {
        let plain = from == convert.dtype && convert.scale == 1.0 && !onto;
        if plain && let Some(words) = in_words(copies, from.size()) {
            let word = dtype_to_storage_type(DType::U32);
            return Ok((Self { source: word, target: word, sum: word, bytes: (WORD, WORD) }, words));
        }
        if !(plain || from.is_float() && convert.dtype.is_float()) {
            return Err(CubeError::Convert { from, to: convert.dtype });
        }
        let wide = [from, convert.dtype].contains(&DType::F64);
        let sum = if plain {
            from
        } else if wide {
            DType::F64
        } else {
            DType::F32
        };
        for dtype in [from, convert.dtype, sum] {
            let usage = client.properties().type_usage(dtype_to_storage_type(dtype));
            if !usage.is_superset(TypeUsage::Buffer | TypeUsage::Conversion) {
                return Err(CubeError::Dtype { dtype });
            }
        }
        let [source, target, sum] = [from, convert.dtype, sum].map(dtype_to_storage_type);
        Ok((Self { source, target, sum, bytes: (from.size(), convert.dtype.size()) }, copies.clone()))
    }

    /// Returns the number of lanes of a vector.
    pub fn per_vector(&self, client: &Client) -> usize {
        vector_lanes(client, self.bytes.0.max(self.bytes.1))
    }
}

/// Returns the copies counted in words, or `None` if a word contains elements of two runs.
fn in_words(copies: &CopyPlan, bytes: usize) -> Option<CopyPlan> {
    let words = |elements: usize| (elements * bytes).is_multiple_of(WORD).then_some(elements * bytes / WORD);
    let segment = |segment: &StridedCopy| {
        let StridedCopy { source, target, from, to, rows, run, from_stride, to_stride } = *segment;
        let stride = |stride| if rows == 1 { Some(0) } else { words(stride) };
        let (from, to, run) = (words(from)?, words(to)?, words(run)?);
        let (from_stride, to_stride) = (stride(from_stride)?, stride(to_stride)?);
        Some(StridedCopy { source, target, from, to, rows, run, from_stride, to_stride })
    };
    let shape = |shape: &Shape| Shape::new([(shape.num_elements() * bytes).div_ceil(WORD)]);
    let shapes = |shapes: &[Shape]| shapes.iter().map(shape).collect();
    let segments = copies.segments.iter().map(segment).collect::<Option<_>>()?;
    Some(CopyPlan::new(shapes(&copies.sources), shapes(&copies.targets), segments))
}
