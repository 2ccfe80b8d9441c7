//! [`ExchangeOrder`]: the one order in which the exchanges of a world start.
//!
//! Ranks may post the calls of several groups in different orders. But a device carries out
//! exchanges in the order in which they were started, and two ranks that start two exchanges in
//! different orders wait for each other forever. So one process, the one that decides which failure
//! is the first, orders the exchanges of all groups:
//!
//! ```text
//! process of member 0    all ranks have posted: reports it
//! first process                                            orders the call, and says so to the processes of the group
//! each process                                                            starts the exchange on all its ranks
//! ```
//!
//! Calls are ordered once all ranks have posted them, so that a call never waits for another that
//! some rank posts only later. Messages of the first process arrive in the order in which it sent
//! them, so all processes start their exchanges in the same order. Among the ranks of one process
//! no messages are needed.
//!
//! Deferred calls are ordered when the first rank needs the result: until then they take no memory
//! in addition to the tensors. If all ranks give a deferred call up, it is never started. The other
//! calls of a group start in the order in which they were posted, and the first of a group is not
//! deferred: the ranks connect in it.
//!
//! [Messages](super::exchanged_messages) have places in the same order.

mod end;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::mem;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::HostBackend;
use super::completion_thread::CompletionTask;
use super::exchanged_messages::ExchangedMessages;
use super::remote_group::RemoteGroup;
use crate::comm::backend::{Backend, Failure};
use crate::comm::control::exchange_report::ExchangeReport;
use crate::comm::control::match_table::{GroupKey, OpHandle};
use crate::comm::control::rendezvous::LONGEST;
use crate::comm::transport::header::{ControlMessage, MessageId};
use crate::comm::transport::peer_processes::ChannelId;
use crate::comm::{CollectiveId, CommError};

/// Identifies a call: its group, and its sequence number.
type CallKey = (GroupKey, u64);

/// The exchanges of a world that are not started in this process, and their order.
#[derive(Default)]
pub(super) struct ExchangeOrder {
    calls: Mutex<Calls>,
    /// Notified when an exchange was started, or the world has failed.
    changed: Condvar,
    /// True once this process reports nothing any more. Locked while calls are reported, so that those
    /// of a group are reported in their order.
    reporting: Mutex<bool>,
    /// Deferred calls about which some processes have not reported. Used by the first process, which
    /// holds the lock until all processes are notified of the next call or message, so that they
    /// receive them in one order.
    ordering: Mutex<HashMap<CallKey, Reports>>,
    pub messages: ExchangedMessages,
}

#[derive(Default)]
struct Calls {
    unstarted: BTreeMap<CallKey, UnstartedCall>,
    /// Groups of which an exchange was started, so that their ranks are connected.
    connected: HashSet<GroupKey>,
    order: VecDeque<OrderedExchange>,
    /// Other processes that exchange tensors, once one of their ranks has ended.
    exchanging: HashSet<usize>,
    /// Processes that report nothing any more.
    ended: HashSet<usize>,
    /// True once the order is complete: the programs of all ranks have ended.
    is_complete: bool,
    /// True once another process was lost, so that what it has sent may never arrive.
    has_lost: bool,
    /// Groups by the numbers of this process's channels.
    own: HashMap<usize, GroupKey>,
    /// True while a thread starts exchanges.
    is_starting: bool,
    is_over: bool,
}

/// A call that some local ranks have posted.
struct UnstartedCall {
    op: OpHandle,
    /// Tasks that start the exchange, one for each local rank.
    tasks: Vec<Arc<dyn CompletionTask>>,
    /// Number of the group's ranks in this process.
    members: usize,
    /// Channel of one of them, if the group has ranks in other processes.
    remote: Option<Arc<RemoteGroup>>,
    is_deferred: bool,
    /// True if a local rank needs the result.
    is_wanted: bool,
    /// Number of local ranks that have given the deferred call up.
    declined: usize,
    /// True if this process has reported, or need not.
    is_reported: bool,
    /// Number of threads that wait until all ranks have posted it. It is started afterwards,
    /// because that releases the handle with which they wait.
    awaiting: usize,
}

