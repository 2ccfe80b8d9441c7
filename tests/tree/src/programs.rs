//! The test programs of the repository: which tests each has, and under which features.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use itertools::Itertools;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{Attribute, File, Item, ItemMacro, Meta, Token};

use crate::root;

/// The test programs that `cargo test` builds: their names, as [`Test::program`] has them, and the
/// files that the compiler reads first.
const PROGRAMS: [(&str, &str); 9] = [
    ("operators", "tests/operators/main.rs"),
    ("suite", "tests/suite/main.rs"),
    ("memory", "tests/memory/main.rs"),
    ("seeded", "tests/seeded.rs"),
    ("spans", "tests/spans.rs"),
    ("train", "tests/train/main.rs"),
    ("downstream", "tests/downstream/tests/downstream.rs"),
    ("flight", "crates/burn-dtensor-flight/src/lib.rs"),
    ("lib", "src/lib.rs"),
];

/// The features in which the README's test command builds these programs.
const DEFAULT: [&str; 6] = ["default", "flex", "anyhow", "dataset", "store", "testing"];

/// The sets of features that a test may need in addition, smallest first.
const ADDED: [&[&str]; 6] = [
    &[],
    &["mpi"],
    &["wgpu"],
    &["mpi", "wgpu"],
    &["train"],
    &["mpi", "train"],
];

/// A test function that some set of features builds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test {
    /// The program that it is part of: `lib` and `flight` for the crates' own tests, else the name
    /// of a test target.
    pub program: &'static str,
    /// The file that defines it, from the root of the repository.
    pub file: PathBuf,
    /// Its path as the test harness prints it: `fsdp::runtime_options::factors`.
    pub path: String,
    /// The name of its function, or of the `mesh_test!` that defines it.
    pub name: String,
    /// The features that it needs in addition to those of the README's test command.
    pub needs: &'static [&'static str],
}

/// Returns every test of every program.
pub fn tests() -> &'static [Test] {
    &walked().tests
}

/// Returns the files of all programs, also those without tests, from the root of the repository.
pub fn files() -> &'static BTreeSet<PathBuf> {
    &walked().files
}

/// Walks through all programs, once.
fn walked() -> &'static Walk {
    static WALKED: OnceLock<Walk> = OnceLock::new();
    WALKED.get_or_init(|| {
        let mut walk = Walk {
            program: "",
            tests: Vec::new(),
            files: BTreeSet::new(),
        };
        for (program, file) in PROGRAMS.map(|(program, file)| (program, Path::new(file))) {
            walk.program = program;
            walk.file(
                file,
                file.parent().expect("a source is in a folder"),
                &[],
                &[],
            );
        }
        walk
    })
}

/// Returns the tests of one text, as if it were a whole program.
#[cfg(test)]
fn of_text(text: &str) -> Vec<Test> {
    let mut walk = Walk {
        program: "text",
        tests: Vec::new(),
        files: BTreeSet::new(),
    };
    walk.items(
        &syn::parse_file(text).expect("Rust"),
        Path::new("text.rs"),
        Path::new(""),
        &[],
        &[],
    );
    walk.tests
}

/// A walk through the modules of programs.
struct Walk {
    program: &'static str,
    tests: Vec<Test>,
    files: BTreeSet<PathBuf>,
}

