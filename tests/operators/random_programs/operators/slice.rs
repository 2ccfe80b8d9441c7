//! Slices, assignment to them, and padding.

use std::ops::Range;

use burn::tensor::ops::PadMode;
use burn::tensor::s;

use super::{Operator, operator, step};
use crate::random_programs::draft::Draft;

/// Elements of a dimension of this length, at least one.
fn part(d: &mut Draft, len: usize) -> Range<usize> {
    let start = d.below(len);
    start..start + 1 + d.below(len - start)
}

pub fn operators() -> Vec<Operator> {
    vec![
        operator!("slice", |d| {
            let x = d.any::<2>();
            let [rows, columns] = d.shape::<2>(x);
            let (rows, columns) = (part(d, rows), part(d, columns));
            step!((x: Float<2>) [rows, columns] => x.slice([rows, columns]))
        }),
        operator!("slice", |d| {
            let x = d.any::<2>();
            let columns = d.shape::<2>(x)[1];
            let (columns, by) = (part(d, columns), d.one_of(&[2, -1, -2]));
            step!((x: Float<2>) [columns, by] => x.slice(s![.., columns; by]))
        }),
        operator!("slice", |d| {
            let i = d.any_ints::<2>();
            step!((i: Int<2>) [] => i.slice(s![-1.., ..]))
        }),
        operator!("slice", |d| {
            let m = d.any_bools::<2>();
            let columns = d.shape::<2>(m)[1];
            let columns = part(d, columns);
            step!((m: Bool<2>) [columns] => m.slice(s![.., columns]))
        }),
        operator!("slice_dim", |d| {
            let (x, dim) = (d.any::<3>(), d.below(3));
            let len = d.shape::<3>(x)[dim];
            let range = part(d, len);
            step!((x: Float<3>) [dim, range] => x.slice_dim(dim, range))
        }),
        operator!("narrow", |d| {
            let (x, dim) = (d.any::<2>(), d.below(2));
            let len = d.shape::<2>(x)[dim];
            let Range { start, end } = part(d, len);
            let len = end - start;
            step!((x: Float<2>) [dim, start, len] => x.narrow(dim, start, len))
        }),
        operator!("select_dim", |d| {
            let (x, dim) = (d.any::<3>(), d.below(3));
            let len = d.shape::<3>(x)[dim];
            let at = d.below(len) as isize;
            step!((x: Float<3>) [dim, at] => x.select_dim::<2>(dim, at))
        }),
        operator!("slice_assign", |d| {
            let x = d.any::<2>();
            let [rows, columns] = d.shape::<2>(x);
            let (rows, columns) = (part(d, rows), part(d, columns));
            let v = d.floats([rows.len(), columns.len()]);
            step!((x: Float<2>, v: Float<2>) [rows, columns] => x.slice_assign(s![rows, columns], v))
        }),
        operator!("slice_assign", |d| {
            let i = d.any_ints::<2>();
            let [rows, columns] = d.shape::<2>(i);
            let columns = part(d, columns);
            let v = d.ints([rows, columns.len()], 9);
            step!((i: Int<2>, v: Int<2>) [columns] => i.slice_assign(s![.., columns], v))
        }),
        operator!("slice_assign", |d| {
            let m = d.any_bools::<2>();
            let [rows, columns] = d.shape::<2>(m);
            let rows = part(d, rows);
            let n = d.bools([rows.len(), columns]);
            step!((m: Bool<2>, n: Bool<2>) [rows] => m.slice_assign(s![rows, ..], n))
        }),
        operator!("slice_fill", |d| {
            let x = d.any::<2>();
            let [rows, columns] = d.shape::<2>(x);
            let (rows, columns, value) = (part(d, rows), part(d, columns), d.one_of(&[0.0, 1.5]));
            step!((x: Float<2>) [rows, columns, value] => x.slice_fill(s![rows, columns], value))
        }),
        operator!("slice_fill", |d| {
            let i = d.any_ints::<2>();
            let rows = d.shape::<2>(i)[0];
            let rows = part(d, rows);
            step!((i: Int<2>) [rows] => i.slice_fill(s![rows, ..], 7))
        }),
        operator!("pad", |d| {
            let x = d.any::<2>();
            let [before, after, value] = [d.below(3), d.below(3), d.below(2)];
            step!((x: Float<2>) [before, after, value] =>
                x.pad([(before, after)], PadMode::Constant(value as f32)))
        }),
        operator!("pad", |d| {
            let x = d.any::<2>();
            let [before, after] = [d.below(3), d.below(3)];
            step!((x: Float<2>) [before, after] => x.pad([(before, 0), (0, after)], PadMode::Edge))
        }),
        operator!("pad", |d| {
            let x = d.any::<2>();
            let len = d.shape::<2>(x)[1];
            let [before, after] = [d.below(len), d.below(len)];
            step!((x: Float<2>) [before, after] => x.pad([(before, after)], PadMode::Reflect))
        }),
        operator!("pad", |d| {
            let i = d.any_ints::<2>();
            step!((i: Int<2>) [] => i.pad([(1, 2)], PadMode::Constant(3.0)))
        }),
    ]
}
