//! Reductions.

use super::{Operator, operator, step};

macro_rules! full {
    ($($name:literal $draw:ident $kind:ident => |$x:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2], |d| {
            let $x = d.$draw::<D>();
            step!(($x: $kind<D>) [] => $expr)
        })),*]
    };
}

macro_rules! along {
    ($($name:literal $draw:ident $kind:ident => |$x:ident, $dim:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [2 3], |d| {
            let ($x, $dim) = (d.$draw::<D>(), d.below(D));
            step!(($x: $kind<D>) [$dim] => $expr)
        })),*]
    };
}

/// Along one to three dimensions of three.
macro_rules! along_some {
    ($($name:literal => |$x:ident, $dims:ident| $expr:expr;)*) => {
        vec![$(operator!($name, |d| {
            let $x = d.any::<3>();
            let $dims: Vec<usize> = d.one_of(&[&[1usize][..], &[0, 2], &[1, 2], &[0, 1], &[0, 1, 2]]).to_vec();
            step!(($x: Float<3>) [$dims] => $expr)
        })),*]
    };
}

/// Along a dimension of more than one element.
macro_rules! spread {
    ($($name:literal => |$x:ident, $dim:ident| $expr:expr;)*) => {
        vec![$(operator!($name, |d| {
            let $dim = d.below(2);
            let mut shape = d.any_shape::<2>();
            shape[$dim] = shape[$dim].max(2);
            let $x = d.floats(shape);
            step!(($x: Float<2>) [$dim] => $expr)
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = full! {
        "sum" any Float => |x| x.sum();
        "mean" any Float => |x| x.mean();
        "prod" any Float => |x| x.prod();
        "max" any Float => |x| x.max();
        "min" any Float => |x| x.min();
        "max_abs" any Float => |x| x.max_abs();
        "sum" any_ints Int => |i| i.sum();
        "prod" any_ints Int => |i| i.prod();
        "mean" any_ints Int => |i| i.mean();
        "max" any_ints Int => |i| i.max();
        "min" any_ints Int => |i| i.min();
        "max_abs" any_ints Int => |i| i.max_abs();
        "any" any_ints Int => |i| i.any();
        "all" any_ints Int => |i| i.all();
        "any" any_bools Bool => |m| m.any();
        "all" any_bools Bool => |m| m.all();
        "any" any Float => |x| x.greater_scalar(1.0).any();
        "all" any Float => |x| x.lower_scalar(1.0).all();
    };
    all.extend(along! {
        "sum_dim" any Float => |x, dim| x.sum_dim(dim);
        "mean_dim" any Float => |x, dim| x.mean_dim(dim);
        "prod_dim" any Float => |x, dim| x.prod_dim(dim);
        "max_dim" any Float => |x, dim| x.max_dim(dim);
        "min_dim" any Float => |x, dim| x.min_dim(dim);
        "max_abs_dim" any Float => |x, dim| x.max_abs_dim(dim);
        "max_dim_with_indices" any Float => |x, dim| x.max_dim_with_indices(dim);
        "min_dim_with_indices" any Float => |x, dim| x.min_dim_with_indices(dim);
        "argmax" any Float => |x, dim| x.argmax(dim);
        "argmin" any Float => |x, dim| x.argmin(dim);
        "sum_dim" any_ints Int => |i, dim| i.sum_dim(dim);
        "mean_dim" any_ints Int => |i, dim| i.mean_dim(dim);
        "prod_dim" any_ints Int => |i, dim| i.prod_dim(dim);
        "max_dim" any_ints Int => |i, dim| i.max_dim(dim);
        "min_dim" any_ints Int => |i, dim| i.min_dim(dim);
        "min_dim_with_indices" any_ints Int => |i, dim| i.min_dim_with_indices(dim);
        "argmin" any_ints Int => |i, dim| i.argmin(dim);
        "any_dim" any_bools Bool => |m, dim| m.any_dim(dim);
        "all_dim" any_bools Bool => |m, dim| m.all_dim(dim);
    });
    all.extend(along_some! {
        "sum_dims" => |x, dims| x.sum_dims(&dims);
        "sum_dims_squeeze" => |x, dims| x.sum_dims_squeeze::<1, _>(&[dims[0], (dims[0] + 1) % 3]);
        "mean_dims" => |x, dims| x.mean_dims(&dims);
        "prod_dims" => |x, dims| x.prod_dims(&dims);
        "max_dims" => |x, dims| x.max_dims(&dims);
        "min_dims" => |x, dims| x.min_dims(&dims);
        "max_abs_dims" => |x, dims| x.max_abs_dims(&dims);
    });
    all.extend(spread! {
        "var" => |x, dim| x.var(dim);
        "var_bias" => |x, dim| x.var_bias(dim);
        "var_mean" => |x, dim| x.var_mean(dim);
        "var_mean_bias" => |x, dim| x.var_mean_bias(dim);
        "cov" => |x, dim| x.cov(dim, 1);
    });
    all.push(operator!("sum_dims_squeeze", |d| {
        let (i, dim) = (d.any_ints::<2>(), d.below(2));
        step!((i: Int<2>) [dim] => i.sum_dims_squeeze::<1, _>(&[dim]))
    }));
    all
}
