//! The order of the top-level modules, and that no files import each other in a cycle, except
//! inside a module that is open.
//!
//! Read from the sources: `use` declarations, and paths that begin with `crate` or `super`. A name
//! is followed to the file that defines it through the `pub use` of modules above. What only tests
//! use does not count, nor does what a module and those inside it have of each other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::slice::from_ref;

use itertools::Itertools;
use syn::visit::{self, Visit};
use syn::{Attribute, File, Item, ItemMod, ItemUse, UseTree, Visibility};

/// Every top-level module may use those of the lines above it. Modules of one line do not know each
/// other. A folder inside a module has an entry if its layer is not the module's.
const LAYERS: [&[&str]; 16] = [
    &["burn_compat/internals", "placement"],
    &["memory", "pattern"],
    &["kernels"],
    &["autodiff"],
    &["comm"],
    &["mesh", "watch"],
    &["dtensor"],
    &["burn_compat", "tensor_tree"],
    &["data", "param"],
    &["optim", "parallel", "pretrained"],
    &["fsdp"],
    &["nn", "replicate"],
    &["checkpoint", "debug"],
    &["testing"],
    &["train"],
    &["book"],
];

/// Every module of `comm` in this list may use those before it, and none after it.
const COMM: [&str; 4] = ["control", "transport", "data", "host_backend"];

/// The module that uses all others, and is used by all.
const ERROR: &str = "error";

/// A module's path from the root of the crate, which is empty.
pub type Module = Vec<String>;

#[test]
fn modules_use_those_above_them_and_files_form_no_cycle() {
    let tree = Tree::read(&crate::root().join("src"));
    let top: BTreeSet<&str> = tree
        .files
        .keys()
        .filter_map(|module| Some(module.first()?.as_str()))
        .collect();
    assert_eq!(
        top,
        LAYERS
            .into_iter()
            .flatten()
            .copied()
            .filter(|unit| !unit.contains('/'))
            .chain([ERROR])
            .collect(),
        "every module has its layer"
    );
    let layers: BTreeSet<&str> = tree
        .files
        .keys()
        .filter(|module| module[..].first().is_some_and(|top| top == "comm"))
        .filter_map(|module| Some(module.get(1)?.as_str()))
        .collect();
    assert!(
        COMM.iter().all(|layer| layers.contains(layer)),
        "every layer of `comm` exists"
    );
    assert_eq!(tree.faults(), [""; 0]);
}

#[test]
fn a_cycle_and_a_module_that_uses_one_below_it_are_found() {
    let planted = |sources: &[(&str, &str)]| {
        Tree::new(sources.iter().map(|&(path, text)| (path, text.into()))).faults()
    };
    assert_eq!(
        planted(&[
            ("mesh/a.rs", "use crate::comm::b::B;"),
            ("comm/b.rs", "struct B;")
        ]),
        [""; 0]
    );
    let upward = [
        ("comm/b.rs", "fn f() -> crate::mesh::A { a() }"),
        ("mesh/mod.rs", "mod a; pub use a::A;"),
        ("mesh/a.rs", "#[cfg(test)] mod tests { use crate::nn::C; }"),
    ];
    assert_eq!(
        planted(&upward),
        ["comm/b uses mesh/a, a module that is not above its own"]
    );
    let layered = |path: &str, text: &str| {
        let modules = [
            ("comm/mod.rs", ""),
            ("comm/control/mod.rs", ""),
            ("comm/data/mod.rs", ""),
        ];
        planted(&[&modules[..], &[(path, text)]].concat())
    };
    let above = "comm/control/a uses comm/data, a layer above its own";
    assert_eq!(
        layered("comm/control/a.rs", "use crate::comm::data::B;"),
        [above]
    );
    assert_eq!(
        layered("comm/data/a.rs", "use crate::comm::control::B;"),
        [""; 0]
    );
    let cycle = [
        (
            "mesh/mod.rs",
            "mod a; mod b; mod c; use c::C; pub(crate) use {a::A, b::{B, D as E}};",
        ),
        ("mesh/a.rs", "use super::{B, c};"),
        ("mesh/b.rs", "pub struct B; use super::c::C;"),
        ("mesh/c.rs", "fn f(_: super::A) {}"),
    ];
    assert_eq!(planted(&cycle), ["a cycle: mesh/a, mesh/b, mesh/c"]);
}

/// The sources of a crate, without modules that only tests have.
pub struct Tree {
    files: BTreeMap<Module, File>,
}