impl Walk {
    /// Reads a file whose modules lie in `folder`.
    fn file(&mut self, file: &Path, folder: &Path, path: &[String], conditions: &[Meta]) {
        let text = fs::read_to_string(root().join(file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let parsed =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.files.insert(file.to_path_buf());
        self.items(&parsed, file, folder, path, conditions);
    }

    fn items(
        &mut self,
        parsed: &File,
        file: &Path,
        folder: &Path,
        path: &[String],
        conditions: &[Meta],
    ) {
        let conditions = [conditions, &cfgs(&parsed.attrs)].concat();
        self.walk(
            &parsed.items,
            &makers(&parsed.items),
            file,
            folder,
            path,
            &conditions,
        );
    }

    fn walk(
        &mut self,
        items: &[Item],
        makers: &[String],
        file: &Path,
        folder: &Path,
        path: &[String],
        conditions: &[Meta],
    ) {
        for item in items {
            match item {
                Item::Fn(function)
                    if has(&function.attrs, "test") && !has(&function.attrs, "ignore") =>
                {
                    let conditions = [conditions, &cfgs(&function.attrs)].concat();
                    self.add(
                        file,
                        path,
                        &function.sig.ident.to_string(),
                        None,
                        &conditions,
                    );
                }
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let inside = [path, std::slice::from_ref(&name)].concat();
                    let conditions = [conditions, &cfgs(&module.attrs)].concat();
                    if let Some((_, items)) = &module.content {
                        self.walk(
                            items,
                            makers,
                            file,
                            &folder.join(&name),
                            &inside,
                            &conditions,
                        );
                    } else {
                        let explicit =
                            path_of(&module.attrs).map(|at| normalized(&file.with_file_name(at)));
                        let candidates = [
                            folder.join(format!("{name}.rs")),
                            folder.join(&name).join("mod.rs"),
                        ];
                        let found = explicit
                            .into_iter()
                            .chain(candidates)
                            .find(|at| root().join(at).exists());
                        let found = found.unwrap_or_else(|| {
                            panic!("no file of module {name} of {}", file.display())
                        });
                        self.file(&found, &folder.join(&name), &inside, &conditions);
                    }
                }
                Item::Macro(call) => self.macro_call(call, makers, file, path, conditions),
                _ => {}
            }
        }
    }

    /// Adds the tests that a call of `mesh_test!`, or of a macro of the same file, defines.
    fn macro_call(
        &mut self,
        call: &ItemMacro,
        makers: &[String],
        file: &Path,
        path: &[String],
        conditions: &[Meta],
    ) {
        let conditions = [conditions, &cfgs(&call.attrs)].concat();
        let mut tokens = call
            .mac
            .tokens
            .clone()
            .into_iter()
            .map(|token| token.to_string())
            .peekable();
        if call
            .mac
            .path
            .segments
            .last()
            .is_some_and(|name| name.ident == "mesh_test")
        {
            while tokens.next_if_eq("#").is_some() {
                tokens.next();
            }
            let name = tokens.next().expect("a mesh_test has a name");
            self.add(file, path, &name, Some("threads"), &conditions);
            let mpi: Meta = syn::parse_str("feature = \"mpi\"").expect("a condition");
            self.add(
                file,
                path,
                &name,
                Some("processes"),
                &[&conditions[..], &[mpi]].concat(),
            );
        } else if makers.iter().any(|maker| call.mac.path.is_ident(maker)) {
            let tokens: Vec<_> = [";".to_string()].into_iter().chain(tokens).collect();
            for (before, name, colon) in tokens.iter().tuple_windows() {
                if colon == ":" && [";", ","].contains(&before.as_str()) {
                    self.add(file, path, name, None, &conditions);
                }
            }
        }
    }

    /// Adds a test, unless no set of features builds it.
    fn add(
        &mut self,
        file: &Path,
        path: &[String],
        name: &str,
        variant: Option<&str>,
        conditions: &[Meta],
    ) {
        let holds = |added: &&&[&str]| conditions.iter().all(|condition| holds(condition, added));
        let Some(needs) = ADDED.iter().find(holds) else {
            return;
        };
        let path = path
            .iter()
            .map(String::as_str)
            .chain([name])
            .chain(variant)
            .join("::");
        self.tests.push(Test {
            program: self.program,
            file: file.into(),
            path,
            name: name.into(),
            needs,
        });
    }
}

/// Returns the names of the macros that write `#[test]`.
fn makers(items: &[Item]) -> Vec<String> {
    let maker = |item: &Item| match item {
        Item::Macro(ItemMacro {
            ident: Some(name),
            mac,
            ..
        }) => mac
            .tokens
            .to_string()
            .replace(' ', "")
            .contains("#[test]")
            .then(|| name.to_string()),
        _ => None,
    };
    items.iter().filter_map(maker).collect()
}

fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes
        .iter()
        .any(|attribute| attribute.path().is_ident(name))
}

/// Returns the value of `#[path = ".."]`.
pub(crate) fn path_of(attributes: &[Attribute]) -> Option<String> {
    let path = attributes
        .iter()
        .find(|attribute| attribute.path().is_ident("path"))?;
    let Meta::NameValue(pair) = &path.meta else {
        return None;
    };
    let syn::Expr::Lit(syn::ExprLit {
        lit: syn::Lit::Str(value),
        ..
    }) = &pair.value
    else {
        return None;
    };
    Some(value.value())
}

