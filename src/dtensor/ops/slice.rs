//! Slices, and assignment to them.

use burn::tensor::{AsIndex, Element, Shape, Slice, SliceArg};
use smallvec::SmallVec;

use super::args::{dim_of, operand_error};
use super::partial_rules::{MOVED, MOVED_WITH_CONSTANT};
use super::placements::{AVG, MAX, MIN, R};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const SLICE: EinsumRule = EinsumRule::new("slice", ".._.. -> ..D..").with_partial_rules(MOVED);
const SLICE_FILL: EinsumRule = EinsumRule::new("slice_fill", "..D.. -> ..D..").with_partial_rules(MOVED_WITH_CONSTANT);
const SLICE_FILL_WITH_ZERO: EinsumRule = SLICE_FILL.with_partial_rules(MOVED);
const SLICE_ASSIGN: EinsumRule =
    EinsumRule::new("slice_assign", "..D.., .._.. -> ..D..").with_partial_rules(MOVED.and(&[
        (&[AVG, R], AVG),
        (&[R, AVG], AVG),
        (&[MAX, R], MAX),
        (&[R, MAX], MAX),
        (&[MIN, R], MIN),
        (&[R, MIN], MIN),
    ]));

/// One slice per dimension. That of a whole dimension is [`Slice::full`], right for any part of it.
struct SliceRule(SmallVec<[Slice; 4]>);

impl SliceRule {
    fn new(slices: impl SliceArg, shape: &Shape) -> Self {
        let full = |(slice, &len): (Slice, &usize)| {
            let entire = slice.step == 1 && slice.to_range(len) == (0..len);
            if entire { Slice::full() } else { slice }
        };
        Self(slices.into_slices(shape).into_iter().zip(shape.iter()).map(full).collect())
    }

    /// The dimensions that are not whole.
    fn dims(&self) -> impl Iterator<Item = usize> {
        (0..self.0.len()).filter(|&dim| self.0[dim] != Slice::full())
    }

    /// How long those are.
    fn lens(&self, shape: &Shape) -> impl Iterator<Item = usize> {
        self.dims().map(|dim| self.0[dim].output_size(shape[dim]))
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The elements inside `slices`, as burn's [`slice`](burn::tensor::Tensor::slice).
    #[must_use]
    #[track_caller]
    pub fn slice<S: SliceArg>(self, slices: S) -> Self {
        let slices = SliceRule::new(slices, self.spec.shape());
        if slices.dims().next().is_none() {
            return self;
        }
        let rule = SLICE.at(slices.dims()).lens(slices.lens(self.spec.shape()));
        apply(&rule, self, |x, _| x.slice(&slices.0[..]))
    }

    /// The elements inside `slice` of `dim`, as burn's [`slice_dim`](burn::tensor::Tensor::slice_dim).
    #[must_use]
    #[track_caller]
    pub fn slice_dim<S: Into<Slice>>(self, dim: impl AsIndex, slice: S) -> Self {
        let mut slices = [Slice::full(); D];
        slices[dim_of("slice_dim", dim, D)] = slice.into();
        self.slice(slices)
    }

    /// `length` elements of `dim` from `start` on, as burn's [`narrow`](burn::tensor::Tensor::narrow).
    #[must_use]
    #[track_caller]
    pub fn narrow(self, dim: impl AsIndex, start: usize, length: usize) -> Self {
        let dim = dim_of("narrow", dim, D);
        let len = self.dims()[dim];
        if length == 0 || start + length > len {
            let why =
                format!("dimension {dim} has no {length} elements from {start} on; it has {len}, take at least 1");
            operand_error("narrow", &[self.shape()], why).unwind();
        }
        self.slice_dim(dim, start..start + length)
    }

    /// Element `index` of `dim`, without that dimension, as burn's
    /// [`select_dim`](burn::tensor::Tensor::select_dim).
    #[must_use]
    #[track_caller]
    pub fn select_dim<const D2: usize>(self, dim: impl AsIndex, index: impl AsIndex) -> DTensor<D2, K> {
        let dim = dim_of("select_dim", dim, D);
        let len = self.dims()[dim];
        let Ok(index) = index.try_dim_index(len) else {
            let why = format!("dimension {dim} has no element {index:?}; use one in -{len}..{len}");
            operand_error("select_dim", &[self.shape()], why).unwind()
        };
        self.slice_dim(dim, index).squeeze_dim(dim)
    }

    /// `values` in the place of the elements inside `slices`, as burn's
    /// [`slice_assign`](burn::tensor::Tensor::slice_assign).
    #[must_use]
    #[track_caller]
    pub fn slice_assign<S: SliceArg>(self, slices: S, values: Self) -> Self {
        let (shape, slices) = (self.shape(), SliceRule::new(slices, self.spec.shape()));
        if slices.lens(&shape).any(|len| len == 0) && shape.num_elements() > 0 {
            return self;
        }
        let mut sliced = slices.dims().zip(slices.lens(&shape));
        if let Some((dim, len)) = sliced.find(|&(dim, len)| values.dims()[dim] != len) {
            let why = format!("the slice is {len} long in dimension {dim}, and so must the values be");
            operand_error("slice_assign", &[shape.clone(), values.shape()], why).unwind()
        }
        apply(&SLICE_ASSIGN.at(slices.dims()), (self, values), |(x, values), _| x.slice_assign(&slices.0[..], values))
    }

    /// `value` in the place of the elements inside `slices`, as burn's
    /// [`slice_fill`](burn::tensor::Tensor::slice_fill).
    #[must_use]
    #[track_caller]
    pub fn slice_fill<S: SliceArg, E: Element>(self, slices: S, value: E) -> Self {
        let slices = SliceRule::new(slices, self.spec.shape());
        let rule = if value.elem::<f64>() == 0.0 { &SLICE_FILL_WITH_ZERO } else { &SLICE_FILL };
        apply(&rule.at(slices.dims()), self, |x, _| x.slice_fill(&slices.0[..], value))
    }
}
