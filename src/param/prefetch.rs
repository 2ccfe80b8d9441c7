//! All-gathers of units before their forward: those that the program starts, and [`prefetch`].

use std::sync::{Arc, Weak};

use super::events::{Event, EventKind, ShardedState, TrainingState, record};
use super::shards::LocalShards;
use super::storage::GatherOrigin;
use super::unit::Unit;
use super::unit_comm::UnitCollectiveKind;
use super::unit_stack;
use crate::comm::{Call, Phase};

/// Prefetches the units that follow `unit`. Called when `unit` has been gathered for forward.
///
/// | in | next units | gathered by |
/// |---|---|---|
/// | forward | the units that the program named, or those that followed in the previous forward | an all-gather that is posted here |
/// | backward ([`UnitPass::start_backward_gather`](super::unit_pass::UnitPass::start_backward_gather)) | the units that the program named, or the one that forward left before | the all-gather that forward posted |
///
/// Only the prefetch in forward posts collectives, so it must be the same on all ranks, as forward
/// is. If the backend can overlap transfers of a unit with computation, the unit is gathered when
/// the one before it in the previous forward is entered, while the rank computes. If it cannot, as
/// between threads, the first unit of a forward posts the all-gather. The parameters are not in
/// memory before their unit is entered. A rank then waits for a slow rank only if that rank has not
/// posted its all-gathers yet.
///
/// Which of the two it is depends on the ranks of the unit that is gathered alone, not on those of
/// units before it: these may be sharded within a process on some ranks, and over processes on
/// others.
pub(super) fn prefetch(unit: &Arc<Unit>) {
    let named = unit.prefetch.lock().forward.clone();
    let next: Vec<_> = match named {
        Some(units) => units.iter().filter_map(Weak::upgrade).collect(),
        None => {
            if unit_stack::is_first() {
                post_followers(unit);
            }
            follower_of(unit)
                .filter(|follower| follower.spec().moves_meanwhile())
                .into_iter()
                .collect()
        }
    };
    for next in next {
        if let Some(shards) = unit_stack::shards_inside(&next)
            && !next.copies.has(&shards, false)
        {
            begin_gather(&next, &shards, GatherOrigin::Prefetch);
        }
    }
}

fn follower_of(unit: &Unit) -> Option<Arc<Unit>> {
    unit.follower.lock().as_ref().and_then(Weak::upgrade)
}

/// Posts the all-gathers of the units that followed `unit`, except those that are gathered while
/// the rank computes. Stops at the first unit that needs none or has one already, because units
/// that run twice may follow each other in a cycle.
fn post_followers(unit: &Arc<Unit>) {
    let mut passed = vec![unit.clone()];
    while let Some(next) = follower_of(&passed[passed.len() - 1])
        && !passed.iter().any(|unit| Arc::ptr_eq(unit, &next))
        && next.spec().is_gathered()
    {
        if !next.spec().moves_meanwhile() {
            match unit_stack::shards_inside(&next) {
                Some(shards) if !next.copies.has(&shards, true) => {
                    begin_gather(&next, &shards, GatherOrigin::Posted)
                }
                _ => return,
            }
        }
        passed.push(next);
    }
}

/// Starts gathering parameters before their use, unless earlier passes kept them.
pub(crate) fn unshard_unit(unit: &Unit, shards: &LocalShards) {
    if !unit.copies.has_retained(shards) {
        begin_gather(unit, shards, GatherOrigin::Program);
    }
}

/// Uses the all-gather that was posted for these shards, or posts one now.
fn begin_gather(unit: &Unit, shards: &LocalShards, origin: GatherOrigin) {
    let (phase, during) = match origin {
        GatherOrigin::Program | GatherOrigin::Retained => (Phase::Other, TrainingState::Idle),
        GatherOrigin::Prefetch | GatherOrigin::Posted => (Phase::Forward, TrainingState::Forward),
    };
    let is_under_way = unit.copies.promote(shards, origin).unwrap_or_else(|| {
        let model = unit.comm.model(shards);
        let decision = unit.decision(shards);
        let call = Call {
            model,
            decision,
            ..Call::new(unit.label()).with_phase(phase)
        };
        let sent = unit.spec().computed(true, &shards.members, shards.plain());
        let gathering = unit.comm.all_gather(
            UnitCollectiveKind::GatherShards,
            call,
            &shards.members,
            sent,
            unit.spec().offloaded(),
            unit.comm.codec(),
        );
        let is_under_way = gathering.is_under_way();
        unit.copies.gather(shards, gathering, origin);
        is_under_way
    });
    if is_under_way && origin != GatherOrigin::Posted {
        record(|| {
            Event::of(
                unit.label(),
                EventKind::Unshard,
                during,
                ShardedState::Unsharded,
            )
        });
    }
}