/// Returns a path without `..`.
fn normalized(path: &Path) -> PathBuf {
    path.components()
        .fold(PathBuf::new(), |mut path, component| {
            match component {
                Component::ParentDir => drop(path.pop()),
                component => path.push(component),
            }
            path
        })
}

/// Returns the conditions of all `cfg` attributes.
fn cfgs(attributes: &[Attribute]) -> Vec<Meta> {
    let cfgs = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"));
    cfgs.map(|cfg| {
        cfg.parse_args::<Meta>()
            .expect("a cfg attribute holds one condition")
    })
    .collect()
}

/// Returns true if `condition` holds in a test program on Linux that is built with the default and
/// `added` features.
fn holds(condition: &Meta, added: &[&str]) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test") || path.is_ident("unix"),
        Meta::NameValue(pair) => {
            let syn::Expr::Lit(syn::ExprLit {
                lit: syn::Lit::Str(value),
                ..
            }) = &pair.value
            else {
                panic!("the value of a cfg condition is a string");
            };
            match value.value().as_str() {
                "cube" => added.contains(&"wgpu"),
                feature if pair.path.is_ident("feature") => {
                    DEFAULT.contains(&feature) || added.contains(&feature)
                }
                target => ["linux", "x86_64"].contains(&target),
            }
        }
        Meta::List(list) => {
            let parts = Punctuated::<Meta, Token![,]>::parse_terminated.parse2(list.tokens.clone());
            let parts = parts.expect("all, any and not hold conditions");
            let mut parts = parts.iter().map(|part| holds(part, added));
            match list
                .path
                .require_ident()
                .map(ToString::to_string)
                .as_deref()
            {
                Ok("all") => parts.all(|part| part),
                Ok("any") => parts.any(|part| part),
                Ok("not") => !parts.any(|part| part),
                other => panic!("unknown condition {other:?}"),
            }
        }
    }
}

#[cfg(test)]
mod checks {
    use super::*;

    fn found(text: &str) -> Vec<(String, &'static [&'static str])> {
        of_text(text)
            .into_iter()
            .map(|test| (test.path, test.needs))
            .collect()
    }

    #[test]
    fn tests_are_found_with_the_features_that_they_need() {
        let text = "fn a() {} #[test] fn b() {} #[test] #[ignore] fn c() {} mod m { #[test] #[should_panic] fn d() {} }";
        assert_eq!(found(text), [("b".into(), &[][..]), ("m::d".into(), &[])]);
        let text = "#![cfg(test)] #[cfg(feature = \"mpi\")] mod m { #[cfg(feature = \"cube\")] #[test] fn a() {} }
            #[cfg(all(test, not(feature = \"flex\")))] #[test] fn never() {}
            #[cfg(any(feature = \"wgpu\", target_os = \"linux\"))] #[test] fn b() {}";
        assert_eq!(
            found(text),
            [("m::a".into(), &["mpi", "wgpu"][..]), ("b".into(), &[])]
        );
    }

    #[test]
    fn tests_that_macros_define_are_found() {
        let text = "mesh_test!(#[allow(unused)] a, [2], [\"b\"], |mesh| Ok(()));";
        assert_eq!(
            found(text),
            [
                ("a::threads".into(), &[][..]),
                ("a::processes".into(), &["mpi"])
            ]
        );
        let text = "macro_rules! checks { ($($t:ident: $e:expr;)*) => {$(#[test] fn $t() { $e })*} } checks! { a: b; c: d; }";
        assert_eq!(found(text), [("a".into(), &[][..]), ("c".into(), &[])]);
        assert_eq!(found("other! { a: b; }"), []);
    }

    /// `.ci/run` runs the tests that need features of each program that has such tests.
    #[test]
    fn tests_that_need_features_are_run() {
        let script = fs::read_to_string(root().join(".ci/run")).expect("it is there");
        let steps = script
            .lines()
            .filter_map(|line| line.strip_prefix("step gated ")?.split(' ').next());
        let gated = tests()
            .iter()
            .filter(|test| !test.needs.is_empty())
            .map(|test| test.program);
        assert_eq!(steps.collect::<BTreeSet<_>>(), gated.collect());
    }
}
