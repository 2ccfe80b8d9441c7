//! Names: a type's name stands for one type, names that were replaced do not come back, and texts
//! name what exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Ident, ImplItem, ItemEnum, ItemFn, ItemImpl, ItemMod, ItemStruct, ItemTrait, ItemType,
    ItemUnion, TraitItem, Type, Visibility,
};

use crate::layers::{Tree, is_test};
use crate::pages;

/// Type names that several modules define, and why: at most 15.
const SHARED_TYPE_NAMES: [(&str, &str); 1] = [(
    "Sealed",
    "the idiom for a trait that only this crate implements; no other module names it",
)];

/// Words that neither identifiers nor prose contain, with what to write instead.
pub const RETIRED_WORDS: [(&str, &str); 16] = [
    ("ahead", "deferred, prefetched"),
    ("alike", "identical, same"),
    ("anew", "again, from scratch"),
    ("anybody", "any rank"),
    ("beside", "except, next to, other"),
    ("brought", "contributed, received"),
    ("cut", "shard, split, shard sizes"),
    ("cuts", "shards, splits, shard sizes"),
    ("nobody", "no rank"),
    ("piece", "shard, block, fragment, task"),
    ("pieces", "shards, blocks, fragments, tasks"),
    ("ragged", "uneven"),
    ("somebody", "a rank, another process"),
    ("whoever", "the rank that"),
    ("whole", "full, unsharded, complete"),
    ("wholes", "full tensors, unsharded parameters"),
];

/// Sources of the crate that reads flight files.
const FLIGHT: &str = "crates/burn-dtensor-flight/src";

/// Names that nothing is called any more.
const RETIRED_NAMES: &str = include_str!("retired_names.txt");

/// Files of `src` that still contain such words and names, and are going to be replaced.
const EXCEPTIONS: [&str; 0] = [];

#[test]
fn a_type_name_stands_for_one_type() {
    let tree = Tree::read(&crate::root().join("src"));
    assert_eq!(shared(&tree, &SHARED_TYPE_NAMES), [""; 0]);
    assert_eq!(
        shared(&Tree::read(&crate::root().join(FLIGHT)), &[]),
        [""; 0]
    );
    assert!(
        SHARED_TYPE_NAMES.len() <= 15,
        "{} type names stand for several types",
        SHARED_TYPE_NAMES.len()
    );
}

#[test]
fn retired_names_do_not_come_back() {
    let root = crate::root();
    let mut found = Vec::new();
    for path in ["src", "crates", "tests", "examples", "benches"]
        .iter()
        .flat_map(|folder| sources(&root.join(folder)))
    {
        let name = path
            .strip_prefix(&root)
            .expect("inside")
            .display()
            .to_string();
        let faults = retired(&fs::read_to_string(&path).expect("a source"));
        match EXCEPTIONS.contains(&name.as_str()) {
            true if faults.is_empty() => found.push(format!(
                "{name} contains none: remove it from the exceptions"
            )),
            true => {}
            false => found.extend(faults.into_iter().map(|fault| format!("{name}: {fault}"))),
        }
    }
    assert_eq!(found, [""; 0]);
}

#[test]
fn texts_name_members_that_exist() {
    let root = crate::root();
    let mut members = members(&Tree::read(&root.join("src")));
    members.extend(self::members(&Tree::read(&root.join(FLIGHT))));
    let mut faults = Vec::new();
    for path in ["src", "crates"]
        .iter()
        .flat_map(|folder| sources(&root.join(folder)))
    {
        let name = path
            .strip_prefix(&root)
            .expect("inside")
            .display()
            .to_string();
        let mut texts = Vec::new();
        collect_texts(
            fs::read_to_string(&path)
                .expect("a source")
                .parse()
                .expect("Rust"),
            &mut texts,
        );
        faults.extend(
            texts
                .iter()
                .flat_map(|text| gone(text, &members))
                .map(|fault| format!("{name}: {fault}")),
        );
    }
    for page in pages::all(&root) {
        let text = fs::read_to_string(&page).expect("a page");
        faults.extend(
            gone(&text, &members)
                .into_iter()
                .map(|fault| format!("{}: {fault}", page.display())),
        );
    }
    assert_eq!(faults, [""; 0]);
}

