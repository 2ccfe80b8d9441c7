//! Prints tests for the scripts of `.ci`.
//!
//! - `tree gated PROGRAM [FEATURE]`: the paths of a program's tests that the README's test command does not build, one a line;
//!   with a feature, of those that need this feature alone.
//! - `tree needs PROGRAM FILTER`: the features that the tests need whose paths contain a filter, separated by commas; an empty
//!   line if the README's test command builds one of them.
//!
//! A program is `lib` or the name of a test target.

use std::process::ExitCode;

use tree::programs::tests;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["gated", program] => {
            let gated = tests().iter().filter(|test| test.program == program && !test.needs.is_empty());
            gated.for_each(|test| println!("{}", test.path));
        }
        ["gated", program, feature] => {
            let gated = tests().iter().filter(|test| test.program == program && test.needs == [feature]);
            gated.for_each(|test| println!("{}", test.path));
        }
        ["needs", program, filter] => {
            let matching = tests().iter().filter(|test| test.program == program && test.path.contains(filter));
            let Some(needs) = matching.map(|test| test.needs).min_by_key(|needs| needs.len()) else {
                eprintln!("no test of {program} matches {filter}");
                return ExitCode::FAILURE;
            };
            println!("{}", needs.join(","));
        }
        _ => {
            eprintln!("usage: tree gated PROGRAM [FEATURE] | tree needs PROGRAM FILTER");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
