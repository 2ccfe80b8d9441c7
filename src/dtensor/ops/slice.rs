//! Slices, and assignment to them.
//!
//! | | input | values | output |
//! |---|---|---|---|
//! | the slice is the whole of `d` | `S(d)` | `S(d)` | `S(d)` |
//! | | `P(op)` | `P(op)` | `P(op)` |
//! | not of sum and product | `P(op)` | `R` | `P(op)` |
//! | not of sum and product | `R` | `P(op)` | `P(op)` |
//!
//! A constant that fills a slice is a value that is `R`; zeros pass through every reduction.

use burn::tensor::{AsIndex, Element, Shape, Slice, SliceArg};
use smallvec::SmallVec;

use super::args::{dim_of, misfit};
use super::empty::{blank, is_empty};
use super::placements::{AVG, MAX, MIN, R};
use super::rows::{PARTIALS, kept, through, through_constant};
use super::{Rule, Strategy, binary, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

/// One slice a dimension. That of a whole dimension is [`Slice::full`], right for any part of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Slices(SmallVec<[Slice; 4]>);

impl Slices {
    fn new(slices: impl SliceArg, shape: &Shape) -> Self {
        let full = |(slice, &len): (Slice, &usize)| {
            let whole = slice.step == 1 && slice.to_range(len) == (0..len);
            if whole { Slice::full() } else { slice }
        };
        Self(slices.into_slices(shape).into_iter().zip(shape.iter()).map(full).collect())
    }

    fn is_whole(&self) -> bool {
        self.whole_dims().count() == self.0.len()
    }

    fn whole_dims(&self) -> impl Iterator<Item = usize> {
        (0..self.0.len()).filter(|&dim| self.0[dim] == Slice::full())
    }

    fn shape_of(&self, shape: &Shape) -> Shape {
        let lens: Vec<_> = self.0.iter().zip(shape.iter()).map(|(slice, &len)| slice.output_size(len)).collect();
        lens.into()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SliceRule(Slices);

impl Rule for SliceRule {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(vec![self.0.shape_of(&inputs[0])])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        kept(1, self.0.whole_dims()).chain(through(1, PARTIALS)).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SliceAssign(Slices);

impl Rule for SliceAssign {
    fn name(&self) -> &'static str {
        "slice_assign"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let slice = self.0.shape_of(&inputs[0]);
        if slice != inputs[1] {
            return Err(misfit(
                self.name(),
                inputs,
                format!("the slice has shape {slice}, the values must have it too"),
            ));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let one = [AVG, MAX, MIN].into_iter().flat_map(|op| [strategy([op, R], [op]), strategy([R, op], [op])]);
        kept(2, self.0.whole_dims()).chain(through(2, PARTIALS)).chain(one).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SliceFill {
    slices: Slices,
    zero: bool,
}

impl Rule for SliceFill {
    fn name(&self) -> &'static str {
        "slice_fill"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(inputs.to_vec())
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        kept(1, self.slices.whole_dims()).chain(through(1, through_constant(self.zero))).collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The elements inside `slices`, as burn's [`slice`](burn::tensor::Tensor::slice).
    #[must_use]
    pub fn slice<S: SliceArg>(self, slices: S) -> Self {
        let rule = SliceRule(Slices::new(slices, self.spec.shape()));
        if rule.0.is_whole() {
            return self;
        }
        unary(
            &rule,
            self,
            |x, op| {
                if is_empty(op, 0) { blank([x], op.output_shape(0)) } else { x.slice(&rule.0.0[..]) }
            },
        )
    }

    /// The elements inside `slice` of `dim`, as burn's [`slice_dim`](burn::tensor::Tensor::slice_dim).
    #[must_use]
    pub fn slice_dim<S: Into<Slice>>(self, dim: impl AsIndex, slice: S) -> Self {
        let mut slices = [Slice::full(); D];
        slices[dim_of("slice_dim", dim, D)] = slice.into();
        self.slice(slices)
    }

    /// `length` elements of `dim` from `start` on, as burn's [`narrow`](burn::tensor::Tensor::narrow).
    #[must_use]
    pub fn narrow(self, dim: impl AsIndex, start: usize, length: usize) -> Self {
        let dim = dim_of("narrow", dim, D);
        let len = self.dims()[dim];
        if length == 0 || start + length > len {
            let why =
                format!("dimension {dim} has no {length} elements from {start} on; it has {len}, take at least 1");
            misfit("narrow", &[self.shape()], why).unwind();
        }
        self.slice_dim(dim, start..start + length)
    }

    /// Element `index` of `dim`, without that dimension, as burn's
    /// [`select_dim`](burn::tensor::Tensor::select_dim).
    #[must_use]
    pub fn select_dim<const D2: usize>(self, dim: impl AsIndex, index: impl AsIndex) -> DTensor<D2, K> {
        let dim = dim_of("select_dim", dim, D);
        let len = self.dims()[dim];
        let Ok(index) = index.try_dim_index(len) else {
            let why = format!("dimension {dim} has no element {index:?}; use one in -{len}..{len}");
            misfit("select_dim", &[self.shape()], why).unwind()
        };
        self.slice_dim(dim, index).squeeze_dim(dim)
    }

    /// `values` in the place of the elements inside `slices`, as burn's
    /// [`slice_assign`](burn::tensor::Tensor::slice_assign).
    #[must_use]
    pub fn slice_assign<S: SliceArg>(self, slices: S, values: Self) -> Self {
        let rule = SliceAssign(Slices::new(slices, self.spec.shape()));
        if rule.0.shape_of(self.spec.shape()).num_elements() == 0 && self.spec.shape().num_elements() > 0 {
            return self;
        }
        binary(&rule, self, values, |x, values, op| {
            if is_empty(op, 0) { blank([x, values], op.output_shape(0)) } else { x.slice_assign(&rule.0.0[..], values) }
        })
    }

    /// `value` in the place of the elements inside `slices`, as burn's
    /// [`slice_fill`](burn::tensor::Tensor::slice_fill).
    #[must_use]
    pub fn slice_fill<S: SliceArg, E: Element>(self, slices: S, value: E) -> Self {
        let slices = Slices::new(slices, self.spec.shape());
        let rule = SliceFill { slices, zero: value.elem::<f64>() == 0.0 };
        unary(&rule, self, |x, op| if is_empty(op, 0) { x } else { x.slice_fill(&rule.slices.0[..], value) })
    }
}
