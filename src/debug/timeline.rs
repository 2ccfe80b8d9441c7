//! [`Timeline`]: when a rank's units computed, and when their parameters and gradients were transferred.

use std::collections::HashMap;
use std::fmt::Write;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::overlap::Overlap;
use crate::comm::Op;
use crate::fsdp::{Event, EventKind};

/// Times at which a rank's units computed, and at which their parameters and gradients were
/// transferred, from the events of [`record_events`](crate::fsdp::record_events). Between
/// processes, transfers have the times that the progress thread recorded, whatever the rank itself
/// did at that time.
///
/// A timeline can be sent to another rank and shown together with those of others:
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Tensor;
/// use burn_dtensor::debug::{Timeline, chrome_trace};
/// use burn_dtensor::fsdp::record_events;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
///     let x = Tensor::<2>::ones([1, 4], &device);
///     let (_, events) = record_events(|| unit(&model, x, |model, x| model.forward(x)).sum().backward());
///     let own = Timeline::of(world.rank(), &events);
///     if let Some(all) = world.all().gather_object("timeline".into(), &own, 0)? {
///         let trace = chrome_trace(&all); // for https://ui.perfetto.dev
///         assert!(trace.contains("rank 1, communication"));
///     }
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    rank: usize,
    spans: Vec<Span>,
    overlap: Overlap,
}

/// An activity with its duration. Times are microseconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Span {
    what: SpanKind,
    unit: String,
    start: f64,
    end: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum SpanKind {
    Forward,
    Backward,
    Gather,
    Reduce,
    /// All-reduce over the replicas.
    ReduceReplicas,
}

impl SpanKind {
    fn is_communication(self) -> bool {
        !matches!(self, Self::Forward | Self::Backward)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Gather => "all-gather",
            Self::Reduce => "reduce-scatter",
            Self::ReduceReplicas => "all-reduce",
        }
    }

    /// Returns the kind of activity that an event begins or ends, and true if it begins.
    fn of(kind: EventKind) -> Option<(Self, bool)> {
        match kind {
            EventKind::PreForward => Some((Self::Forward, true)),
            EventKind::PostForward => Some((Self::Forward, false)),
            EventKind::PreBackward => Some((Self::Backward, true)),
            EventKind::PostBackward => Some((Self::Backward, false)),
            EventKind::Unshard => Some((Self::Gather, true)),
            EventKind::Done(Op::AllGather) => Some((Self::Gather, false)),
            EventKind::Issued(Op::ReduceScatter) => Some((Self::Reduce, true)),
            EventKind::Done(Op::ReduceScatter) => Some((Self::Reduce, false)),
            EventKind::Issued(Op::AllReduce) => Some((Self::ReduceReplicas, true)),
            EventKind::Done(Op::AllReduce) => Some((Self::ReduceReplicas, false)),
            EventKind::Reshard | EventKind::Issued(_) | EventKind::Done(_) => None,
        }
    }
}

impl Timeline {
    /// Creates the timeline of `rank` from its recorded events.
    pub fn of(rank: usize, events: &[Event]) -> Self {
        let (now, epoch) = (
            Instant::now(),
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        );
        let micros = |at: Instant| {
            (epoch.saturating_sub(now.saturating_duration_since(at))).as_secs_f64() * 1e6
        };
        let mut begun: HashMap<(SpanKind, &str), Vec<f64>> = HashMap::new();
        let mut spans = Vec::new();
        for event in events {
            let Some((what, begins)) = SpanKind::of(event.kind) else {
                continue;
            };
            let unit = event.unit.to_string();
            let at = micros(event.at);
            let open = begun.entry((what, &*event.unit)).or_default();
            if begins {
                open.push(at);
            } else if !open.is_empty() {
                // For a unit inside itself, the inner computation ends first; its collectives end
                // in the order in which they began.
                let start = if what.is_communication() {
                    open.remove(0)
                } else {
                    open.swap_remove(open.len() - 1)
                };
                let (start, end) = event.timing.map_or((start, at), |course| {
                    let transfer = course.transfer;
                    (micros(transfer.started), micros(transfer.completed))
                });
                spans.push(Span {
                    what,
                    unit,
                    start,
                    end,
                });
            }
        }
        spans.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
        Self {
            rank,
            spans,
            overlap: Overlap::of(events),
        }
    }

    /// Returns how many all-gathers overlapped with computation.
    pub fn overlap(&self) -> Overlap {
        self.overlap
    }

