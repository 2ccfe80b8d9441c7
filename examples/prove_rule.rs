//! Proves the rule of one operator, as a contributor does who has just written it.
//!
//! ```text
//! cargo run --example prove_rule -- matmul
//! cargo run --example prove_rule -- --list
//! cargo run --release --example prove_rule -- --exhaustive
//! ```
//!
//! The cases are those of the tests `rules_are_proven_by_..`, and an operator of this example's own.

#[path = "../tests/suite/rules/mod.rs"]
mod rules;

use std::time::Duration;

use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::partial_rules::SHIFT;
use burn_dtensor::dtensor::ops::{EinsumRule, apply};
use burn_dtensor::testing::prove::{Case, Effort, Report, case, prove_with};
use clap::Parser;
use itertools::Itertools;

/// Proves operators on DTensors: combinations of layouts of their inputs, on meshes of one, two and
/// three dimensions, forward and backward, against burn's operators on ordinary tensors.
#[derive(Parser)]
struct Args {
    /// Operators to prove; all of them if none is named.
    operators: Vec<String>,
    /// Print the operators there are.
    #[arg(long)]
    list: bool,
    /// Try all combinations of every case on meshes of one dimension, and up to a thousand on others, not some dozens: of
    /// all operators it takes hours.
    #[arg(long)]
    exhaustive: bool,
}

/// `2 x - 1`, an operator that this crate does not have: elementwise, and of what is yet to be averaged each
/// rank may compute it alone.
///
/// Let a partial sum through, with `LINEAR`, and see what the prover says: every rank would subtract its own 1.
const CENTERED: EinsumRule = EinsumRule::pointwise("centered", SHIFT);

/// The operator, on whatever a trait says is a tensor here.
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
    if let Some(unknown) = args.operators.iter().find(|name| !names.contains(&name.as_str())) {
        eprintln!("there are no cases of `{unknown}`; --list prints the operators there are");
        std::process::exit(2);
    }
    let effort = if args.exhaustive { Effort::Exhaustive } else { Effort::Test };
    let asked = |name: &&str| args.operators.is_empty() || args.operators.iter().any(|asked| asked == name);
    // One by one: of all operators it takes hours, and what is wrong should be seen at once.
    let mut all = Report { operators: Vec::new(), elapsed: Duration::ZERO };
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
