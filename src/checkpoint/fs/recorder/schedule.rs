//! [`Schedule`]: an order of the calls of threads that write behind training and of those of the training.

use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Time after which a call is never made: the test would wait forever.
const DEADLINE: Duration = Duration::from_secs(60);

/// Order in which the ranks' threads behind training make their calls. They make as many as they
/// are allowed, one rank after the other, so that other calls come at chosen moments between them.
pub(crate) struct Schedule {
    turns: Mutex<Turns>,
    changed: Condvar,
}

struct Turns {
    /// Calls that the threads of each rank may have made.
    allowed: Vec<usize>,
    /// Calls that they have made: of each thread of each rank, in the order of the first.
    made: Vec<Vec<(ThreadId, usize)>>,
    /// Calls of rank 0's training until the threads behind training make theirs.
    interruption: Option<(usize, Vec<usize>)>,
}

impl Turns {
    fn made(&self, rank: usize) -> usize {
        self.made[rank].iter().map(|(_, calls)| calls).sum()
    }
}

impl Schedule {
    /// Creates a schedule in which threads behind training make no calls.
    pub(crate) fn new(ranks: usize) -> Arc<Self> {
        let turns = Turns {
            allowed: vec![0; ranks],
            made: vec![Vec::new(); ranks],
            interruption: None,
        };
        Arc::new(Self {
            turns: Mutex::new(turns),
            changed: Condvar::new(),
        })
    }

    /// Lets the threads of a rank make calls until they have made that many.
    pub(crate) fn allow(&self, rank: usize, calls: usize) {
        let mut turns = self.turns.lock();
        turns.allowed[rank] = turns.allowed[rank].max(calls);
        self.changed.notify_all();
    }

    /// Lets all make all their calls.
    pub(crate) fn allow_all(&self) {
        let ranks = self.turns.lock().allowed.len();
        (0..ranks).for_each(|rank| self.allow(rank, usize::MAX));
    }

    /// Returns the number of calls that the threads of a rank have made.
    pub(crate) fn made(&self, rank: usize) -> usize {
        self.turns.lock().made(rank)
    }

    /// Returns the numbers of calls that the threads of a rank have made, one after the other.
    pub(crate) fn made_by_threads(&self, rank: usize) -> Vec<usize> {
        self.turns.lock().made[rank]
            .iter()
            .map(|(_, calls)| *calls)
            .collect()
    }

    /// After that many calls of rank 0's training, the threads behind training make calls until
    /// each rank's have made as many as given, and then the training continues.
    pub(crate) fn interrupt(&self, after: usize, calls: &[usize]) {
        self.turns.lock().interruption = Some((after, calls.to_vec()));
    }

    /// Takes the interruption back. Returns true if there was one that the training did not come
    /// to.
    pub(crate) fn resume(&self) -> bool {
        self.turns.lock().interruption.take().is_some()
    }

    /// Makes a call of a rank when it is its turn.
    pub(super) fn in_turn<T>(&self, rank: usize, call: impl FnOnce() -> T) -> T {
        if !is_behind_training() {
            self.before_call(rank);
            return call();
        }
        let mut turns = self.turns.lock();
        let late = self
            .changed
            .wait_while_for(
                &mut turns,
                |turns| turns.made(rank) >= turns.allowed[rank],
                DEADLINE,
            )
            .timed_out();
        assert!(!late, "the threads of rank {rank} may make no more calls");
        let done = call();
        let this = thread::current().id();
        match turns.made[rank]
            .iter_mut()
            .find(|(thread, _)| *thread == this)
        {
            Some((_, calls)) => *calls += 1,
            None => turns.made[rank].push((this, 1)),
        }
        self.changed.notify_all();
        done
    }

    /// Interrupts the training if it is time.
    fn before_call(&self, rank: usize) {
        let mut turns = self.turns.lock();
        let Some((after, calls)) = turns.interruption.take_if(|_| rank == 0) else {
            return;
        };
        if after > 0 {
            turns.interruption = Some((after - 1, calls));
            return;
        }
        for (rank, calls) in calls.into_iter().enumerate() {
            turns.allowed[rank] = turns.allowed[rank].max(calls);
            self.changed.notify_all();
            let late = self
                .changed
                .wait_while_for(&mut turns, |turns| turns.made(rank) < calls, DEADLINE)
                .timed_out();
            assert!(
                !late,
                "the threads of rank {rank} have not made {calls} calls"
            );
        }
    }
}

/// Returns true on a thread that an asynchronous save has started.
fn is_behind_training() -> bool {
    thread::current()
        .name()
        .is_some_and(|name| name.starts_with("checkpoint "))
}
