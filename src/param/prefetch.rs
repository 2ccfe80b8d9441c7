//! Prefetch: gathers units before they are needed, so that communication overlaps computation.
//!
//! | in | next units | gathered by |
//! |---|---|---|
//! | forward | the units that the program named, or those that followed in the previous forward | an all-gather that is posted here |
//! | backward ([`UnitPass::start_again`](super::unit_pass::UnitPass::start_again)) | the units that the program named, or the one that forward left before | the all-gather that forward posted |
//!
//! Only the prefetch in forward posts collectives, so it must be the same on all ranks, as forward is. If the
//! backend can overlap transfers with computation, the unit that followed in the previous forward is gathered while
//! the rank computes. If it cannot, as between threads, the first unit posts the all-gathers of all following
//! units. None of these parameters is in memory before its unit is entered. A rank then waits for a slow rank only
//! if that rank has not posted its all-gathers yet.

use std::sync::{Arc, Weak};

use super::unit::Unit;
use super::unit_stack;

/// Prefetches the units that follow `unit`. Called when `unit` has been gathered for forward.
pub(super) fn prefetch(unit: &Arc<Unit>) {
    let named = unit.prefetch.lock().forward.clone();
    let next = match named {
        Some(units) => units,
        None if unit.moves_meanwhile() => unit.follower().into_iter().collect(),
        None if unit_stack::is_first() => return post_followers(unit),
        None => return,
    };
    for next in next.iter().filter_map(Weak::upgrade) {
        if let Some(shards) = unit_stack::shards_inside(&next) {
            next.prefetch(&shards);
        }
    }
}

/// Posts the all-gathers of the units that followed `unit`. Stops at the first unit that needs none or has one
/// already, because units that run twice may follow each other in a cycle.
fn post_followers(unit: &Unit) {
    let mut next = unit.follower();
    while let Some(unit) = next.as_ref().and_then(Weak::upgrade)
        && let Some(shards) = unit_stack::shards_inside(&unit)
        && unit.post(&shards)
    {
        next = unit.follower();
    }
}

impl Unit {
    /// Returns the unit that was entered after this one in the most recent forward.
    pub(super) fn follower(&self) -> Option<Weak<Unit>> {
        self.follower.lock().clone()
    }

    /// Records that `unit` was entered after this one.
    pub(super) fn is_followed_by(&self, unit: &Arc<Unit>) {
        *self.follower.lock() = Some(Arc::downgrade(unit));
    }

    /// Returns true if the unit is gathered and its backend overlaps the transfer with computation.
    pub(super) fn moves_meanwhile(&self) -> bool {
        self.is_gathered() && self.data.as_ref().is_some_and(|data| data.shard.moves_meanwhile())
    }
}
