//! What is no number, and what is rounded: a layout changes nothing about them.

use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};
use burn_dtensor::dtensor::DTensor;

use super::*;

/// The truth is burn's on the whole tensor.
#[test]
fn a_comparison_with_a_greatest_or_least_element_that_is_nan_is_false_under_every_layout() {
    for x in [
        [f32::NAN, 5.0],
        [-5.0, f32::NAN],
        [f32::NAN, f32::NAN],
        [5.0, -5.0],
    ] {
        on_mesh(&[2], |_, mesh| {
            let full = || Tensor::<1>::from_floats(x, mesh.device());
            let sizes = || DTensor::distribute_replicated(full(), mesh, &[S(0)]);
            let truth = |x: Tensor<1, Bool>| x.into_data().iter::<bool>().collect::<Vec<_>>();
            macro_rules! check {
                ($($reduced:ident $compared:ident),*) => {$(
                    let found = sizes()?.$reduced().$compared(1.0).full_tensor()?;
                    let name = concat!(stringify!($reduced), " ", stringify!($compared));
                    assert_eq!(truth(found), truth(full().$reduced().$compared(1.0)), "{name} of {x:?}");
                )*};
            }
            check! { max greater_scalar, max greater_equal_elem, max lower_elem, max lower_equal_scalar }
            check! { min greater_elem, min greater_equal_scalar, min lower_scalar, min lower_equal_elem }
            let ints = |x: Tensor<1, Int>| x.into_data().iter::<i64>().collect::<Vec<_>>();
            assert_eq!(
                ints(sizes()?.max().int().full_tensor()?),
                ints(full().max().int()),
                "max of {x:?}"
            );
            assert_eq!(
                ints(sizes()?.min().int().full_tensor()?),
                ints(full().min().int()),
                "min of {x:?}"
            );
            Ok(())
        });
    }
}

/// 1.001 is 1 in eight bits, and 100001 beside 100000. All beyond a bound are the bound.
#[test]
fn the_gradient_of_a_greatest_element_is_its_own_also_where_the_others_become_what_it_is() {
    macro_rules! check {
        ($device:ident $mesh:ident $values:expr, $gradient:expr; $(|$x:ident| $rounded:expr),* $(,)?) => {$(
            let leaf = || Tensor::<1>::from_floats($values, &$device).require_grad();
            let (full, sizes) = (leaf(), DTensor::distribute_replicated(leaf(), $mesh, &[S(0)])?);
            let $x = full.clone().max();
            let expected = values(full.grad(&$rounded.sum().backward()).expect("a leaf"));
            assert_eq!(expected, $gradient);
            let $x = sizes.clone().max();
            let loss = $rounded.full_tensor()?;
            let found = values(sizes.local().grad(&loss.sum().backward()).expect("a leaf"));
            assert_eq!(found, expected[sizes.spec().local_range(0)], stringify!($rounded));
        )*};
    }
    on_mesh(&[2], |_, mesh| {
        let device = Device::flex().autodiff();
        check! {
            device mesh [1.0, 1.001], [0.0, 1.0];
            |x| x.cast(FloatDType::BF16).cast(FloatDType::F32),
            |x| x.add_scalar(1e5),
            |x| x.clone().ones_like().mul_scalar(1e5) + x,
            |x| x.clone() - x.ones_like().mul_scalar(1e5),
        }
        check! {
            device mesh [6.0, 7.0], [0.0, 0.0];
            |x| x.clamp_max(6.0),
            |x| x.clamp(-6.0, 6.0),
        }
        Ok(())
    });
}
