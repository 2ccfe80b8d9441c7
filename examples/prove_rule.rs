//! Proves the sharding rule of one operator, as its author would.
//!
//! ```text
//! cargo run --example prove_rule -- matmul
//! cargo run --example prove_rule -- --list
//! cargo run --release --example prove_rule -- --exhaustive
//! ```
//!
//! The cases are those of the tests `rules_are_proven_by_..`, and one operator that this example
//! defines.

#[path = "../tests/operators/rules/mod.rs"]
mod rules;

use std::time::Duration;

use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::partial_rules::SHIFT;
use burn_dtensor::dtensor::ops::{EinsumRule, apply};
use burn_dtensor::testing::prove::{Case, Effort, Report, case, prove_with};
use clap::Parser;
use itertools::Itertools;

/// Proves the sharding rules of operators on DTensors: runs forward and backward in
/// combinations of layouts of the inputs, on meshes of one, two and three
/// dimensions, and compares the results with those of burn's operators on ordinary
/// tensors. Shows for each operator the layouts that its rule redistributes, and
/// the results that were wrong.
#[derive(Parser)]
#[command(verbatim_doc_comment)]
struct Args {
    /// Operators to prove [default: all]
    operators: Vec<String>,
    /// Print the names of all operators
    #[arg(long)]
    list: bool,
    /// Try all combinations of every case on meshes of one dimension, and up to a thousand on
    /// others, instead of some dozens. This takes hours for all operators
    #[arg(long)]
    exhaustive: bool,
}

/// Sharding rule of `2 x - 1`, an operator that this crate does not have. It is elementwise. Under
/// `P(avg)` each rank can apply it to its own partial value.
///
/// Replace `SHIFT` by `LINEAR`, which lets partial sums through as well, to see what the prover
/// reports: every rank would subtract its own 1.
const CENTERED: EinsumRule = EinsumRule::pointwise("centered", SHIFT);

/// Operator `centered` on both kinds of tensors.
trait CenteredExt {
    fn centered(self) -> Self;
}

impl<const D: usize> CenteredExt for burn::tensor::Tensor<D> {
    fn centered(self) -> Self {
        self * 2 - 1
    }
}

impl<const D: usize> CenteredExt for DTensor<D> {
    fn centered(self) -> Self {
        apply(&CENTERED, self, |x, _| x.centered())
    }
}

fn main() {
    let args = Args::parse();
    let mut cases: Vec<Case> = rules::cases();
    cases.push(case!("centered", (x: 2 = [3, 6]) => x.centered()));
    let names: Vec<_> = cases.iter().map(Case::name).unique().collect();
    if args.list {
        println!("{}", names.join("\n"));
        return;
    }
    if let Some(unknown) = args
        .operators
        .iter()
        .find(|name| !names.contains(&name.as_str()))
    {
        eprintln!(
            "there are no cases of `{unknown}`. Run with --list for the names of all operators"
        );
        std::process::exit(2);
    }
    let effort = if args.exhaustive {
        Effort::Exhaustive
    } else {
        Effort::Test
    };
    let asked =
        |name: &&str| args.operators.is_empty() || args.operators.iter().any(|asked| asked == name);
    // Proves and prints one operator at a time, because all of them take hours.
    let mut all = Report {
        operators: Vec::new(),
        elapsed: Duration::ZERO,
    };
    for name in names.into_iter().filter(asked) {
        let of_it: Vec<Case> = cases.extract_if(.., |case| case.name() == name).collect();
        let Report { operators, elapsed } = prove_with(&of_it, effort);
        println!("{}", operators.iter().format("\n"));
        all.operators.extend(operators);
        all.elapsed += elapsed;
    }
    println!("{}", all.summary());
    if all.wrong() > 0 {
        std::process::exit(1);
    }
}