impl Tree {
    pub fn read(root: &Path) -> Self {
        let (mut paths, mut open) = (Vec::new(), vec![root.to_path_buf()]);
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).expect("a folder of sources") {
                let path = entry.expect("an entry of a folder").path();
                // Beside the sources are pages that they include.
                match path.extension() {
                    _ if path.is_dir() => open.push(path),
                    Some(extension) if extension == "rs" => paths.push(path),
                    _ => {}
                }
            }
        }
        let name = |path: &Path| {
            path.strip_prefix(root)
                .expect("inside")
                .to_str()
                .expect("a name")
                .to_owned()
        };
        let sources: Vec<_> = paths
            .iter()
            .map(|path| (name(path), fs::read_to_string(path).expect("a source")))
            .collect();
        Self::new(
            sources
                .iter()
                .map(|(path, text)| (path.as_str(), text.clone())),
        )
    }

    /// Of paths such as `mesh/mod.rs`, and texts.
    pub fn new<'a>(sources: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let module = |path: &str| -> Module {
            let parts = path.trim_end_matches(".rs").split('/').map(String::from);
            parts
                .filter(|part| !["mod", "lib"].contains(&part.as_str()))
                .collect()
        };
        let parsed =
            |(path, text): (&str, String)| (module(path), syn::parse_file(&text).expect("Rust"));
        let mut tree = Self {
            files: sources.into_iter().map(parsed).collect(),
        };
        let tests: Vec<Module> = tree
            .files
            .iter()
            .flat_map(|(module, file)| tests(module, file))
            .collect();
        tree.files
            .retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        tree
    }

    /// Returns each file with its module.
    pub fn files(&self) -> impl Iterator<Item = (&Module, &File)> {
        self.files.iter()
    }

    /// What is wrong, in words.
    pub fn faults(&self) -> Vec<String> {
        let uses = self.uses();
        let upward = uses
            .iter()
            .filter(|(from, to)| unit(from) != unit(to) && place(from) <= place(to));
        let upward = upward.map(|(from, to)| {
            format!(
                "{} uses {}, a module that is not above its own",
                from.join("/"),
                to.join("/")
            )
        });
        let layer = |module: &Module| match &module[..] {
            [top, name, ..] if top == "comm" => COMM.iter().position(|layer| layer == name),
            _ => None,
        };
        let above = uses.iter().filter(|(from, to)| {
            layer(from).is_some_and(|from| layer(to).is_some_and(|to| from < to))
        });
        let above = above.map(|(from, to)| {
            format!(
                "{} uses {}, a layer above its own",
                from.join("/"),
                to.join("/")
            )
        });
        upward.chain(above).chain(self.circles()).collect()
    }

    /// Returns the sets of files that all reach each other, in words.
    pub fn circles(&self) -> Vec<String> {
        let mut found = Vec::new();
        for circle in cycles(&self.uses()) {
            let files = circle.into_iter().map(|module| module.join("/")).join(", ");
            found.push(format!("a cycle: {files}"));
        }
        found
    }

    /// Returns the files inside `folder`, each with those inside it that it uses.
    pub fn uses_inside(&self, folder: &str) -> BTreeMap<String, Vec<String>> {
        let folder: Vec<String> = folder.split('/').map(String::from).collect();
        let mut inside: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (from, to) in self.uses() {
            if from.starts_with(&folder) && to.starts_with(&folder) {
                inside.entry(from.join("/")).or_default().push(to.join("/"));
            }
        }
        inside
    }

    /// Which file uses which, but for those that lie inside each other.
    fn uses(&self) -> BTreeSet<(&Module, &Module)> {
        let exports: BTreeMap<(&Module, String), &Module> = self.exports();
        let mut uses = BTreeSet::new();
        for (from, file) in &self.files {
            let mut paths = Paths::default();
            paths.visit_file(file);
            for path in paths.0 {
                let Some(to) = self.definer(from, &path, &exports) else {
                    continue;
                };
                let error = [from, to]
                    .iter()
                    .any(|module| module.first().is_some_and(|top| top == ERROR));
                if !error && !to.starts_with(from) && !from.starts_with(to) {
                    uses.insert((from, to));
                }
            }
        }
        uses
    }

    /// What modules hand on: by module and name, the module where it comes from.
    fn exports(&self) -> BTreeMap<(&Module, String), &Module> {
        let mut exports = BTreeMap::new();
        for (module, file) in &self.files {
            for item in &file.items {
                let Item::Use(ItemUse { vis, tree, .. }) = item else {
                    continue;
                };
                let mut paths = Vec::new();
                flatten(tree, &mut Vec::new(), &mut paths);
                for Used { path, name } in paths {
                    if !matches!(vis, Visibility::Inherited)
                        && let Some(from) = self.definer(module, &path, &BTreeMap::new())
                    {
                        exports.insert((module, name), from);
                    }
                }
            }
        }
        exports
    }

    /// The file that defines what `path` names in `module`.
    fn definer<'a>(
        &'a self,
        module: &Module,
        path: &[String],
        exports: &BTreeMap<(&Module, String), &'a Module>,
    ) -> Option<&'a Module> {
        let inside = |module: &Module, part: &String| {
            self.files
                .get_key_value(&[&module[..], from_ref(part)].concat())
        };
        let (mut at, mut rest) = match path.first()?.as_str() {
            "crate" => (Module::new(), &path[1..]),
            "super" | "self" => (module.clone(), path),
            _ => (inside(module, &path[0])?.0.clone(), &path[1..]),
        };
        while let Some(first @ ("super" | "self")) = rest.first().map(String::as_str) {
            if first == "super" {
                at.pop();
            }
            rest = &rest[1..];
        }
        while let Some(part) = rest.first() {
            let known = self
                .files
                .get_key_value(&at)
                .map(|(at, _)| (at, part.clone()));
            let handed_on = known.and_then(|key| exports.get(&key));
            // A function that is handed on may be called like a module beside it.
            at = match (handed_on, inside(&at, part)) {
                (Some(from), None) => (*from).clone(),
                (Some(from), Some(_)) if rest.len() == 1 => (*from).clone(),
                (_, Some((next, _))) => next.clone(),
                (None, None) => break,
            };
            rest = &rest[1..];
        }
        self.files.get_key_value(&at).map(|(at, _)| at)
    }
}

