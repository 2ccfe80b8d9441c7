//! The cases that prove the rules, a file per family, and the test that proves them.
//!
//! `cargo run --example prove_rule -- <operator>` proves one.

mod activation;
mod arithmetic;
mod attention;
mod cat;
mod compare;
#[cfg(test)]
mod completeness;
mod conv;
mod cross;
mod einsum;
mod embedding;
mod expand;
mod flip;
mod gather;
mod grid;
mod lengths;
mod linalg;
mod linear;
#[cfg(test)]
mod list;
mod loss;
mod matmul;
mod nan;
mod norm;
mod numbers;
mod one_hot;
mod order;
mod pad;
mod permute;
mod pool;
mod random;
mod reduce;
mod select;
mod signal;
mod slice;
mod split;
mod triangle;
mod unary;
mod view;

#[cfg(test)]
pub use list::LAYERS;

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
        grid::cases(),
        lengths::cases(),
        linalg::cases(),
        linear::cases(),
        loss::cases(),
        matmul::cases(),
        nan::cases(),
        norm::cases(),
        numbers::cases(),
        one_hot::cases(),
        order::cases(),
        pad::cases(),
        permute::cases(),
        pool::cases(),
        random::cases(),
        reduce::cases(),
        select::cases(),
        signal::cases(),
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
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use burn_dtensor::placement::chunk;
    use burn_dtensor::testing::prove::{Case, Effort, prove_with};

    use super::list::operators;
    use crate::own_process::own_process;

    /// Checks values and gradients against those of the unsharded operator, in combinations of
    /// layouts on many meshes: with `LONG_TESTS` in all combinations of one input and on small
    /// meshes, with `SMOKE_TESTS` one case of ten. Takes one case of two, since tests run next to
    /// each other.
    fn rules_are_proven(remainder: usize) {
        let step = if crate::effort::is_smoke() { 20 } else { 2 };
        let cases: Vec<_> = super::cases()
            .into_iter()
            .skip(remainder)
            .step_by(step)
            .collect();
        let effort = if crate::effort::is_long() {
            Effort::Test
        } else {
            Effort::Brief
        };
        let report = prove_with(&cases, effort);
        println!("{report}");
        assert_eq!(report.wrong(), 0, "{}", report.summary());
    }

    #[test]
    fn rules_are_proven_by_even_cases() {
        own_process("rules::tests::rules_are_proven_by_even_cases", || {
            rules_are_proven(0)
        });
    }

    #[test]
    fn rules_are_proven_by_odd_cases() {
        own_process("rules::tests::rules_are_proven_by_odd_cases", || {
            rules_are_proven(1)
        });
    }

    #[test]
    fn every_operator_has_a_case_and_the_book_counts_them() {
        let (operators, cases) = (operators(), super::cases());
        let proven: BTreeSet<String> = cases.iter().map(Case::name).map(String::from).collect();
        let lacking: Vec<_> = operators.difference(&proven).collect();
        assert!(
            lacking.is_empty(),
            "without a case in `tests/operators/rules`: {lacking:?}"
        );
        let unknown: Vec<_> = proven.difference(&operators).collect();
        assert!(
            unknown.is_empty(),
            "cases of what `src/dtensor/ops` does not have: {unknown:?}"
        );
        let count = format!("There are {} operators", operators.len());
        assert!(
            include_str!("../../../docs/concepts.md").contains(&count),
            "docs/concepts.md must say: {count}"
        );
    }

    #[test]
    fn every_operator_meets_even_short_and_empty_shards() {
        let mut met: BTreeMap<&str, [bool; 3]> = BTreeMap::new();
        for case in super::cases() {
            let lengths = case.inputs().iter().flat_map(|input| input.shape());
            for (&len, ranks) in lengths.flat_map(|len| [2, 3, 4].map(|ranks| (len, ranks))) {
                let last = chunk(len, ranks, ranks - 1).len();
                let short = (0..ranks)
                    .any(|rank| (1..len.div_ceil(ranks)).contains(&chunk(len, ranks, rank).len()));
                let met = met.entry(case.name()).or_default();
                *met = [
                    met[0] || last * ranks == len,
                    met[1] || short,
                    met[2] || last == 0,
                ];
            }
        }
        let lacking: Vec<_> = met
            .into_iter()
            .filter(|(_, met)| *met != [true; 3])
            .collect();
        assert!(lacking.is_empty(), "even, short, empty: {lacking:?}");
    }
}
