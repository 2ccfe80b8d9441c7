//! The spans of collectives, as a profiler sees them. A process of its own: a subscriber is the
//! process's.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Once;

use burn::tensor::{DType, Shape, Tensor};
use burn_dtensor::comm::{Call, LedgerEntry, Phase, ShardedTensor, TensorMeta};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// What is known of one span.
#[derive(Debug, Clone, Default)]
struct Seen {
    fields: BTreeMap<&'static str, String>,
    entered: usize,
    inside: usize,
    closed: bool,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        assert!(
            self.fields
                .insert(field.name(), format!("{value:?}"))
                .is_none(),
            "each field once"
        );
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

thread_local! {
    /// Of this thread, which is one rank of one test.
    static SPANS: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
}

/// Keeps the spans of collectives.
struct Profiler;

impl Profiler {
    fn with(id: &Id, change: impl FnOnce(&mut Seen)) {
        SPANS.with_borrow_mut(|spans| change(&mut spans[id.into_u64() as usize - 1]));
    }
}

impl Subscriber for Profiler {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "burn_dtensor::comm" && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        assert_eq!(attributes.metadata().name(), "collective");
        SPANS.with_borrow_mut(|spans| {
            let mut seen = Seen::default();
            attributes.record(&mut seen);
            spans.push(seen);
            Id::from_u64(spans.len() as u64)
        })
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        Self::with(id, |seen| values.record(seen));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        panic!("collectives are spans, not {event:?}");
    }

    fn enter(&self, id: &Id) {
        Self::with(id, |seen| {
            (seen.entered, seen.inside) = (seen.entered + 1, seen.inside + 1)
        });
    }

    fn exit(&self, id: &Id) {
        Self::with(id, |seen| seen.inside -= 1);
    }

    fn try_close(&self, id: Id) -> bool {
        Self::with(&id, |seen| seen.closed = true);
        true
    }
}

/// Runs `program` on each rank while the profiler listens.
fn profiled(ranks: usize, program: impl Fn(&World) -> Result<()> + Sync) {
    static LISTENING: Once = Once::new();
    LISTENING
        .call_once(|| tracing::subscriber::set_global_default(Profiler).expect("the only one"));
    launch(Launch::threads(ranks), program).unwrap_or_else(|error| panic!("{error}"));
}

/// The spans of this rank.
fn spans() -> Vec<Seen> {
    SPANS.with_borrow(Vec::clone)
}

/// Each collective once, and one of a group that is the rank alone, which sends nothing.
fn each_once(world: &World) -> Result<()> {
    let (all, rank, device) = (world.all(), world.rank(), world.device());
    let tensor = |shape: [usize; 2]| Tensor::<2>::ones(shape, device).into_dispatch();
    let meta = |shape: [usize; 2]| TensorMeta {
        shape: Shape::from(shape),
        dtype: DType::F32,
    };
    let shard = || ShardedTensor {
        tensor: tensor([2, 3]),
        dim: 0,
        sizes: ShardSizes::Chunked(6),
    };
    let forward = Call::new("gather").with_phase(Phase::Forward);
    all.all_gather(forward, vec![shard(), shard()]).wait()?;
    let full = ShardedTensor {
        tensor: tensor([6, 3]),
        dim: 0,
        sizes: ShardSizes::Chunked(6),
    };
    let backward = Call::new("reduce").with_phase(Phase::Backward);
    all.reduce_scatter(backward, vec![full], ReduceOp::Sum)
        .wait()?;
    all.all_reduce("sum".into(), vec![tensor([1, 1])], ReduceOp::Sum)
        .wait()?;
    all.all_to_all("swap".into(), shard(), 1, ShardSizes::Chunked(3))
        .wait()?;
    // To the next rank alone.
    let (mut parts, mut metas) = (vec![None; 3], vec![None; 3]);
    (parts[(rank + 1) % 3], metas[(rank + 2) % 3]) = (Some(tensor([1, 2])), Some(meta([1, 2])));
    all.all_to_all_list("list".into(), parts, metas).wait()?;
    let root = |shape| (rank == 1).then(|| vec![tensor(shape)]);
    all.broadcast("copy".into(), root([2, 2]), vec![meta([2, 2])], 1)
        .wait()?;
    all.scatter(
        "scatter".into(),
        root([3, 2]),
        vec![meta([3, 2])],
        vec![(0, ShardSizes::Chunked(3))],
        1,
    )
    .wait()?;
    all.barrier("end".into()).wait()?;
    world.group(&[rank])?.barrier("alone".into()).wait()?;
    Ok(())
}

