//! The conformance suite on [`Naive`], and on burn-dtensor's own backend of processes over a
//! transport of another crate.

use burn_dtensor::comm::Launch;
use burn_dtensor::testing::Conformance;
use downstream::naive::Naive;

/// Returns true if all cases are tried, as `.ci/long` has time for.
fn is_long() -> bool {
    std::env::var_os("LONG_TESTS").is_some()
}

fn threads() -> Conformance<impl Fn(usize) -> Launch> {
    let conformance =
        Conformance::of(|ranks| Launch::on_backend(Naive::new(ranks))).with_ranks([2, 3]);
    if is_long() {
        conformance
    } else {
        conformance.with_few_cases()
    }
}

#[test]
fn a_backend_of_threads_passes_every_check() {
    let cases: Vec<_> = Conformance::names()
        .map(|check| (check, threads().check(check)))
        .collect();
    assert!(cases.iter().all(|(_, cases)| *cases > 0), "{cases:?}");
}

#[test]
fn a_backend_of_threads_names_wrong_use() {
    assert!(threads().misuse() >= 2 * 38);
}

#[cfg(unix)]
mod processes {
    use burn_dtensor::comm::ProcessJob;
    use downstream::naive::NaiveJob;

    use super::super::two_processes::in_two_processes;
    use super::*;

    /// Runs every check in two processes, with `each` ranks in each.
    fn conforms(launch: impl Fn() -> Launch, each: usize) {
        let conformance = Conformance::of(|_| launch()).with_ranks([2 * each]);
        let conformance = if is_long() {
            conformance
        } else {
            conformance.with_few_cases()
        };
        let report = conformance.run();
        assert!(report.cases.iter().all(|(_, cases)| *cases > 0), "{report}");
        println!("{report}");
    }

    #[test]
    fn a_backend_of_two_processes_passes_every_check() {
        in_two_processes(
            "backend::conformance::processes::a_backend_of_two_processes_passes_every_check",
            |transport| {
                let job = NaiveJob::new(transport);
                for each in [1, 2] {
                    conforms(|| Launch::on_backend(job.backend(each)), each);
                }
            },
        );
    }

    #[test]
    fn a_transport_connects_two_processes_of_the_crates_own_backend() {
        let test = "backend::conformance::processes::a_transport_connects_two_processes_of_the_crates_own_backend";
        in_two_processes(test, |transport| {
            let job = ProcessJob::new(transport);
            conforms(|| Launch::on_backend(job.backend(2)), 2);
        });
    }
}