    /// Returns the spans of computation, or of communication, each with the lane in which it is
    /// drawn. Spans that partially overlap are in different lanes.
    fn lanes(&self, communication: bool) -> Vec<(usize, &Span)> {
        let mut open: Vec<Vec<f64>> = Vec::new();
        let spans = self
            .spans
            .iter()
            .filter(|span| span.what.is_communication() == communication);
        let lane_of = |span: &Span, open: &mut Vec<Vec<f64>>| {
            for (lane, ends) in open.iter_mut().enumerate() {
                ends.retain(|end| *end > span.start);
                // A span of computation fits into a lane if it is nested in all unfinished spans.
                // Collectives that overlap have separate lanes.
                if ends.iter().all(|end| !communication && *end >= span.end) {
                    ends.push(span.end);
                    return lane;
                }
            }
            open.push(vec![span.end]);
            open.len() - 1
        };
        spans.map(|span| (lane_of(span, &mut open), span)).collect()
    }
}

/// Returns the timelines of several ranks in the JSON format of Chrome's trace viewer, which
/// <https://ui.perfetto.dev> opens. Each rank has one track for computation and one for
/// communication. Local: it formats the timelines that it gets.
pub fn chrome_trace(timelines: &[Timeline]) -> String {
    let mut events: Vec<Value> = Vec::new();
    // Number of lanes reserved for each track, more than are ever needed.
    const LANES: usize = 1000;
    for timeline in timelines {
        let rank = timeline.rank;
        for (communication, name) in [
            (false, format!("rank {rank}")),
            (true, format!("rank {rank}, communication")),
        ] {
            let first = (2 * rank + usize::from(communication)) * LANES;
            let spans = timeline.lanes(communication);
            for lane in 0..=spans.iter().map(|(lane, _)| *lane).max().unwrap_or(0) {
                let name = if lane == 0 {
                    name.clone()
                } else {
                    format!("{name} ({})", lane + 1)
                };
                let args = |key: &str, value: Value| json!({ key: value });
                let meta = |event: &str, args: Value| json!({ "ph": "M", "pid": 0, "tid": first + lane, "name": event, "args": args });
                events.push(meta("thread_name", args("name", name.into())));
                events.push(meta(
                    "thread_sort_index",
                    args("sort_index", (first + lane).into()),
                ));
            }
            events.extend(spans.into_iter().map(|(lane, Span { what, unit, start, end })| {
                let name = format!("{} {unit}", what.name());
                json!({
                    "ph": "X", "pid": 0, "tid": first + lane, "name": name, "cat": what.name(), "ts": start,
                    "dur": end - start,
                })
            }));
        }
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
}

/// Draws the timelines of several ranks as an SVG document: for each rank its computation above its
/// communication, and at the end the number of all-gathers that overlapped with computation. Local.
pub fn timeline_picture(timelines: &[Timeline]) -> String {
    const WIDTH: f64 = 1000.0;
    const MARGIN: f64 = 130.0;
    const ROW: usize = 18;
    let all = || timelines.iter().flat_map(|timeline| &timeline.spans);
    let start = all()
        .map(|span| span.start)
        .reduce(f64::min)
        .unwrap_or_default();
    let end = all().map(|span| span.end).fold(start, f64::max);
    let x = |at: f64| MARGIN + (at - start) / (end - start).max(1.0) * WIDTH;
    let mut body = String::new();
    let mut y = 10;
    for timeline in timelines {
        for (communication, name) in [
            (false, format!("rank {}", timeline.rank)),
            (true, "communication".into()),
        ] {
            let spans = timeline.lanes(communication);
            // Nested computation is drawn over the computation that contains it.
            let lanes = spans.iter().map(|(lane, _)| lane + 1).max().unwrap_or(1);
            let _ = writeln!(
                body,
                r#"<text x="4" y="{}" class="name">{name}</text>"#,
                y + 13
            );
            for (
                lane,
                Span {
                    what,
                    unit,
                    start,
                    end,
                },
            ) in spans
            {
                let left = x(*start);
                let width = (x(*end) - x(*start)).max(0.5);
                let top = y + lane * ROW;
                let kind = what.name();
                let _ = write!(
                    body,
                    r#"<g><title>{kind} {unit}: {:.3} ms</title><rect x="{left:.1}" y="{top}" width="{width:.1}" height="{}" class="{kind}"/>"#,
                    (end - start) / 1e3,
                    ROW - 2
                );
                // Approximate width of the label.
                if width > 6.5 * unit.len() as f64 {
                    let _ = write!(
                        body,
                        r#"<text x="{:.1}" y="{}">{unit}</text>"#,
                        left + 3.0,
                        top + 12
                    );
                }
                body.push_str("</g>\n");
            }
            y += lanes * ROW + if communication { 14 } else { 2 };
        }
    }
    let width = MARGIN + WIDTH + 10.0;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<style>.name{{font-size:12px}} .forward{{fill:#9ecae1;stroke:#fff}} .backward{{fill:#6baed6;stroke:#fff}} .all-gather{{fill:#fdae6b}} .reduce-scatter{{fill:#a1d99b}} .all-reduce{{fill:#bcbddc}}</style>
<rect width="100%" height="100%" fill="#fff"/>
{body}<text x="{MARGIN}" y="{legend}">{ms:.1} ms. Blue: forward, and darker backward; orange: all-gathers; green: reduce-scatters; violet: all-reduces.</text>
<text x="{MARGIN}" y="{below}">{overlap}</text>
</svg>
"##,
        height = y + 40,
        legend = y + 12,
        below = y + 28,
        overlap = timelines.iter().map(Timeline::overlap).sum::<Overlap>(),
        ms = (end - start) / 1e3,
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::comm::{OpTiming, TransferTiming};
    use crate::fsdp::{ShardedState, TrainingState};

    fn events(list: &[(EventKind, &str, u64)]) -> Vec<Event> {
        let origin = Instant::now() - Duration::from_secs(1);
        let event = |&(kind, unit, at): &(EventKind, &str, u64)| Event {
            kind,
            unit: unit.into(),
            training_state: TrainingState::Forward,
            state: ShardedState::Sharded,
            at: origin + Duration::from_millis(at),
            timing: None,
        };
        list.iter().map(event).collect()
    }

    /// Returns the timeline of a root around a block, both gathered at the same time.
    fn timeline() -> Timeline {
        Timeline::of(
            1,
            &events(&[
                (EventKind::PreForward, "root", 0),
                (EventKind::Unshard, "root", 1),
                (EventKind::Unshard, "a", 2),
                (EventKind::Done(Op::AllGather), "root", 5),
                (EventKind::PreForward, "a", 6),
                (EventKind::Done(Op::AllGather), "a", 7),
                (EventKind::PostForward, "a", 9),
                (EventKind::PostForward, "root", 10),
                // A backward that has not ended is not shown.
                (EventKind::PreBackward, "root", 11),
            ]),
        )
    }

    #[test]
    fn begins_and_ends_make_spans() {
        let timeline = timeline();
        let lengths: Vec<_> = timeline
            .spans
            .iter()
            .map(|span| {
                (
                    span.what,
                    &*span.unit,
                    ((span.end - span.start) / 1e3).round() as u64,
                )
            })
            .collect();
        let expected = [
            (SpanKind::Forward, "root", 10),
            (SpanKind::Gather, "root", 4),
            (SpanKind::Gather, "a", 5),
            (SpanKind::Forward, "a", 3),
        ];
        assert_eq!(lengths, expected);
    }

    #[test]
    fn what_another_thread_has_moved_is_drawn_as_that_has_seen_it() {
        let mut events = events(&[
            (EventKind::Unshard, "a", 1),
            (EventKind::Done(Op::AllGather), "a", 9),
        ]);
        let [posted, started, completed, requested] =
            [0, 2, 5, 7].map(|after| events[0].at + Duration::from_millis(after));
        let transfer = TransferTiming {
            send_started: Some(posted),
            started,
            completed,
        };
        events[1].timing = Some(OpTiming {
            posted,
            transfer,
            requested,
        });
        let timeline = Timeline::of(0, &events);
        let [Span { start, end, .. }] = &timeline.spans[..] else {
            panic!("{timeline:?}")
        };
        assert_eq!(((end - start) / 1e3).round() as u64, 3);
        let picture = timeline_picture(&[timeline]);
        assert!(
            picture.contains("of 0 all-gathers, 0 were posted before"),
            "there is no previous unit: {picture}"
        );
    }

    #[test]
    fn what_nests_shares_a_lane_and_collectives_do_not() {
        let timeline = timeline();
        let lanes = |communication| {
            timeline
                .lanes(communication)
                .iter()
                .map(|(lane, _)| *lane)
                .collect::<Vec<_>>()
        };
        assert_eq!(lanes(false), [0, 0]);
        assert_eq!(lanes(true), [0, 1]);
    }

    #[test]
    fn a_trace_has_a_track_for_each_rank_and_one_for_its_communication() {
        let trace: Value = serde_json::from_str(&chrome_trace(&[timeline()])).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events
            .iter()
            .filter_map(|event| event["args"]["name"].as_str())
            .collect();
        assert_eq!(
            names,
            [
                "rank 1",
                "rank 1, communication",
                "rank 1, communication (2)"
            ]
        );
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), 4);
        assert!(spans.iter().all(|span| span["dur"].as_f64().unwrap() > 0.0));
    }

    #[test]
    fn a_picture_names_the_units() {
        assert!(!timeline_picture(&[]).contains("NaN"));
        let picture = timeline_picture(&[timeline()]);
        assert!(
            picture.starts_with("<svg") && picture.contains(">root</text>"),
            "{picture}"
        );
        assert_eq!(picture.matches("<rect x=").count(), 4);
    }
}
