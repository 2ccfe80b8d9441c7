//! Random programs of operators: run sharded, each must give what it gives on ordinary tensors.
//!
//! The prover tries every operator alone, in all layouts. Programs try what comes of several:
//! results laid out as no test's author would, gradients that meet, values shared or moved, leaves
//! used again, and other meshes and shapes than the prover's. What is not drawn: F16 and the
//! integers I8, I16, U16 and U32, inputs that are infinite, NaN, empty or negative integers, and
//! results that wrap around, but for bytes.
//!
//! A program has 5 to 22 steps, redistributions among them, on a mesh of up to 2 x 2 x 2 ranks. Its
//! inputs come in any layout, cut raggedly at times. Compared are, on every rank: the global
//! shape, the local shape, the dtype and the full value of every result; and the gradient of every
//! leaf, also of one that holds terms of a reduction, by the true derivative. All ranks' parts of a
//! result must lie equally deep in the autodiff graph.
//!
//! The programs of seeds 0, 1, .. are always the same. `RANDOM_PROGRAMS` says how many to run,
//! `RANDOM_PROGRAMS_FROM` the first seed, and `RANDOM_PROGRAMS_COVERAGE` how often every operator
//! must be drawn, and a result of it redistributed. A failing program is made small and printed.

#[macro_use]
mod value;

mod coverage;
mod draft;
mod layouts;
mod operators;
mod profile;
mod program;
mod run;
mod shrink;

use std::collections::BTreeSet;

use crate::effort::{setting, stops_at_failure};
use burn_dtensor::testing::prove::Case;
use coverage::Coverage;
use value::ElementKind;

/// How many programs run where the environment does not say.
const PROGRAMS: u64 = 80;

#[test]
fn random_programs_give_what_they_give_on_ordinary_tensors() {
    let (first, count) = (
        setting("RANDOM_PROGRAMS_FROM", 0),
        setting("RANDOM_PROGRAMS", PROGRAMS),
    );
    let operators = operators::all();
    let (mut coverage, mut failures) = (Coverage::new(&operators), Vec::new());
    for seed in first..first + count {
        let program = draft::draw(seed, &operators);
        coverage.add(&program);
        if let Some(failure) = run::fails(&program) {
            assert!(!stops_at_failure(), "program of seed {seed}: {failure}");
            let (small, how) = shrink::shrink(program, failure, run::fails);
            println!("{small}// {how}\n");
            failures.push(seed);
        }
    }
    println!("{coverage}");
    let lacking = coverage.lacking(setting("RANDOM_PROGRAMS_COVERAGE", 0) as usize);
    assert!(lacking.is_empty(), "too few programs for {lacking:?}");
    assert!(failures.is_empty(), "programs of seeds {failures:?} failed");
}

/// The prover's list of operators is the programs' too, but for layers, whose tables or numbers are
/// of one dtype.
#[test]
fn every_operator_that_is_proven_is_drawn() {
    let drawn: Vec<_> = operators::all()
        .iter()
        .map(|operator| operator.name)
        .collect();
    let proven = crate::rules::cases().into_iter().map(|case| case.name());
    let layers = crate::rules::LAYERS;
    let lacking: Vec<_> = proven
        .filter(|name| !drawn.contains(name) && !layers.contains(name))
        .collect();
    assert!(
        lacking.is_empty(),
        "no program has {lacking:?}: give them entries in random_programs/operators"
    );
}

/// Integers and Booleans go through partial inputs by other rows than floats. An operator that is
/// proven of them alone is drawn of them alone too.
#[test]
fn every_operator_that_is_proven_without_floats_is_drawn_without_floats() {
    let drawn: BTreeSet<(&str, BTreeSet<ElementKind>)> = operators::all()
        .iter()
        .map(|operator| (operator.name, draft::operand_kinds(operator)))
        .collect();
    let cases = crate::rules::cases();
    let of_case = |case: &Case| {
        case.inputs()
            .iter()
            .map(|input| ElementKind::of(input.dtype()))
            .collect()
    };
    let proven: BTreeSet<_> = cases
        .iter()
        .map(|case| (case.name(), of_case(case)))
        .collect();
    let lacking: Vec<_> = proven
        .difference(&drawn)
        .filter(|(_, kinds)| !kinds.contains(&ElementKind::Float))
        .collect();
    assert!(
        lacking.is_empty(),
        "no program has {lacking:?}: give them entries in random_programs/operators"
    );
}
