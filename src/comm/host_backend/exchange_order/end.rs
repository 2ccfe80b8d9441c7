//! The end of a launch in several processes.
//!
//! A process may have started its part of an exchange whose place in the order another process has
//! not received yet. So when the programs of all ranks have ended, no process drops what it has not
//! started before it has received, and started, the complete order:
//!
//! ```text
//! each process      makes its last reports: `ExchangesEnded` to the first process
//! first process     has ordered what all have reported: `ExchangesEnded` to all
//! each process      starts the rest of the order
//! ```
//!
//! Only processes whose ranks exchange tensors take part. They know of each other by the messages
//! with which ranks end.

use std::time::{Duration, Instant};

use super::HostBackend;
use crate::comm::transport::header::ControlMessage;

/// Time for which a process waits for the others, whose ranks have ended.
const PATIENCE: Duration = Duration::from_secs(60);

impl HostBackend {
    /// Starts all exchanges that some process starts. Called when the programs of all ranks, in all
    /// processes, have ended. Waits for the other processes, at most for a minute.
    pub(in crate::comm::host_backend) fn complete_exchanges(&self) {
        let remote = self.remote();
        self.end_reports();
        match remote.decides() {
            true => self.exchanges_ended(remote.here()),
            false if self.exchanges_of(remote.first()) => {
                remote.notify_process(remote.first(), ControlMessage::ExchangesEnded);
            }
            // No process orders exchanges.
            false => return,
        }
        let until = Instant::now() + PATIENCE;
        loop {
            self.start_exchanges();
            let mut calls = self.exchanges.calls.lock();
            let is_done = calls.is_complete && calls.order.is_empty() && !calls.is_starting;
            // What a lost process has sent may never arrive.
            if is_done || calls.is_over || (calls.is_complete && calls.has_lost) {
                return;
            }
            let changed = &self.exchanges.changed;
            if changed.wait_until(&mut calls, until).timed_out() {
                log::warn!("some processes have not completed the last exchanges in time");
                return;
            }
        }
    }

    /// Makes the last reports of this process.
    fn end_reports(&self) {
        let mut has_ended = self.exchanges.reporting.lock();
        let mut groups: Vec<_> = {
            let calls = self.exchanges.calls.lock();
            calls.unstarted.keys().map(|(group, _)| *group).collect()
        };
        groups.dedup();
        groups
            .into_iter()
            .for_each(|group| self.report_due_exchanges(group));
        *has_ended = true;
    }

    /// Returns true if ranks of `process` exchange tensors, as far as this process knows.
    fn exchanges_of(&self, process: usize) -> bool {
        self.exchanges.calls.lock().exchanging.contains(&process)
    }

    /// Notes that a process, of which a rank has ended, exchanges tensors.
    pub(in crate::comm::host_backend) fn note_exchanging(&self, process: usize) {
        self.exchanges.calls.lock().exchanging.insert(process);
    }

    /// Notes that a process reports nothing any more; if it is the first, that the order is complete.
    pub(in crate::comm::host_backend) fn exchanges_ended(&self, process: usize) {
        let remote = self.remote();
        let mut calls = self.exchanges.calls.lock();
        calls.ended.insert(process);
        let is_complete = match remote.decides() {
            // The other processes are known when this one ends.
            true => {
                calls.ended.contains(&remote.here()) && calls.exchanging.is_subset(&calls.ended)
            }
            false => process == remote.first(),
        };
        if !is_complete || calls.is_complete {
            return;
        }
        calls.is_complete = true;
        let others: Vec<_> = calls.exchanging.iter().copied().collect();
        self.exchanges.changed.notify_all();
        drop(calls);
        if remote.decides() {
            for other in others {
                remote.notify_process(other, ControlMessage::ExchangesEnded);
            }
        }
    }

    /// Notes that a process is lost.
    pub(in crate::comm::host_backend) fn exchanges_lost(&self, process: usize) {
        self.exchanges.calls.lock().has_lost = true;
        self.exchanges_ended(process);
        self.exchanges.changed.notify_all();
    }
}
