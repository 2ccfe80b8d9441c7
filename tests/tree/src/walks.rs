//! Walks: the functions that the book's page on the architecture lists exist, in the files that it names.

use std::collections::BTreeSet;
use std::fs;

use syn::visit::{self, Visit};
use syn::{ImplItem, ItemFn, ItemImpl, ItemTrait, TraitItem, Type};

/// Page with the tables.
const PAGE: &str = "docs/architecture.md";

#[test]
fn listed_functions_exist() {
    let page = fs::read_to_string(crate::root().join(PAGE)).expect("a page");
    let rows = rows(&page);
    assert!(rows.len() > 50, "{} rows", rows.len());
    let missing: Vec<_> = rows.iter().filter(|(function, path)| !is_defined(function, path)).collect();
    assert_eq!(missing, [&(String::new(), String::new()); 0]);
}

#[test]
fn the_counts_are_those_of_the_tables() {
    let page = fs::read_to_string(crate::root().join(PAGE)).expect("a page");
    let threads = page.split("## An all-gather in five steps").nth(1).expect("a section");
    let (threads, processes) = threads.split_once("### Between processes").expect("a section");
    let processes = processes.split("\n## ").next().expect("a section");
    for (section, text) in [(threads, "crosses"), (processes, "add")] {
        assert!(section.contains(&format!("{text} {} functions", rows(section).len())), "{}", rows(section).len());
    }
}

#[test]
fn a_function_that_is_gone_is_found() {
    let source =
        "impl A { fn method() {} } impl Trait for B<u8> { fn given() {} } fn free() {} trait C { fn own() {} }";
    let defined = functions(&syn::parse_file(source).expect("Rust"));
    assert_eq!(defined, ["A::method", "B::given", "C::own", "free"].map(String::from).into());
}

/// Returns the functions of a page's tables, each with its file.
fn rows(page: &str) -> Vec<(String, String)> {
    let row = |line: &str| {
        let [function, path] = line.strip_prefix("| `")?.strip_suffix("` |")?.split("` | `").collect::<Vec<_>>()[..]
        else {
            return None;
        };
        path.ends_with(".rs").then(|| (function.to_owned(), path.to_owned()))
    };
    page.lines().filter_map(row).collect()
}

fn is_defined(function: &str, path: &str) -> bool {
    let Ok(source) = fs::read_to_string(crate::root().join(path)) else { return false };
    functions(&syn::parse_file(&source).expect("Rust")).contains(function)
}

/// Returns the functions of a file, with their types.
fn functions(file: &syn::File) -> BTreeSet<String> {
    let mut functions = Functions::default();
    functions.visit_file(file);
    functions.0
}

#[derive(Default)]
struct Functions(BTreeSet<String>);

impl Visit<'_> for Functions {
    fn visit_item_fn(&mut self, item: &ItemFn) {
        self.0.insert(item.sig.ident.to_string());
        visit::visit_item_fn(self, item);
    }

    fn visit_item_trait(&mut self, item: &ItemTrait) {
        for function in &item.items {
            if let TraitItem::Fn(function) = function {
                self.0.insert(format!("{}::{}", item.ident, function.sig.ident));
            }
        }
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        let Type::Path(path) = &*item.self_ty else { return };
        let Some(owner) = path.path.segments.last() else { return };
        for function in &item.items {
            if let ImplItem::Fn(function) = function {
                self.0.insert(format!("{}::{}", owner.ident, function.sig.ident));
            }
        }
    }
}
