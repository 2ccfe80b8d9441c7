//! A failure of one process reaches the ranks of the other.

#![cfg(unix)]

use std::time::Duration;

use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Launch, LaunchError, World, launch};
use downstream::naive::NaiveJob;

use super::two_processes::in_two_processes;

/// Launches `program` on two ranks in two processes, where it fails.
fn failed(job: &NaiveJob, program: fn(&World) -> burn_dtensor::Result<()>) -> LaunchError {
    let config = Launch::on_backend(job.backend(1)).with_deadline(Duration::from_secs(60));
    launch(config, program).expect_err("the program fails")
}

#[test]
fn both_processes_report_the_same_failure() {
    in_two_processes(
        "backend::failure::both_processes_report_the_same_failure",
        |transport| {
            let here = burn_dtensor::comm::transport::Transport::process_index(&*transport);
            let job = NaiveJob::new(transport);
            let error = failed(&job, |world| match world.rank() {
                1 => Err(Error::other("out of paper")),
                _ => world.barrier("step"),
            });
            assert_eq!(
                (error.rank, error.is_reported_by_other_process),
                (1, here != 0),
                "{error}"
            );
            assert!(error.cause.to_string().contains("out of paper"), "{error}");
            let [other] = &error.others[..] else {
                panic!("{error}")
            };
            assert!(
                other.rank == 0
                    && other
                        .error
                        .as_ref()
                        .is_some_and(|error| error.to_string().contains("paper"))
            );
            let error = failed(&job, |world| {
                if world.rank() == 0 {
                    Ok(())
                } else {
                    world.barrier("step")
                }
            });
            assert!(
                matches!(
                    error.cause,
                    Error::Comm(CommError::RankReturned { rank: 0, .. })
                ),
                "{error}"
            );
            // The job outlives a failure.
            launch(Launch::on_backend(job.backend(2)), |world| {
                world.barrier("next")
            })
            .unwrap();
        },
    );
}

#[test]
fn a_process_that_ends_is_a_failure_of_the_other() {
    in_two_processes(
        "backend::failure::a_process_that_ends_is_a_failure_of_the_other",
        |transport| {
            let job = NaiveJob::new(transport);
            launch(Launch::on_backend(job.backend(1)), |world| {
                world.barrier("all are here")
            })
            .unwrap();
            let error = failed(&job, |world| {
                // The other process has left the first launch.
                world.barrier("begin")?;
                if world.rank() == 1 {
                    std::process::exit(0);
                }
                world.barrier("step")
            });
            assert!(
                matches!(
                    error.cause,
                    Error::Comm(CommError::Disconnected { rank: 1, .. })
                ),
                "{error}"
            );
        },
    );
}
