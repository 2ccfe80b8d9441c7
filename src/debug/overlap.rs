//! [`Overlap`]: how many of a rank's all-gathers overlapped with its computation.

use std::fmt;
use std::iter::Sum;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::comm::{Op, OpTiming};
use crate::fsdp::{Event, EventKind, TrainingState};

/// Overlap of the all-gathers of a rank's units with computation, in both passes.
///
/// A unit begins to compute at its [`PreForward`](EventKind::PreForward), and in backward at its
/// [`PreBackward`](EventKind::PreBackward). The previous unit is the last one that began to compute
/// before, in the same pass.
///
/// ```text
/// rank                    | unit 1 computes              | unit 2 computes
/// all-gather of unit 2  posted   started ====== completed requested
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Overlap {
    /// Number of all-gathers of units that have a previous unit.
    pub gathers: usize,
    /// Number of these that were posted before the previous unit began to compute.
    pub prefetched: usize,
    /// Number of prefetched ones whose transfer overlapped with the previous unit: it completed
    /// after that unit began to compute, and began before the rank waited for the result.
    pub hidden: usize,
    /// Time from the start of a rank's wait for a result until the result was complete, summed over
    /// all gathers, those of first units included.
    pub exposed: Duration,
}

impl Overlap {
    /// Computes the overlap from the recorded events of a rank's units.
    pub(super) fn of(events: &[Event]) -> Self {
        let mut overlap = Self::default();
        for (at, event) in events
            .iter()
            .enumerate()
            .filter(|(_, event)| event.kind == EventKind::Done(Op::AllGather))
        {
            let Some(OpTiming {
                posted,
                transfer,
                requested,
            }) = event.timing
            else {
                continue;
            };
            overlap.exposed += transfer.completed.saturating_duration_since(requested);
            let Some(before) = before(events, at) else {
                continue;
            };
            let is_prefetched = posted < before;
            overlap.gathers += 1;
            overlap.prefetched += usize::from(is_prefetched);
            overlap.hidden += usize::from(
                is_prefetched && before < transfer.completed && transfer.started < requested,
            );
        }
        overlap
    }
}

/// Returns the time at which the previous unit began to compute; `done` is the index of the event
/// at which the unit's all-gather was complete.
fn before(events: &[Event], done: usize) -> Option<Instant> {
    let Event {
        unit,
        training_state,
        ..
    } = &events[done];
    let starts =
        |event: &Event| matches!(event.kind, EventKind::PreForward | EventKind::PreBackward);
    let begins = |event: &Event| starts(event) && event.unit == *unit;
    // In forward, a unit has its parameters before it computes. In backward, it waits for them when
    // it needs them.
    let own = match training_state {
        TrainingState::Forward => done + events[done..].iter().position(begins)?,
        _ => events[..done].iter().rposition(begins)?,
    };
    let before = events[..own].iter().rfind(|event| starts(event))?;
    (before.kind == events[own].kind).then_some(before.at)
}

/// Adds up the overlap of several ranks.
impl Sum for Overlap {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            gathers: sum.gathers + one.gathers,
            prefetched: sum.prefetched + one.prefetched,
            hidden: sum.hidden + one.hidden,
            exposed: sum.exposed + one.exposed,
        })
    }
}

