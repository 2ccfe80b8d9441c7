//! [`TensorTree`]: inputs and outputs of units.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

/// Function that is applied to each tensor of a structure.
pub type TensorMapFn<'a> = &'a mut (dyn FnMut(DispatchTensor) -> DispatchTensor + 'a);

/// Input or output of a unit: a structure whose tensors can be mapped.
///
/// Implemented for
///
/// * tensors and DTensors of every rank and kind;
/// * tuples of up to twelve elements, arrays, `Vec`, `VecDeque`, `Option`, `Result`, `Box`, `Rc`,
///   `Arc`, `BTreeMap` and `HashMap` of types that implement it;
/// * burn's `LstmState`, `RnnState` and `MhaOutput`, and the inputs and outputs of
///   [`nn`](crate::nn);
/// * numbers, text, shapes, `TensorData`, ranges and the like, which are passed through;
/// * references, which are passed through: the referenced tensors are treated as if the closure had
///   captured them. Their gradients are correct. However, [mixed
///   precision](crate::fsdp::MixedPrecisionPolicy) does not cast them, and weights stay unsharded
///   longer if they are tracked.
///
/// Implement it for your own structs and enums with [`tensor_tree!`](crate::tensor_tree). Some of
/// burn's inputs have private fields (`TransformerEncoderInput`, `TransformerDecoderInput`,
/// `MhaInput`). Pass their tensors to the unit as a tuple, and construct the input inside.
///
/// ```
/// # use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
/// # use burn::tensor::{Bool, Tensor};
/// # use burn_dtensor::fsdp::unit;
/// fn forward(encoder: &TransformerEncoder, x: Tensor<3>, mask: Tensor<2, Bool>) -> Tensor<3> {
///     unit(encoder, (x, mask), |encoder, (x, mask)| encoder.forward(TransformerEncoderInput::new(x).mask_pad(mask)))
/// }
/// ```
///
/// The compiler rejects a type that does not implement it:
///
/// ```compile_fail,E0277
/// # use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::fsdp::unit;
/// fn forward(encoder: &TransformerEncoder, x: TransformerEncoderInput) -> Tensor<3> {
///     unit(encoder, x, |encoder, x| encoder.forward(x))
/// }
/// ```
// Where a reference would be accepted, the compiler advises one and shows only the message, without
// label and notes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an input or output of a unit. For your own struct or enum, name its fields, as in \
               `burn_dtensor::tensor_tree! {{ struct Batch {{ tokens, mask }} }}`. Do not borrow it: mixed precision does \
               not cast tensors behind a reference, and weights stay unsharded longer",
    label = "not composed of tensors that can be mapped",
    note = "if the fields are private, pass its tensors as a tuple and construct it inside the closure, \
            or let the closure capture it: gradients are correct then, too"
)]
pub trait TensorTree: Sized {
    /// Replaces every tensor, of any kind, by the result of `f`, in a fixed order.
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self;

    /// Replaces every float tensor by the result of `f`, in a fixed order.
    fn map_floats(self, f: TensorMapFn<'_>) -> Self {
        self.map_tensors(&mut |tensor| {
            let dtype = tensor.dtype();
            // A quantized tensor is a float tensor, too.
            if dtype.is_int() || dtype.is_uint() || dtype.is_bool() {
                tensor
            } else {
                f(tensor)
            }
        })
    }
}

impl<const D: usize, K: Kind> TensorTree for Tensor<D, K> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Tensor::from_dispatch(f(self.into_dispatch()))
    }
}

thread_local! {
    /// True while a tree is visited without its DTensors.
    static LEAVES_DTENSORS: Cell<bool> = const { Cell::new(false) };
}

/// Calls `f` with each tensor of `tree`. DTensors are returned as they are, with the
/// redistributions that they share with their clones.
pub(crate) fn visit_plain<T: TensorTree>(tree: T, f: &mut dyn FnMut(&DispatchTensor)) -> T {
    /// Resets the flag, also if the function unwinds.
    struct Reset(bool);

    impl Drop for Reset {
        fn drop(&mut self) {
            LEAVES_DTENSORS.set(self.0);
        }
    }
    let _reset = Reset(LEAVES_DTENSORS.replace(true));
    tree.map_tensors(&mut |tensor| {
        f(&tensor);
        tensor
    })
}

/// Maps the local tensor. If `f` changes its shape, the global shape changes by the same factor.
impl<const D: usize, K: Kind> TensorTree for DTensor<D, K> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        if LEAVES_DTENSORS.get() {
            return self;
        }
        let spec = self.spec().clone();
        let before = self.local().dims();
        let local = self.to_local().map_tensors(f);
        let after = local.dims();
        if after == before {
            let spec = spec.in_dtype(local.dtype());
            return DTensor::from_parts(local, spec);
        }
        let shape: [usize; D] = std::array::from_fn(|dim| {
            (spec.shape()[dim] * after[dim])
                .checked_div(before[dim])
                .unwrap_or(after[dim])
        });
        DTensor::from_local_with_layout(local, spec.mesh(), spec.layout().clone(), shape)
            .or_unwind()
    }
}

/// Implements `TensorTree` for types without tensors.
macro_rules! without_tensors {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::tensor_tree::TensorTree for $ty {
            fn map_tensors(self, _: $crate::tensor_tree::TensorMapFn<'_>) -> Self {
                self
            }
        }
    )*};
}

impl<T: TensorTree> TensorTree for Option<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<T: TensorTree, E> TensorTree for Result<T, E> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Box::new((*self).map_tensors(f))
    }
}

/// Other owners of the value keep the original.
impl<T: TensorTree + Clone> TensorTree for Rc<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Rc::new(Rc::unwrap_or_clone(self).map_tensors(f))
    }
}

