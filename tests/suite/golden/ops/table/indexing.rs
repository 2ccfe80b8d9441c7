//! By indices.

use burn::tensor::IndexingUpdateOp::{Add, Assign};
use burn_dtensor::dtensor::ops::module::embedding;

use super::{F2, I1, I2};
use crate::golden::ops::call::{Row, Wanted, op};

pub fn rows() -> Vec<Row> {
    vec![
        (
            "embedding",
            op(|tokens: I2, table: F2| embedding(table, tokens)),
        ),
        // Torch keeps one row of the table from learning.
        (
            "embedding_padidx",
            op(|tokens: I2, table: F2, Wanted(shape): Wanted<3>| {
                let padding = tokens
                    .clone()
                    .equal_scalar(1)
                    .unsqueeze_dim::<3>(2)
                    .expand(shape);
                let rows = embedding(table, tokens);
                rows.clone().mask_where(padding, rows.detach())
            }),
        ),
        ("gather_d0", op(|x: F2, indices: I2| x.gather(0, indices))),
        ("gather_d1", op(|x: F2, indices: I2| x.gather(1, indices))),
        (
            "index_select_d0",
            op(|x: F2, indices: I1| x.select(0, indices)),
        ),
        (
            "index_select_d1",
            op(|x: F2, indices: I1| x.select(1, indices)),
        ),
        (
            "index_tensor",
            op(|x: F2, indices: I1| x.select(0, indices)),
        ),
        (
            "index_tensor_d1",
            op(|x: F2, indices: I1| x.select(1, indices)),
        ),
        (
            "scatter_d1",
            op(|x: F2, indices: I2, values: F2| x.scatter(1, indices, values, Assign)),
        ),
        (
            "scatter_add_d1",
            op(|x: F2, indices: I2, values: F2| x.scatter(1, indices, values, Add)),
        ),
        (
            "index_add_d0",
            op(|x: F2, indices: I1, values: F2| x.select_assign(0, indices, values, Add)),
        ),
        (
            "index_put_acc",
            op(|x: F2, indices: I1, values: F2| x.select_assign(0, indices, values, Add)),
        ),
        (
            "one_hot",
            op(|x: I2, Wanted([.., classes]): Wanted<3>| x.one_hot::<3>(classes)),
        ),
    ]
}
