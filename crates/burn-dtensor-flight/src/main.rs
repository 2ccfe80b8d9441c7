//! Reports which rank of a program is at fault and which ranks wait for which, after a crash or
//! while the program runs.
//!
//! ```text
//! BURN_DTENSOR_FLIGHT=flights mpirun -n 4 program
//! flight flights
//! ```

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_dtensor_flight::LaunchTrace;
use clap::Parser;

/// Shows the rank of a program that is at fault and the reason, which ranks wait
/// for which, and the last operations of each rank. Reads the folder that
/// `Launch::with_flight_recorder` or the environment variable BURN_DTENSOR_FLIGHT
/// names. The program may be running, or may have ended or been killed. Processes
/// that are gone or stopped are detected only on their own host.
///
/// Exits with 0 if no rank is at fault, with 1 if one is, with 2 if there is
/// nothing to read.
#[derive(Parser)]
#[command(verbatim_doc_comment)]
struct Args {
    /// Folder of flight files, such as `launch-0-rank-3.flight`
    folder: PathBuf,
    /// Print JSON, one line per launch
    #[arg(long)]
    json: bool,
    /// Number of last operations to print for each rank
    #[arg(long, default_value_t = 5)]
    last: usize,
}

fn main() -> ExitCode {
    match is_well(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Prints all launches. Returns true if no rank is at fault.
fn is_well(Args { folder, json, last }: &Args) -> Result<bool, Box<dyn Error>> {
    let launches = LaunchTrace::read(folder)?;
    if launches.is_empty() {
        return Err(format!("{}: no rank has begun its program yet", folder.display()).into());
    }
    for flights in &launches {
        if *json {
            println!("{}", flights.to_json(*last));
        } else {
            print!("{}", flights.text(*last));
        }
    }
    Ok(launches.iter().all(|flights| flights.fault().is_none()))
}
