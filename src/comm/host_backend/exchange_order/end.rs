//! The end of a launch in several processes.
//!
//! A process may have started its part of an exchange whose place in the order another process has not
//! received yet. So when the programs of all ranks have ended, no process drops what it has not
//! started before it has received the complete order:
//!
//! ```text
//! each process      has reported all: `ExchangesEnded` to the first process
//! first process     has ordered all that was reported: `ExchangesEnded` to all
//! each process      starts the rest of the order
//! ```

use std::time::{Duration, Instant};

use super::HostBackend;
use crate::comm::control::rendezvous::LONGEST;
use crate::comm::transport::header::ControlMessage;

impl HostBackend {
    /// Starts all exchanges that some process starts. Called when the programs of all ranks, in all
    /// processes, have ended. Waits for the other processes, at most for `deadline`.
    pub(in crate::comm::host_backend) fn complete_exchanges(&self, deadline: Duration) {
        let mut groups: Vec<_> = {
            let calls = self.exchanges.calls.lock();
            calls.unstarted.keys().map(|(group, _)| *group).collect()
        };
        groups.dedup();
        // Waits for reports that other threads are making.
        drop(self.exchanges.reporting.lock());
        groups
            .into_iter()
            .for_each(|group| self.report_exchanges(group));
        let remote = self.remote();
        match remote.decides() {
            true => self.exchanges_ended(remote.here()),
            false => remote.notify_process(remote.first(), ControlMessage::ExchangesEnded),
        }
        let until = Instant::now() + deadline.min(LONGEST);
        let mut is_late = false;
        let mut calls = self.exchanges.calls.lock();
        while !calls.is_complete && !calls.is_over && !is_late {
            let changed = &self.exchanges.changed;
            is_late = changed.wait_until(&mut calls, until).timed_out();
        }
        drop(calls);
        self.start_exchanges();
        let mut calls = self.exchanges.calls.lock();
        while calls.is_starting && !is_late {
            let changed = &self.exchanges.changed;
            is_late = changed.wait_until(&mut calls, until).timed_out();
        }
        if is_late {
            log::warn!("the processes have not agreed on the last exchanges within {deadline:?}");
        }
    }

    /// Notes that a process reports nothing any more, or is lost; if it is the first, that the order is
    /// complete.
    pub(in crate::comm::host_backend) fn exchanges_ended(&self, process: usize) {
        let remote = self.remote();
        let mut calls = self.exchanges.calls.lock();
        calls.ended.insert(process);
        let is_running = |process: &usize| !remote.ranks_of(*process).is_empty();
        let mut running = (0..remote.processes()).filter(is_running);
        let is_complete = match remote.decides() {
            true => running.all(|process| calls.ended.contains(&process)),
            false => process == remote.first(),
        };
        if !is_complete || calls.is_complete {
            return;
        }
        calls.is_complete = true;
        self.exchanges.changed.notify_all();
        drop(calls);
        if remote.decides() {
            let others = (0..remote.processes()).filter(|other| *other != remote.here());
            for other in others.filter(is_running) {
                remote.notify_process(other, ControlMessage::ExchangesEnded);
            }
        }
    }
}
