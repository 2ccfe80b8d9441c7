//! Slices, and assignments to slices.

use burn::tensor::{AsIndex, Element, Shape, Slice, SliceArg};
use smallvec::SmallVec;

use super::args::{converted, dim_of, operand_error};
use super::partial_rules::{MOVED, MOVED_WITH_CONSTANT};
use super::placements::{AVG, MAX, MIN, R};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const SLICE: EinsumRule = EinsumRule::new("slice", ".._.. -> ..D..").with_partial_rules(MOVED);
const SLICE_FILL: EinsumRule =
    EinsumRule::new("slice_fill", "..D.. -> ..D..").with_partial_rules(MOVED_WITH_CONSTANT);
const SLICE_FILL_WITH_ZERO: EinsumRule = SLICE_FILL.with_partial_rules(MOVED);
const SLICE_ASSIGN: EinsumRule = EinsumRule::new("slice_assign", "..D.., .._.. -> ..D..")
    .with_partial_rules(MOVED.and(&[
        (&[AVG, R], AVG),
        (&[R, AVG], AVG),
        (&[MAX, R], MAX),
        (&[R, MAX], MAX),
        (&[MIN, R], MIN),
        (&[R, MIN], MIN),
    ]));

/// One slice per dimension. The slice of a complete dimension is [`Slice::full`], which is also
/// correct for a shard of it.
struct SliceRule(SmallVec<[Slice; 4]>);

impl SliceRule {
    #[track_caller]
    fn new(name: &'static str, slices: impl SliceArg, shape: &Shape) -> Self {
        let full = |(slice, &len): (Slice, &usize)| {
            let entire = slice.step == 1 && slice.to_range(len) == (0..len);
            if entire { Slice::full() } else { slice }
        };
        let slices = converted(
            name,
            shape,
            || slices.into_slices(shape),
            || {
                format!(
                    "there are more slices than dimensions. Pass at most {}",
                    shape.num_dims()
                )
            },
        );
        Self(slices.into_iter().zip(shape.iter()).map(full).collect())
    }

    /// Returns the dimensions of which only some elements are taken.
    fn dims(&self) -> impl Iterator<Item = usize> {
        (0..self.0.len()).filter(|&dim| self.0[dim] != Slice::full())
    }

    /// Returns the lengths of the slices of these dimensions.
    fn lens(&self, shape: &Shape) -> impl Iterator<Item = usize> {
        self.dims().map(|dim| self.0[dim].output_size(shape[dim]))
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns the elements inside `slices`, as burn's [`slice`](burn::tensor::Tensor::slice).
    #[must_use]
    #[track_caller]
    pub fn slice<S: SliceArg>(self, slices: S) -> Self {
        let slices = SliceRule::new("slice", slices, self.spec.shape());
        if slices.dims().next().is_none() {
            return self;
        }
        let rule = SLICE.at(slices.dims()).lens(slices.lens(self.spec.shape()));
        apply(&rule, self, |x, _| x.slice(&slices.0[..]))
    }

    /// Returns the elements inside `slice` of `dim`, as burn's
    /// [`slice_dim`](burn::tensor::Tensor::slice_dim).
    #[must_use]
    #[track_caller]
    pub fn slice_dim<S: Into<Slice>>(self, dim: impl AsIndex, slice: S) -> Self {
        let mut slices = [Slice::full(); D];
        slices[dim_of("slice_dim", dim, D)] = slice.into();
        self.slice(slices)
    }

    /// Returns `length` elements of `dim` from `start` on, as burn's
    /// [`narrow`](burn::tensor::Tensor::narrow).
    #[must_use]
    #[track_caller]
    pub fn narrow(self, dim: impl AsIndex, start: usize, length: usize) -> Self {
        let dim = dim_of("narrow", dim, D);
        let len = self.dims()[dim];
        if length == 0 || start + length > len {
            let why = format!(
                "dimension {dim} has no {length} elements from {start} on. Take 1 to {len} elements inside it"
            );
            operand_error("narrow", &[self.shape()], why).unwind();
        }
        self.slice_dim(dim, start..start + length)
    }

    /// Returns element `index` of `dim` and removes that dimension, as burn's
    /// [`select_dim`](burn::tensor::Tensor::select_dim).
    #[must_use]
    #[track_caller]
    pub fn select_dim<const D2: usize>(
        self,
        dim: impl AsIndex,
        index: impl AsIndex,
    ) -> DTensor<D2, K> {
        let dim = dim_of("select_dim", dim, D);
        let len = self.dims()[dim];
        let Ok(index) = index.try_dim_index(len) else {
            let why = format!("dimension {dim} has no element {index:?}. Use one in -{len}..{len}");
            operand_error("select_dim", &[self.shape()], why).unwind()
        };
        self.slice_dim(dim, index).squeeze_dim(dim)
    }

    /// Replaces the elements inside `slices` by `values`, as burn's
    /// [`slice_assign`](burn::tensor::Tensor::slice_assign).
    #[must_use]
    #[track_caller]
    pub fn slice_assign<S: SliceArg>(self, slices: S, values: Self) -> Self {
        let (shape, slices) = (
            self.shape(),
            SliceRule::new("slice_assign", slices, self.spec.shape()),
        );
        if slices.lens(&shape).any(|len| len == 0) && shape.num_elements() > 0 {
            return self;
        }
        let mut sliced = slices.dims().zip(slices.lens(&shape));
        if let Some((dim, len)) = sliced.find(|&(dim, len)| values.dims()[dim] != len) {
            let why = format!(
                "the slice has length {len} in dimension {dim}. Pass values of the same length"
            );
            operand_error("slice_assign", &[shape.clone(), values.shape()], why).unwind()
        }
        apply(
            &SLICE_ASSIGN.at(slices.dims()),
            (self, values),
            |(x, values), _| x.slice_assign(&slices.0[..], values),
        )
    }

    /// Replaces the elements inside `slices` by `value`, as burn's
    /// [`slice_fill`](burn::tensor::Tensor::slice_fill).
    #[must_use]
    #[track_caller]
    pub fn slice_fill<S: SliceArg, E: Element>(self, slices: S, value: E) -> Self {
        let slices = SliceRule::new("slice_fill", slices, self.spec.shape());
        let rule = if value.elem::<f64>() == 0.0 {
            &SLICE_FILL_WITH_ZERO
        } else {
            &SLICE_FILL
        };
        apply(&rule.at(slices.dims()), self, |x, _| {
            x.slice_fill(&slices.0[..], value)
        })
    }
}
