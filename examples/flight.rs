//! Says which rank of a program is at fault and who waits for whom, after a crash or while the program runs.
//!
//! ```text
//! BURN_DTENSOR_FLIGHT=flights mpirun -n 4 program
//! cargo run --example flight -- flights
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use burn_dtensor::comm::flight::{FlightError, LaunchTrace};
use clap::Parser;

/// Reads what the ranks of a program did last, from the folder that `Launch::with_flight_recorder` or the environment
/// variable BURN_DTENSOR_FLIGHT has named: who is at fault and why, who waits for whom, and the last operations of each
/// rank. Of a program that runs, has ended or was killed; processes that are gone or stopped are known on their own
/// host.
///
/// Exits with 0 if no rank is at fault, with 1 if one is, with 2 if there is nothing to read.
#[derive(Parser)]
struct Args {
    /// The folder of flight files, `launch-0-rank-0.flight` and on.
    folder: PathBuf,
    /// Print JSON, a line for each launch.
    #[arg(long)]
    json: bool,
    /// How many operations of each rank to print, the last ones.
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

/// Prints what there is. Returns whether no rank is at fault.
fn is_well(Args { folder, json, last }: &Args) -> Result<bool, FlightError> {
    let launches = LaunchTrace::read(folder)?;
    for flights in &launches {
        if *json {
            println!("{}", flights.to_json(*last));
        } else {
            print!("{}", flights.text(*last));
        }
    }
    Ok(launches.iter().all(|flights| flights.fault().is_none()))
}
