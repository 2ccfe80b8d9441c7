//! The operators that there are, as their sources say: what must have a case.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use itertools::Itertools;

/// Files of operators that are none: how rules are written, decided and run.
const MACHINERY: [&str; 27] = [
    "apply",
    "config",
    "cost_model",
    "crop",
    "einsum_rule",
    "empty",
    "exchange",
    "explain",
    "local_map",
    "lookup",
    "methods",
    "operand",
    "operator",
    "partial_rules",
    "plan",
    "policy",
    "replicated",
    "resolve_sharding",
    "rule",
    "select_strategy",
    "shard_summaries",
    "sharding_context",
    "strategy_cost",
    "subscripts",
    "tests",
    "update",
    "window",
];

/// Functions beside operators: methods of a loss and of its configuration, seeds and streams, plain
/// random tensors.
const EXTRA: [&str; 10] = [
    "forward",
    "forward_no_reduction",
    "fold_in",
    "init",
    "next_seed",
    "next_seed_on",
    "rng_state",
    "seed",
    "set_rng_state",
    "tensor",
];

/// Local functions that a macro names beside the operator.
const LOCAL: [&str; 2] = ["avg_pool", "max_pool"];

/// Layers with a rule of their own.
pub const LAYERS: [&str; 3] = [
    "local_response_norm",
    "positional_encoding",
    "rotary_encoding",
];

/// The names of all operators.
pub fn operators() -> BTreeSet<String> {
    let mut names = BTreeSet::from(LAYERS.map(String::from));
    let sources: Vec<Vec<String>> =
        files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dtensor/ops"))
            .into_iter()
            .filter(|file| {
                !MACHINERY.contains(
                    &file
                        .file_stem()
                        .expect("a name")
                        .to_str()
                        .expect("a name of ASCII"),
                )
            })
            .map(|file| tokens(&fs::read_to_string(file).expect("a source")))
            .collect();
    let shared = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dtensor/ops/methods.rs"),
    );
    let shared = tokens(&shared.expect("a source"));
    let macros: BTreeMap<&str, &[String]> = sources
        .iter()
        .chain([&shared])
        .flat_map(|source| macro_bodies(source))
        .collect();
    for source in &sources {
        names.extend(functions(source));
        for (at, window) in source.windows(3).enumerate() {
            if let [name, bang, open] = window
                && let Some(made_of) = macros.get(name.as_str())
                && (bang.as_str(), open.as_str()) == ("!", "{")
            {
                names.extend(names_of_macro(made_of, &source[at + 3..]));
            }
        }
    }
    for other in EXTRA.into_iter().chain(LOCAL) {
        assert!(
            names.remove(other),
            "`{other}` is gone from the sources: take it off the list of exceptions"
        );
    }
    names
}

pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .expect("a folder of sources")
        .map(|entry| entry.expect("an entry").path());
    entries
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![path]
            }
        })
        .sorted()
        .collect()
}

/// Words, and signs one by one; no comments, no strings.
pub fn tokens(source: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    for line in source.lines() {
        let outside = line.split("//").next().expect("a first part");
        for (at, part) in outside.split('"').enumerate() {
            // Within a string.
            if at % 2 == 1 {
                continue;
            }
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            for (word, group) in &part.chars().chunk_by(|&c| is_word(c)) {
                match word {
                    true => tokens.push(group.collect()),
                    false => tokens.extend(group.filter(|c| !c.is_whitespace()).map(String::from)),
                }
            }
        }
    }
    tokens
}

/// What is written out as `pub fn`.
pub fn functions(source: &[String]) -> impl Iterator<Item = String> + '_ {
    let named = |window: &&[String]| window[0] == "pub" && window[1] == "fn" && window[2] != "$";
    source
        .windows(3)
        .filter(named)
        .map(|window| window[2].clone())
}

/// The macros that write a `pub fn`, and what they are made of.
pub fn macro_bodies(source: &[String]) -> impl Iterator<Item = (&str, &[String])> {
    let places = source.iter().positions(|token| token == "macro_rules");
    let bodies = places.map(|at| (source[at + 2].as_str(), body(&source[at + 4..])));
    bodies.filter(|(_, body)| body.windows(2).any(|window| window == ["pub", "fn"]))
}

/// What an invocation of a macro makes: the names that it is given, if the macro takes names, and
/// those that the macro has of its own.
pub fn names_of_macro(made_of: &[String], given: &[String]) -> Vec<String> {
    let takes_names = made_of
        .windows(3)
        .any(|window| window == ["pub", "fn", "$"]);
    let given = if takes_names {
        invoked(given)
    } else {
        Vec::new()
    };
    given.into_iter().chain(functions(made_of)).collect()
}

/// Up to the bracket that closes what is open, or to the end.
fn body(source: &[String]) -> &[String] {
    let mut depth = 1;
    let end = source.iter().position(|token| {
        depth +=
            i32::from("{([".contains(token.as_str())) - i32::from("})]".contains(token.as_str()));
        depth == 0
    });
    &source[..end.unwrap_or(source.len())]
}

/// The names that an invocation gives: `name: table`, `name other: table`, `(arguments): table`.
fn invoked(source: &[String]) -> Vec<String> {
    let (mut names, mut depth) = (Vec::new(), 0);
    let body = body(source);
    for (at, token) in body.iter().enumerate() {
        depth +=
            i32::from("{([".contains(token.as_str())) - i32::from("})]".contains(token.as_str()));
        let is_name = depth == 0 && token.starts_with(|c: char| c.is_lowercase());
        // A table, or a condition on it: but for `Bound: name`.
        let upper = |token: &String| token.starts_with(char::is_uppercase);
        let is_table = at > 0 && body[at - 1] == ":" && !(at > 1 && upper(&body[at - 2]));
        if is_name && !is_table {
            names.push(token.clone());
        }
    }
    names
}
