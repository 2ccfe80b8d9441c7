//! Stations: the architecture page names functions and types that exist in the files it names, and
//! pages name sources that exist.

use std::collections::BTreeMap;
use std::fs;

use syn::visit::{self, Visit};
use syn::{
    Ident, ImplItemFn, ItemEnum, ItemFn, ItemMacro, ItemMod, ItemStruct, ItemTrait, TraitItemFn,
};

use crate::pages;

/// The page of the book that describes the stations.
const PAGE: &str = "docs/architecture.md";

/// Ways through the crate, by their headings.
const WAYS: [&str; 4] = [
    "### An all-gather",
    "### A unit's forward",
    "### A unit's backward",
    "### A checkpoint",
];

#[test]
fn the_architecture_page_names_what_its_files_define() {
    let root = crate::root();
    let page = fs::read_to_string(root.join(PAGE)).expect("the page");
    let mut known = BTreeMap::new();
    let missing: Vec<_> = named(&page)
        .into_iter()
        .filter(|(name, file)| {
            let defined = known.entry(file.clone()).or_insert_with(|| {
                fs::read_to_string(root.join(file))
                    .map(|text| defined(&text))
                    .unwrap_or_default()
            });
            !defined.contains(name)
        })
        .collect();
    assert_eq!(missing, [], "`name` (`file`) is not defined there");
}

#[test]
fn every_way_has_a_picture_and_five_to_eight_stations() {
    let page = fs::read_to_string(crate::root().join(PAGE)).expect("the page");
    for heading in WAYS {
        let steps = steps(&page, heading);
        assert!((5..=8).contains(&steps.len()), "{heading}: {}", steps.len());
        for step in steps {
            assert!(!named(&step).is_empty(), "{step} names where it begins");
        }
        let (_, below) = page.split_once(heading).expect("a section");
        assert!(below.trim_start().starts_with("```text"), "{heading}");
    }
}

#[test]
fn pages_name_sources_that_exist() {
    let root = crate::root();
    let mut missing = Vec::new();
    for page in pages::all(&root) {
        let text = fs::read_to_string(&page).expect("a page");
        for source in sources(&text) {
            // The guide to backends describes a crate of its own.
            let is_known = [".", "tests/downstream"]
                .iter()
                .any(|package| root.join(package).join(&source).exists());
            if !is_known {
                missing.push(format!("{}: {source}", page.display()));
            }
        }
    }
    assert_eq!(missing, [""; 0]);
}

#[test]
fn sources_are_found() {
    let page = "in `src/comm/a.rs` and `src/comm/host`, `tests/suite/b.rs`, `.ci/c`, not `src/{a,b}.rs`, `b.rs` or src/c.rs; `src/..`";
    assert_eq!(
        sources(page),
        [
            "src/comm/a.rs",
            "src/comm/host",
            "tests/suite/b.rs",
            ".ci/c"
        ]
    );
}

#[test]
fn a_name_that_its_file_does_not_define_is_found() {
    let page = "### Walk\n\n1. `a` (`x.rs`) does\n   more, as `B::c` (see `d`); `a -> b` (`x.rs`).\n2. `B::c` (`y/z.rs`)\n\n### Next\n\n1. `e` (`x.rs`)\n";
    let names = |names: &[(&str, &str)]| -> Vec<(String, String)> {
        names
            .iter()
            .map(|(name, file)| (name.to_string(), file.to_string()))
            .collect()
    };
    assert_eq!(
        named(page),
        names(&[("a", "x.rs"), ("B::c", "y/z.rs"), ("e", "x.rs")])
    );
    assert_eq!(steps(page, "### Walk").len(), 2);
    let text = "struct B; impl B { fn c() {} } trait D { fn f(); } mod m { fn a() {} } macro_rules! n { () => {} } impl D for B { fn f() {} }";
    let defined = defined(text);
    for name in ["B", "B::c", "D", "D::f", "a", "n", "B::f"] {
        assert!(defined.contains(&name.to_string()), "{name}");
    }
    assert!(!defined.contains(&"c".to_string()) && !defined.contains(&"E".to_string()));
}

