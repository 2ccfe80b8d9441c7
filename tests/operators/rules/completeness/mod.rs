//! Burn's list of methods and functions beside ours: what burn's `Tensor` has a `DTensor` has too,
//! of every kind of elements, and what is left out stands in one [table](exceptions) with its
//! reason.

mod exceptions;
mod functions;
mod methods;
mod sources;

use std::collections::BTreeSet;

use exceptions::EXCEPTIONS;
use itertools::Itertools;

/// Names of the table, each once.
fn excepted() -> BTreeSet<String> {
    let names = EXCEPTIONS
        .iter()
        .flat_map(|(names, _)| *names)
        .map(ToString::to_string);
    names
        .inspect(|name| assert!(name.contains("::"), "`{name}` names no family"))
        .collect()
}

/// `Tensor::abs of Float`, `activation::relu`: what burn has, and what is ours.
fn both() -> [BTreeSet<String>; 2] {
    let [burns, ours] = [methods::of_burn(), methods::ours()];
    [
        burns.into_iter().chain(functions::of_burn()).collect(),
        ours.into_iter().chain(functions::ours()).collect(),
    ]
}

/// Without the kind.
fn name(listed: &str) -> &str {
    listed.split(' ').next().expect("a name")
}

#[test]
fn burns_methods_and_functions_have_their_forms_or_a_reason() {
    let ([burns, ours], excepted) = (both(), excepted());
    assert!(
        burns.len() > 400,
        "burn's sources were not understood: {burns:?}"
    );
    let lacking = burns
        .difference(&ours)
        .filter(|listed| !excepted.contains(name(listed)));
    let lacking = lacking.collect_vec();
    assert!(
        lacking.is_empty(),
        "burn has them, DTensors have not, and no exception says why: {lacking:?}"
    );
}

#[test]
fn an_exception_is_burns_and_not_ours() {
    let [burns, ours] = both();
    let burns: BTreeSet<&str> = burns.difference(&ours).map(|listed| name(listed)).collect();
    let idle = excepted()
        .into_iter()
        .filter(|name| !burns.contains(name.as_str()))
        .collect_vec();
    assert!(
        idle.is_empty(),
        "burn has them no more, or they are ours now: take them off the table: {idle:?}"
    );
}

#[test]
fn a_name_stands_in_the_table_once_with_its_reason() {
    let all = EXCEPTIONS.iter().flat_map(|(names, _)| *names);
    let twice = all.duplicates().collect_vec();
    assert!(twice.is_empty(), "{twice:?}");
    assert!(EXCEPTIONS.iter().all(|(_, reason)| reason.contains(' ')));
}
