//! Where burn's sources are, and what a file of them holds.

use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, File};

/// The folder of sources of a crate of burn's, of the version that `Cargo.lock` names: where cargo
/// unpacked it to build it.
///
/// # Panics
/// If it is nowhere.
pub fn of_crate(name: &str) -> PathBuf {
    let lock = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock"))
        .expect("a lock file");
    let (_, after) = lock
        .split_once(&format!("name = \"{name}\"\nversion = \""))
        .expect("it is a dependency");
    let (version, _) = after.split_once('"').expect("quotes are closed");
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home
        .or_else(|| Some(std::env::home_dir()?.join(".cargo")))
        .expect("cargo has a home");
    let registries = fs::read_dir(home.join("registry/src"))
        .into_iter()
        .flatten()
        .flatten();
    let found = registries
        .map(|registry| registry.path().join(format!("{name}-{version}/src")))
        .find(|at| at.is_dir());
    found.unwrap_or_else(|| {
        panic!(
            "the sources of {name} {version} are not in {}/registry/src: let cargo fetch them",
            home.display()
        )
    })
}

/// The items of a file.
pub fn parsed(path: &Path) -> File {
    let text = fs::read_to_string(path).expect("a source");
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Whether what has these attributes is of tests alone.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list();
        attribute.path().is_ident("cfg") && list.is_ok_and(|list| list.tokens.to_string() == "test")
    })
}
