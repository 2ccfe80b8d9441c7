//! [`book`]: the module `book` of the library, in which rustdoc shows the pages of the book.
//!
//! Pages link to each other by reference: `[units][fsdp.md]`, with `[fsdp.md]: fsdp.md` at their end. Of
//! several definitions of one reference, Markdown takes the first. The module places definitions
//! before each page that lead to modules, so links work on GitHub, in mdbook and in rustdoc. A
//! picture is defined as its data.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use itertools::Itertools;

/// Pages whose programs need a feature.
const NEED: [(&str, &str); 2] = [
    ("docs/guides/burn-train.md", "train"),
    ("docs/guides/data.md", "dataset"),
];

/// The file that has the module.
#[cfg(test)]
const FILE: &str = "src/book.rs";

#[test]
fn the_module_has_the_pages_of_the_book() {
    let root = crate::root();
    let found = fs::read_to_string(root.join(FILE)).expect("the module");
    assert!(
        found == book(&root),
        "{FILE} is older than the book: cargo run -p tree -- book > {FILE}"
    );
}

#[test]
fn pages_of_the_book_link_by_reference() {
    let root = crate::root();
    let mut faults = Vec::new();
    for page in pages(&root) {
        let text = fs::read_to_string(root.join(&page.file)).expect("a page");
        let defined = definitions(&text);
        let inline = links(&text).into_iter().filter(|link| {
            !link.contains("://")
                && !link.starts_with('#')
                && !defined.contains(&(link.clone(), link.clone()))
        });
        faults.extend(inline.map(|link| format!("{}: {link}", page.file.display())));
    }
    assert_eq!(
        faults, [""; 0],
        "write [text][page.md], and [page.md]: page.md at the end"
    );
}

#[test]
fn references_of_pages_are_defined() {
    let root = crate::root();
    let mut faults = Vec::new();
    for page in pages(&root) {
        let text = fs::read_to_string(root.join(&page.file)).expect("a page");
        let defined = definitions(&text);
        let is_undefined = |label: &String| defined.iter().all(|(known, _)| known != label);
        let undefined = references(&text).into_iter().filter(is_undefined);
        faults.extend(undefined.map(|label| format!("{}: {label}", page.file.display())));
    }
    assert_eq!(faults, [""; 0]);
}

/// A page of the book.
struct Page {
    title: String,
    /// Path from the root of the repository.
    file: PathBuf,
    /// Name of its module.
    module: String,
}

/// Returns the pages in the order of the summary, with the headings between them.
fn summary(root: &Path) -> Vec<Result<Page, String>> {
    let summary = fs::read_to_string(root.join("docs/SUMMARY.md")).expect("a summary");
    let entry = |line: &str| {
        if let Some(heading) = line.strip_prefix("# ") {
            return Some(Err(heading.to_owned())).filter(|_| heading != "Summary");
        }
        let (title, file) = line
            .strip_prefix("- [")?
            .strip_suffix(')')?
            .split_once("](")?;
        let name = Path::new(file).file_stem()?.to_str()?;
        Some(Ok(Page {
            title: title.into(),
            file: Path::new("docs").join(file),
            module: name.replace('-', "_"),
        }))
    };
    summary.lines().filter_map(entry).collect()
}

fn pages(root: &Path) -> Vec<Page> {
    summary(root).into_iter().filter_map(Result::ok).collect()
}

/// Returns the text of the module.
pub fn book(root: &Path) -> String {
    let mut text = String::from(
        "// Written by `cargo run -p tree -- book > src/book.rs`, from `docs/SUMMARY.md`.\n\n\
         //! The book: how to train, parallelize, save, run and debug a model. Its pages are in reading order.\n//!\n",
    );
    let mut modules = String::new();
    for entry in summary(root) {
        match entry {
            Err(heading) => {
                let space = if text.ends_with("//!\n") { "" } else { "//!\n" };
                write!(text, "{space}//! # {heading}\n//!\n")
            }
            Ok(page) => {
                modules += &module(root, &page);
                writeln!(text, "//! - [{}]({})", page.title, page.module)
            }
        }
        .expect("a string takes all");
    }
    text + "\n" + modules.trim_end() + "\n"
}

