//! Prints what scripts and contributors ask of the sources.
//!
//! - `tree gated PROGRAM [FEATURE]`: the paths of a program's tests that the README's test command
//!   does not build, one a line; with a feature, of those that need this feature alone.
//! - `tree needs PROGRAM FILTER`: the features that the tests need whose paths contain a filter,
//!   separated by commas; an empty line if the README's test command builds one of them.
//! - `tree lines [FOLDER..]`: lines that are not tests, lines of tests, files of each kind, and
//!   thread-locals, of every folder in these, as [`lines`](tree::lines) counts them; of `src`
//!   without a folder. Folders are named from the root of the repository.
//! - `tree uses FOLDER`: for every file in the folder of `src`, the files of that folder that it
//!   uses; then the circles among them.
//! - `tree book`: the module of the book, for `src/book.rs`.
//!
//! A program is `lib` or the name of a test target.

use std::process::ExitCode;

use tree::book::book;
use tree::layers::Tree;
use tree::lines::{self, Size};
use tree::programs::tests;
use tree::root;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["gated", program] => {
            let gated = tests()
                .iter()
                .filter(|test| test.program == program && !test.needs.is_empty());
            gated.for_each(|test| println!("{}", test.path));
        }
        ["gated", program, feature] => {
            let gated = tests()
                .iter()
                .filter(|test| test.program == program && test.needs == [feature]);
            gated.for_each(|test| println!("{}", test.path));
        }
        ["needs", program, filter] => {
            let matching = tests()
                .iter()
                .filter(|test| test.program == program && test.path.contains(filter));
            let Some(needs) = matching
                .map(|test| test.needs)
                .min_by_key(|needs| needs.len())
            else {
                eprintln!("no test of {program} matches {filter}");
                return ExitCode::FAILURE;
            };
            println!("{}", needs.join(","));
        }
        ["book"] => print!("{}", book(&root())),
        ["uses", folder] => print_uses(folder),
        ["lines"] => print_sizes("src"),
        ["lines", ref folders @ ..] => folders.iter().for_each(|folder| print_sizes(folder)),
        _ => {
            eprintln!(
                "usage: tree gated PROGRAM [FEATURE] | tree needs PROGRAM FILTER | tree lines [FOLDER..] | tree uses FOLDER | \
                 tree book"
            );
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Prints what the files of `folder` use of each other.
fn print_uses(folder: &str) {
    let tree = Tree::read(&tree::root().join("src"));
    for (file, used) in tree.uses_inside(folder) {
        println!("{file}: {}", used.join(" "));
    }
    for circle in tree.circles() {
        println!("{circle}");
    }
}

/// Prints the sizes of the folders in `folder`, and their sum.
fn print_sizes(folder: &str) {
    let sizes = lines::of_folder(&tree::root().join(folder));
    println!(
        "{:<40}{:>9}{:>8}{:>7}{:>12}{:>15}",
        "folder", "non-test", "test", "files", "test files", "thread-locals"
    );
    for (name, size) in sizes
        .iter()
        .map(|(name, size)| (format!("{folder}/{name}"), *size))
    {
        print_size(&name, size);
    }
    print_size(folder, sizes.into_values().sum());
}

fn print_size(name: &str, size: Size) {
    let Size {
        code,
        test,
        files,
        test_files,
        thread_locals,
    } = size;
    println!("{name:<40}{code:>9}{test:>8}{files:>7}{test_files:>12}{thread_locals:>15}");
}
