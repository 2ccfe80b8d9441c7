//! [`apply`]: runs an operator. It redistributes the inputs as the rule requires, runs the local operator on the
//! local tensors, and gives each result its spec.

use burn::tensor::Tensor;
use smallvec::SmallVec;

use super::empty::EmptyOutput;
use super::operand::{Arg, Operand};
use super::{Operator, ShardingRule};
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

/// Runs the operator of `rule` on `inputs`: every rank calls `local` on its local tensors.
///
/// Inputs are a [`DTensor`] or an [`Operand`], an `Option` or a `Vec` of these, or a tuple of up to
/// five of all of them. Results are a tensor, a `Vec`, or a tuple of two or three results of which
/// the last may be a `Vec`. The rule determines the number of results and their placements.
///
/// If all results are empty and the rule does not [support empty
/// shards](ShardingRule::supports_empty_shards), `local` is not called: `apply` creates the empty
/// results, connected to the autodiff graph of the inputs.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error), as [all operators](super#panics) do.
#[track_caller]
#[inline]
pub fn apply<R: ShardingRule, I: Inputs, O: Outputs>(
    rule: &R,
    inputs: I,
    local: impl FnOnce(I::Local, &Operator) -> O,
) -> O::Global {
    let operator = {
        let mut args = SmallVec::new();
        inputs.args(&mut args);
        Operator::resolve(rule, &args).or_unwind()
    };
    // Fast path of most calls: no input moves. It is a separate branch because tensors are copied
    // where branches join.
    if operator.is_direct() && !operator.is_blank() {
        return globalized(rule, local(inputs.into_local(), &operator), &operator);
    }
    let inputs = redistributed(inputs, &operator);
    let outputs = if operator.is_blank() {
        blank::<I, O>(&inputs, &operator)
    } else {
        local(inputs, &operator)
    };
    globalized(rule, outputs, &operator)
}

/// Makes DTensors of an operator's results.
#[track_caller]
#[inline(always)]
fn globalized<R: ShardingRule, O: Outputs>(rule: &R, outputs: O, operator: &Operator) -> O::Global {
    let made = outputs.count();
    let said = operator.outputs();
    assert!(
        made == said,
        "`{}` returned {made} outputs, but its rule has {said}",
        rule.name()
    );
    outputs.globalize(operator, &mut 0)
}

/// Returns the local inputs and redistributes those that need it. A separate function, so that on
/// the fast path tensors (256 bytes each) are moved less often.
#[track_caller]
#[inline(never)]
fn redistributed<I: Inputs>(inputs: I, operator: &Operator) -> I::Local {
    inputs.localize(operator, &mut 0)
}

/// Makes results without elements, for which nothing is to be computed.
#[inline(never)]
fn blank<I: Inputs, O: Outputs>(inputs: &I::Local, operator: &Operator) -> O {
    let mut blank = EmptyOutput::default();
    I::see(inputs, &mut blank);
    O::blank(&blank, operator, &mut 0)
}

/// Conversion between DTensors and local tensors: implemented by an operator for its inputs and
/// outputs, and by a [`LocalMap`](super::LocalMap) for those of its function.
#[doc(hidden)]
pub trait Boundary {
    /// Returns the local tensor of input `at`, redistributed if necessary.
    #[track_caller]
    fn localize<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Tensor<D, K>;

    /// Returns the DTensor of output `at`, of which this rank has the local tensor `local`.
    #[track_caller]
    fn globalize<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> DTensor<D, K>;
}

impl Boundary for Operator {
    #[inline(always)]
    #[track_caller]
    fn localize<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Tensor<D, K> {
        self.localize(at, tensor)
    }

    #[inline(always)]
    fn globalize<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        self.output(at, local)
    }
}

/// Inputs that [`apply`] accepts.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an input of an operator on DTensors",
    label = "neither a `DTensor` or `Operand`, nor an `Option`, `Vec` or tuple of such",
    note = "make a plain tensor a DTensor on the same mesh: `DTensor::distribute_replicated` if every rank holds the \
            full tensor, `DTensor::from_local` if each holds its shard"
)]
pub trait Inputs {
    /// The local tensors of one rank.
    type Local;

