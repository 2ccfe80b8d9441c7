//! Views, permutations, expansion, concatenation and splits.

use super::{Operator, operator, step};

/// Of any kind of elements: floats, and integers or Booleans.
macro_rules! of_each {
    ($($name:literal [$($draw:ident $kind:ident)+] => |$d:ident, $x:ident: $rank:literal| $arguments:tt $expr:expr;)*) => {
        [$(vec![$(of_each!(@one $name $draw $kind $d $x $rank $arguments $expr)),+]),*].into_iter().flatten()
    };
    (@one $name:literal $draw:ident $kind:ident $d:ident $x:ident $rank:literal [$($arg:ident = $value:expr),*] $expr:expr) => {
        operator!($name, |$d| {
            let $x = $d.$draw::<$rank>();
            $(let $arg = $value;)*
            step!(($x: $kind<$rank>) [$($arg),*] => $expr)
        })
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all: Vec<Operator> = of_each! {
        "permute" [any Float any_bools Bool] => |d, x: 3|
            [axes = d.one_of(&[[2, 0, 1], [1, 2, 0], [0, 2, 1], [2, 1, 0]])] x.permute(axes);
        "swap_dims" [any Float any_ints Int] => |d, x: 3| [a = d.below(3), b = d.below(3)] x.swap_dims(a, b);
        "transpose" [any Float any_bools Bool] => |d, x: 3| [] x.transpose();
        "t" [any Float any_ints Int] => |d, x: 2| [] x.t();
        "movedim" [any Float] => |d, x: 3| [from = d.below(3), to = d.below(3)] x.movedim(from, to);
        "reshape" [any Float any_bools Bool] => |d, x: 3| [shape = {
            let [a, b, c] = d.shape::<3>(x);
            d.one_of(&[[a * b, c], [a, b * c], [1, a * b * c], [a * b * c, 1]])
        }] x.reshape(shape);
        "reshape" [any Float any_ints Int] => |d, x: 2| [shape = {
            let [a, b] = d.shape::<2>(x);
            let split = |len: usize| (2..=len).find(|part| len.is_multiple_of(*part)).unwrap_or(1);
            let (p, q) = (split(a), split(b));
            d.one_of(&[[p, a / p, b], [a, q, b / q], [a, b / q, q], [p, a * b / p, 1], [a * b / q, 1, q]])
        }] x.reshape(shape);
        "flatten" [any Float any_ints Int] => |d, x: 3| [at = d.below(2)] x.flatten::<2>(at, at + 1);
        "unsqueeze" [any Float any_bools Bool] => |d, x: 2| [] x.unsqueeze::<3>();
        "unsqueeze_dim" [any Float any_bools Bool] => |d, x: 2| [at = d.below(3)] x.unsqueeze_dim::<3>(at);
        "unsqueeze_dims" [any Float] => |d, x: 1| [at = d.below(2) as isize] x.unsqueeze_dims::<3>(&[at, -1]);
        "repeat_dim" [any Float any_ints Int] => |d, x: 2| [dim = d.below(2), times = 1 + d.below(3)]
            x.repeat_dim(dim, times);
        "repeat" [any Float any_bools Bool] => |d, x: 2| [times = [1 + d.below(2), 1 + d.below(2)]] x.repeat(&times);
        "flip" [any Float any_bools Bool] => |d, x: 3| [axes = d.one_of(&[[0, 1], [0, 2], [1, 2]])] x.flip(axes);
        "roll_dim" [any Float any_ints Int] => |d, x: 2| [by = d.below(7) as i64 - 3, dim = d.below(2)]
            x.roll_dim(by, dim);
        "roll" [any Float any_ints Int] => |d, x: 2| [by = [d.below(3) as i64, d.below(5) as i64 - 2]]
            x.roll(&by, &[0, 1]);
        "unfold" [any Float any_ints Int any_bools Bool] => |d, x: 2|
            [dim = d.below(2), size = 1 + d.below(3), step = 1 + d.below(3)] x.unfold::<3, _>(dim, size, step);
        "chunk" [any Float any_ints Int any_bools Bool] => |d, x: 2| [dim = d.below(2), count = {
            // Burn panics where the last chunks would be empty.
            let (len, count) = (d.shape::<2>(x)[dim], 1 + d.below(4));
            len.div_ceil(len.div_ceil(count))
        }] x.chunk(count, dim);
        "split" [any Float any_bools Bool] => |d, x: 2| [size = 1 + d.below(4), dim = d.below(2)] x.split(size, dim);
        "split_with_sizes" [any Float any_ints Int] => |d, x: 2| [sizes = {
            let len = d.shape::<2>(x)[0];
            let first = 1 + d.below(len);
            if first < len { vec![first, len - first] } else { vec![len] }
        }] x.split_with_sizes(sizes, 0);
        "iter_dim" [any Float] => |d, x: 2| [dim = d.below(2)] x.iter_dim(dim).rev().collect::<Vec<_>>();
        "triu" [any Float any_ints Int] => |d, x: 2| [diagonal = d.below(5) as i64 - 2] x.triu(diagonal);
        "tril" [any Float any_ints Int] => |d, x: 3| [diagonal = d.below(5) as i64 - 2] x.tril(diagonal);
    }
    .collect();
    all.extend([
        operator!("squeeze", |d| {
            let len = 1 + d.len();
            let x = d.floats([1, len, 1]);
            step!((x: Float<3>) [] => x.squeeze::<1>())
        }),
        operator!("squeeze_dim", |d| {
            let (mut shape, dim) = (d.any_shape::<3>(), d.below(3));
            shape[dim] = 1;
            let x = d.floats(shape);
            step!((x: Float<3>) [dim] => x.squeeze_dim::<2>(dim))
        }),
        operator!("squeeze_dims", |d| {
            let len = d.len();
            let x = d.floats([1, len, 1]);
            step!((x: Float<3>) [] => x.squeeze_dims::<2>(&[-1]))
        }),
        operator!("squeeze_dims", |d| {
            let (rows, columns) = (d.len(), d.len());
            let i = d.ints([1, rows, 1, columns], 9);
            step!((i: Int<4>) [] => i.squeeze_dims::<2>(&[0, 2]))
        }),
        operator!("expand", |d| {
            let [mut shape, target] = [d.any_shape::<2>(); 2];
            shape[d.below(2)] = 1;
            let (x, times) = (d.floats(shape), 1 + d.below(3));
            let target = [times, target[0], target[1]];
            step!((x: Float<2>) [target] => x.expand(target))
        }),
        operator!("expand", |d| {
            let [mut shape, target] = [d.any_shape::<2>(); 2];
            shape[d.below(2)] = 1;
            let m = d.bools(shape);
            step!((m: Bool<2>) [target] => m.expand(target))
        }),
        operator!("cat", |d| {
            let (a, dim) = (d.any::<2>(), d.below(2));
            let mut shape = d.shape::<2>(a);
            shape[dim] = d.len();
            let b = d.floats(shape);
            step!((a: Float<2>, b: Float<2>) [dim] => Tensor::cat(vec![a.clone(), b, a], dim))
        }),
        operator!("cat", |d| {
            let (i, dim) = (d.any_ints::<2>(), d.below(2));
            let mut shape = d.shape::<2>(i);
            shape[dim] = d.len();
            let j = d.ints(shape, 9);
            step!((i: Int<2>, j: Int<2>) [dim] => Tensor::cat(vec![i, j], dim))
        }),
        operator!("cat", |d| {
            let (m, dim) = (d.any_bools::<2>(), d.below(2));
            let mut shape = d.shape::<2>(m);
            shape[dim] = d.len();
            let n = d.bools(shape);
            step!((m: Bool<2>, n: Bool<2>) [dim] => Tensor::cat(vec![m, n], dim))
        }),
        operator!("stack", |d| {
            let (a, dim) = (d.any::<2>(), d.below(3));
            let shape = d.shape::<2>(a);
            let b = d.floats(shape);
            step!((a: Float<2>, b: Float<2>) [dim] => Tensor::stack::<3>(vec![a, b], dim))
        }),
        operator!("stack", |d| {
            let (i, dim) = (d.any_ints::<1>(), d.below(2));
            let j = d.ints(d.shape::<1>(i), 9);
            step!((i: Int<1>, j: Int<1>) [dim] => Tensor::stack::<2>(vec![i, j], dim))
        }),
        operator!("stack", |d| {
            let m = d.any_bools::<2>();
            let shape = d.shape::<2>(m);
            let n = d.bools(shape);
            step!((m: Bool<2>, n: Bool<2>) [] => Tensor::stack::<3>(vec![m, n], 0))
        }),
    ]);
    all
}
