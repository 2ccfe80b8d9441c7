//! Public functions of burn's, by module, and ours: `activation::relu`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Item, Visibility};

use super::super::list::{files, functions, macro_bodies, names_of_macro, tokens};
use super::sources::{is_test, of_crate, parsed};

/// Of a module: its crate and its sources there, and our sources of the same functions.
const FAMILIES: [(&str, &str, &str, &[&str]); 9] = [
    (
        "activation",
        "burn-tensor",
        "tensor/activation",
        &["ops/activation.rs"],
    ),
    ("grid", "burn-tensor", "tensor/grid", &["ops/grid.rs"]),
    ("loss", "burn-tensor", "tensor/loss", &["ops/loss"]),
    (
        "module",
        "burn-tensor",
        "tensor/module.rs",
        &["ops/module.rs"],
    ),
    ("quantization", "burn-tensor", "tensor/quantization.rs", &[]),
    ("distributed", "burn-tensor", "tensor/distributed.rs", &[]),
    (
        "linalg",
        "burn-linalg",
        "functions",
        &["ops/linalg.rs", "ops/linalg"],
    ),
    ("signal", "burn-signal", "functions", &["ops/signal.rs"]),
    ("tensor", "burn-tensor", "tensor/api", &["factory.rs"]),
];

/// More of what is at the root.
const ROOT: (&str, &str) = ("burn-tensor", "tensor/report.rs");

/// Those of burn.
pub fn of_burn() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let families = FAMILIES.map(|(family, from, at, _)| (family, from, at));
    for (family, from, at) in families.into_iter().chain([("tensor", ROOT.0, ROOT.1)]) {
        let sources = sources(&of_crate(from).join(at));
        assert!(!sources.is_empty(), "`{family}` has no sources at {at}");
        // What checks arguments, and how einsum runs, are not public.
        let public = sources
            .into_iter()
            .filter(|path| !path.ends_with("check.rs") && !path.ends_with("execution.rs"));
        for item in public.flat_map(|path| parsed(&path).items) {
            if let Item::Fn(function) = item
                && matches!(function.vis, Visibility::Public(_))
                && !is_test(&function.attrs)
            {
                all.insert(format!("{family}::{}", function.sig.ident));
            }
        }
    }
    all
}

/// Ours.
pub fn ours() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dtensor");
    let mut all = BTreeSet::new();
    for (family, _, _, ours) in FAMILIES {
        for path in ours.iter().flat_map(|at| sources(&root.join(at))) {
            let source = tokens(&fs::read_to_string(&path).expect("a source"));
            // Operators of several files: what `module` says again is what there is.
            let again = source.iter().filter(|_| family == "module").cloned();
            let names: Vec<String> = again
                .chain(functions(&source))
                .chain(of_macros(&source))
                .collect();
            all.extend(names.into_iter().map(|name| format!("{family}::{name}")));
        }
    }
    all
}

/// What a source's own macros make.
fn of_macros(source: &[String]) -> Vec<String> {
    let mut names = Vec::new();
    for (name, body) in macro_bodies(source) {
        for (at, window) in source.windows(3).enumerate() {
            if [name, "!", "{"] == [&window[0], &window[1], &window[2]].map(String::as_str) {
                names.extend(names_of_macro(body, &source[at + 3..]));
            }
        }
    }
    names
}

/// A file, or all of a folder's.
fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        files(path)
    } else {
        vec![path.to_owned()]
    }
}
