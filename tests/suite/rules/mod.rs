//! The cases that prove the rules, a file a family, and the test that proves them.
//!
//! `cargo run --example prove_rule -- <operator>` proves one.

mod activation;
mod arithmetic;
mod attention;
mod cat;
mod compare;
mod conv;
mod cross;
mod einsum;
mod embedding;
mod expand;
mod flip;
mod gather;
mod linalg;
mod linear;
mod loss;
mod matmul;
mod norm;
mod one_hot;
mod order;
mod pad;
mod permute;
mod pool;
mod random;
mod reduce;
mod select;
mod slice;
mod split;
mod triangle;
mod unary;
mod view;

use burn_dtensor::testing::prove::Case;

/// Every operator's cases.
pub fn cases() -> Vec<Case> {
    [
        activation::cases(),
        arithmetic::cases(),
        attention::cases(),
        cat::cases(),
        compare::cases(),
        conv::cases(),
        cross::cases(),
        einsum::cases(),
        embedding::cases(),
        expand::cases(),
        flip::cases(),
        gather::cases(),
        linalg::cases(),
        linear::cases(),
        loss::cases(),
        matmul::cases(),
        norm::cases(),
        one_hot::cases(),
        order::cases(),
        pad::cases(),
        permute::cases(),
        pool::cases(),
        random::cases(),
        reduce::cases(),
        select::cases(),
        slice::cases(),
        split::cases(),
        triangle::cases(),
        unary::cases(),
        view::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
#[test]
fn rules_are_proven() {
    let report = burn_dtensor::testing::prove::prove(&cases());
    println!("{report}");
    assert_eq!(report.wrong(), 0, "{}", report.summary());
}
