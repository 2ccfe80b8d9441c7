//! Command line handling shared by the examples.

use std::process::ExitCode;
use std::str::FromStr;

use burn_dtensor::Result;
use clap::Parser;
use clap::error::ErrorKind;

/// Exit code of a wrong command line.
const USAGE: u8 = 2;

/// Parses the command line and calls `run`, which returns true if its checks passed.
///
/// Prints any error as one line. If several processes fail with the same error, one of them prints
/// it.
pub fn main<C: Parser, S>(
    settings: impl FnOnce(C) -> Result<S, String>,
    run: impl FnOnce(&S) -> Result<bool>,
) -> ExitCode {
    let settings = match C::try_parse() {
        Ok(cli) => settings(cli),
        Err(help) if is_help(help.kind()) => help.exit(),
        // The usage below clap's error would hide it.
        Err(error) => {
            let text = error.to_string();
            let lines = text
                .trim_start_matches("error: ")
                .lines()
                .take_while(|line| !line.is_empty());
            Err(lines.map(str::trim).collect::<Vec<_>>().join(" "))
        }
    };
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("error: {error}. Run with --help for the options");
            return ExitCode::from(USAGE);
        }
    };
    match run(&settings) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if !error.is_reported_by_other_process() {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

fn is_help(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    )
}

/// Sizes of at most `MOST` mesh dimensions, such as `2x2`.
#[derive(Debug, Clone)]
pub struct MeshShape<const MOST: usize>(pub Vec<usize>);

impl<const MOST: usize> FromStr for MeshShape<MOST> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = text.split('x').map(positive).collect::<Result<Vec<_>, _>>();
        let sizes = sizes.map_err(|_| "expected sizes above 0, joined by x, such as 2x2")?;
        match sizes.len() {
            n if n > MOST => Err(format!("expected at most {MOST} mesh dimensions, not {n}")),
            _ => Ok(Self(sizes)),
        }
    }
}

pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected an integer above 0".into()),
        Ok(value) => Ok(value),
    }
}

pub fn positive_float(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if f64::is_finite(value) && value > 0.0 => Ok(value),
        _ => Err("expected a number above 0".into()),
    }
}
