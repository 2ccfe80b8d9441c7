//! The sizes of folders of sources: lines, files and thread-locals, tests apart.
//!
//! Lines of tests are those of items and statements that only `cfg(test)` builds, and of whole
//! files: `tests.rs`, `*_tests.rs`, files in a folder `tests`, and the files of modules that are
//! declared under `cfg(test)`. All other lines count as code, also comments and blank lines.

use std::collections::BTreeMap;
use std::fs;
use std::iter::Sum;
use std::ops::Add;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use proc_macro2::TokenTree;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, Macro, Meta, Stmt, Token};

use crate::programs::path_of;

/// The size of some files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Lines that are not tests.
    pub code: usize,
    pub test: usize,
    /// Files that are not only tests.
    pub files: usize,
    pub test_files: usize,
    /// Variables that each thread has of its own, without those of tests.
    pub thread_locals: usize,
}

impl Add for Size {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            code: self.code + other.code,
            test: self.test + other.test,
            files: self.files + other.files,
            test_files: self.test_files + other.test_files,
            thread_locals: self.thread_locals + other.thread_locals,
        }
    }
}

impl Sum for Size {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), Add::add)
    }
}

/// Returns the size of each folder in `folder`, with all that lies in it, by name. The files of
/// `folder` itself have the name `.`.
pub fn of_folder(folder: &Path) -> BTreeMap<String, Size> {
    let (mut sources, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display())) {
            let path = entry.expect("an entry of a folder").path();
            match path.extension() {
                _ if path.is_dir() => open.push(path),
                Some(extension) if extension == "rs" => {
                    let text = fs::read_to_string(&path).expect("a source is text");
                    sources.push((
                        path.strip_prefix(folder)
                            .expect("it lies inside")
                            .to_path_buf(),
                        text,
                    ));
                }
                _ => {}
            }
        }
    }
    of_sources(sources)
}

/// Returns the sizes of sources by the first folder of their paths.
fn of_sources(sources: impl IntoIterator<Item = (PathBuf, String)>) -> BTreeMap<String, Size> {
    let counted: Vec<_> = sources
        .into_iter()
        .map(|(path, text)| (Counted::new(&path, &text), path))
        .collect();
    let modules: Vec<&PathBuf> = counted
        .iter()
        .flat_map(|(counted, _)| &counted.test_modules)
        .collect();
    let mut sizes: BTreeMap<String, Size> = BTreeMap::new();
    for (counted, path) in &counted {
        let folder = path.parent().and_then(|folder| folder.iter().next());
        let folder = folder.map_or(".".into(), |name| name.to_string_lossy().into_owned());
        let in_module = modules
            .iter()
            .any(|module| path.starts_with(module) || path.with_extension("") == **module);
        let size = if in_module || is_test_file(path) {
            counted.as_test()
        } else {
            counted.size
        };
        let sum = sizes.entry(folder).or_default();
        *sum = *sum + size;
    }
    sizes
}

fn is_test_file(path: &Path) -> bool {
    let name = path
        .file_name()
        .expect("a file has a name")
        .to_string_lossy();
    name == "tests.rs" || name.ends_with("_tests.rs") || path.iter().any(|part| part == "tests")
}

/// One file, counted.
struct Counted {
    size: Size,
    /// Modules that are declared under `cfg(test)`, whose files are others: their paths without an
    /// extension.
    test_modules: Vec<PathBuf>,
}

impl Counted {
    fn new(path: &Path, text: &str) -> Self {
        let file =
            syn::parse_file(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut tests = Tests {
            path,
            lines: Vec::new(),
            modules: Vec::new(),
            thread_locals: 0,
        };
        let lines = text.lines().count();
        if only_in_tests(&file.attrs) {
            tests.lines = (1..=lines).collect();
        } else {
            tests.visit_file(&file);
        }
        let test = tests.lines.iter().unique().count();
        let size = Size {
            code: lines - test,
            test,
            files: 1,
            test_files: 0,
            thread_locals: tests.thread_locals,
        };
        Self {
            size,
            test_modules: tests.modules,
        }
    }

    /// Returns the size of this file if all of it is a test.
    fn as_test(&self) -> Size {
        Size {
            test: self.size.code + self.size.test,
            test_files: 1,
            ..Size::default()
        }
    }
}

/// The tests in a file.
struct Tests<'a> {
    path: &'a Path,
    /// The numbers of their lines.
    lines: Vec<usize>,
    modules: Vec<PathBuf>,
    thread_locals: usize,
}

impl Tests<'_> {
    /// Notes the lines of `node` if it has one of `attributes` that only tests fulfil, and returns
    /// true then.
    fn note(&mut self, attributes: &[Attribute], node: &impl Spanned) -> bool {
        let test = only_in_tests(attributes);
        if test {
            self.lines
                .extend(node.span().start().line..=node.span().end().line);
        }
        test
    }

    /// Returns the path of the module that `item` declares, without an extension.
    fn module(&self, item: &ItemMod) -> PathBuf {
        if let Some(path) = path_of(&item.attrs) {
            return self.path.with_file_name(path).with_extension("");
        }
        let is_root = ["mod", "lib"]
            .iter()
            .any(|name| self.path.file_stem().is_some_and(|stem| stem == *name));
        let folder = if is_root {
            self.path.parent().expect("a file").into()
        } else {
            self.path.with_extension("")
        };
        folder.join(item.ident.to_string())
    }
}

impl Visit<'_> for Tests<'_> {
    fn visit_item(&mut self, item: &Item) {
        if !self.note(attributes(item), item) {
            visit::visit_item(self, item);
        } else if let Item::Mod(module) = item
            && module.content.is_none()
        {
            self.modules.push(self.module(module));
        }
    }

