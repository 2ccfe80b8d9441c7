//! Matrix products, linear transformations, Einstein summation, products of vectors.

use super::{Operator, operator, step};

pub fn operators() -> Vec<Operator> {
    vec![
        operator!("matmul", |d| {
            let (a, columns) = (d.any::<2>(), d.len());
            let b = d.floats([d.shape::<2>(a)[1], columns]);
            step!((a: Float<2>, b: Float<2>) [] => a.matmul(b))
        }),
        // A batch of products, of single rows too, where burn takes other ways.
        operator!("matmul", |d| {
            let (mut shape, columns) = (d.any_shape::<3>(), d.len());
            if d.chance(0.4) {
                shape[1] = 1;
            }
            let a = d.floats(shape);
            let batch = if d.chance(0.3) { 1 } else { shape[0] };
            let b = d.floats([batch, shape[2], columns]);
            step!((a: Float<3>, b: Float<3>) [] => a.matmul(b))
        }),
        operator!("matmul", |d| {
            let (batch, heads, rows, inner, columns) = (
                1 + d.below(3),
                1 + d.below(3),
                d.one_of(&[1, 1, 3]),
                1 + d.below(4),
                1 + d.below(4),
            );
            let (a, b) = (
                d.floats([batch, heads, rows, inner]),
                d.floats([batch, heads, inner, columns]),
            );
            step!((a: Float<4>, b: Float<4>) [] => a.matmul(b))
        }),
        // One matrix for several, along either dimension of the batch.
        operator!("matmul", |d| {
            let (batch, heads, rows, inner, columns) = (
                1 + d.below(4),
                1 + d.below(5),
                1 + d.below(5),
                1 + d.below(4),
                1 + d.below(4),
            );
            let a = d.floats([batch, heads, rows, inner]);
            let [batch, heads] = d.broadcast([batch, heads]);
            let b = d.floats([batch, heads, inner, columns]);
            step!((a: Float<4>, b: Float<4>) [] => a.matmul(b))
        }),
        // The scalar products of rows.
        operator!("matmul", |d| {
            let mut shape = d.any_shape::<3>();
            if d.chance(0.4) {
                shape[1] = 1;
            }
            let x = d.floats(shape);
            step!((x: Float<3>) [] => x.clone().matmul(x.transpose()))
        }),
        operator!("matmul", |d| {
            let (a, columns) = (d.any_ints::<2>(), 1 + d.below(4));
            let b = d.ints([d.shape::<2>(a)[1], columns], 4);
            step!((a: Int<2>, b: Int<2>) [] => a.matmul(b))
        }),
        operator!("linear", D in [1 2 3], |d| {
            let (x, columns) = (d.any::<D>(), d.len());
            let weight = d.floats([d.shape::<D>(x)[D - 1], columns]);
            step!((x: Float<D>, weight: Float<2>) [] => module::linear(x, weight, None))
        }),
        operator!("linear", D in [2 3], |d| {
            let (x, columns) = (d.any::<D>(), d.len());
            let (weight, bias) = (d.floats([d.shape::<D>(x)[D - 1], columns]), d.floats([columns]));
            step!((x: Float<D>, weight: Float<2>, bias: Float<1>) [] => module::linear(x, weight, Some(bias)))
        }),
        operator!("einsum", |d| {
            let (a, columns) = (d.any::<2>(), d.len());
            let b = d.floats([columns, d.shape::<2>(a)[1]]);
            step!((a: Float<2>, b: Float<2>) [] => Tensor::<2>::einsum("ij,kj->ik", [a.into(), b.into()]))
        }),
        operator!("einsum", |d| {
            let (a, columns) = (d.any::<3>(), d.len());
            let [batch, _, inner] = d.shape::<3>(a);
            let b = d.floats([batch, inner, columns]);
            step!((a: Float<3>, b: Float<3>) [] => Tensor::<3>::einsum("bij,bjk->bik", [a.into(), b.into()]))
        }),
        operator!("einsum", |d| {
            let (a, columns) = (d.any::<3>(), d.len());
            let b = d.floats([d.shape::<3>(a)[2], columns]);
            step!((a: Float<3>, b: Float<2>) [] => Tensor::<3>::einsum("...ij,jk", [a.into(), b.into()]))
        }),
        operator!("einsum", |d| {
            let (a, len) = (d.any::<1>(), d.len());
            let b = d.floats([len]);
            step!((a: Float<1>, b: Float<1>) [] => Tensor::<2>::einsum("i,j->ij", [a.into(), b.into()]))
        }),
        operator!("einsum", |d| {
            let a = d.any::<2>();
            step!((a: Float<2>) [] => Tensor::<1>::einsum("ij->j", [a.into()]))
        }),
        operator!("einsum", |d| {
            let (i, columns) = (d.any_ints::<2>(), 1 + d.below(4));
            let j = d.ints([d.shape::<2>(i)[1], columns], 4);
            step!((i: Int<2>, j: Int<2>) [] => Tensor::<2, Int>::einsum("ij,jk->ki", [i.into(), j.into()]))
        }),
        operator!("cross", |d| {
            let (mut shape, dim) = (d.any_shape::<2>(), d.below(2));
            shape[dim] = 3;
            let (a, b) = (d.floats(shape), d.floats(shape));
            step!((a: Float<2>, b: Float<2>) [dim] => a.cross(b, dim))
        }),
        operator!("dot", |d| {
            let a = d.any::<1>();
            let b = d.floats(d.shape::<1>(a));
            step!((a: Float<1>, b: Float<1>) [] => a.dot(b))
        }),
        operator!("dot", |d| {
            let i = d.any_ints::<1>();
            let j = d.ints(d.shape::<1>(i), 5);
            step!((i: Int<1>, j: Int<1>) [] => i.dot(j))
        }),
    ]
}
