//! `tests/planted`: each patch names the tests that find its error, and these exist.

use std::fs;

use crate::programs::tests;
use crate::root;

#[test]
fn planted_errors_are_found_by_tests_that_exist() {
    let folder = root().join("tests/planted");
    let patches = fs::read_dir(folder)
        .expect("the folder of planted errors")
        .map(|entry| entry.expect("an entry").path());
    let mut found = 0;
    let faults = patches.filter_map(|patch| {
        found += 1;
        let text = fs::read_to_string(&patch).expect("a patch");
        let header = text.split("\ndiff --git ").next().unwrap_or_default();
        fault_of(header).map(|fault| {
            format!(
                "{}: {fault}",
                patch.file_name().unwrap_or_default().display()
            )
        })
    });
    assert_eq!(faults.collect::<Vec<_>>(), [""; 0]);
    assert!(found > 0, "tests/planted is empty");
}

#[test]
fn filters_that_match_no_test_are_found() {
    assert_eq!(
        fault_of("An error.\nfound by: suite fsdp::runtime_options\n"),
        None
    );
    assert_eq!(fault_of("An error.\nfound by: rendezvous-model\n"), None);
    for (header, fault) in [
        ("An error.\n", "0 lines `found by: ..`, expected 1"),
        (
            "found by: suite fsdp\nfound by: lib comm\n",
            "2 lines `found by: ..`, expected 1",
        ),
        (
            "found by: suite no_such_test\n",
            "no test of `suite` matches `no_such_test`",
        ),
        (
            "found by: lib fsdp::runtime_options::gradients_are_divided\n",
            "no test of `lib` matches `fsdp::runtime_options::gradients_are_divided`",
        ),
        ("found by: gone-model\n", "there is no tests/gone-model"),
        ("found by: luck\n", "`luck` names no program of tests"),
    ] {
        assert_eq!(fault_of(header).as_deref(), Some(fault));
    }
}

/// Returns what is wrong with the lines of a patch before its first change.
fn fault_of(header: &str) -> Option<String> {
    let by: Vec<_> = header
        .lines()
        .filter_map(|line| line.strip_prefix("found by: "))
        .collect();
    let [by] = by[..] else {
        return Some(format!("{} lines `found by: ..`, expected 1", by.len()));
    };
    let (program, filter) = match by {
        "random_programs" => ("operators", by),
        "random_trees" => ("suite", by),
        "sanitize" => return None,
        model if model.ends_with("-model") => {
            let exists = root().join("tests").join(model).join("Cargo.toml").exists();
            return (!exists).then(|| format!("there is no tests/{model}"));
        }
        _ => by.split_once(' ').unwrap_or((by, "")),
    };
    if !["lib", "operators", "suite", "memory", "downstream", "train"].contains(&program)
        || filter.is_empty()
    {
        return Some(format!("`{by}` names no program of tests"));
    }
    let is_found = tests()
        .iter()
        .any(|test| test.program == program && test.path.contains(filter));
    (!is_found).then(|| format!("no test of `{program}` matches `{filter}`"))
}
