//! Pages: every page of the book is in its summary, and relative links lead to files and headings that
//! exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use itertools::Itertools;

use crate::book::links;

/// Returns the README, the other pages of the root, and the pages of the book.
pub fn all(root: &Path) -> Vec<PathBuf> {
    let of_root = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root.join(name));
    of_root
        .into_iter()
        .chain(below(&root.join("docs")))
        .collect()
}

/// The pages below a folder.
fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .expect("a folder of pages")
        .map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.sorted().partition(|path| path.is_dir());
    let pages = files
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "md"));
    pages
        .chain(folders.iter().flat_map(|folder| below(folder)))
        .collect()
}

#[test]
fn every_page_is_in_the_summary() {
    let docs = crate::root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("a summary");
    let listed: BTreeSet<PathBuf> = links(&summary)
        .into_iter()
        .map(|link| docs.join(link))
        .collect();
    let pages = below(&docs)
        .into_iter()
        .filter(|page| !page.ends_with("SUMMARY.md"));
    assert_eq!(pages.collect::<BTreeSet<_>>(), listed);
}

#[test]
fn every_page_with_rust_is_run() {
    let root = crate::root();
    let [library, book] = ["src/lib.rs", "src/book.rs"]
        .map(|file| fs::read_to_string(root.join(file)).expect("the library"));
    let has_rust =
        |page: &PathBuf| fs::read_to_string(page).is_ok_and(|text| text.contains("```rust"));
    let is_run = |page: &PathBuf| {
        let name = page.strip_prefix(&root).expect("inside").display();
        [&library, &book]
            .iter()
            .any(|text| text.contains(&format!("include_str!(\"../{name}\")")))
    };
    let missing: Vec<_> = all(&root)
        .into_iter()
        .filter(|page| has_rust(page) && !is_run(page))
        .collect();
    assert_eq!(missing, [""; 0].map(PathBuf::from));
}

#[test]
fn relative_links_lead_somewhere() {
    let mut broken = Vec::new();
    let root = crate::root();
    let in_sources = root.join("src/param/backward.md");
    for page in all(&root).into_iter().chain([in_sources]) {
        let text = fs::read_to_string(&page).expect("a page");
        // Pages of the web, and items that rustdoc finds.
        let is_other = |link: &String| link.contains("://") || link.contains("::");
        let is_broken = |link: &String| !is_other(link) && !leads_somewhere(&page, link);
        broken.extend(
            links(&text)
                .into_iter()
                .filter(is_broken)
                .map(|link| format!("{}: {link}", page.display())),
        );
    }
    assert_eq!(broken, [""; 0]);
}

#[test]
fn links_are_found() {
    let page = "See [a](b.md#c), ![d](e.svg) and <https://f>.\n\n[g]: h.md\n```rust\nx[0](i)\n```\n`[j](k)`\n";
    assert_eq!(links(page), ["b.md#c", "e.svg", "h.md"]);
}

#[test]
fn headings_are_found() {
    let page = "# A page\n\n```sh\n# no heading\n```\n\n## Not `Shard(0)`: \"its\" 2 forms\n#no\n";
    assert_eq!(headings(page), ["a-page", "not-shard0-its-2-forms"]);
}

/// Returns true if the file that a link of `page` names exists and has the heading that the link
/// names.
fn leads_somewhere(page: &Path, link: &str) -> bool {
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => page.to_path_buf(),
        _ => page.parent().expect("a file is in a folder").join(file),
    };
    let has_heading = || {
        let text = fs::read_to_string(&target).unwrap_or_default();
        headings(&text).iter().any(|anchor| anchor == heading)
    };
    target.exists() && (heading.is_empty() || has_heading())
}

/// Returns the anchors of a page's headings, as GitHub and mdbook name them.
fn headings(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        let title = line.trim_start_matches('#');
        if is_code || title == line || !title.starts_with(' ') {
            continue;
        }
        let is_kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
        let kept: String = title.trim().chars().filter(is_kept).collect();
        found.push(kept.to_lowercase().replace(' ', "-"));
    }
    found
}
