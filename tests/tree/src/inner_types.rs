//! Which folders use the inner types of burn and cubecl, and why: what a new version of them may
//! break.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{File, ItemMod, ItemUse};

use crate::layers::{Module, Tree, flatten, is_test};

/// Paths of types that users of burn do not meet: a crate, or a module of burn.
const INNER: [&[&str]; 8] = [
    &["burn", "backend", "autodiff"],
    &["burn", "backend", "flex"],
    &["burn_cubecl"],
    &["burn_pack"],
    &["burn_std"],
    &["cubecl"],
    &["cubecl_server"],
    &["burn_autodiff"],
];

/// Folders of `src` whose files may use them, with all that lies in these folders.
const ALLOWED: [(&str, &str); 10] = [
    (
        "autodiff",
        "records operations in burn's graph by its extension interface",
    ),
    (
        "burn_compat",
        "relies on what burn and cubecl do and do not promise, one file each",
    ),
    (
        "checkpoint",
        "reads optimizer records, whose format is burn_pack's",
    ),
    (
        "comm/data",
        "reads the memory of tensors on the host and on devices",
    ),
    ("kernels", "kernels of this crate, on Flex and on cubecl"),
    (
        "memory",
        "allocates, shares and evicts the memory of tensors",
    ),
    (
        "optim",
        "reads and writes optimizer records, whose format is burn_pack's",
    ),
    ("param", "tells leaves of the graph apart by their node ids"),
    (
        "param/storage",
        "evictable memory under a Flex tensor; a test of what it assumes is in `flex`",
    ),
    (
        "testing",
        "compares copies with the kernels of this crate and of burn",
    ),
];

#[test]
fn inner_types_are_used_where_a_reason_is_given() {
    let tree = Tree::read(&crate::root().join("src"));
    assert_eq!(faults(&tree, &ALLOWED), [""; 0]);
}

#[test]
fn uses_without_a_reason_and_reasons_without_a_use_are_found() {
    let sources = [
        (
            "mesh/a.rs",
            "use burn::backend::{DispatchTensor, flex::FlexTensor};",
        ),
        ("kernels/b.rs", "fn f() { cubecl::launch() }"),
        ("comm/mod.rs", "use burn::tensor::Tensor;"),
        ("comm/data/c.rs", "use burn_std::Bytes; "),
        ("comm/data/tests.rs", ""),
        (
            "dtensor/d.rs",
            "#[cfg(test)] mod tests { use burn_cubecl::CubeTensor; }",
        ),
    ];
    let tree = Tree::new(sources.map(|(path, text)| (path, text.to_owned())));
    let allowed = [
        ("kernels", ""),
        ("comm", ""),
        ("comm/data", ""),
        ("dtensor", ""),
    ];
    assert_eq!(
        faults(&tree, &allowed),
        [
            "mesh/a uses burn::backend::flex, and no reason is given",
            "comm uses none: remove it",
            "dtensor uses none: remove it",
        ]
    );
}

/// Returns the files that use inner types outside the folders of `allowed`, and the folders in it
/// that use none.
fn faults(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut used = BTreeSet::new();
    for (module, file) in tree.files() {
        for inner in inner_paths(file) {
            let folders = allowed.iter().map(|(folder, _)| *folder);
            // The folder inside the others, if several contain the file.
            match folders
                .filter(|folder| is_in(module, folder))
                .max_by_key(|folder| folder.len())
            {
                Some(folder) => _ = used.insert(folder),
                None => faults.push(format!(
                    "{} uses {inner}, and no reason is given",
                    module.join("/")
                )),
            }
        }
    }
    for (folder, _) in allowed {
        if !used.contains(folder) {
            faults.push(format!("{folder} uses none: remove it"));
        }
    }
    faults
}

fn is_in(module: &Module, folder: &str) -> bool {
    let parts: Vec<&str> = folder.split('/').collect();
    module.len() >= parts.len() && module.iter().zip(parts).all(|(a, b)| a == b)
}

/// Returns the inner paths that a file names, once each.
fn inner_paths(file: &File) -> BTreeSet<String> {
    let mut paths = Paths::default();
    paths.visit_file(file);
    let mut inner = BTreeSet::new();
    for path in paths.0 {
        let found = INNER.iter().find(|inner| {
            path.len() >= inner.len() && inner.iter().zip(&path).all(|(a, b)| a == b)
        });
        inner.extend(found.map(|inner| inner.join("::")));
    }
    inner
}

/// All paths of a file, outside tests.
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

    fn visit_path(&mut self, path: &syn::Path) {
        let segments = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        self.0.push(segments.collect());
        visit::visit_path(self, path);
    }
}
