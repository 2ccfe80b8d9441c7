//! [`ReductionOrder`]: the order in which a rank's units are reduced.
//!
//! Each pass gets an order key in forward, which runs in the same order on all ranks. Reductions
//! follow these keys: rule 5 of [`backward_nodes`](crate::param::backward_nodes).
//!
//! ```text
//!   entered       root (nothing before it)   0   1   2   3
//!   reduced       3   2   1   0   root
//! ```
//!
//! * **Tied** passes depend on something before them: a tracked input, or a unit around them. They
//!   are reduced in reverse order of entry, which is the order in which backward reaches the units
//!   of a chain.
//! * **Loose** passes depend on nothing. Backward reaches them last in any model. They follow in
//!   order of entry, the root first.
//! * A pass whose gradients are complete is **held** while a pass that was entered later is open,
//!   even if this backward will never reach that one. This rule uses only information that is the
//!   same on every rank.
//! * When backward ends, [`RootPostBackward`](crate::param::backward_nodes::RootPostBackward)
//!   issues the reductions that are still held.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// The passes of one rank, sorted by order key.
///
/// `P` is a handle on a pass, which this type only holds and returns. The handle must not keep the
/// pass alive: the graph's nodes do. If a backward is abandoned, its nodes are dropped, and each
/// pass calls [`leave`](Self::leave).
#[derive(Debug)]
pub(crate) struct ReductionOrder<P>(Mutex<OrderedQueue<P>>);

#[derive(Debug)]
struct OrderedQueue<P> {
    next: u64,
    /// Tied passes that have not been reduced.
    tied: BTreeMap<u64, Tied<P>>,
    /// Loose passes whose gradients are complete.
    loose: BTreeMap<u64, P>,
    /// Key of the pass that this backward reduced last.
    last: Option<OrderKey>,
}

#[derive(Debug)]
enum Tied<P> {
    /// The pass is open: gradients may still arrive.
    Open,
    /// The gradients are complete, and the pass is held.
    Held(P),
    /// It was dropped. The moment of the drop differs between ranks, so the pass still holds those
    /// entered before it.
    Dropped,
}

/// Position of a pass in the order of entry, and its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OrderKey {
    Tied(u64),
    Loose(u64),
}

impl<P> Default for ReductionOrder<P> {
    fn default() -> Self {
        Self(Mutex::new(OrderedQueue {
            next: 0,
            tied: BTreeMap::new(),
            loose: BTreeMap::new(),
            last: None,
        }))
    }
}

impl<P> ReductionOrder<P> {
    /// Returns the next order key, for a pass that is entered now.
    pub(crate) fn next_key(&self, tied: bool) -> OrderKey {
        let mut queue = self.0.lock();
        // It is left over from a backward that was abandoned.
        queue.last = None;
        let place = queue.next;
        queue.next += 1;
        if !tied {
            return OrderKey::Loose(place);
        }
        queue.tied.insert(place, Tied::Open);
        OrderKey::Tied(place)
    }

    /// Records that the gradients of `pass` are complete. Returns the passes that may be reduced
    /// now, in order.
    pub(crate) fn ready(&self, place: OrderKey, pass: P) -> Vec<P> {
        let mut queue = self.0.lock();
        match place {
            OrderKey::Tied(place) => {
                let before = queue.tied.insert(place, Tied::Held(pass));
                debug_assert!(
                    matches!(before, Some(Tied::Open)),
                    "rule 5: pass {place} is ready twice"
                );
            }
            OrderKey::Loose(place) => {
                queue.loose.insert(place, pass);
            }
        }
        let mut due = Vec::new();
        while let Some(last) = queue
            .tied
            .last_entry()
            .filter(|last| matches!(last.get(), Tied::Held(_)))
        {
            let (place, tied) = last.remove_entry();
            due.extend(tied.into_pass());
            queue.reduced(OrderKey::Tied(place));
        }
        due
    }

    /// Ends the backward. Returns the passes that are still held, in order.
    pub(crate) fn flush(&self) -> Vec<P> {
        let mut queue = self.0.lock();
        let held = queue
            .tied
            .iter()
            .rev()
            .filter(|(_, tied)| matches!(tied, Tied::Held(_)));
        let held: Vec<_> = held.map(|(&place, _)| place).collect();
        let mut due = Vec::new();
        for place in held {
            due.extend(queue.tied.remove(&place).and_then(Tied::into_pass));
            queue.reduced(OrderKey::Tied(place));
        }
        for (place, pass) in std::mem::take(&mut queue.loose) {
            due.push(pass);
            queue.reduced(OrderKey::Loose(place));
        }
        queue.last = None;
        due
    }