/// Returns the entry of [`LAYERS`] that a module belongs to.
fn unit(module: &Module) -> String {
    let path = module.join("/");
    let mut inside = LAYERS
        .into_iter()
        .flatten()
        .filter(|unit| unit.contains('/'));
    match inside.find(|unit| path == **unit || path.starts_with(&format!("{unit}/"))) {
        Some(unit) => (*unit).to_owned(),
        None => module[0].clone(),
    }
}

fn place(module: &Module) -> Option<usize> {
    let unit = unit(module);
    LAYERS
        .iter()
        .position(|layer| layer.contains(&unit.as_str()))
}

/// The modules inside `module` that only tests have.
fn tests(module: &Module, file: &File) -> Vec<Module> {
    let only = |item: &Item| match item {
        Item::Mod(ItemMod { attrs, ident, .. }) if is_test(attrs) => {
            Some([&module[..], &[ident.to_string()]].concat())
        }
        _ => None,
    };
    file.items.iter().filter_map(only).collect()
}

pub fn is_test(attributes: &[Attribute]) -> bool {
    let is_test = |attribute: &Attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|cfg| cfg.is_ident("test"))
    };
    attributes.iter().any(is_test)
}

/// The paths that a file names.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl Visit<'_> for Paths {
    fn visit_item_use(&mut self, item: &ItemUse) {
        let mut used = Vec::new();
        flatten(&item.tree, &mut Vec::new(), &mut used);
        self.0.extend(used.into_iter().map(|used| used.path));
    }

    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_visibility(&mut self, _: &Visibility) {}

    fn visit_path(&mut self, path: &syn::Path) {
        if path
            .segments
            .first()
            .is_some_and(|first| first.ident == "crate" || first.ident == "super")
        {
            self.0.push(
                path.segments
                    .iter()
                    .map(|segment| segment.ident.to_string())
                    .collect(),
            );
        }
        visit::visit_path(self, path);
    }
}

/// One name of a `use`.
pub struct Used {
    pub path: Vec<String>,
    /// What it is called here.
    pub name: String,
}

pub fn flatten(tree: &UseTree, before: &mut Vec<String>, used: &mut Vec<Used>) {
    let at = |ident: &syn::Ident| [&before[..], &[ident.to_string()]].concat();
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, used);
            before.pop();
        }
        UseTree::Name(name) => used.push(Used {
            path: at(&name.ident),
            name: name.ident.to_string(),
        }),
        UseTree::Rename(name) => used.push(Used {
            path: at(&name.ident),
            name: name.rename.to_string(),
        }),
        UseTree::Glob(_) => used.push(Used {
            path: before.clone(),
            name: "*".into(),
        }),
        UseTree::Group(group) => group
            .items
            .iter()
            .for_each(|tree| flatten(tree, before, used)),
    }
}

/// The largest sets of modules that all reach each other.
fn cycles<'a>(uses: &BTreeSet<(&'a Module, &'a Module)>) -> BTreeSet<Vec<&'a Module>> {
    let used: HashMap<&Module, Vec<&Module>> = uses.iter().copied().into_group_map();
    let reached = |start: &'a Module| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(at) = open.pop() {
            let next = used.get(at).into_iter().flatten().copied();
            open.extend(next.filter(|to| reached.insert(*to)));
        }
        reached
    };
    let all: BTreeMap<&Module, BTreeSet<&Module>> =
        used.keys().map(|from| (*from, reached(from))).collect();
    let cycle = |(start, reached): (&&'a Module, &BTreeSet<&'a Module>)| -> Vec<&'a Module> {
        let back = |to: &&&Module| all.get(**to).is_some_and(|back| back.contains(*start));
        reached.iter().filter(back).copied().collect()
    };
    all.iter()
        .map(cycle)
        .filter(|cycle| !cycle.is_empty())
        .collect()
}
