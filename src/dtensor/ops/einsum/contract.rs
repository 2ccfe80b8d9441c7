//! Local contractions that record the same number of autodiff nodes on every rank.
//!
//! Burn's einsum omits sums and reshapes that a length of 1 makes unnecessary, and replaces such
//! matrix products by elementwise products. A rank whose shard has length 1 would record fewer
//! nodes than its peers. The contractions here depend on letters and global lengths only.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::Axes;
use crate::dtensor::ops::product::matmul_of;
use crate::dtensor::ops::subscripts::Axis;

/// A local tensor and the axes of its dimensions. Without axes, it is a scalar of shape `[1]`.
#[derive(Debug)]
pub(super) struct ContractionOperand {
    tensor: DispatchTensor,
    axes: Axes,
}

/// Calls the float or the integer operation, depending on the tensor.
macro_rules! either {
    ($float:ident, $int:ident, $tensor:expr $(, $arg:expr)*) => {{
        let tensor = $tensor;
        if tensor.dtype().is_float() { Dispatch::$float(tensor $(, $arg)*) } else { Dispatch::$int(tensor $(, $arg)*) }
    }};
}

impl ContractionOperand {
    /// Makes an operand with the dimensions `axes`. Dimensions that are only broadcast along an
    /// axis are removed, and an axis that occurs twice is replaced by its diagonal.
    pub(super) fn new(
        tensor: DispatchTensor,
        axes: &[Axis],
        repeats: impl Fn(usize) -> bool,
    ) -> Self {
        let all = Self {
            tensor,
            axes: axes.into(),
        };
        let own: Vec<usize> = (0..axes.len()).filter(|&dim| !repeats(dim)).collect();
        let mut factor = if own.len() < axes.len() {
            all.keeping(&own)
        } else {
            all
        };
        while let Some(axis) = factor.repeated() {
            factor = factor.diagonal(axis);
        }
        factor
    }

    /// Returns the product with `other`, summed over the shared axes for which `wanted` returns
    /// false.
    pub(super) fn contract(self, other: Self, wanted: impl Fn(Axis) -> bool) -> Self {
        let left = self.axes.clone();
        let right = other.axes.clone();
        let left_alone = self.sum(|axis| !wanted(axis) && !right.contains(&axis));
        let right_alone = other.sum(|axis| !wanted(axis) && !left.contains(&axis));
        let left = left_alone.axes.clone();
        let right = right_alone.axes.clone();
        let shared = |axis: &&Axis| left.contains(axis) && right.contains(axis);
        let batch: Axes = left
            .iter()
            .filter(shared)
            .copied()
            .filter(|&axis| wanted(axis))
            .collect();
        let summed: Axes = left
            .iter()
            .filter(shared)
            .copied()
            .filter(|&axis| !wanted(axis))
            .collect();
        let rows: Axes = left
            .iter()
            .copied()
            .filter(|axis| !right.contains(axis))
            .collect();
        let columns: Axes = right
            .iter()
            .copied()
            .filter(|axis| !left.contains(axis))
            .collect();

        let a = left_alone.permute([&batch[..], &rows, &summed].concat().into());
        let b = right_alone.permute([&batch[..], &summed, &columns].concat().into());
        let lens: Vec<usize> = a
            .lens(&batch)
            .chain(a.lens(&rows))
            .chain(b.lens(&columns))
            .collect();
        let groups = a.lens(&batch).product();
        let inner = a.lens(&summed).product();
        let height = a.lens(&rows).product();
        let width = b.lens(&columns).product();
        let a = a.reshape(vec![groups, height, inner]).tensor;
        let b = b.reshape(vec![groups, inner, width]).tensor;
        // Without summed axes, the product is elementwise.
        let tensor = if summed.is_empty() {
            either!(float_mul, int_mul, a, b)
        } else {
            matmul_of(a, b)
        };
        Self {
            tensor,
            axes: [&batch[..], &rows, &columns].concat().into(),
        }
        .reshape(lens)
    }

    /// Sums over all axes except those of `output`, and returns these in their order.
    pub(super) fn finish(self, output: &Axes) -> DispatchTensor {
        self.sum(|axis| !output.contains(&axis))
            .permute(output.clone())
            .tensor
    }

    /// Returns the lengths of these axes.
    fn lens(&self, axes: &[Axis]) -> impl Iterator<Item = usize> {
        let shape = self.tensor.shape();
        axes.iter().map(move |&axis| shape[self.place(axis)])
    }

    fn place(&self, axis: Axis) -> usize {
        self.axes
            .iter()
            .position(|&own| own == axis)
            .expect("the operand has this axis")
    }

    fn reshape(self, lens: Vec<usize>) -> Self {
        let shape = if lens.is_empty() {
            Shape::new([1])
        } else {
            Shape::from(lens)
        };
        Self {
            tensor: either!(float_reshape, int_reshape, self.tensor, shape),
            axes: self.axes,
        }
    }

    fn permute(self, axes: Axes) -> Self {
        if axes == self.axes {
            return self;
        }
        let places: Vec<usize> = axes.iter().map(|&axis| self.place(axis)).collect();
        Self {
            tensor: either!(float_permute, int_permute, self.tensor, &places),
            axes,
        }
    }

    /// Removes all dimensions except `dims`; the removed ones have length 1.
    fn keeping(self, dims: &[usize]) -> Self {
        let shape = self.tensor.shape();
        let axes = dims.iter().map(|&dim| self.axes[dim]).collect();
        Self { axes, ..self }.reshape(dims.iter().map(|&dim| shape[dim]).collect())
    }

    fn sum(mut self, over: impl Fn(Axis) -> bool) -> Self {
        let (summed, rest): (Vec<usize>, Vec<usize>) =
            (0..self.axes.len()).partition(|&dim| over(self.axes[dim]));
        if summed.is_empty() {
            return self;
        }
        for dim in summed {
            self.tensor = either!(float_sum_dim, int_sum_dim, self.tensor, dim);
        }
        self.keeping(&rest)
    }

    /// Returns an axis that occurs twice.
    fn repeated(&self) -> Option<Axis> {
        self.axes
            .iter()
            .enumerate()
            .find(|(at, axis)| self.axes[at + 1..].contains(axis))
            .map(|(_, &axis)| axis)
    }

    /// Replaces the two dimensions of `axis` by their diagonal, as the last dimension.
    fn diagonal(self, axis: Axis) -> Self {
        let first = self.place(axis);
        let second = self
            .axes
            .iter()
            .rposition(|&own| own == axis)
            .expect("twice");
        let mut places: Vec<usize> = (0..self.axes.len())
            .filter(|&dim| dim != first && dim != second)
            .collect();
        let axes = places
            .iter()
            .map(|&dim| self.axes[dim])
            .chain([axis])
            .collect();
        let shape = self.tensor.shape();
        let lens = places
            .iter()
            .map(|&dim| shape[dim])
            .chain([shape[first] * shape[second]])
            .collect();
        places.extend([first, second]);
        let matrices = either!(float_permute, int_permute, self.tensor, &places);
        let flat = Self {
            tensor: matrices,
            axes,
        }
        .reshape(lens);
        let mut slices = vec![Slice::full(); flat.axes.len()];
        slices[flat.axes.len() - 1] = Slice::new(0, None, shape[first] as isize + 1);
        Self {
            tensor: either!(float_slice, int_slice, flat.tensor, &slices),
            axes: flat.axes,
        }
    }
}