/// A call in the order, as the first process has named it.
enum OrderedCall {
    Known(CallKey),
    /// A call on a channel of another process, which may not have introduced it yet.
    OnChannel(ChannelId, u64),
}

/// An element of the order.
enum OrderedExchange {
    /// Call that is started, or dropped.
    Call { call: OrderedCall, is_started: bool },
    /// Message that a receive has taken.
    Message(MessageId),
}

/// Exchange that is started next.
enum NextExchange {
    Call(CallKey),
    Message(MessageId),
}

/// Reports of the processes of a group about a deferred call.
#[derive(Default)]
struct Reports {
    count: usize,
    is_ordered: bool,
}

impl Calls {
    fn key(&self, backend: &HostBackend, call: &OrderedCall) -> Option<CallKey> {
        match call {
            OrderedCall::Known(key) => Some(*key),
            OrderedCall::OnChannel((process, number), seq) => {
                let remote = backend.remote();
                let group = match *process == remote.here() {
                    true => self.own.get(number).copied(),
                    false => remote.group_of((*process, *number)),
                };
                Some((group?, *seq))
            }
        }
    }

    /// Takes the next call or message from the order, if all its ranks have posted it and none waits
    /// for that. Moves calls before it that no rank needs to `dropped`.
    fn next_ready(
        &mut self,
        backend: &HostBackend,
        dropped: &mut Vec<UnstartedCall>,
    ) -> Option<NextExchange> {
        loop {
            let (call, is_started) = match self.order.front()? {
                OrderedExchange::Call { call, is_started } => (call, *is_started),
                OrderedExchange::Message(id) => {
                    let next = NextExchange::Message(*id);
                    self.order.pop_front();
                    return Some(next);
                }
            };
            let key = self.key(backend, call)?;
            if !is_started {
                self.order.pop_front();
                dropped.extend(self.unstarted.remove(&key));
                continue;
            }
            let call = self.unstarted.get(&key)?;
            let is_ready = call.tasks.len() == call.members
                && call.awaiting == 0
                && backend.rendezvous.read(|table| table.is_complete(call.op));
            is_ready.then(|| self.order.pop_front())?;
            return Some(NextExchange::Call(key));
        }
    }
}

impl HostBackend {
    /// Adds a call that a local rank has posted. `task` starts the rank's exchange. `members` of the
    /// group's ranks are in this process.
    pub(super) fn add_exchange(
        &self,
        op: OpHandle,
        task: Arc<dyn CompletionTask>,
        is_deferred: bool,
        members: usize,
        remote: Option<&Arc<RemoteGroup>>,
    ) {
        let key = (op.group, op.seq);
        if remote.is_some() {
            let this = self.this.clone();
            self.completion.add(
                op,
                Arc::new(OnAgreement {
                    this,
                    group: op.group,
                }),
            );
        }
        let is_agreed = {
            let mut calls = self.exchanges.calls.lock();
            if calls.is_over {
                return self.completion.discard(op);
            }
            calls
                .own
                .extend(remote.map(|remote| (remote.number(), op.group)));
            let call = calls.unstarted.entry(key).or_insert_with(|| UnstartedCall {
                op,
                tasks: Vec::new(),
                members,
                remote: remote.cloned(),
                is_deferred,
                is_wanted: false,
                declined: 0,
                is_reported: false,
                awaiting: 0,
            });
            call.tasks.push(task);
            self.rendezvous.read(|table| table.is_complete(op))
        };
        if is_agreed && remote.is_some() {
            // Other threads do this for calls that are complete later.
            self.completion.complete(op);
        }
        self.exchange_agreed(op.group);
    }

    /// Reports the calls of a group that this process must report now to the process that orders the
    /// exchanges, and starts what can be started.
    fn exchange_agreed(&self, group: GroupKey) {
        self.report_exchanges(group);
        self.start_exchanges();
    }

