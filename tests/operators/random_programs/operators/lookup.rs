//! Gathering, scattering, selection, embedding and encoding by index.

use burn::tensor::IndexingUpdateOp;

use super::{Operator, operator, step};

pub fn operators() -> Vec<Operator> {
    vec![
        operator!("gather", |d| {
            let (x, dim) = (d.table(), d.below(2));
            let mut shape = d.shape::<2>(x);
            let len = std::mem::replace(&mut shape[dim], d.len());
            let i = d.ints(shape, len);
            step!((x: Float<2>, i: Int<2>) [dim] => x.gather(dim, i))
        }),
        operator!("gather", |d| {
            let (x, dim) = (d.any_ints::<2>(), d.below(2));
            let mut shape = d.shape::<2>(x);
            let len = std::mem::replace(&mut shape[dim], d.len());
            let i = d.ints(shape, len);
            step!((x: Int<2>, i: Int<2>) [dim] => x.gather(dim, i))
        }),
        operator!("scatter", |d| {
            let (x, dim) = (d.any::<2>(), d.below(2));
            let mut shape = d.shape::<2>(x);
            let len = std::mem::replace(&mut shape[dim], d.len());
            let (i, v) = (d.ints(shape, len), d.floats(shape));
            step!((x: Float<2>, i: Int<2>, v: Float<2>) [dim] => x.scatter(dim, i, v, IndexingUpdateOp::Add))
        }),
        operator!("scatter", |d| {
            let (x, dim) = (d.any_ints::<2>(), d.below(2));
            let mut shape = d.shape::<2>(x);
            let len = std::mem::replace(&mut shape[dim], d.len());
            let (i, v) = (d.ints(shape, len), d.ints(shape, 9));
            step!((x: Int<2>, i: Int<2>, v: Int<2>) [dim] => x.scatter(dim, i, v, IndexingUpdateOp::Add))
        }),
        operator!("select", |d| {
            let (x, count) = (d.table(), d.len());
            let rows = d.shape::<2>(x)[0];
            let i = d.ints([count], rows);
            step!((x: Float<2>, i: Int<1>) [] => x.select(0, i))
        }),
        operator!("select", D in [2 3], |d| {
            let (x, dim, count) = (d.any::<D>(), d.below(D), d.len());
            let len = d.shape::<D>(x)[dim];
            let i = d.ints([count], len);
            step!((x: Float<D>, i: Int<1>) [dim] => x.select(dim, i))
        }),
        operator!("select", |d| {
            let (x, dim, count) = (d.any_ints::<2>(), d.below(2), d.len());
            let len = d.shape::<2>(x)[dim];
            let i = d.ints([count], len);
            step!((x: Int<2>, i: Int<1>) [dim] => x.select(dim, i))
        }),
        operator!("select_assign", |d| {
            let (x, dim, count) = (d.table(), d.below(2), d.len());
            let mut shape = d.shape::<2>(x);
            let len = std::mem::replace(&mut shape[dim], count);
            let (i, v) = (d.ints([count], len), d.floats(shape));
            step!((x: Float<2>, i: Int<1>, v: Float<2>) [dim] => x.select_assign(dim, i, v, IndexingUpdateOp::Add))
        }),
        operator!("take", |d| {
            let (x, dim, shape) = (d.table(), d.below(2), [1 + d.below(3), 1 + d.below(4)]);
            let len = d.shape::<2>(x)[dim];
            let i = d.ints(shape, len);
            step!((x: Float<2>, i: Int<2>) [dim] => x.take::<2, 3>(dim, i))
        }),
        operator!("gather_nd", |d| {
            let (x, count) = (d.any::<3>(), d.len());
            let [rows, columns, _] = d.shape::<3>(x);
            let i = d.ints([count, 2], rows.min(columns));
            step!((x: Float<3>, i: Int<2>) [] => x.gather_nd::<2, 2>(i))
        }),
        operator!("gather_nd", |d| {
            let (x, shape) = (d.table(), [1 + d.below(4), 1 + d.below(4), 1]);
            let i = d.ints(shape, d.shape::<2>(x)[0]);
            step!((x: Float<2>, i: Int<3>) [] => x.gather_nd::<3, 3>(i))
        }),
        operator!("gather_nd", |d| {
            let (x, count) = (d.any_ints::<2>(), d.len());
            let [rows, columns] = d.shape::<2>(x);
            let i = d.ints([count, 2], rows.min(columns));
            step!((x: Int<2>, i: Int<2>) [] => x.gather_nd::<2, 1>(i))
        }),
        operator!("scatter_nd", |d| {
            let (x, count) = (d.any::<3>(), d.len());
            let [rows, columns, width] = d.shape::<3>(x);
            let (i, v) = (
                d.ints([count, 2], rows.min(columns)),
                d.floats([count, width]),
            );
            step!((x: Float<3>, i: Int<2>, v: Float<2>) [] => x.scatter_nd(i, v, IndexingUpdateOp::Add))
        }),
        operator!("scatter_nd", |d| {
            let x = d.table();
            let [rows, columns] = d.shape::<2>(x);
            let update = d.one_of(&[IndexingUpdateOp::Assign, IndexingUpdateOp::Mul]);
            let (i, v) = (d.ints([1], rows), d.floats([columns]));
            step!((x: Float<2>, i: Int<1>, v: Float<1>) [update] => x.scatter_nd(i, v, update))
        }),
        operator!("scatter_nd", |d| {
            let (x, count) = (d.any_ints::<2>(), d.len());
            let [rows, columns] = d.shape::<2>(x);
            let (i, v) = (d.ints([count, 2], rows.min(columns)), d.ints([count], 9));
            step!((x: Int<2>, i: Int<2>, v: Int<1>) [] => x.scatter_nd(i, v, IndexingUpdateOp::Add))
        }),
        operator!("argwhere", |d| {
            let m = d.any_bools::<2>();
            step!((m: Bool<2>) [] => m.argwhere())
        }),
        operator!("nonzero", |d| {
            let m = d.any_bools::<2>();
            step!((m: Bool<2>) [] => m.nonzero())
        }),
        operator!("mask_select", |d| {
            let x = d.any::<2>();
            let shape = d.shape::<2>(x);
            let m = d.bools(shape);
            step!((x: Float<2>, m: Bool<2>) [] => x.mask_select(m))
        }),
        operator!("embedding", |d| {
            let (weight, shape) = (d.table(), [1 + d.below(5), 1 + d.below(5)]);
            let rows = d.shape::<2>(weight)[0];
            let i = d.ints(shape, rows);
            step!((weight: Float<2>, i: Int<2>) [] => module::embedding(weight, i))
        }),
        operator!("one_hot", |d| {
            let (count, classes) = (d.len(), 2 + d.below(6));
            let i = d.ints([count], classes);
            step!((i: Int<1>) [classes] => i.one_hot::<2>(classes))
        }),
        operator!("one_hot_fill", |d| {
            let (shape, classes, axis) =
                (d.any_shape::<2>(), 2 + d.below(3), d.one_of(&[0, 1, -1]));
            let i = d.ints(shape, classes);
            step!((i: Int<2>) [classes, axis] => i.one_hot_fill::<3>(classes, 2.0, 0.0, axis))
        }),
    ]
}