#[test]
fn a_text_that_names_what_is_gone_is_found() {
    let source = "struct A { private: u8, pub field: u8 } impl A { fn method() {} const C: u8 = 0; } enum E { V } impl Trait for A { fn given() {} }";
    let members = members(&Tree::new([("mesh/a.rs", source.to_owned())]));
    let text = "call `A::method`, `A::given`, `A::field`, `A::C` or `E::V`, not `A::gone`, `A::private` or `E::v`; `Burns::gone` is not this crate's";
    assert_eq!(
        gone(text, &members),
        ["`A::gone`", "`A::private`", "`E::v`"]
    );
}

#[test]
fn two_types_of_one_name_are_found() {
    let sources = [
        ("mesh/a.rs", "struct State; fn f() { enum Local {} }"),
        (
            "mesh/b.rs",
            "mod inner { type State = u32; } #[cfg(test)] mod tests { struct Local; }",
        ),
        (
            "mesh/c.rs",
            "trait Sealed {} impl Iterator for A { type Item = u32; }",
        ),
        (
            "mesh/d.rs",
            "trait Sealed {} impl Iterator for B { type Item = u32; } enum Local {}",
        ),
    ];
    let tree = Tree::new(sources.map(|(path, text)| (path, text.to_owned())));
    let sealed = [("Sealed", "an idiom")];
    assert_eq!(
        shared(&tree, &sealed),
        ["Local: mesh/a, mesh/d", "State: mesh/a, mesh/b"]
    );
    assert_eq!(
        shared(&tree, &[("Gone", "")])[1..],
        [
            "Sealed: mesh/c, mesh/d",
            "State: mesh/a, mesh/b",
            "Gone: one type or none"
        ]
    );
}

#[test]
fn retired_words_and_names_are_found_in_identifiers_alone() {
    let text = "/// The whole.\nfn whole_grads(wholesome: &str) -> PackWholes { \"a piece\"; CUT; cutting; Muster }";
    let write = "write full, unsharded, complete for `whole`";
    let expected = [
        format!("whole_grads: {write}"),
        "PackWholes: write full tensors, unsharded parameters for `wholes`".to_owned(),
        "CUT: write shard, split, shard sizes for `cut`".to_owned(),
        "Muster: retired".to_owned(),
    ];
    assert_eq!(retired(text), expected);
}

/// Returns the type names outside tests that several modules define and `allowed` does not list,
/// and those that it lists in vain.
fn shared(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, file) in tree.files() {
        if module.last().is_some_and(|name| name.ends_with("_tests")) {
            continue;
        }
        let mut types = Types::default();
        types.visit_file(file);
        for (at, name) in types.0.into_iter().enumerate() {
            // Twice in one file is as bad.
            let place = module.join("/");
            let names = modules.entry(name).or_default();
            if !names.insert(place.clone()) {
                names.insert(format!("{place} ({at})"));
            }
        }
    }
    let is_shared = |name: &str| modules.get(name).is_some_and(|modules| modules.len() > 1);
    let is_allowed = |name: &str| allowed.iter().any(|(allowed, _)| *allowed == name);
    let faults = modules
        .iter()
        .filter(|(name, _)| is_shared(name) && !is_allowed(name));
    let faults = faults.map(|(name, modules)| format!("{name}: {}", modules.iter().join(", ")));
    let in_vain = allowed.iter().filter(|(name, _)| !is_shared(name));
    faults
        .chain(in_vain.map(|(name, _)| format!("{name}: one type or none")))
        .collect()
}

/// Returns the identifiers of a source that contain retired words or are retired names, once each.
fn retired(text: &str) -> Vec<String> {
    let mut idents = Vec::new();
    collect(text.parse().expect("Rust"), &mut idents);
    let fault = |ident: String| {
        let words = words(&ident);
        let word = RETIRED_WORDS
            .iter()
            .find(|(word, _)| words.iter().any(|found| found == word));
        if let Some((word, instead)) = word {
            return Some(format!("{ident}: write {instead} for `{word}`"));
        }
        RETIRED_NAMES
            .lines()
            .any(|name| name == ident)
            .then(|| format!("{ident}: retired"))
    };
    idents.into_iter().unique().filter_map(fault).collect()
}

/// Returns the names of this crate's types with those of their members: methods, constants, public
/// fields and variants. Without `DTensor`, whose operators macros define, and `Lora` and `Tensor`,
/// which are burn's.
fn members(tree: &Tree) -> BTreeMap<String, BTreeSet<String>> {
    let (mut members, mut types) = (Members::default(), Types::default());
    for (_, file) in tree.files() {
        members.visit_file(file);
        types.visit_file(file);
    }
    members.0.retain(|name, _| {
        !["DTensor", "Lora", "Tensor"].contains(&name.as_str()) && types.0.contains(name)
    });
    members.0
}

