//! The conformance suite, on ranks in several processes.

use super::loopback::Job;
use crate::comm::Launch;
use crate::testing::Conformance;

fn conforms(processes: usize, each: usize) {
    let job = Job::new(processes, 7);
    let reports = job.run(|_, processes| {
        let launch = |ranks: usize| {
            assert_eq!(ranks, job.processes.len() * each);
            Launch::on(processes.engine(each))
        };
        Conformance::of(launch).ranks([job.processes.len() * each]).run()
    });
    assert!(reports.iter().all(|report| report.total() > 10_000), "{}", reports[0]);
}

#[test]
fn two_processes_of_one_rank_conform() {
    conforms(2, 1);
}

#[test]
fn three_processes_of_one_rank_conform() {
    conforms(3, 1);
}

#[test]
fn two_processes_of_two_ranks_conform() {
    conforms(2, 2);
}

#[test]
fn one_process_of_four_ranks_conforms() {
    conforms(1, 4);
}