    /// Removes a pass that was dropped, reduced or not.
    pub(crate) fn leave(&self, place: OrderKey) {
        let mut queue = self.0.lock();
        match place {
            OrderKey::Tied(place) => queue
                .tied
                .entry(place)
                .and_modify(|tied| *tied = Tied::Dropped),
            OrderKey::Loose(place) => return drop(queue.loose.remove(&place)),
        };
        // A dropped pass without an earlier one holds nothing.
        while let Some(first) = queue
            .tied
            .first_entry()
            .filter(|first| matches!(first.get(), Tied::Dropped))
        {
            first.remove();
        }
    }
}

impl<P> OrderedQueue<P> {
    /// Checks in debug builds that the pass at `place` may be reduced next.
    fn reduced(&mut self, place: OrderKey) {
        let last = self.last.replace(place);
        debug_assert!(
            last.is_none_or(|last| last.is_before(place)),
            "rule 5: {place:?} is reduced after {last:?}"
        );
    }
}

impl OrderKey {
    /// Returns true if one backward reduces this pass before `other`.
    fn is_before(self, other: Self) -> bool {
        match (self, other) {
            (Self::Tied(this), Self::Tied(other)) => this > other,
            (Self::Loose(this), Self::Loose(other)) => this < other,
            (Self::Tied(_), Self::Loose(_)) => true,
            (Self::Loose(_), Self::Tied(_)) => false,
        }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Tied(number) | Self::Loose(number) => number,
        }
    }
}

impl<P> Tied<P> {
    fn into_pass(self) -> Option<P> {
        match self {
            Self::Held(pass) => Some(pass),
            Self::Open | Self::Dropped => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enters passes that are `tied` or not, and returns their order keys.
    fn entered<const N: usize>(order: &ReductionOrder<usize>, tied: [bool; N]) -> [OrderKey; N] {
        tied.map(|tied| order.next_key(tied))
    }

    #[test]
    fn a_chain_is_reduced_as_it_comes_up() {
        let order = ReductionOrder::default();
        let queue = entered(&order, [false, true, true, true]);
        for pass in [3, 2, 1] {
            assert_eq!(order.ready(queue[pass], pass), [pass], "no pass is held");
        }
        assert_eq!(
            order.ready(queue[0], 0),
            [0; 0],
            "the root is reduced at the end"
        );
        assert_eq!(order.flush(), [0]);
        assert_eq!(order.flush(), [0; 0]);
    }

    /// Checks that the order of the reductions does not depend on the order in which backward
    /// reaches the passes.
    #[test]
    fn whatever_comes_up_first_the_order_is_that_of_entry() {
        for mut code in 0..120 {
            let order = ReductionOrder::default();
            let queue = entered(&order, [false, true, true, false, true]);
            let mut left = vec![0, 1, 2, 3, 4];
            let mut reduced = Vec::new();
            while !left.is_empty() {
                let pass = left.remove(code % left.len());
                code /= left.len() + 1;
                reduced.extend(order.ready(queue[pass], pass));
            }
            reduced.extend(order.flush());
            assert_eq!(reduced, [4, 2, 1, 0, 3]);
        }
    }

    #[test]
    fn a_pass_that_never_comes_up_holds_the_others_until_the_end() {
        let order = ReductionOrder::default();
        let queue = entered(&order, [true, true, true]);
        assert_eq!(order.ready(queue[0], 0), [0; 0]);
        assert_eq!(order.ready(queue[1], 1), [0; 0]);
        // Whether a rank has dropped the pass must not matter.
        order.leave(queue[2]);
        assert_eq!(order.flush(), [1, 0]);
        order.leave(queue[0]);
        order.leave(queue[1]);
        assert!(
            order.0.lock().tied.is_empty(),
            "dropped passes that hold nothing are removed"
        );
    }

    #[test]
    fn what_a_backward_held_when_it_was_given_up_is_never_reduced() {
        let order = ReductionOrder::default();
        let queue = entered(&order, [false, true, true]);
        assert_eq!(
            [order.ready(queue[1], 1), order.ready(queue[0], 0)],
            [[0; 0]; 2]
        );
        // The graph is dropped, and all passes with it.
        queue.into_iter().for_each(|place| order.leave(place));
        assert_eq!(order.flush(), [0; 0]);
    }

    #[test]
    fn an_earlier_forward_holds_nothing() {
        let order = ReductionOrder::default();
        let old = order.next_key(true);
        let new = order.next_key(true);
        assert_eq!(order.ready(new, 1), [1]);
        assert_eq!(order.ready(old, 0), [0]);
    }
}