/// Other owners of the value keep the original.
impl<T: TensorTree + Clone> TensorTree for Arc<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Arc::new(Arc::unwrap_or_clone(self).map_tensors(f))
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter().map(|value| value.map_tensors(f)).collect()
    }
}

impl<T: TensorTree> TensorTree for VecDeque<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter().map(|value| value.map_tensors(f)).collect()
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<K: Ord, V: TensorTree> TensorTree for BTreeMap<K, V> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter()
            .map(|(key, value)| (key, value.map_tensors(f)))
            .collect()
    }
}

/// Visits entries in the order of the keys. A hash map's own order changes with every rebuild.
impl<K: Hash + Ord, V: TensorTree, S: BuildHasher + Default> TensorTree for HashMap<K, V, S> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        let mut entries: Vec<_> = self.into_iter().collect();
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        entries
            .into_iter()
            .map(|(key, value)| (key, value.map_tensors(f)))
            .collect()
    }
}

without_tensors!(
    ['a, T: ?Sized] &'a T, ['a, T: ?Sized] &'a mut T, ['a, T: ?Sized + ToOwned] Cow<'a, T>,
    [] (), [] bool, [] char, [] String, [] f32, [] f64,
    [] u8, [] u16, [] u32, [] u64, [] u128, [] usize, [] i8, [] i16, [] i32, [] i64, [] i128, [] isize,
    [] Shape, [] DType, [] Device, [] TensorData, [] Duration,
    [T] Range<T>, [T] RangeInclusive<T>, [T: ?Sized] PhantomData<T>,
);

macro_rules! tuples {
    ($first:ident $($rest:ident)*) => {
        impl<$first: TensorTree, $($rest: TensorTree),*> TensorTree for ($first, $($rest,)*) {
            #[allow(non_snake_case)]
            fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
                let ($first, $($rest,)*) = self;
                ($first.map_tensors(f), $($rest.map_tensors(f),)*)
            }
        }
        tuples!($($rest)*);
    };
    () => {};
}

tuples!(A B C D E G H I J K L M);

crate::tensor_tree! {
    struct MhaOutput { weights, context }
    [const D: usize] struct LstmState<D> { cell, hidden }
    [const D: usize] struct RnnState<D> { hidden }
}

/// Implements [`TensorTree`](crate::fsdp::TensorTree) for structs and enums, so that units can take
/// and return them.
///
/// Name the fields as in a pattern. Each named field must implement `TensorTree` too. Omitting a
/// field is a compile error. Fields behind `..` are passed through unchanged.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_dtensor::fsdp::unit;
/// use burn_dtensor::tensor_tree;
///
/// struct Batch {
///     tokens: Tensor<2>,
///     mask: Option<Tensor<2, Bool>>,
///     source: std::path::PathBuf,
/// }
///
/// struct Pair<T>(T, T);
///
/// enum Heads {
///     One(Tensor<2>),
///     Two { left: Tensor<2>, right: Tensor<2> },
///     None,
/// }
///
/// tensor_tree! {
///     struct Batch { tokens, mask, .. }
///     [T: TensorTree] struct Pair<T>(first, second);
///     enum Heads { One(x), Two { left, right }, None }
/// }
///
/// fn forward(layer: &Linear, batch: Batch) -> (Batch, Heads) {
///     unit(layer, batch, |layer, batch| {
///         let tokens = layer.forward(batch.tokens);
///         (Batch { tokens: tokens.clone(), ..batch }, Heads::One(tokens))
///     })
/// }
/// # let device = Device::flex();
/// # let batch = Batch { tokens: Tensor::zeros([2, 3], &device), mask: None, source: "a".into() };
/// # let (batch, heads) = forward(&LinearConfig::new(3, 4).init(&device), batch);
/// # assert_eq!(batch.source, std::path::PathBuf::from("a"));
/// # assert!(matches!(heads, Heads::One(x) if x.dims() == [2, 4]));
/// ```
///
/// Omitting a field:
///
/// ```compile_fail,E0027
/// # use burn::tensor::Tensor;
/// struct Batch {
///     tokens: Tensor<2>,
///     mask: Tensor<2>,
/// }
///
/// burn_dtensor::tensor_tree! { struct Batch { tokens } }
/// ```
#[macro_export]
macro_rules! tensor_tree {
    () => {};
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? { $($field:ident,)+ .. } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, Self {
            $($field: TensorTree::map_tensors(self.$field, f),)+
            ..self
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? { $($field:ident),* $(,)? } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, {
            let Self { $($field),* } = self;
            Self { $($field: TensorTree::map_tensors($field, f)),* }
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? ( $($field:ident),* $(,)? ); $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, {
            let Self($($field),*) = self;
            Self($(TensorTree::map_tensors($field, f)),*)
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? enum $name:ident $(<$($argument:tt),*>)? {
        $($variant:ident $(($($value:ident),* $(,)?))? $({ $($field:ident),* $(,)? })?),* $(,)?
    } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, match self {
            $(Self::$variant $(($($value),*))? $({ $($field),* })? =>
                Self::$variant $(($(TensorTree::map_tensors($value, f)),*))?
                    $({ $($field: TensorTree::map_tensors($field, f)),* })?,)*
        });
        $crate::tensor_tree! { $($rest)* }
    };
    (@impl [$($generics:tt)*] $name:ident $(<$($argument:tt),*>)?, $self:ident, $f:ident, $body:expr) => {
        const _: () = {
            #[allow(unused_imports)]
            use $crate::fsdp::{TensorMapFn, TensorTree};

            impl<$($generics)*> TensorTree for $name $(<$($argument),*>)? {
                #[allow(unused_variables)]
                fn map_tensors($self, $f: TensorMapFn<'_>) -> Self {
                    $body
                }
            }
        };
    };
}