    /// Appends the spec and the placement constraint of each input to `args`.
    #[doc(hidden)]
    fn args<'a>(&'a self, args: &mut SmallVec<[Arg<'a>; 5]>);

    /// Returns the local tensors without redistributing them.
    #[doc(hidden)]
    fn into_local(self) -> Self::Local;

    /// Returns the local tensors after redistribution. The inputs have the indices from `at` on.
    #[doc(hidden)]
    #[track_caller]
    fn localize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Local;

    /// Records the element types and the device of the local tensors in `blank`.
    #[doc(hidden)]
    fn see(local: &Self::Local, blank: &mut EmptyOutput);
}

macro_rules! tensors {
    ($($Tensor:ident $($tensor:ident)?),*) => {$(
        impl<const D: usize, K: Kind> Inputs for $Tensor<D, K> {
            type Local = Tensor<D, K>;

            #[inline(always)]
            fn args<'a>(&'a self, args: &mut SmallVec<[Arg<'a>; 5]>) {
                args.push(self.into());
            }

            #[inline(always)]
            fn into_local(self) -> Self::Local {
                self$(.$tensor)?.local
            }

            #[track_caller]
            fn localize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Local {
                *at += 1;
                by.localize(*at - 1, self$(.$tensor)?)
            }

            fn see(local: &Self::Local, blank: &mut EmptyOutput) {
                blank.see(local);
            }
        }
    )*};
}

tensors! { DTensor, Operand tensor }

macro_rules! collections {
    ($($Collection:ident: $each:expr);*) => {$(
        impl<I: Inputs> Inputs for $Collection<I> {
            type Local = $Collection<I::Local>;

            #[inline(always)]
            fn args<'a>(&'a self, args: &mut SmallVec<[Arg<'a>; 5]>) {
                self.iter().for_each(|input| input.args(args));
            }

            #[inline(always)]
            fn into_local(self) -> Self::Local {
                $each(self, I::into_local)
            }

            #[track_caller]
            fn localize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Local {
                $each(self, |input: I| input.localize(by, at))
            }

            fn see(local: &Self::Local, blank: &mut EmptyOutput) {
                local.iter().for_each(|input| I::see(input, blank));
            }
        }
    )*};
}

collections! {
    Option: Option::map;
    Vec: |inputs: Self, each| inputs.into_iter().map(each).collect()
}

/// Results that the local operator of [`apply`] returns.
pub trait Outputs: Sized {
    /// The DTensors of these results.
    type Global;

    /// Makes results without elements.
    #[doc(hidden)]
    fn blank(blank: &EmptyOutput, operator: &Operator, at: &mut usize) -> Self;

    /// Returns the number of tensors.
    #[doc(hidden)]
    fn count(&self) -> usize;

    /// Makes a DTensor of each result. The results have the output indices from `at` on.
    #[doc(hidden)]
    #[track_caller]
    fn globalize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Global;
}

impl<const D: usize, K: Kind> Outputs for Tensor<D, K> {
    type Global = DTensor<D, K>;

    fn blank(blank: &EmptyOutput, operator: &Operator, at: &mut usize) -> Self {
        *at += 1;
        blank.make(operator.output_shape(*at - 1))
    }

    #[inline(always)]
    fn count(&self) -> usize {
        1
    }

    #[inline(always)]
    #[track_caller]
    fn globalize<By: Boundary>(self, by: &By, at: &mut usize) -> DTensor<D, K> {
        *at += 1;
        by.globalize(*at - 1, self)
    }
}

impl<O: Outputs> Outputs for Vec<O> {
    type Global = Vec<O::Global>;

    fn blank(blank: &EmptyOutput, operator: &Operator, at: &mut usize) -> Self {
        let mut outputs = Self::new();
        while *at < operator.outputs() {
            outputs.push(O::blank(blank, operator, at));
        }
        outputs
    }

    fn count(&self) -> usize {
        self.iter().map(O::count).sum()
    }

    #[track_caller]
    fn globalize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Global {
        self.into_iter()
            .map(|output| output.globalize(by, at))
            .collect()
    }
}

macro_rules! tuples {
    ($trait:ident: $($($name:ident)+),+) => {$(tuples! { @$trait $($name)+ })+};
    (@Inputs $($name:ident)+) => {
        #[allow(non_snake_case)] // the types' names
        impl<$($name: Inputs),+> Inputs for ($($name,)+) {
            type Local = ($($name::Local,)+);

            #[inline(always)]
            fn args<'a>(&'a self, args: &mut SmallVec<[Arg<'a>; 5]>) {
                let ($($name,)+) = self;
                $($name.args(args);)+
            }

            #[inline(always)]
            fn into_local(self) -> Self::Local {
                let ($($name,)+) = self;
                ($($name.into_local(),)+)
            }

            #[track_caller]
            fn localize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Local {
                let ($($name,)+) = self;
                ($($name.localize(by, at),)+)
            }

            fn see(local: &Self::Local, blank: &mut EmptyOutput) {
                let ($($name,)+) = local;
                $($name::see($name, blank);)+
            }
        }
    };
    (@Outputs $($name:ident)+) => {
        #[allow(non_snake_case)]
        impl<$($name: Outputs),+> Outputs for ($($name,)+) {
            type Global = ($($name::Global,)+);

            fn blank(blank: &EmptyOutput, operator: &Operator, at: &mut usize) -> Self {
                ($($name::blank(blank, operator, at),)+)
            }

            #[inline(always)]
            fn count(&self) -> usize {
                let ($($name,)+) = self;
                0 $(+ $name.count())+
            }

            #[inline(always)]
            #[track_caller]
            fn globalize<By: Boundary>(self, by: &By, at: &mut usize) -> Self::Global {
                let ($($name,)+) = self;
                ($($name.globalize(by, at),)+)
            }
        }
    };
}

tuples! { Inputs: A B, A B C, A B C D, A B C D E }
tuples! { Outputs: A B, A B C }
