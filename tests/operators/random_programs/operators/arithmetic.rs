//! Arithmetic of two tensors.

use super::{Operator, operator, step};

/// Of two floats of one shape, or of shapes that broadcast; each in a range, or any.
macro_rules! binary {
    ($($name:literal ($($a:expr)?, $($b:expr)?) => |$x:ident, $y:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [2 3], |d| {
            let $x = binary!(@first d $($a)?);
            let shape = d.shape::<D>($x);
            let shape = d.broadcast(shape);
            let $y = binary!(@second d shape $($b)?);
            step!(($x: Float<D>, $y: Float<D>) [] => $expr)
        })),*]
    };
    (@first $d:ident) => { $d.any::<D>() };
    (@first $d:ident $range:expr) => { $d.within::<D>($range) };
    (@second $d:ident $shape:ident) => { $d.floats($shape) };
    (@second $d:ident $shape:ident $range:expr) => { $d.floats_within($shape, $range) };
}

/// Of two integers of one shape, the second from 0 to below a bound.
macro_rules! binary_int {
    ($($name:literal ($bound:literal) => |$i:ident, $j:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2], |d| {
            let $i = d.any_ints::<D>();
            let shape = d.shape::<D>($i);
            let shape = d.broadcast(shape);
            let $j = d.ints(shape, $bound);
            step!(($i: Int<D>, $j: Int<D>) [] => $expr)
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = binary! {
        "add" (,) => |a, b| a + b;
        "sub" (,) => |a, b| b.sub(a);
        "mul" (,) => |a, b| a * b;
        "div" (, 0.3..4.0) => |a, b| a / b;
        "remainder" (0.1..4.0, 0.3..4.0) => |a, b| a % b;
        "powi" (0.2..3.0, -2.0..2.0) => |a, b| a.powi(b);
        "powf" (0.2..3.0, -2.0..2.0) => |a, b| a.powf(b);
        "max_pair" (,) => |a, b| a.max_pair(b);
        "min_pair" (,) => |a, b| b.min_pair(a);
        "atan2" (, 0.2..4.0) => |a, b| a.atan2(b);
        "fmod" (, 0.3..4.0) => |a, b| a.fmod(b);
        "hypot" (, 0.2..4.0) => |a, b| a.hypot(b);
    };
    all.extend(binary_int! {
        "add" (9) => |i, j| i + j;
        "sub" (3) => |i, j| i - j;
        "mul" (3) => |i, j| j * i;
        "div" (3) => |i, j| i / (j + 1);
        "remainder" (3) => |i, j| i % (j + 1);
        "max_pair" (9) => |i, j| i.max_pair(j);
        "min_pair" (9) => |i, j| i.min_pair(j);
        "bitwise_and" (16) => |i, j| i.bitwise_and(j);
        "bitwise_or" (16) => |i, j| i.bitwise_or(j);
        "bitwise_xor" (16) => |i, j| i.bitwise_xor(j);
        "bitwise_left_shift" (3) => |i, j| i.bitwise_left_shift(j);
        "bitwise_right_shift" (3) => |i, j| i.bitwise_right_shift(j);
    });
    // One tensor twice: its two gradients add up.
    all.push(operator!("mul", D in [2 3], |d| {
        let x = d.any::<D>();
        step!((x: Float<D>) [] => x.clone() * x)
    }));
    all
}
