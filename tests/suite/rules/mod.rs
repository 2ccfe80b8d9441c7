//! The cases that prove the rules, a file a family, and the test that proves them.
//!
//! `cargo run --example prove_rule -- <operator>` proves one.

mod arithmetic;
mod attention;
mod conv;
mod einsum;
mod linear;
mod loss;
mod matmul;
mod pool;
mod unary;

use burn_dtensor::testing::prove::Case;

/// Every operator's cases.
pub fn cases() -> Vec<Case> {
    [
        arithmetic::cases(),
        attention::cases(),
        conv::cases(),
        einsum::cases(),
        linear::cases(),
        loss::cases(),
        matmul::cases(),
        pool::cases(),
        unary::cases(),
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