/// Formats the overlap as `of 14 all-gathers, 14 were posted before the previous unit began to
/// compute, and 13 overlapped with it; 0.412 ms of waiting`.
impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gathers,
            prefetched,
            hidden,
            exposed,
        } = self;
        write!(
            f,
            "of {gathers} all-gathers, {prefetched} were posted before the previous unit began to compute, and \
             {hidden} overlapped with it; {:.3} ms of waiting",
            exposed.as_secs_f64() * 1e3
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::TransferTiming;
    use crate::fsdp::ShardedState;

    /// Times in milliseconds at which an all-gather was posted, began to transfer, was complete,
    /// and was waited for.
    type Times = [u64; 4];

    /// Returns the overlap of two consecutive units in one pass, where the second unit's all-gather
    /// has these times. The first unit begins to compute at 10 milliseconds, the second at 20.
    fn overlap(
        training_state: TrainingState,
        [posted, started, completed, requested]: Times,
    ) -> Overlap {
        let origin = Instant::now();
        let at = |millis: u64| origin + Duration::from_millis(millis);
        let event = |kind, unit: &str, millis, training_state| Event {
            kind,
            unit: unit.into(),
            training_state,
            state: ShardedState::Unsharded,
            at: at(millis),
            timing: None,
        };
        let transfer = TransferTiming {
            send_started: Some(at(posted)),
            started: at(started),
            completed: at(completed),
        };
        let timing = Some(OpTiming {
            posted: at(posted),
            transfer,
            requested: at(requested),
        });
        let done = Event {
            timing,
            ..event(EventKind::Done(Op::AllGather), "b", 19, training_state)
        };
        let starts = |kind| {
            [
                event(kind, "a", 10, training_state),
                event(kind, "b", 20, training_state),
            ]
        };
        let other = event(EventKind::PreForward, "b", 5, TrainingState::Forward);
        Overlap::of(&match training_state {
            TrainingState::Forward => {
                let [first, second] = starts(EventKind::PreForward);
                vec![first, done, second]
            }
            _ => {
                let [first, second] = starts(EventKind::PreBackward);
                vec![other, first, second, done]
            }
        })
    }

    #[test]
    fn a_gather_is_hidden_if_it_moves_while_the_unit_before_computes() {
        for pass in [TrainingState::Forward, TrainingState::PreBackward] {
            let counts = |times| {
                let Overlap {
                    gathers,
                    prefetched,
                    hidden,
                    exposed,
                } = overlap(pass, times);
                (gathers, prefetched, hidden, exposed.as_millis())
            };
            assert_eq!(counts([8, 11, 15, 18]), (1, 1, 1, 0), "{pass:?}");
            assert_eq!(
                counts([8, 11, 19, 16]),
                (1, 1, 1, 3),
                "{pass:?}: it overlaps partially"
            );
            assert_eq!(
                counts([8, 9, 9, 18]),
                (1, 1, 0, 0),
                "{pass:?}: it was complete before"
            );
            assert_eq!(
                counts([12, 13, 15, 18]),
                (1, 0, 0, 0),
                "{pass:?}: it was posted too late"
            );
            assert_eq!(
                counts([8, 17, 18, 16]),
                (1, 1, 0, 2),
                "{pass:?}: the transfer began after the wait"
            );
        }
    }

    #[test]
    fn a_pass_begins_with_a_unit_that_has_none_before() {
        let mut events = Vec::new();
        let at = Instant::now();
        let transfer = TransferTiming {
            send_started: Some(at),
            started: at,
            completed: at + Duration::from_millis(2),
        };
        let timing = Some(OpTiming {
            posted: at,
            transfer,
            requested: at,
        });
        for (kind, training_state) in [
            (EventKind::PreForward, TrainingState::Forward),
            (EventKind::PreBackward, TrainingState::PreBackward),
            (EventKind::Done(Op::AllGather), TrainingState::PreBackward),
        ] {
            let timing = timing.filter(|_| kind == EventKind::Done(Op::AllGather));
            events.push(Event {
                kind,
                unit: "a".into(),
                training_state,
                state: ShardedState::Unsharded,
                at,
                timing,
            });
        }
        let overlap = Overlap::of(&events);
        assert_eq!(
            overlap,
            Overlap {
                exposed: Duration::from_millis(2),
                ..Overlap::default()
            }
        );
        let both: Overlap = [
            overlap,
            Overlap {
                gathers: 2,
                prefetched: 1,
                hidden: 1,
                exposed: Duration::ZERO,
            },
        ]
        .into_iter()
        .sum();
        assert_eq!(
            both.to_string(),
            "of 2 all-gathers, 1 were posted before the previous unit began to compute, and 1 overlapped with it; \
             2.000 ms of waiting"
        );
    }
}
