//! Gathering units before they are needed, so that their parameters are on their way while a rank computes.
//!
//! | in | the next units are | gathered by |
//! |---|---|---|
//! | forward | those the program has named, or those that followed last time | an all-gather that is posted here |
//! | backward ([`Pass::start_again`](super::unit_pass::UnitPass::start_again)) | those the program has named, or the one that forward has left before | the all-gather that forward has posted |
//!
//! Only forward's adds to the order of collectives, so it must be alike on all ranks, as forward is. Of the units that
//! followed last time, the next one moves while the rank computes. Where nothing moves before it is waited for, as between
//! threads, the first unit posts all of them, and none is in memory before it is entered: no rank waits for one that is
//! late, but for what that one has not posted.

use std::sync::{Arc, Weak};

use super::unit::Unit;
use super::unit_stack;

/// `unit` is gathered for forward: gathers what comes next.
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
            next.prefetch(shards);
        }
    }
}

/// Posts the all-gathers of what followed `unit`, up to the first that there is one of: units that run twice may follow
/// each other in a circle.
fn post_followers(unit: &Unit) {
    let mut next = unit.follower();
    while let Some(unit) = next.as_ref().and_then(Weak::upgrade)
        && let Some(shards) = unit_stack::shards_inside(&unit)
        && unit.post(shards)
    {
        next = unit.follower();
    }
}

impl Unit {
    /// The unit that was entered after it last.
    pub(super) fn follower(&self) -> Option<Weak<Unit>> {
        self.follower.lock().clone()
    }

    /// `unit` is entered after it.
    pub(super) fn is_followed_by(&self, unit: &Arc<Unit>) {
        *self.follower.lock() = Some(Arc::downgrade(unit));
    }

    /// Whether its parameters move while its ranks compute.
    pub(super) fn moves_meanwhile(&self) -> bool {
        self.is_gathered() && self.data.as_ref().is_some_and(|data| data.shard.moves_meanwhile())
    }
}
