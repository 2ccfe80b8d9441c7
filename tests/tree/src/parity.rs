//! `docs/parity.md`: a row for each capability of PyTorch's tests, and the tests of this repository
//! that show it.
//!
//! A row names tests as `` `path::test` ``. A test that the README's command does not build has the
//! features that it needs after it: `` `path::test` (mpi) ``.

use std::fs;
use std::path::Path;

use crate::programs::{files, tests};
use crate::root;

/// The number of capabilities, numbered from F1.
const ROWS: usize = 97;
const COLUMNS: usize = 5;

#[test]
fn every_capability_has_a_row_and_every_row_names_tests_that_run() {
    let page = fs::read_to_string(root().join("docs/parity.md")).expect("the page");
    assert_eq!(faults(&page, ROWS), [""; 0]);
}

/// Every test that the page names anywhere, also outside the table, exists.
#[test]
fn tests_that_the_text_names_exist() {
    let page = fs::read_to_string(root().join("docs/parity.md")).expect("the page");
    let quoted = page.split('`').skip(1).step_by(2);
    let named = quoted.filter(|text| text.contains(".rs::"));
    let faults: Vec<_> = named.filter_map(|test| needs_of(test).err()).collect();
    assert_eq!(faults, [""; 0]);
}

#[test]
fn rows_and_tests_that_are_missing_are_found() {
    let this = "tests/suite/testing.rs::a_failing_rank_fails_the_test_with_its_message";
    let row = |id: &str, tests: &str, remark: &str| {
        format!("| {id} | a test | a capability | {tests} | {remark} |\n")
    };
    let good =
        row("F1", &format!("`{this}`"), "") + &row("F2", "not yet", "") + &row("F3", "none", "why");
    assert_eq!(faults(&good, 3), [""; 0]);

    let faults_of = |rows: &str| faults(rows, 1);
    assert_eq!(faults(&good, 4), ["rows F1, F2, F3, expected F1 to F4"]);
    assert_eq!(
        faults(&(row("F2", "not yet", "") + &row("F1", "not yet", "")), 2),
        ["rows F2, F1, expected F1 to F2"]
    );
    assert_eq!(
        faults_of("| F1 | four | cells | not yet |\n"),
        ["F1 has 4 cells, expected 5"]
    );
    assert_eq!(
        faults_of(&row("F1", "none", "")),
        ["F1 does not say why it has no test"]
    );
    assert_eq!(
        faults_of(&row("F1", "", "why")),
        ["F1 names no test, and says neither `not yet` nor `none`"]
    );
    let processes = "tests/suite/processes.rs::two_processes_conform";
    for (test, fault) in [
        (
            "`tests/suite/testing.rs`".into(),
            "`tests/suite/testing.rs` is not of the form `path::test`".into(),
        ),
        (
            "`tests/suite/testing.rs::no_such`".into(),
            "no test `no_such` in `tests/suite/testing.rs`".into(),
        ),
        (
            "`tests/suite/gone.rs::any`".into(),
            "`tests/suite/gone.rs` is part of no test program".into(),
        ),
        (
            "`tests/sanitized.rs::any`".into(),
            "`tests/sanitized.rs` is part of no test program".into(),
        ),
        (
            format!("`{processes}`"),
            format!("`{processes}` needs features that the row does not say: (mpi)"),
        ),
        (
            format!("`{processes}` (wgpu)"),
            format!("`{processes}` needs features that the row does not say: (mpi)"),
        ),
        (
            format!("`{this}` (mpi)"),
            format!("`{this}` needs no features"),
        ),
    ] {
        assert_eq!(faults_of(&row("F1", &test, "")), [format!("F1: {fault}")]);
    }
    assert_eq!(
        faults_of(&row("F1", &format!("`{processes}` (mpi), `{this}`"), "")),
        [""; 0]
    );
}

/// Returns what is wrong with a page that should have rows F1 to F`rows`.
fn faults(page: &str, rows: usize) -> Vec<String> {
    let lines = page.lines().filter(|line| line.starts_with("| F"));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|')
            .split(" | ")
            .map(|cell| cell.trim().into())
            .collect()
    };
    let table: Vec<_> = lines.map(cells).collect();
    let ids: Vec<_> = table.iter().map(|row| row[0].clone()).collect();
    let mut faults = Vec::new();
    if ids
        != (1..=rows)
            .map(|number| format!("F{number}"))
            .collect::<Vec<_>>()
    {
        faults.push(format!("rows {}, expected F1 to F{rows}", ids.join(", ")));
    }
    for row in &table {
        let [id, _, _, tests, remark] = row.as_slice() else {
            faults.push(format!(
                "{} has {} cells, expected {COLUMNS}",
                row[0],
                row.len()
            ));
            continue;
        };
        match tests.as_str() {
            "not yet" => {}
            "none" if remark.is_empty() => {
                faults.push(format!("{id} does not say why it has no test"))
            }
            "none" => {}
            tests if !tests.contains('`') => {
                faults.push(format!(
                    "{id} names no test, and says neither `not yet` nor `none`"
                ));
            }
            tests => faults.extend(
                tests
                    .split(", `")
                    .filter_map(|test| Some(format!("{id}: {}", fault_of(test)?))),
            ),
        }
    }
    faults
}

/// Returns what is wrong with a test that a row names, as `` `path::test` (feature) ``, without its
/// first backquote or with it.
fn fault_of(test: &str) -> Option<String> {
    let (name, features) = test
        .trim_start_matches('`')
        .split_once('`')
        .unwrap_or((test, ""));
    let needs = match needs_of(name) {
        Ok([]) => String::new(),
        Ok(needs) => format!("({})", needs.join(", ")),
        Err(fault) => return Some(fault),
    };
    match features.trim() {
        said if said == needs => None,
        _ if needs.is_empty() => Some(format!("`{name}` needs no features")),
        _ => Some(format!(
            "`{name}` needs features that the row does not say: {needs}"
        )),
    }
}

/// Returns the features that `path::test` needs beside those of the README's command.
///
/// # Errors
/// The reason, where there is no such test.
fn needs_of(test: &str) -> Result<&'static [&'static str], String> {
    let Some((path, name)) = test.split_once("::") else {
        return Err(format!("`{test}` is not of the form `path::test`"));
    };
    if !files().contains(Path::new(path)) {
        return Err(format!("`{path}` is part of no test program"));
    }
    let found = tests()
        .iter()
        .filter(|test| test.file == Path::new(path) && test.name == name);
    let needs = found.map(|test| test.needs).min_by_key(|needs| needs.len());
    needs.ok_or_else(|| format!("no test `{name}` in `{path}`"))
}