    /// Reports the calls of a group that are due, in their order.
    fn report_exchanges(&self, group: GroupKey) {
        let has_ended = self.exchanges.reporting.lock();
        if !*has_ended {
            self.report_due_exchanges(group);
        }
    }

    /// Reports what is due, under the lock of reports.
    fn report_due_exchanges(&self, group: GroupKey) {
        let reports_agreement = self.reports_agreement(group);
        let mut due = Vec::new();
        let mut calls = self.exchanges.calls.lock();
        let is_connected = calls.connected.contains(&group);
        let of_group = calls.unstarted.range_mut((group, 0)..=(group, u64::MAX));
        // Without tasks a call is being started, and its handle may be released.
        let unreported = of_group.filter(|(_, call)| !call.is_reported && !call.tasks.is_empty());
        for (key, call) in unreported {
            let is_agreed = || self.rendezvous.read(|table| table.is_complete(call.op));
            let report = if !call.is_deferred {
                if !reports_agreement {
                    continue;
                }
                if !is_agreed() {
                    // Later ones are not reported before it.
                    break;
                }
                ExchangeReport::Agreed
            } else if call.is_wanted && is_connected && is_agreed() {
                ExchangeReport::Wanted
            } else if !call.is_wanted && call.declined == call.members {
                ExchangeReport::Declined
            } else {
                continue;
            };
            call.is_reported = true;
            due.push((*key, report, call.remote.clone()));
        }
        drop(calls);
        for (key, report, remote) in due {
            self.report_exchange(key, report, remote.as_deref());
        }
    }

    /// Returns true if this process reports the calls of a group: if it has the group's first rank.
    fn reports_agreement(&self, group: GroupKey) -> bool {
        let first = self.rendezvous.read(|table| table.ranks(group)[0]);
        self.local_ranks.contains(&first)
    }

    fn report_exchange(&self, key: CallKey, report: ExchangeReport, remote: Option<&RemoteGroup>) {
        let Some(remote) = remote else {
            return self.order_exchange(key, OrderedCall::Known(key), report);
        };
        let peers = self.remote();
        let channel = (peers.here(), remote.number());
        if peers.decides() {
            self.order_exchange(key, OrderedCall::OnChannel(channel, key.1), report);
        } else {
            remote.report_exchange(key.1, report);
        }
    }

    /// Handles a report. Only called in the process that orders the exchanges.
    fn order_exchange(&self, key: CallKey, call: OrderedCall, report: ExchangeReport) {
        let ranks = self.rendezvous.read(|table| table.ranks(key.0).clone());
        let mut processes: Vec<_> = match &self.remote {
            Some(remote) => ranks.iter().map(|rank| remote.process_of(*rank)).collect(),
            None => vec![0],
        };
        processes.sort_unstable();
        processes.dedup();
        let mut deferred = self.exchanges.ordering.lock();
        let is_started = match report {
            ExchangeReport::Agreed => true,
            ExchangeReport::Wanted | ExchangeReport::Declined => {
                let reports = deferred.entry(key).or_default();
                reports.count += 1;
                let is_started = report == ExchangeReport::Wanted && !reports.is_ordered;
                reports.is_ordered |= is_started;
                let is_over = reports.count == processes.len();
                let is_dropped = is_over && !reports.is_ordered;
                if is_over {
                    deferred.remove(&key);
                }
                if !is_started && !is_dropped {
                    return;
                }
                is_started
            }
        };
        let here = self.remote.as_ref().map_or(0, |remote| remote.here());
        if let OrderedCall::OnChannel((owner, channel), seq) = call {
            for process in processes.iter().filter(|process| **process != here) {
                let message = ControlMessage::ExchangeOrdered {
                    owner,
                    channel,
                    seq,
                    is_started,
                };
                self.remote().notify_process(*process, message);
            }
        }
        if processes.contains(&here) {
            self.exchange_ordered(OrderedExchange::Call { call, is_started });
        }
        drop(deferred);
    }

