//! The conformance suite with ranks in several processes.

use burn_dtensor::comm::Launch;
use burn_dtensor::testing::Conformance;
use burn_dtensor::testing::LoopbackJob;

/// Runs all cases, or only some if `is_brief` is set, because the MPI tests run all of them on real
/// processes.
fn conforms(processes: usize, each: usize, is_brief: bool) {
    let job = LoopbackJob::new(processes, 7);
    let reports = job.run(|_, processes| {
        let launch = |ranks: usize| {
            assert_eq!(ranks, job.processes.len() * each);
            Launch::on_backend(processes.backend(each))
        };
        let conformance = Conformance::of(launch).with_ranks([job.processes.len() * each]);
        if is_brief {
            conformance.with_few_cases()
        } else {
            conformance
        }
        .run()
    });
    let least = if is_brief { 1000 } else { 10_000 };
    assert!(
        reports.iter().all(|report| report.total() > least),
        "{}",
        reports[0]
    );
}

#[test]
fn two_processes_of_one_rank_conform() {
    conforms(2, 1, false);
}

#[test]
fn three_processes_of_one_rank_conform() {
    conforms(3, 1, true);
}

#[test]
fn two_processes_of_two_ranks_conform() {
    conforms(2, 2, true);
}

#[test]
fn one_process_of_four_ranks_conforms() {
    conforms(1, 4, true);
}