#[test]
fn each_collective_is_a_span_with_the_fields_of_its_ledger_entry() {
    profiled(3, |world| {
        each_once(world)?;
        let spans = spans();
        assert_eq!(spans.len(), 8);
        let of = |entry: &LedgerEntry| {
            let LedgerEntry {
                op,
                group_size,
                bytes,
                label,
                phase,
                ..
            } = entry;
            [
                op.to_string(),
                group_size.to_string(),
                bytes.to_string(),
                label.to_string(),
                phase.to_string(),
            ]
        };
        let names = ["operation", "group", "bytes", "label", "phase"];
        let fields = |seen: &Seen| names.map(|name| seen.fields[name].clone());
        let entries = world.ledger().recent();
        assert_eq!(
            spans.iter().map(fields).collect::<Vec<_>>(),
            entries.iter().map(of).collect::<Vec<_>>()
        );

        let field = |name: &str| {
            spans
                .iter()
                .map(|seen| seen.fields[name].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            field("seq"),
            [0, 1, 2, 3, 4, 5, 6, 7].map(|seq| seq.to_string())
        );
        assert_eq!(field("ranks"), ["[0, 1, 2]"; 8]);
        assert_eq!(field("rank"), vec![world.rank().to_string(); 8]);
        let mut given = ["none"; 3];
        given[(world.rank() + 1) % 3] = "[1, 2] f32";
        let tensors = [
            "[6, 3] f32, [6, 3] f32",
            "[6, 3] f32",
            "[1, 1] f32",
            "[6, 3] f32",
            &given.join(", "),
            "[2, 2] f32",
            "[3, 2] f32",
            "",
        ];
        assert_eq!(field("tensors"), tensors);

        let nanos = |name: &str| {
            field(name)
                .iter()
                .map(|nanos| nanos.parse::<u128>().unwrap())
                .sum::<u128>()
        };
        let spent = world.ledger().spent();
        assert_eq!(
            (nanos("waiting_ns"), nanos("moving_ns")),
            (spent.waiting.as_nanos(), spent.local_work.as_nanos())
        );
        let last: Vec<usize> = field("last")
            .iter()
            .map(|last| last.parse().unwrap())
            .collect();
        let others = (0..3).filter(|rank| *rank != world.rank() && last.contains(rank));
        let of_spans: Vec<_> = others
            .map(|rank| {
                (
                    rank,
                    last.iter().filter(|last| **last == rank).count() as u64,
                )
            })
            .collect();
        let mut of_ledger: Vec<_> = world
            .ledger()
            .waits()
            .stragglers()
            .iter()
            .map(|each| (each.rank, each.waits))
            .collect();
        of_ledger.sort();
        assert_eq!(of_spans, of_ledger);
        // While it is posted, and while it is waited for.
        assert!(
            spans
                .iter()
                .all(|seen| (seen.entered, seen.inside, seen.closed) == (2, 0, true)),
            "{spans:?}"
        );
        Ok(())
    });
}

#[test]
fn a_span_lasts_until_the_result_is_there_or_is_dropped() {
    profiled(2, |world| {
        let closed = || spans().iter().map(|seen| seen.closed).collect::<Vec<_>>();
        let [first, second] = ["a", "b"].map(|label| world.all().barrier(label.into()));
        let deferred = world
            .all()
            .barrier(Call::new("c").with_deferred())
            .then(|()| 7);
        assert_eq!(closed(), [false; 3]);
        drop(second);
        assert_eq!(closed(), [false, true, false]);
        assert_eq!(deferred.wait()?, 7);
        assert_eq!(closed(), [false, true, true]);
        first.wait()?;
        assert_eq!(closed(), [true; 3]);
        let waited: Vec<_> = spans()
            .iter()
            .map(|seen| seen.fields.contains_key("waiting_ns"))
            .collect();
        assert_eq!(waited, [true, false, true]);
        Ok(())
    });
}
