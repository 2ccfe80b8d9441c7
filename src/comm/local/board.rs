//! [`Board`]: who has joined which collective. Pure state: no locks, no tensors, no clock.
//!
//! Invariants, cited by number in the tests:
//! 1. The n-th call of one rank on a group meets the n-th call of every other rank.
//! 2. A collective is complete when every rank of its group has joined with the same fingerprint.
//! 3. A collective's deposits are freed once every rank has taken its result or given it up, whatever
//!    becomes of others; those of collectives that a failure leaves incomplete are freed with it.
//! 4. The first failure is the only one: it is final, and joint for all groups.
//! 5. A rank that waits is told at once when a rank it needs has returned or waits for it. The latter
//!    proves a deadlock only where a rank that waits does not call: one that does is at fault, and in a
//!    multithreaded world, where it may, nothing is claimed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::comm::{CollectiveId, CommError, Op};

/// What two ranks must agree on.
pub(crate) trait Fingerprint {
    /// The operation.
    fn op(&self) -> Op;
    /// The caller's label.
    fn label(&self) -> Arc<str>;
    /// What differs, this one's value first; `None` if nothing does.
    fn difference(&self, other: &Self) -> Option<String>;
}

/// The first thing that went wrong in a world.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    Panicked { rank: usize, message: String },
    Failed { rank: usize, message: String },
    Collective(CommError),
}

impl Failure {
    /// The error that a rank sees during `during`.
    pub fn error(&self, during: Option<CollectiveId>) -> CommError {
        match self.clone() {
            Self::Panicked { rank, message } => CommError::RankPanicked { rank, message, during },
            Self::Failed { rank, message } => CommError::RankFailed { rank, message, during },
            Self::Collective(error) => error,
        }
    }
}

/// A group's place on the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupKey(usize);

impl GroupKey {
    pub fn index(self) -> usize {
        self.0
    }
}

/// One rank's part in one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub group: GroupKey,
    /// The rank's position in the group.
    pub member: usize,
    pub seq: u64,
}

/// Every member's deposit, in group order.
pub(crate) type Parts<P> = Arc<[P]>;

/// What a waiting rank finds.
pub(crate) enum Poll<P> {
    Ready(Parts<P>),
    Pending,
    Failed,
}

pub(crate) struct Board<F, P> {
    ranks: Vec<Rank>,
    groups: Vec<Group<F, P>>,
    /// By name and ranks.
    keys: HashMap<&'static str, HashMap<Arc<[usize]>, GroupKey>>,
    failure: Option<Failure>,
    /// What every rank was doing when the first failure came.
    scene: Vec<String>,
    /// A rank may call and wait on several threads at once.
    multithreaded: bool,
    /// Deposits that nobody needs any more, until [`take_freed`](Self::take_freed).
    freed: Vec<Parts<P>>,
}

#[derive(Default)]
struct Rank {
    last: Option<CollectiveId>,
    waits: Vec<Ticket>,
    returned: bool,
}

struct Group<F, P> {
    ranks: Arc<[usize]>,
    next: Vec<u64>,
    /// Sequence number of the oldest slot.
    base: u64,
    slots: VecDeque<Slot<F, P>>,
}

struct Slot<F, P> {
    joined: Vec<Option<(F, Option<P>)>>,
    absent: usize,
    parts: Option<Parts<P>>,
    unreleased: usize,
}

impl<F: Fingerprint, P> Board<F, P> {
    pub fn new(ranks: usize, multithreaded: bool) -> Self {
        Self {
            ranks: (0..ranks).map(|_| Rank::default()).collect(),
            groups: Vec::new(),
            keys: HashMap::new(),
            failure: None,
            scene: Vec::new(),
            multithreaded,
            freed: Vec::new(),
        }
    }

    /// The group of these ranks in this order and of this name; the same for all its ranks.
    pub fn group(&mut self, ranks: &[usize], name: &'static str) -> GroupKey {
        let named = self.keys.entry(name).or_default();
        if let Some(key) = named.get(ranks) {
            return *key;
        }
        let (key, ranks) = (GroupKey(self.groups.len()), Arc::from(ranks));
        named.insert(Arc::clone(&ranks), key);
        let next = vec![0; ranks.len()];
        self.groups.push(Group { ranks, next, base: 0, slots: VecDeque::new() });
        key
    }

