//! `docs/parity.md`: a line per capability of PyTorch's tests, and the test of ours that shows it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use syn::{Attribute, File, Item, ItemFn, ItemMacro};

/// The capabilities are numbered from F1.
const ROWS: usize = 97;
const COLUMNS: usize = 5;
/// Where the compiler starts reading tests.
const ROOTS: [&str; 6] = [
    "tests/suite/main.rs",
    "tests/memory/main.rs",
    "tests/seeded.rs",
    "tests/spans.rs",
    "tests/downstream/tests/downstream.rs",
    "src/lib.rs",
];

#[test]
fn every_capability_has_a_row_and_every_row_names_tests_that_run() {
    let page = fs::read_to_string(root().join("docs/parity.md")).expect("the page");
    assert_eq!(faults(&page, ROWS), [""; 0]);
}

#[test]
fn rows_and_tests_that_are_not_there_are_found() {
    let this = "tests/suite/parity.rs::rows_and_tests_that_are_not_there_are_found";
    let row = |id: &str, tests: &str, remark: &str| format!("| {id} | a test | a capability | {tests} | {remark} |\n");
    let good = row("F1", &format!("`{this}`"), "") + &row("F2", "not yet", "") + &row("F3", "none", "why");
    assert_eq!(faults(&good, 3), [""; 0]);

    let faults_of = |rows: &str| faults(rows, 1);
    assert_eq!(faults(&good, 4), ["rows F1, F2, F3, expected F1 to F4"]);
    assert_eq!(faults(&(row("F2", "not yet", "") + &row("F1", "not yet", "")), 2), ["rows F2, F1, expected F1 to F2"]);
    assert_eq!(faults_of("| F1 | four | cells | not yet |\n"), ["F1 has 4 cells, expected 5"]);
    assert_eq!(faults_of(&row("F1", "none", "")), ["F1 says not why it has no test"]);
    assert_eq!(faults_of(&row("F1", "", "why")), ["F1 names no test, and says neither `not yet` nor `none`"]);
    for (test, fault) in [
        ("tests/suite/parity.rs", "`tests/suite/parity.rs` is no `path::test`"),
        ("tests/suite/parity.rs::faults", "no test `faults` in `tests/suite/parity.rs`"),
        ("tests/suite/parity.rs::no_such", "no test `no_such` in `tests/suite/parity.rs`"),
        ("tests/suite/gone.rs::any", "`tests/suite/gone.rs` is part of no test program"),
        ("tests/sanitized.rs::any", "`tests/sanitized.rs` is part of no test program"),
    ] {
        assert_eq!(faults_of(&row("F1", &format!("`{test}`"), "")), [format!("F1: {fault}")]);
    }

    let file = |text| syn::parse_file(text).expect("Rust");
    let made =
        "macro_rules! checks { ($($t:ident: $e:expr;)*) => {$(#[test] fn $t() { $e })*} } checks! { a: b; c: d; }";
    assert_eq!(tests_of(&file(made)), ["a", "c"]);
    let plain = "fn a() {} #[test] fn b() {} #[test] #[ignore] fn c() {} mod m { #[test] #[should_panic] fn d() {} }";
    assert_eq!(tests_of(&file(plain)), ["b", "d"]);
    assert_eq!(tests_of(&file("mesh_test!(a, [2], [\"b\"], |mesh| Ok(()));")), ["a"]);
    assert_eq!(tests_of(&file("other! { a: b }")), [""; 0]);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What is wrong with a page that should have rows F1 to F`rows`, in words.
fn faults(page: &str, rows: usize) -> Vec<String> {
    let lines: Vec<_> = page.lines().filter(|line| line.starts_with("| F")).collect();
    let cells =
        |line: &&str| -> Vec<String> { line.trim_matches('|').split(" | ").map(|cell| cell.trim().into()).collect() };
    let table: Vec<_> = lines.iter().map(cells).collect();
    let ids: Vec<_> = table.iter().map(|row| row[0].clone()).collect();
    let mut faults = Vec::new();
    if ids != (1..=rows).map(|number| format!("F{number}")).collect::<Vec<_>>() {
        faults.push(format!("rows {}, expected F1 to F{rows}", ids.join(", ")));
    }
    let programs: BTreeSet<PathBuf> = ROOTS.iter().flat_map(|file| reachable(&root().join(file))).collect();
    for row in &table {
        let [id, _, _, tests, remark] = row.as_slice() else {
            faults.push(format!("{} has {} cells, expected {COLUMNS}", row[0], row.len()));
            continue;
        };
        match tests.as_str() {
            "not yet" => {}
            "none" if remark.is_empty() => faults.push(format!("{id} says not why it has no test")),
            "none" => {}
            tests if !tests.contains('`') => {
                faults.push(format!("{id} names no test, and says neither `not yet` nor `none`"));
            }
            tests => {
                let named = tests.split(", ").map(|test| test.trim_matches('`'));
                faults.extend(named.filter_map(|test| Some(format!("{id}: {}", fault_of(test, &programs)?))));
            }
        }
    }
    faults
}

/// What is wrong with `path::test`.
fn fault_of(test: &str, programs: &BTreeSet<PathBuf>) -> Option<String> {
    let Some((path, name)) = test.split_once("::") else { return Some(format!("`{test}` is no `path::test`")) };
    let file = root().join(path);
    if !programs.contains(&file) {
        return Some(format!("`{path}` is part of no test program"));
    }
    (!tests_of(&parsed(&file)).iter().any(|found| found == name)).then(|| format!("no test `{name}` in `{path}`"))
}

fn parsed(file: &Path) -> File {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    syn::parse_file(&text).expect("Rust")
}

/// The files of a program whose root is `file`.
fn reachable(file: &Path) -> Vec<PathBuf> {
    let folder = file.parent().expect("a file's folder");
    let inside = match file.file_stem().and_then(|stem| stem.to_str()).expect("a name") {
        "main" | "lib" | "mod" => folder.to_path_buf(),
        _ if ROOTS.iter().any(|root_file| root().join(root_file) == file) => folder.to_path_buf(),
        stem => folder.join(stem),
    };
    let mut files = vec![file.to_path_buf()];
    for item in &parsed(file).items {
        let Item::Mod(module) = item else { continue };
        let name = module.ident.to_string();
        let at =
            [inside.join(format!("{name}.rs")), inside.join(&name).join("mod.rs")].into_iter().find(|at| at.exists());
        files.extend(at.filter(|_| module.content.is_none()).iter().flat_map(|at| reachable(at)));
    }
    files
}

/// The names of a file's tests: functions under `#[test]`, what a macro of the file makes such functions of, and what
/// `mesh_test!` does.
fn tests_of(file: &File) -> Vec<String> {
    tests_in(&file.items, &makers(&file.items))
}

fn tests_in(items: &[Item], makers: &[String]) -> Vec<String> {
    let tests = |item: &Item| match item {
        Item::Fn(ItemFn { attrs, sig, .. }) if has(attrs, "test") && !has(attrs, "ignore") => {
            vec![sig.ident.to_string()]
        }
        Item::Mod(module) => module.content.iter().flat_map(|(_, items)| tests_in(items, makers)).collect(),
        Item::Macro(call) if call.mac.path.segments.last().is_some_and(|name| name.ident == "mesh_test") => {
            call.mac.tokens.clone().into_iter().take(1).map(|name| name.to_string()).collect()
        }
        Item::Macro(call) if makers.iter().any(|maker| call.mac.path.is_ident(maker)) => {
            let names = call.mac.tokens.clone().into_iter().map(|token| token.to_string()).tuple_windows();
            let is_first = |before: &str| [";", ","].contains(&before);
            let mut before = ";".to_string();
            let mut found = Vec::new();
            for (name, colon) in names {
                if colon == ":" && is_first(&before) {
                    found.push(name.clone());
                }
                before = name;
            }
            found
        }
        _ => vec![],
    };
    items.iter().flat_map(tests).collect()
}

/// The macros that write `#[test]`.
fn makers(items: &[Item]) -> Vec<String> {
    let maker = |item: &Item| match item {
        Item::Macro(ItemMacro { ident: Some(name), mac, .. }) => {
            mac.tokens.to_string().replace(' ', "").contains("#[test]").then(|| name.to_string())
        }
        _ => None,
    };
    items.iter().filter_map(maker).collect()
}

fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident(name))
}