/// Folders of the repository whose files pages name.
const FOLDERS: [&str; 7] = [
    ".ci/",
    "benches/",
    "crates/",
    "docs/",
    "examples/",
    "src/",
    "tests/",
];

/// Returns the paths below [`FOLDERS`] that a page names in backquotes.
fn sources(page: &str) -> Vec<String> {
    let mut sources = Vec::new();
    for (at, text) in page.split('`').enumerate() {
        let is_path = text
            .chars()
            .all(|letter| letter.is_alphanumeric() || "_-/.".contains(letter));
        let is_below = FOLDERS.iter().any(|folder| text.starts_with(folder));
        if at % 2 == 1 && is_path && is_below && !text.contains("..") {
            sources.push(text.to_owned());
        }
    }
    sources
}

/// Returns the numbered items below a heading, up to the next one.
fn steps(page: &str, heading: &str) -> Vec<String> {
    let Some((_, below)) = page.split_once(&format!("{heading}\n")) else {
        return Vec::new();
    };
    let below = below.split("\n#").next().expect("a first part");
    let mut steps: Vec<String> = Vec::new();
    for line in below.lines() {
        match line.split_once(". ") {
            Some((number, _))
                if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) =>
            {
                steps.push(line.into())
            }
            _ if line.starts_with("   ") => {
                steps.last_mut().into_iter().for_each(|step| *step += line)
            }
            _ => {}
        }
    }
    steps
}

/// Returns the names that a page gives with their files: `` `name` (`file.rs`) ``.
fn named(page: &str) -> Vec<(String, String)> {
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let parts: Vec<&str> = page.split('`').collect();
    let is_name = |text: &str| {
        text.chars()
            .all(|letter| letter.is_alphanumeric() || "_:".contains(letter))
    };
    let is_named = |at: &usize| {
        is_name(parts[*at])
            && parts[at + 1] == " ("
            && parts[at + 2].ends_with(".rs")
            && parts[at + 3].starts_with(')')
    };
    let places = (1..parts.len().saturating_sub(3))
        .step_by(2)
        .filter(is_named);
    places
        .map(|at| (parts[at].into(), parts[at + 2].into()))
        .collect()
}

/// Returns the functions, methods, types, traits and macros that a file defines. A method has the
/// name of its type.
fn defined(text: &str) -> Vec<String> {
    let mut items = Items::default();
    items.visit_file(&syn::parse_file(text).expect("Rust"));
    items.names
}

#[derive(Default)]
struct Items {
    /// Name of the type or trait that is being visited.
    around: Option<String>,
    names: Vec<String>,
}

impl Items {
    fn add(&mut self, name: &Ident) {
        self.names.push(
            self.around
                .iter()
                .map(|around| format!("{around}::"))
                .collect::<String>()
                + &name.to_string(),
        );
    }

    fn inside(&mut self, around: Option<String>, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.around, around);
        visit(self);
        self.around = before;
    }
}

impl<'a> Visit<'a> for Items {
    fn visit_item_fn(&mut self, item: &'a ItemFn) {
        self.add(&item.sig.ident);
    }

    fn visit_item_struct(&mut self, item: &'a ItemStruct) {
        self.add(&item.ident);
    }

    fn visit_item_enum(&mut self, item: &'a ItemEnum) {
        self.add(&item.ident);
    }

    fn visit_item_macro(&mut self, item: &'a ItemMacro) {
        item.ident.iter().for_each(|name| self.add(name));
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        self.inside(None, |items| visit::visit_item_mod(items, item));
    }

    fn visit_item_trait(&mut self, item: &'a ItemTrait) {
        self.add(&item.ident);
        self.inside(Some(item.ident.to_string()), |items| {
            visit::visit_item_trait(items, item)
        });
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let of = match &*item.self_ty {
            syn::Type::Path(path) => path
                .path
                .segments
                .last()
                .map(|segment| segment.ident.to_string()),
            _ => None,
        };
        self.inside(of, |items| visit::visit_item_impl(items, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'a ImplItemFn) {
        self.add(&item.sig.ident);
    }

    fn visit_trait_item_fn(&mut self, item: &'a TraitItemFn) {
        self.add(&item.sig.ident);
    }
}
