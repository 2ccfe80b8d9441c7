//! Running an operator: inputs brought to their layouts, the local operator, the output's spec.

use burn::tensor::Tensor;

use super::resolved::{Resolved, resolve};
use super::rule::Rule;
use crate::dtensor::{DTensor, Kind};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The local tensor as the local operator of `op` takes input `at`.
    ///
    /// # Collective
    /// If the input moves: every rank of the mesh. In backward also if it varies.
    ///
    /// # Panics
    /// Unwinds with the typed error if a collective fails.
    pub(super) fn enter(self, op: &Resolved, at: usize) -> Tensor<D, K> {
        let input = &op.inputs[at];
        if !input.moves && input.varying.is_empty() {
            return self.local;
        }
        self.brought_to(input.spec.layout(), &input.varying).unwrap_or_else(|error| error.unwind())
    }
}

impl Resolved {
    /// The DTensor of this rank's part `local` of output `at`.
    ///
    /// # Panics
    /// If that is not the part which the rule promised.
    pub(super) fn leave<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        self.check_output(at, || local.shape());
        let spec = self.output_spec(at, local.dtype());
        DTensor::from_parts(local, spec)
    }
}

/// Runs an operator of one input and one output: `local` on every rank's part.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error): operands that do not fit, a redistribution that
/// the [policy](super::RedistributePolicy) denies, a collective that fails.
pub fn unary<R: Rule, const D: usize, K: Kind, const O: usize, L: Kind>(
    rule: &R,
    x: DTensor<D, K>,
    local: impl FnOnce(Tensor<D, K>, &Resolved) -> Tensor<O, L>,
) -> DTensor<O, L> {
    let op = resolve(rule, &[&x.spec]).unwrap_or_else(|error| error.unwind());
    op.leave(0, local(x.enter(&op, 0), &op))
}

/// [`unary`], of two inputs.
///
/// # Collective
/// As [`unary`].
///
/// # Panics
/// As [`unary`].
pub fn binary<R: Rule, const A: usize, KA: Kind, const B: usize, KB: Kind, const O: usize, L: Kind>(
    rule: &R,
    a: DTensor<A, KA>,
    b: DTensor<B, KB>,
    local: impl FnOnce(Tensor<A, KA>, Tensor<B, KB>, &Resolved) -> Tensor<O, L>,
) -> DTensor<O, L> {
    let op = resolve(rule, &[&a.spec, &b.spec]).unwrap_or_else(|error| error.unwind());
    op.leave(0, local(a.enter(&op, 0), b.enter(&op, 1), &op))
}

/// [`unary`], of three inputs.
///
/// # Collective
/// As [`unary`].
///
/// # Panics
/// As [`unary`].
#[allow(clippy::type_complexity)]
pub fn ternary<
    R: Rule,
    const A: usize,
    KA: Kind,
    const B: usize,
    KB: Kind,
    const C: usize,
    KC: Kind,
    const O: usize,
    L: Kind,
>(
    rule: &R,
    a: DTensor<A, KA>,
    b: DTensor<B, KB>,
    c: DTensor<C, KC>,
    local: impl FnOnce(Tensor<A, KA>, Tensor<B, KB>, Tensor<C, KC>, &Resolved) -> Tensor<O, L>,
) -> DTensor<O, L> {
    let op = resolve(rule, &[&a.spec, &b.spec, &c.spec]).unwrap_or_else(|error| error.unwind());
    op.leave(0, local(a.enter(&op, 0), b.enter(&op, 1), c.enter(&op, 2), &op))
}

/// [`unary`], of any number of inputs of one type.
///
/// # Collective
/// As [`unary`].
///
/// # Panics
/// As [`unary`], and if there are no inputs.
pub fn variadic<R: Rule, const D: usize, K: Kind, const O: usize, L: Kind>(
    rule: &R,
    inputs: Vec<DTensor<D, K>>,
    local: impl FnOnce(Vec<Tensor<D, K>>, &Resolved) -> Tensor<O, L>,
) -> DTensor<O, L> {
    let specs: Vec<_> = inputs.iter().map(|input| &input.spec).collect();
    let op = resolve(rule, &specs).unwrap_or_else(|error| error.unwind());
    let locals = inputs.into_iter().enumerate().map(|(at, input)| input.enter(&op, at)).collect();
    op.leave(0, local(locals, &op))
}
