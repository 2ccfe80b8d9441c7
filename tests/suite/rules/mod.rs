//! The cases that prove the rules, a file a family, and the test that proves them.
//!
//! `cargo run --example prove_rule -- <operator>` proves one.

mod arithmetic;
mod matmul;
mod unary;

use burn_dtensor::testing::prove::Case;

/// Every operator's cases.
pub fn cases() -> Vec<Case> {
    [arithmetic::cases(), matmul::cases(), unary::cases()].into_iter().flatten().collect()
}

#[cfg(test)]
#[test]
fn rules_are_proven() {
    let report = burn_dtensor::testing::prove::prove(&cases());
    println!("{report}");
    assert_eq!(report.wrong(), 0, "{}", report.summary());
}
