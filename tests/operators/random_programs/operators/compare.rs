//! Comparisons, logic, casts and masks.

use burn::tensor::{FloatDType, IntDType};

use super::{Operator, operator, step};

macro_rules! floats {
    ($($name:literal => |$a:ident, $b:ident| $expr:expr;)*) => {
        vec![$(operator!($name, |d| {
            let $a = d.any::<2>();
            let shape = d.shape::<2>($a);
            let shape = d.broadcast(shape);
            let $b = d.floats(shape);
            step!(($a: Float<2>, $b: Float<2>) [] => $expr)
        })),*]
    };
}

macro_rules! ints {
    ($($name:literal => |$i:ident, $j:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2], |d| {
            let $i = d.any_ints::<D>();
            let shape = d.shape::<D>($i);
            let $j = d.ints(shape, 9);
            step!(($i: Int<D>, $j: Int<D>) [] => $expr)
        })),*]
    };
}

macro_rules! of_one {
    ($($name:literal $draw:ident $kind:ident => |$x:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2], |d| {
            let $x = d.$draw::<D>();
            step!(($x: $kind<D>) [] => $expr)
        })),*]
    };
}

macro_rules! bools {
    ($($name:literal => |$m:ident, $n:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2], |d| {
            let $m = d.any_bools::<D>();
            let shape = d.shape::<D>($m);
            let shape = d.broadcast(shape);
            let $n = d.bools(shape);
            step!(($m: Bool<D>, $n: Bool<D>) [] => $expr)
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = floats! {
        "greater" => |a, b| a.greater(b);
        "greater_equal" => |a, b| a.greater_equal(b);
        "lower" => |a, b| a.lower(b);
        "lower_equal" => |a, b| a.lower_equal(b);
        "equal" => |a, b| a.equal(b);
        "is_close" => |a, b| a.is_close(b, Some(0.5), None);
        "all_close" => |a, b| a.clone() * f64::from(u8::from(a.clone().all_close(b.sin() * 0.01 + a, None, Some(0.02))));
    };
    all.extend(ints! {
        "equal" => |i, j| i.equal(j);
        "not_equal" => |i, j| i.not_equal(j);
        "greater" => |i, j| i.greater(j);
        "greater_equal" => |i, j| i.greater_equal(j);
        "lower" => |i, j| i.lower(j);
        "lower_equal" => |i, j| i.lower_equal(j);
    });
    all.extend(of_one! {
        "greater_scalar" any Float => |x| x.greater_scalar(0.2);
        "lower_scalar" any Float => |x| x.lower_scalar(0.2);
        "greater_elem" any Float => |x| x.greater_elem(0.2);
        "lower_elem" any Float => |x| x.lower_elem(0.2);
        "greater_equal_scalar" any Float => |x| x.greater_equal_scalar(0.2);
        "lower_equal_scalar" any Float => |x| x.lower_equal_scalar(0.2);
        "cast" any Float => |x| x.cast(FloatDType::F32);
        "int" any Float => |x| x.int();
        "equal_scalar" any_ints Int => |i| i.equal_scalar(1);
        "equal_elem" any_ints Int => |i| i.equal_elem(2);
        "not_equal_scalar" any_ints Int => |i| i.not_equal_scalar(1);
        "not_equal_elem" any_ints Int => |i| i.not_equal_elem(2);
        "greater_scalar" any_ints Int => |i| i.greater_scalar(2);
        "greater_equal_elem" any_ints Int => |i| i.greater_equal_elem(2);
        "lower_equal_elem" any_ints Int => |i| i.lower_equal_elem(2);
        "greater_equal_scalar" any_ints Int => |i| i.greater_equal_scalar(2);
        "lower_equal_scalar" any_ints Int => |i| i.lower_equal_scalar(2);
        "bitwise_not" any_ints Int => |i| i.bitwise_not();
        "bitwise_and_scalar" any_ints Int => |i| i.bitwise_and_scalar(5);
        "bitwise_or_scalar" any_ints Int => |i| i.bitwise_or_scalar(5);
        "bitwise_xor_scalar" any_ints Int => |i| i.bitwise_xor_scalar(5);
        "bitwise_left_shift_scalar" any_ints Int => |i| i.bitwise_left_shift_scalar(2);
        "bitwise_right_shift_scalar" any_ints Int => |i| i.bitwise_right_shift_scalar(1);
        "cast" any_ints Int => |i| (i.clone().cast(IntDType::I32), i.cast(FloatDType::F64));
        "float" any_ints Int => |i| i.float();
        "bool" any_ints Int => |i| i.bool();
        "bool_not" any_bools Bool => |m| m.bool_not();
        "float" any_bools Bool => |m| m.float();
        "int" any_bools Bool => |m| m.int();
        "cast" any_bools Bool => |m| (m.clone().cast(IntDType::I64), m.cast(FloatDType::F32));
    });
    all.extend(bools! {
        "bool_and" => |m, n| (m.clone().bool_and(n.clone()), m & n);
        "bool_or" => |m, n| m | n;
        "bool_xor" => |m, n| m.bool_xor(n);
        "equal" => |m, n| m.equal(n);
    });
    all.extend([
        operator!("mask_where", D in [1 2], |d| {
            let x = d.any::<D>();
            let shape = d.shape::<D>(x);
            let y = d.floats(shape);
            let mask = d.broadcast(shape);
            let m = d.bools(mask);
            step!((x: Float<D>, m: Bool<D>, y: Float<D>) [] => x.mask_where(m, y))
        }),
        operator!("mask_where", |d| {
            let i = d.any_ints::<2>();
            let shape = d.shape::<2>(i);
            let (j, m) = (d.ints(shape, 9), d.bools(shape));
            step!((i: Int<2>, m: Bool<2>, j: Int<2>) [] => i.mask_where(m, j))
        }),
        operator!("mask_fill", D in [1 2], |d| {
            let x = d.any::<D>();
            let shape = d.shape::<D>(x);
            let mask = d.broadcast(shape);
            let m = d.bools(mask);
            let value = if d.chance(0.5) { 0.0 } else { 1.5 };
            step!((x: Float<D>, m: Bool<D>) [value] => x.mask_fill(m, value))
        }),
        operator!("mask_fill", |d| {
            let i = d.any_ints::<2>();
            let shape = d.shape::<2>(i);
            let m = d.bools(shape);
            step!((i: Int<2>, m: Bool<2>) [] => i.mask_fill(m, 7))
        }),
    ]);
    all
}