/// Returns the module of a page.
fn module(root: &Path, page: &Page) -> String {
    let text = fs::read_to_string(root.join(&page.file)).expect("a page");
    let mut module = String::new();
    for link in links(&text).into_iter().unique() {
        let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
        let target = page.file.parent().expect("a folder").join(file);
        let of_book = pages(root)
            .into_iter()
            .find(|other| is_same(root, &other.file, &target));
        let to = match of_book {
            _ if link.contains("://") || file.is_empty() => continue,
            Some(other) if heading.is_empty() => format!("crate::book::{}", other.module),
            Some(other) => format!("crate::book::{}#{heading}", other.module),
            None if file.ends_with(".svg") => picture(&root.join(&target)),
            // A file of the repository: the definition of the page stays.
            None => continue,
        };
        writeln!(module, "#[doc = {:?}]", format!("[{link}]: {to}")).expect("a string takes all");
    }
    let name = page.file.display();
    writeln!(module, "#[doc = \"\"]").expect("a string takes all");
    let included = format!("include_str!(\"../{name}\")");
    match NEED.iter().find(|(page, _)| name.to_string() == *page) {
        None => writeln!(module, "#[doc = {included}]"),
        Some((_, feature)) => writeln!(
            module,
            "#[cfg_attr(any(not(doctest), feature = \"{feature}\"), doc = {included})]"
        ),
    }
    .expect("a string takes all");
    writeln!(module, "pub mod {} {{}}\n", page.module).expect("a string takes all");
    module
}

/// Returns the labels of a page that are defined, with their targets.
#[cfg(test)]
fn definitions(text: &str) -> Vec<(String, String)> {
    let definition = |line: &str| {
        let (label, target) = line.strip_prefix('[')?.split_once("]: ")?;
        Some((label.to_owned(), target.to_owned()))
    };
    text.lines().filter_map(definition).collect()
}

/// Returns the targets of a page's links and pictures, outside code.
pub fn links(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if is_code {
            continue;
        }
        if let Some((_, target)) = line.split_once("]: ").filter(|_| line.starts_with('[')) {
            found.push(target.to_owned());
        }
        let plain: String = line.split('`').step_by(2).collect();
        found.extend(
            plain
                .split("](")
                .skip(1)
                .filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())),
        );
    }
    found
}

/// Returns the labels of a page's links by reference, outside code.
#[cfg(test)]
fn references(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if !is_code {
            let plain: String = line.split('`').step_by(2).collect();
            let labels = plain.split("][").skip(1);
            found.extend(labels.filter_map(|rest| Some(rest.split_once(']')?.0.to_owned())));
        }
    }
    found
}

/// Returns true if both paths name one file.
fn is_same(root: &Path, a: &Path, b: &Path) -> bool {
    let [a, b] = [a, b].map(|path| root.join(path).canonicalize().ok());
    a.is_some() && a == b
}

/// Returns the address of a picture that contains its data.
fn picture(file: &Path) -> String {
    let svg = fs::read(file).expect("a picture");
    format!("data:image/svg+xml;base64,{}", base64(&svg))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let [a, b, c] = std::array::from_fn(|at| u32::from(*chunk.get(at).unwrap_or(&0)));
        let bits = a << 16 | b << 8 | c;
        for digit in 0..4 {
            text.push(match digit <= chunk.len() {
                true => DIGITS[(bits >> (18 - 6 * digit) & 63) as usize].into(),
                false => '=',
            });
        }
    }
    text
}

#[test]
fn pictures_are_encoded_as_others_do() {
    let encoded = ["", "M", "Ma", "Man", "light work."].map(|text| base64(text.as_bytes()));
    assert_eq!(encoded, ["", "TQ==", "TWE=", "TWFu", "bGlnaHQgd29yay4="]);
}