    fn visit_impl_item(&mut self, item: &syn::ImplItem) {
        let attributes: &[Attribute] = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !self.note(attributes, item) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &Stmt) {
        let attributes: &[Attribute] = match statement {
            Stmt::Local(local) => &local.attrs,
            Stmt::Macro(call) => &call.attrs,
            Stmt::Expr(syn::Expr::Block(block), _) => &block.attrs,
            Stmt::Expr(syn::Expr::MethodCall(call), _) => &call.attrs,
            Stmt::Expr(syn::Expr::Call(call), _) => &call.attrs,
            _ => &[],
        };
        if !self.note(attributes, statement) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_field(&mut self, field: &syn::Field) {
        if !self.note(&field.attrs, field) {
            visit::visit_field(self, field);
        }
    }

    fn visit_macro(&mut self, call: &Macro) {
        if call
            .path
            .segments
            .last()
            .is_some_and(|name| name.ident == "thread_local")
        {
            let statics = call.tokens.clone().into_iter();
            self.thread_locals += statics
                .filter(|token| matches!(token, TokenTree::Ident(word) if word == "static"))
                .count();
        }
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns true if one of the attributes is `cfg(test)`, or `cfg(all(.., test, ..))`.
fn only_in_tests(attributes: &[Attribute]) -> bool {
    fn needs_test(condition: &Meta) -> bool {
        match condition {
            Meta::Path(path) => path.is_ident("test"),
            Meta::List(list) if list.path.is_ident("all") => {
                let parts =
                    Punctuated::<Meta, Token![,]>::parse_terminated.parse2(list.tokens.clone());
                parts.expect("all holds conditions").iter().any(needs_test)
            }
            _ => false,
        }
    }
    let cfgs = attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"));
    cfgs.map(|cfg| {
        cfg.parse_args::<Meta>()
            .expect("a cfg attribute holds one condition")
    })
    .any(|cfg| needs_test(&cfg))
}

#[cfg(test)]
mod checks {
    use super::*;

    /// Returns the sizes of one file at `path`.
    fn size(path: &str, text: &str) -> Size {
        of_sources([(path.into(), text.into())]).into_values().sum()
    }

    #[test]
    fn comments_and_blank_lines_count_and_items_of_tests_do_not() {
        let text = "\
//! A file of 8 lines of code.

/// Adds.
fn add() {
    #[cfg(test)]
    LOOKUPS.set(1);
    one();
}
#[cfg(any(test, feature = \"testing\"))]
fn public() {}
/// Only in tests, with its comment.
#[cfg(all(test, feature = \"cube\"))]
fn three_lines() {}
impl A {
    // Between.
    #[cfg(test)]
    fn two_lines() {}
}
";
        assert_eq!(
            size("a.rs", text),
            Size {
                code: 11,
                test: 7,
                files: 1,
                ..Size::default()
            }
        );
    }

    #[test]
    fn thread_locals_count_one_by_one_except_those_of_tests() {
        let text =
            "thread_local! {\n    static A: u8 = 1;\n    /// B.\n    pub static B: u8 = 2;\n}
#[cfg(test)]\nthread_local!(static C: u8 = 3);\nstd::thread_local!(static D: u8 = 4);";
        assert_eq!(
            size("a.rs", text),
            Size {
                code: 6,
                test: 2,
                files: 1,
                thread_locals: 3,
                ..Size::default()
            }
        );
    }

    #[test]
    fn files_of_tests_are_known_by_name_folder_or_declaration() {
        let test = |lines| Size {
            test: lines,
            test_files: 1,
            ..Size::default()
        };
        let only = "fn one() {}\nfn two() {}\n";
        for path in [
            "tests.rs",
            "a/tests.rs",
            "a/board_tests.rs",
            "a/tests/mod.rs",
            "tests/a/b.rs",
        ] {
            assert_eq!(size(path, only), test(2), "{path}");
        }
        assert_eq!(size("latest.rs", only).code, 2);
        assert_eq!(
            size("a.rs", "#![cfg(test)]\nfn one() {}"),
            test(2).with_file()
        );
        let sources = [
            ("a/mod.rs", "#[cfg(test)]\nmod matrix;\nmod b;\n"),
            ("a/matrix.rs", only),
            ("a/matrix/inner.rs", only),
            (
                "a/b.rs",
                "#[cfg(test)]\n#[path = \"special.rs\"]\nmod s;\n#[cfg(test)]\nmod deep;\n",
            ),
            ("a/special.rs", only),
            ("a/b/deep.rs", only),
            ("c/matrix.rs", only),
            ("lib.rs", only),
        ];
        let sizes = of_sources(sources.map(|(path, text)| (path.into(), text.into())));
        let expected = [
            (
                ".",
                Size {
                    code: 2,
                    files: 1,
                    ..Size::default()
                },
            ),
            (
                "a",
                Size {
                    code: 1,
                    test: 2 + 5 + 8,
                    files: 2,
                    test_files: 4,
                    thread_locals: 0,
                },
            ),
            (
                "c",
                Size {
                    code: 2,
                    files: 1,
                    ..Size::default()
                },
            ),
        ];
        assert_eq!(
            sizes,
            expected.map(|(name, size)| (name.to_owned(), size)).into()
        );
    }

    impl Size {
        /// Counts a file that holds tests, but is not known as one by name.
        fn with_file(self) -> Self {
            Self {
                files: self.test_files,
                test_files: 0,
                ..self
            }
        }
    }
}
