//! [`UnitTensors`]: what may go in and out of a unit.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};

use crate::dtensor::DTensor;

/// A unit's input or output: any structure whose float tensors can be mapped.
///
/// Implemented for tensors and DTensors of every rank and kind, tuples, arrays, `Option`, `Result`, `Vec`, `Box`,
/// strings and the plain scalars. Implement it for a struct of your own by mapping each of its fields; take one
/// of burn's apart into a tuple, or let the closure capture it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no input or output of a unit",
    label = "not made of tensors that can be mapped",
    note = "take it apart into a tuple of its tensors, and put it together again inside; or let the closure capture it, \
            which is right too, gradients included",
    note = "for a struct of your own, implement `UnitTensors` by mapping each field"
)]
pub trait UnitTensors: Sized {
    /// Replaces every float tensor by `f` of it, in a fixed order.
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self;
}

impl<const D: usize> UnitTensors for Tensor<D> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Tensor::from_dispatch(f(self.into_dispatch()))
    }
}

impl<const D: usize> UnitTensors for DTensor<D> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        let spec = self.spec().clone();
        let local = self.to_local().map_floats(f);
        let spec = spec.in_dtype(local.dtype());
        DTensor::from_parts(local, spec)
    }
}

impl<T: UnitTensors> UnitTensors for Option<T> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        self.map(|value| value.map_floats(f))
    }
}

impl<T: UnitTensors, E> UnitTensors for Result<T, E> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        self.map(|value| value.map_floats(f))
    }
}

impl<T: UnitTensors> UnitTensors for Box<T> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Box::new((*self).map_floats(f))
    }
}

impl<T: UnitTensors> UnitTensors for Vec<T> {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        self.into_iter().map(|value| value.map_floats(f)).collect()
    }
}

impl<T: UnitTensors, const N: usize> UnitTensors for [T; N] {
    fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        self.map(|value| value.map_floats(f))
    }
}

macro_rules! without_floats {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        impl<$($generics)*> UnitTensors for $ty {
            fn map_floats(self, _: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                self
            }
        }
    )*};
}

without_floats!(
    [const D: usize] Tensor<D, Int>,
    [const D: usize] Tensor<D, Bool>,
    [const D: usize] DTensor<D, Int>,
    [const D: usize] DTensor<D, Bool>,
    [] (), [] bool, [] String, ['a] &'a str, [] usize, [] u32, [] u64, [] i32, [] i64, [] f32, [] f64,
);

macro_rules! tuple {
    ($($name:ident)*) => {
        impl<$($name: UnitTensors),*> UnitTensors for ($($name,)*) {
            #[allow(non_snake_case)]
            fn map_floats(self, f: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
                let ($($name,)*) = self;
                ($($name.map_floats(f),)*)
            }
        }
    };
}

tuple!(A);
tuple!(A B);
tuple!(A B C);
tuple!(A B C E);
tuple!(A B C E G);
tuple!(A B C E G H);

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn every_float_tensor_is_mapped_once_wherever_it_is() {
        let x = || Tensor::<1>::ones([2], &Device::flex());
        let value = (Ok::<_, String>(Box::new(x())), vec![Some(x()), None], [x(), x()], (x(), "text", String::new()));
        let mut met = 0;
        let (result, listed, _, _) = value.map_floats(&mut |tensor| {
            met += 1;
            Tensor::<1>::from_dispatch(tensor).mul_scalar(met).into_dispatch()
        });
        assert_eq!(met, 5);
        assert_eq!(result.unwrap().into_data(), (x() * 1).into_data());
        assert_eq!(listed[0].clone().unwrap().into_data(), (x() * 2).into_data());
    }
}