    /// Puts a message that a rank of process `receiver` has taken in the order. Only called in the
    /// process that orders the exchanges.
    pub(super) fn order_message(&self, id: MessageId, receiver: usize) {
        let ordering = self.exchanges.ordering.lock();
        let here = self.remote.as_ref().map_or(0, |remote| remote.here());
        let notify = |process: usize| match process == here {
            true => self.exchange_ordered(OrderedExchange::Message(id)),
            false => {
                let message = ControlMessage::MessageOrdered(id);
                self.remote().notify_process(process, message);
            }
        };
        notify(receiver);
        if id.process != receiver {
            notify(id.process);
        }
        drop(ordering);
    }

    /// Handles the place of a message in the order, of which the first process has notified this
    /// one.
    pub(super) fn receive_message_order(&self, from: usize, id: MessageId) -> Result<(), String> {
        if from != self.remote().first() {
            return Err("it ordered a message, which is up to another process".into());
        }
        self.exchange_ordered(OrderedExchange::Message(id));
        self.start_exchanges_in_background();
        Ok(())
    }

    /// Puts an exchange last in the order.
    fn exchange_ordered(&self, exchange: OrderedExchange) {
        let mut calls = self.exchanges.calls.lock();
        if !calls.is_over {
            calls.order.push_back(exchange);
        }
    }

    /// Handles the report of another process about a call of `group`.
    pub(super) fn receive_exchange_report(
        &self,
        channel: ChannelId,
        group: GroupKey,
        seq: u64,
        report: ExchangeReport,
    ) -> Result<(), String> {
        if !self.remote().decides() {
            return Err("it reported an exchange to a process that does not order them".into());
        }
        self.order_exchange((group, seq), OrderedCall::OnChannel(channel, seq), report);
        self.start_exchanges_in_background();
        Ok(())
    }

    /// Handles the place of a call in the order, of which the first process has notified this one.
    pub(super) fn receive_exchange_order(
        &self,
        from: usize,
        channel: ChannelId,
        seq: u64,
        is_started: bool,
    ) -> Result<(), String> {
        if from != self.remote().first() {
            return Err("it ordered an exchange, which is up to another process".into());
        }
        self.exchange_ordered(OrderedExchange::Call {
            call: OrderedCall::OnChannel(channel, seq),
            is_started,
        });
        self.start_exchanges_in_background();
        Ok(())
    }

    /// Lets the completion thread start what can be started: the thread of the transport must keep
    /// communicating.
    pub(super) fn start_exchanges_in_background(&self) {
        let this = self.this.clone();
        let start = move || {
            if let Some(this) = this.upgrade() {
                this.start_exchanges();
            }
        };
        if let Err(refused) = self.completion.run(Box::new(start)) {
            refused();
        }
    }

    /// Starts exchanges in their order, up to the first of which some rank has not posted the call.
    pub(super) fn start_exchanges(&self) {
        let mut calls = self.exchanges.calls.lock();
        if calls.is_starting {
            // The thread that does looks again before it stops.
            return;
        }
        calls.is_starting = true;
        let mut dropped = Vec::new();
        while let Some(next) = calls.next_ready(self, &mut dropped) {
            let key = match next {
                NextExchange::Call(key) => key,
                NextExchange::Message(id) => {
                    MutexGuard::unlocked(&mut calls, || self.start_message(id));
                    continue;
                }
            };
            let tasks = mem::take(&mut calls.unstarted.get_mut(&key).expect("it is ready").tasks);
            MutexGuard::unlocked(&mut calls, || {
                tasks.iter().for_each(|task| task.complete());
                drop(tasks);
            });
            let started = calls.unstarted.remove(&key);
            self.exchanges.changed.notify_all();
            if calls.connected.insert(key.0) {
                // Deferred calls may have waited for that.
                MutexGuard::unlocked(&mut calls, || self.report_exchanges(key.0));
            }
            // The first process waits for the reports of all.
            if let Some(call) = started.filter(|call| call.is_deferred && !call.is_reported) {
                MutexGuard::unlocked(&mut calls, || {
                    let has_ended = self.exchanges.reporting.lock();
                    if !*has_ended {
                        let remote = call.remote.as_deref();
                        self.report_exchange(key, ExchangeReport::Declined, remote);
                    }
                });
            }
        }
        calls.is_starting = false;
        self.exchanges.changed.notify_all();
        drop(calls);
        // Outside the lock.
        drop(dropped);
    }

