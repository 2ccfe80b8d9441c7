//! Pointwise operators of one tensor.

use super::{Operator, operator, step};

/// Of floats, of those in a range where it says so.
macro_rules! unary {
    ($($name:literal $(in $range:expr)? => |$x:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [2 3], |d| {
            let $x = unary!(@draw d $($range)?);
            step!(($x: Float<D>) [] => $expr)
        })),*]
    };
    (@draw $d:ident) => { $d.any::<D>() };
    (@draw $d:ident $range:expr) => { $d.within::<D>($range) };
}

pub fn operators() -> Vec<Operator> {
    let mut all = unary! {
        "neg" => |x| -x;
        "abs" => |x| x.abs();
        "sign" => |x| x.sign();
        "add_scalar" => |x| x + 1.5;
        "sub_scalar" => |x| x - 1.5;
        "mul_scalar" => |x| x * -1.5;
        "div_scalar" => |x| x / -2.0;
        "remainder_scalar" => |x| x % 1.5;
        "fmod_scalar" => |x| x.fmod_scalar(0.7);
        "powi_scalar" in -3.0..3.0 => |x| x.powi_scalar(3);
        "powf_scalar" in 0.1..4.0 => |x| x.powf_scalar(1.5);
        "exp" in -4.0..3.0 => |x| x.exp();
        "log" in 0.1..9.0 => |x| x.log();
        "log1p" in -0.5..9.0 => |x| x.log1p();
        "sqrt" in 0.1..9.0 => |x| x.sqrt();
        "square" in -4.0..4.0 => |x| x.square();
        "recip" in 0.2..4.0 => |x| x.recip();
        "erf" => |x| x.erf();
        "floor" => |x| x.floor();
        "ceil" => |x| x.ceil();
        "round" => |x| x.round();
        "trunc" => |x| x.trunc();
        "deg2rad" => |x| x.deg2rad();
        "rad2deg" in -1.0..1.0 => |x| x.rad2deg();
        "sin" => |x| x.sin();
        "cos" => |x| x.cos();
        "tan" in -1.2..1.2 => |x| x.tan();
        "sinh" in -3.0..3.0 => |x| x.sinh();
        "cosh" in -3.0..3.0 => |x| x.cosh();
        "tanh" => |x| x.tanh();
        "asin" in -0.9..0.9 => |x| x.asin();
        "acos" in -0.9..0.9 => |x| x.acos();
        "atan" => |x| x.atan();
        "asinh" => |x| x.asinh();
        "acosh" in 1.2..3.0 => |x| x.acosh();
        "atanh" in -0.9..0.9 => |x| x.atanh();
        "zeros_like" => |x| x.zeros_like();
        "empty_like" => |x| x.empty_like().ones_like();
        "into_scalar" => |x| x.clone() + x.detach().abs().max().into_scalar::<f64>();
        "ones_like" => |x| x.ones_like();
        "full_like" => |x| x.full_like(3);
        "clamp" => |x| x.clamp(-1.0, 1.0);
        "clamp_min" => |x| x.clamp_min(-1.0);
        "clamp_max" => |x| x.clamp_max(1.0);
        "is_nan" => |x| x.sqrt().is_nan();
        "is_inf" => |x| x.clamp_min(0.0).log().is_inf();
        "is_finite" => |x| x.sqrt().is_finite();
        "contains_nan" => |x| x.sqrt().contains_nan();
    };
    // Of integers: the same names.
    all.extend([
        operator!("neg", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => -i)
        }),
        operator!("sign", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.sign())
        }),
        operator!("abs", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.abs())
        }),
        operator!("square", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.square())
        }),
        operator!("add_scalar", D in [1 2], |d| {
            let (i, by) = (d.any_ints::<D>(), d.below(5) as i64);
            step!((i: Int<D>) [by] => i.add_scalar(by))
        }),
        operator!("sub_scalar", D in [1 2], |d| {
            let (i, by) = (d.any_ints::<D>(), d.below(5) as i64);
            step!((i: Int<D>) [by] => i.sub_scalar(by))
        }),
        operator!("mul_scalar", D in [1 2], |d| {
            let (i, by) = (d.any_ints::<D>(), 1 + d.below(3) as i64);
            step!((i: Int<D>) [by] => i.mul_scalar(by))
        }),
        operator!("div_scalar", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.div_scalar(2))
        }),
        operator!("remainder_scalar", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.remainder_scalar(3))
        }),
        operator!("full_like", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.full_like(3))
        }),
        operator!("clamp", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.clamp(1, 3))
        }),
        operator!("into_scalar", D in [1 2], |d| {
            let i = d.any_ints::<D>();
            step!((i: Int<D>) [] => i.clone() + i.max().into_scalar::<i64>())
        }),
    ]);
    all
}