/// Returns what `text` names as `Type::member` of a type that has no such member.
fn gone(text: &str, members: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    let named = text.match_indices("::").filter_map(|(at, _)| {
        let owner = text[..at].rsplit(|letter| !is_letter(letter)).next()?;
        let member = text[at + 2..].split(|letter| !is_letter(letter)).next()?;
        let known = members.get(owner)?;
        (!member.is_empty() && !known.contains(member)).then(|| format!("`{owner}::{member}`"))
    });
    named.collect()
}

/// Splits `_` and capitals: `PackWholes` and `pack_wholes` are `pack` and `wholes`.
fn words(ident: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for letter in ident.chars() {
        if letter == '_' || letter.is_uppercase() && !before.is_uppercase() {
            words.push(String::new());
        }
        if letter != '_' {
            words
                .last_mut()
                .expect("one to begin with")
                .extend(letter.to_lowercase());
        }
        before = letter;
    }
    words
}

/// Identifiers, also inside macros; comments are none, nor is what strings say.
fn collect(tokens: TokenStream, idents: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => idents.push(ident.to_string()),
            TokenTree::Group(group) => collect(group.stream(), idents),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// String literals, without documentation, whose links rustdoc checks.
fn collect_texts(tokens: TokenStream, texts: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) if group.to_string().starts_with("[doc") => {}
            TokenTree::Group(group) => collect_texts(group.stream(), texts),
            TokenTree::Literal(literal) => {
                texts.extend(
                    syn::parse_str::<syn::LitStr>(&literal.to_string())
                        .ok()
                        .map(|text| text.value()),
                );
            }
            TokenTree::Punct(_) | TokenTree::Ident(_) => {}
        }
    }
}

/// The Rust files below `folder`, without build outputs.
pub fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .expect("a folder of sources")
        .map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.sorted().partition(|path| path.is_dir());
    let below = folders
        .iter()
        .filter(|folder| !folder.ends_with("target"))
        .flat_map(|folder| sources(folder));
    below
        .chain(
            files
                .into_iter()
                .filter(|file| file.extension().is_some_and(|extension| extension == "rs")),
        )
        .collect()
}

/// Names of the types that a file defines outside tests.
#[derive(Default)]
struct Types(Vec<String>);

impl Types {
    fn add(&mut self, ident: &Ident) {
        self.0.push(ident.to_string());
    }
}

impl Visit<'_> for Types {
    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &ItemStruct) {
        self.add(&item.ident);
    }

    fn visit_item_enum(&mut self, item: &ItemEnum) {
        self.add(&item.ident);
    }

    fn visit_item_union(&mut self, item: &ItemUnion) {
        self.add(&item.ident);
    }

    fn visit_item_trait(&mut self, item: &ItemTrait) {
        self.add(&item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &ItemType) {
        self.add(&item.ident);
    }
}

/// Types, with the names of their members.
#[derive(Default)]
struct Members(BTreeMap<String, BTreeSet<String>>);

impl Members {
    fn add<'a>(&mut self, owner: &Ident, members: impl IntoIterator<Item = &'a Ident>) {
        let members = members.into_iter().map(ToString::to_string);
        self.0.entry(owner.to_string()).or_default().extend(members);
    }
}

impl Visit<'_> for Members {
    fn visit_item_struct(&mut self, item: &ItemStruct) {
        self.add(
            &item.ident,
            item.fields
                .iter()
                .filter(|field| matches!(field.vis, Visibility::Public(_)))
                .filter_map(|field| field.ident.as_ref()),
        );
    }

    fn visit_item_enum(&mut self, item: &ItemEnum) {
        self.add(
            &item.ident,
            item.variants.iter().map(|variant| &variant.ident),
        );
    }

    fn visit_item_trait(&mut self, item: &ItemTrait) {
        self.add(
            &item.ident,
            item.items.iter().filter_map(|item| match item {
                TraitItem::Fn(method) => Some(&method.sig.ident),
                TraitItem::Const(constant) => Some(&constant.ident),
                TraitItem::Type(associated) => Some(&associated.ident),
                _ => None,
            }),
        );
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        let Type::Path(path) = &*item.self_ty else {
            return;
        };
        let Some(owner) = path.path.segments.last() else {
            return;
        };
        self.add(
            &owner.ident,
            item.items.iter().filter_map(|item| match item {
                ImplItem::Fn(method) => Some(&method.sig.ident),
                ImplItem::Const(constant) => Some(&constant.ident),
                _ => None,
            }),
        );
    }
}