    /// Records that a local rank needs the result of a deferred call.
    pub(super) fn want_exchange(&self, op: OpHandle) {
        let key = (op.group, op.seq);
        if let Some(call) = self.exchanges.calls.lock().unstarted.get_mut(&key) {
            call.is_wanted = true;
        }
        self.exchange_agreed(op.group);
    }

    /// Records that a local rank does not need the result of a call.
    pub(super) fn decline_exchange(&self, op: OpHandle) {
        let key = (op.group, op.seq);
        if let Some(call) = self.exchanges.calls.lock().unstarted.get_mut(&key) {
            call.declined += 1;
        }
        self.exchange_agreed(op.group);
    }

    /// Waits until the exchange of `op`, which errors call `id`, is started, at most for `deadline`.
    pub(super) fn await_exchange(
        &self,
        rank: usize,
        op: OpHandle,
        id: &CollectiveId,
        deadline: Duration,
    ) -> Result<(), CommError> {
        let key = (op.group, op.seq);
        let until = Instant::now() + deadline.min(LONGEST);
        let mut calls = self.exchanges.calls.lock();
        let Some(call) = calls.unstarted.get_mut(&key) else {
            return self.exchange_failed(&calls, id);
        };
        call.is_wanted = true;
        // Once the tasks are taken, the exchange is being started.
        if !call.tasks.is_empty() {
            call.awaiting += 1;
            drop(calls);
            let waited = self.rendezvous.wait_until_complete(op, deadline);
            calls = self.exchanges.calls.lock();
            if let Some(call) = calls.unstarted.get_mut(&key) {
                call.awaiting -= 1;
            }
            drop(calls);
            self.exchange_agreed(op.group);
            waited?;
            calls = self.exchanges.calls.lock();
        }
        while calls.unstarted.contains_key(&key) {
            if self
                .exchanges
                .changed
                .wait_until(&mut calls, until)
                .timed_out()
            {
                drop(calls);
                return Err(self.fail(Failure::Failed {
                    rank,
                    message: format!(
                        "an exchange on which all ranks agree was not ordered within {deadline:?}. If the processes only lack \
                         processor time, raise `Launch::with_deadline`"
                    ),
                }));
            }
        }
        self.exchange_failed(&calls, id)
    }

    fn exchange_failed(&self, calls: &Calls, id: &CollectiveId) -> Result<(), CommError> {
        match self.failure().filter(|_| calls.is_over) {
            Some(failure) => Err(failure.error(Some(id.clone()))),
            None => Ok(()),
        }
    }
}

impl ExchangeOrder {
    /// Drops all calls and messages: the world has failed, or the programs of its ranks have ended.
    pub fn end(&self) {
        let mut calls = self.calls.lock();
        calls.is_over = true;
        calls.order.clear();
        let dropped = mem::take(&mut calls.unstarted);
        self.changed.notify_all();
        drop(calls);
        // Outside the lock.
        drop(dropped);
        self.messages.end();
    }
}

/// Reports a call once all ranks have posted it.
struct OnAgreement {
    this: Weak<HostBackend>,
    group: GroupKey,
}

impl CompletionTask for OnAgreement {
    fn is_open(&self) -> bool {
        true
    }

    fn is_owed(&self) -> bool {
        true
    }

    fn complete(&self) {
        if let Some(this) = self.this.upgrade() {
            this.exchange_agreed(self.group);
        }
    }
}