    /// Keys of the groups with this rank.
    pub fn groups_of(&self, rank: usize) -> impl Iterator<Item = GroupKey> {
        self.groups.iter().enumerate().filter(move |(_, g)| g.ranks.contains(&rank)).map(|(i, _)| GroupKey(i))
    }

    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// What `rank` was doing at the first failure, or is doing now if there was none.
    pub fn doing(&self, rank: usize) -> String {
        self.scene.get(rank).cloned().unwrap_or_else(|| self.describe(rank))
    }

    /// Adds `member`'s deposit to its next collective of `group`. True: now complete.
    pub fn join(&mut self, group: GroupKey, member: usize, print: F, part: P) -> Result<(Ticket, bool), CommError> {
        let g = &mut self.groups[group.0];
        let rank = g.ranks[member];
        let seq = g.next[member];
        let id = CollectiveId { op: print.op(), seq, label: print.label(), ranks: g.ranks.clone() };
        if let Some(failure) = &self.failure {
            let error = failure.error(Some(id));
            self.freed.push(Arc::from([part]));
            return Err(error);
        }
        if !self.multithreaded && !self.ranks[rank].waits.is_empty() {
            self.freed.push(Arc::from([part]));
            return Err(self.fail(self.concurrent(rank, id)).error(None));
        }
        let g = &mut self.groups[group.0];
        g.next[member] += 1;
        self.ranks[rank].last = Some(id);
        let at = (seq - g.base) as usize;
        if at == g.slots.len() {
            g.slots.push_back(Slot::new(g.ranks.len()));
        }
        let slot = &mut g.slots[at];
        let suspect = slot.suspect(member, &print);
        slot.joined[member] = Some((print, Some(part)));
        slot.absent -= 1;
        if let Some((culprit, other)) = suspect {
            let error = g.mismatch(seq, culprit, other);
            self.fail(Failure::Collective(error.clone()));
            return Err(error);
        }
        Ok((Ticket { group, member, seq }, slot.complete()))
    }

    /// Whether the result of `ticket` is there.
    pub fn poll(&mut self, ticket: Ticket) -> Poll<P> {
        match &self.slot(ticket).parts {
            Some(parts) => Poll::Ready(parts.clone()),
            None if self.failure.is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// Notes that the rank of `ticket` now waits, and looks for a reason why it would wait in vain.
    pub fn begin_wait(&mut self, ticket: Ticket) {
        let rank = self.rank(ticket);
        if !self.multithreaded && !self.ranks[rank].waits.is_empty() {
            self.fail(self.concurrent(rank, self.id(ticket)));
        }
        self.ranks[rank].waits.push(ticket);
        self.check_left(ticket);
        if !self.multithreaded
            && self.failure.is_none()
            && let Some(waits) = self.cycle(rank)
        {
            self.fail(Failure::Collective(CommError::Deadlock { waits }));
        }
    }

    /// The rank of `ticket` no longer waits.
    pub fn end_wait(&mut self, ticket: Ticket) {
        let rank = self.rank(ticket);
        self.ranks[rank].waits.retain(|wait| *wait != ticket);
    }

    /// Fails if a rank that `ticket` still needs has returned.
    pub fn check_left(&mut self, ticket: Ticket) {
        let left = self.absent(ticket).find(|rank| self.ranks[*rank].returned);
        if let Some(rank) = left {
            let during = self.id(ticket);
            self.fail(Failure::Collective(CommError::RankLeft { rank, during }));
        }
    }

    /// The result of `ticket` has been taken, or will never be.
    pub fn release(&mut self, ticket: Ticket) {
        let g = &mut self.groups[ticket.group.0];
        let slot = &mut g.slots[(ticket.seq - g.base) as usize];
        slot.unreleased -= 1;
        if slot.unreleased == 0 {
            self.freed.extend(slot.parts.take());
            slot.joined = Vec::new();
        }
        while g.slots.front().is_some_and(|slot| slot.unreleased == 0) {
            g.slots.pop_front();
            g.base += 1;
        }
    }

    /// What has been freed, to be dropped outside the lock.
    #[must_use]
    pub fn take_freed(&mut self) -> Vec<Parts<P>> {
        std::mem::take(&mut self.freed)
    }

    /// Records the first failure; later ones are ignored. Returns the one that counts.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        if let Some(first) = &self.failure {
            return first.clone();
        }
        self.scene = (0..self.ranks.len()).map(|rank| self.describe(rank)).collect();
        self.failure = Some(failure.clone());
        let slots = self.groups.iter_mut().flat_map(|group| &mut group.slots);
        for slot in slots.filter(|slot| slot.parts.is_none()) {
            let incomplete = slot.joined.iter_mut().flatten().filter_map(|(_, part)| part.take());
            self.freed.push(incomplete.collect());
        }
        failure
    }

    /// The rank's program is over.
    pub fn returned(&mut self, rank: usize) {
        self.ranks[rank].returned = true;
    }

    /// Global ranks that have not joined, in group order.
    pub fn missing(&self, ticket: Ticket) -> Vec<usize> {
        self.absent(ticket).collect()
    }

    fn absent(&self, ticket: Ticket) -> impl Iterator<Item = usize> {
        let (g, slot) = (&self.groups[ticket.group.0], self.slot(ticket));
        let joined = if slot.absent == 0 { &[] } else { &slot.joined[..] };
        g.ranks.iter().zip(joined).filter(|(_, joined)| joined.is_none()).map(|(rank, _)| *rank)
    }

    /// The collective of `ticket`, as its rank called it.
    pub fn id(&self, ticket: Ticket) -> CollectiveId {
        self.groups[ticket.group.0].id(ticket.seq, ticket.member)
    }

    /// The global rank that holds `ticket`.
    pub fn rank(&self, ticket: Ticket) -> usize {
        self.groups[ticket.group.0].ranks[ticket.member]
    }

    fn slot(&self, ticket: Ticket) -> &Slot<F, P> {
        let g = &self.groups[ticket.group.0];
        &g.slots[(ticket.seq - g.base) as usize]
    }

    /// `rank` calls while it waits.
    fn concurrent(&self, rank: usize, called: CollectiveId) -> Failure {
        let during = self.id(self.ranks[rank].waits[0]);
        Failure::Collective(CommError::ConcurrentCalls { rank, called, during })
    }

    /// A cycle of waits through `start`: each rank, what it waits in, and the next one.
    fn cycle(&self, start: usize) -> Option<Vec<(usize, CollectiveId, usize)>> {
        let (mut path, mut seen) = (Vec::new(), vec![false; self.ranks.len()]);
        self.follow(start, start, &mut seen, &mut path).then(|| {
            path.reverse();
            path
        })
    }

    /// Whether waits lead from `rank` to `start`; if so, adds them to `path`, the last one first.
    ///
    /// Most ranks that a rank waits for do not wait themselves: they cost a look.
    fn follow(
        &self,
        rank: usize,
        start: usize,
        seen: &mut [bool],
        path: &mut Vec<(usize, CollectiveId, usize)>,
    ) -> bool {
        seen[rank] = true;
        for wait in &self.ranks[rank].waits {
            for target in self.absent(*wait).filter(|target| !self.ranks[*target].waits.is_empty()) {
                if target == start || (!seen[target] && self.follow(target, start, seen, path)) {
                    path.push((rank, self.id(*wait), target));
                    return true;
                }
            }
        }
        false
    }

    fn describe(&self, rank: usize) -> String {
        let state = &self.ranks[rank];
        if state.returned {
            return "finished".into();
        }
        if let Some(wait) = state.waits.last() {
            return match &self.missing(*wait)[..] {
                [] => format!("leaving {}", self.id(*wait)),
                [one] => format!("waiting in {} for rank {one}", self.id(*wait)),
                several => format!("waiting in {} for ranks {several:?}", self.id(*wait)),
            };
        }
        match &state.last {
            Some(id) => format!("computing since {id}"),
            None => "computing, before any collective".into(),
        }
    }
}

impl<F: Fingerprint, P> Group<F, P> {
    fn id(&self, seq: u64, member: usize) -> CollectiveId {
        let (print, _) = self.slots[(seq - self.base) as usize].joined[member].as_ref().expect("the member has joined");
        CollectiveId { op: print.op(), seq, label: print.label(), ranks: self.ranks.clone() }
    }

    fn mismatch(&self, seq: u64, culprit: usize, other: usize) -> CommError {
        let slot = &self.slots[(seq - self.base) as usize];
        let print = |member: usize| &slot.joined[member].as_ref().expect("both have joined").0;
        CommError::Mismatch {
            rank: self.ranks[culprit],
            other: self.ranks[other],
            during: self.id(seq, other),
            differs: print(culprit).difference(print(other)).unwrap_or_default(),
        }
    }
}

impl<F: Fingerprint, P> Slot<F, P> {
    fn new(size: usize) -> Self {
        let joined = (0..size).map(|_| None).collect();
        Self { joined, absent: size, parts: None, unreleased: size }
    }

    /// If `print` differs from those present: the member to blame, and one it differs from.
    ///
    /// Everyone present agreed so far, so with two or more present `member` is the odd one out.
    fn suspect(&self, member: usize, print: &F) -> Option<(usize, usize)> {
        let (present, (first, _)) =
            self.joined.iter().enumerate().find_map(|(i, joined)| joined.as_ref().map(|joined| (i, joined)))?;
        print.difference(first).map(|_| (member, present))
    }

    /// Hands the deposits out once all are there.
    fn complete(&mut self) -> bool {
        if self.absent > 0 {
            return false;
        }
        let parts = self.joined.iter_mut().map(|joined| {
            let (_, part) = joined.as_mut().expect("every member has joined");
            part.take().expect("a collective completes once")
        });
        self.parts = Some(parts.collect());
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    /// An operation and a label; two labels differ.
    #[derive(Debug, Clone)]
    struct Name(&'static str);

    impl Fingerprint for Name {
        fn op(&self) -> Op {
            Op::Barrier
        }

        fn label(&self) -> Arc<str> {
            self.0.into()
        }

        fn difference(&self, other: &Self) -> Option<String> {
            (self.0 != other.0).then(|| format!("label `{}` vs `{}`", self.0, other.0))
        }
    }

    type Plain = Board<Name, usize>;

    fn board(ranks: usize) -> (Plain, GroupKey) {
        let mut board = Plain::new(ranks, false);
        let all: Vec<_> = (0..ranks).collect();
        let group = board.group(&all, "");
        (board, group)
    }

    fn ready(board: &mut Plain, ticket: Ticket) -> Option<Vec<usize>> {
        match board.poll(ticket) {
            Poll::Ready(parts) => Some(parts.to_vec()),
            _ => None,
        }
    }

    fn failure(board: &Plain) -> CommError {
        board.failure().expect("it has failed").error(None)
    }

    #[test]
    fn invariants_1_and_2_nth_calls_meet_and_complete_with_the_last() {
        let (mut board, group) = board(3);
        let mut tickets = [Vec::new(), Vec::new(), Vec::new()];
        // Rank 0 runs three calls ahead.
        for member in [0, 0, 0, 1, 2, 2, 1, 1, 2] {
            let nth = tickets[member].len();
            let (ticket, complete) = board.join(group, member, Name("x"), 10 * nth + member).unwrap();
            tickets[member].push(ticket);
            let joined = tickets.iter().filter(|tickets| tickets.len() > nth).count();
            assert_eq!(complete, joined == 3);
        }
        for nth in 0..3 {
            for tickets in &tickets {
                assert_eq!(ready(&mut board, tickets[nth]), Some(vec![10 * nth, 10 * nth + 1, 10 * nth + 2]));
            }
        }
    }

    /// Deposits that are nothing but alive, and a look at whether they still are.
    struct Watched(Board<Name, Arc<()>>, GroupKey, Vec<Vec<Weak<()>>>);

    impl Watched {
        fn new() -> Self {
            let mut board = Board::new(2, false);
            let group = board.group(&[0, 1], "");
            Self(board, group, Vec::new())
        }

        /// The next collective, joined by its first `joined` ranks.
        fn join(&mut self, joined: usize) -> Vec<Ticket> {
            let parts: Vec<_> = (0..joined).map(|_| Arc::new(())).collect();
            self.2.push(parts.iter().map(Arc::downgrade).collect());
            let join = |(member, part)| self.0.join(self.1, member, Name("x"), part).unwrap().0;
            parts.into_iter().enumerate().map(join).collect()
        }

        /// For each collective whether its deposits are alive, once the freed ones have been dropped.
        fn alive(&mut self) -> Vec<bool> {
            drop(self.0.take_freed());
            self.2.iter().map(|parts| parts.iter().any(|part| part.upgrade().is_some())).collect()
        }
    }

    #[test]
    fn invariant_3_deposits_go_when_all_have_taken_theirs() {
        let mut watched = Watched::new();
        let tickets: Vec<_> = (0..3).flat_map(|_| watched.join(2)).collect();
        // The collectives in the middle and at the end are released first, and wait for nobody.
        for (ticket, alive) in [
            (2, [true, true, true]),
            (3, [true, false, true]),
            (4, [true, false, true]),
            (5, [true, false, false]),
            (0, [true, false, false]),
            (1, [false, false, false]),
        ] {
            watched.0.release(tickets[ticket]);
            assert_eq!(watched.alive(), alive, "after ticket {ticket}");
        }
        assert!(watched.0.groups[0].slots.is_empty());
        // One that is never released keeps nothing of those after it.
        watched.join(2);
        let later = watched.join(2);
        later.into_iter().for_each(|ticket| watched.0.release(ticket));
        let kept = |slot: &Slot<_, _>| slot.joined.iter().flatten().count();
        assert_eq!(watched.0.groups[0].slots.iter().map(kept).collect::<Vec<_>>(), [2, 0]);
        assert_eq!(watched.join(1)[0].seq, 5);
    }

    #[test]
    fn invariant_3_a_failure_frees_what_it_leaves_incomplete() {
        let mut watched = Watched::new();
        let (complete, incomplete) = (watched.join(2), watched.join(1));
        assert_eq!(watched.alive(), [true, true]);
        watched.0.fail(Failure::Panicked { rank: 1, message: String::new() });
        assert_eq!(watched.alive(), [true, false]);
        assert!(matches!(watched.0.poll(complete[0]), Poll::Ready(_)));
        assert!(matches!(watched.0.poll(incomplete[0]), Poll::Failed));
        [complete[0], complete[1], incomplete[0]].into_iter().for_each(|ticket| watched.0.release(ticket));
        assert_eq!(watched.alive(), [false, false]);
    }

    /// Also where the last one to come is the one that differs: nobody is absent then.
    #[test]
    fn invariant_3_a_mismatch_frees_what_it_is_about() {
        let mut watched = Watched::new();
        watched.join(1);
        let (part, group) = (Arc::new(()), watched.1);
        watched.2.push(vec![Arc::downgrade(&part)]);
        watched.0.join(group, 1, Name("y"), part).unwrap_err();
        assert_eq!(watched.alive(), [false, false]);
        let late = Arc::new(());
        watched.2.push(vec![Arc::downgrade(&late)]);
        watched.0.join(group, 0, Name("x"), late).unwrap_err();
        assert_eq!(watched.2[2][0].strong_count(), 1, "it is dropped outside the lock");
        assert_eq!(watched.alive(), [false; 3]);
    }

    #[test]
    fn invariant_4_the_first_failure_is_final_and_joint() {
        let (mut board, group) = board(3);
        let pair = board.group(&[0, 2], "");
        board.fail(Failure::Panicked { rank: 1, message: "first".into() });
        board.fail(Failure::Panicked { rank: 2, message: "second".into() });
        for group in [group, pair] {
            let error = board.join(group, 0, Name("x"), 0).unwrap_err();
            assert!(
                matches!(error, CommError::RankPanicked { rank: 1, ref message, during: Some(_) } if message == "first")
            );
        }
    }

    #[test]
    fn a_complete_collective_is_ready_even_after_a_failure() {
        let (mut board, group) = board(2);
        let (ticket, _) = board.join(group, 0, Name("x"), 5).unwrap();
        board.join(group, 1, Name("x"), 6).unwrap();
        board.fail(Failure::Panicked { rank: 1, message: String::new() });
        assert_eq!(ready(&mut board, ticket), Some(vec![5, 6]));
    }

    #[test]
    fn of_three_ranks_the_one_outside_the_majority_is_named() {
        let (mut board, group) = board(4);
        board.join(group, 3, Name("x"), 0).unwrap();
        board.join(group, 0, Name("x"), 0).unwrap();
        let error = board.join(group, 2, Name("y"), 0).unwrap_err();
        let CommError::Mismatch { rank, other, differs, .. } = &error else { panic!("{error}") };
        assert_eq!((*rank, *other, differs.as_str()), (2, 0, "label `y` vs `x`"));
        assert_eq!(board.join(group, 1, Name("x"), 0).unwrap_err(), error, "who comes later sees the same");
    }

    #[test]
    fn invariant_5_a_missing_rank_that_has_returned_is_named() {
        let (mut board, group) = board(3);
        let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
        board.begin_wait(ticket);
        board.returned(2);
        board.check_left(ticket);
        let error = failure(&board);
        assert!(matches!(&error, CommError::RankLeft { rank: 2, during } if during.seq == 0), "{error}");
        assert_eq!(board.doing(2), "finished");
    }

    #[test]
    fn a_rank_that_has_joined_may_return() {
        let (mut board, group) = board(2);
        board.join(group, 1, Name("x"), 0).unwrap();
        board.returned(1);
        let (ticket, complete) = board.join(group, 0, Name("x"), 0).unwrap();
        board.begin_wait(ticket);
        assert!(complete && board.failure().is_none());
    }

    /// Ranks 0 and 1 wait for each other in two groups; rank 1 came last.
    fn crossed(multithreaded: bool) -> Plain {
        let mut board = Plain::new(3, multithreaded);
        let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
        let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
        board.begin_wait(ticket);
        let (ticket, _) = board.join(pair, 1, Name("y"), 0).unwrap();
        board.begin_wait(ticket);
        board
    }

    #[test]
    fn invariant_5_ranks_that_wait_for_each_other_are_told() {
        let error = failure(&crossed(false));
        assert_eq!(
            error.to_string(),
            "deadlock: rank 1 waits in barrier #0 `y` on ranks [0, 1] for rank 0, \
             rank 0 waits in barrier #0 `x` on ranks [0, 1, 2] for rank 1; make the calls in one order on \
             all ranks, or, if another thread of one of them would have come, declare it: `Launch::multithreaded`"
        );
    }

    #[test]
    fn invariant_5_a_multithreaded_rank_that_waits_may_still_come() {
        let mut board = crossed(true);
        assert!(board.failure().is_none());
        let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
        assert!(board.join(pair, 0, Name("y"), 0).is_ok_and(|(_, complete)| complete));
        assert!(board.join(group, 1, Name("x"), 0).is_ok());
    }

    #[test]
    fn invariant_5_a_rank_that_calls_while_it_waits_is_at_fault() {
        for waits in [false, true] {
            let (mut board, group) = board(3);
            let pair = board.group(&[0, 1], "");
            let (first, _) = board.join(group, 0, Name("x"), 0).unwrap();
            let (second, _) = board.join(pair, 0, Name("y"), 0).unwrap();
            board.begin_wait(first);
            if waits {
                board.begin_wait(second);
            } else {
                board.join(pair, 0, Name("z"), 0).unwrap_err();
            }
            let CommError::ConcurrentCalls { rank: 0, called, during } = failure(&board) else { panic!() };
            assert_eq!((&*called.label, &*during.label), (if waits { "y" } else { "z" }, "x"));
        }
    }

    #[test]
    fn groups_are_told_apart_by_ranks_order_and_name() {
        let (mut board, group) = board(3);
        let others = [board.group(&[2, 1, 0], ""), board.group(&[0, 1], ""), board.group(&[0, 1, 2], "copy")];
        assert_eq!([board.group(&[0, 1, 2], ""), board.group(&[0, 1, 2], "copy")], [group, others[2]]);
        assert!(others.iter().all(|other| *other != group) && others[0] != others[1] && others[1] != others[2]);
    }

    #[test]
    fn a_wait_that_is_over_is_no_deadlock() {
        let (mut board, group) = board(2);
        let pair = board.group(&[1, 0], "");
        let (first, _) = board.join(group, 0, Name("x"), 0).unwrap();
        board.begin_wait(first);
        // Rank 1 completes it, and waits elsewhere before rank 0 has woken up.
        board.join(group, 1, Name("x"), 0).unwrap();
        let (second, _) = board.join(pair, 0, Name("y"), 0).unwrap();
        board.begin_wait(second);
        assert!(board.failure().is_none());
    }

    #[test]
    fn doing_is_what_it_was_at_the_failure() {
        let (mut board, group) = board(3);
        assert_eq!(board.doing(0), "computing, before any collective");
        let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
        assert_eq!(board.doing(0), "computing since barrier #0 `x` on ranks [0, 1, 2]");
        board.begin_wait(ticket);
        board.fail(Failure::Panicked { rank: 1, message: String::new() });
        board.end_wait(ticket);
        board.returned(0);
        assert_eq!(board.doing(0), "waiting in barrier #0 `x` on ranks [0, 1, 2] for ranks [1, 2]");
    }
}
