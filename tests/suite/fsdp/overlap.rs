//! Between processes a unit is gathered while the one before it computes, in both passes, and by
//! the thread that communicates: so that thread's own stamps say.
//!
//! No verdict depends on how fast a machine is. A unit goes on only once the next one's all-gather
//! is there, which nothing but that thread can bring about while the rank is busy. And in forward
//! the other ranks are late: they join that all-gather once the unit computes, so that it is
//! complete after.
//!
//! ```text
//! observed   unit 2, and gathers 3 | computes ................................ until 3 is there
//! late       waits .................... | unit 2, and gathers 3 | computes
//! ```

use std::time::{Duration, Instant};
use std::{iter, thread};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_dtensor::Result;
use burn_dtensor::comm::{Communicator, Launch, Op, OpTiming, TransferTiming, World, launch};
use burn_dtensor::debug::{Overlap, Timeline};
use burn_dtensor::fsdp::{
    Event, EventKind, FsdpModule, FullyShard, ReshardAfterForward, TrainingState, fully_shard,
    record_events, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::ProcessTest;

use super::hook::in_backward;

/// So many that the first, whose ranks meet when they begin, is less than a tenth of those with one
/// before.
const BLOCKS: usize = 12;

#[derive(Module, Debug)]
struct Stack {
    blocks: Vec<Linear>,
}

impl Stack {
    fn units(&self) -> Vec<FsdpModule> {
        self.blocks
            .iter()
            .map(|block| FsdpModule::of(block).unwrap())
            .collect()
    }

    /// Calls `before` each block, and `inside` it. Backward of each waits for the one before.
    fn forward(
        &self,
        x: Tensor<2>,
        mut before: impl FnMut(usize),
        mut inside: impl FnMut(usize),
    ) -> Tensor<2> {
        let blocks = self.units();
        unit(self, x, |stack, mut x| {
            for (at, block) in stack.blocks.iter().enumerate() {
                before(at);
                x = unit(block, x, |block, x| {
                    inside(at);
                    let x = block.forward(x);
                    match at.checked_sub(1).map(|next| blocks[next].clone()) {
                        Some(next) => in_backward(x, move || await_gathered(&next)),
                        None => x,
                    }
                });
            }
            x
        })
    }
}

/// Computes until these are gathered, which this rank does nothing for.
fn await_gathered(units: &FsdpModule) {
    let start = Instant::now();
    while !units.is_prefetched() {
        assert!(
            start.elapsed() < Duration::from_secs(50),
            "{:?} do not come while the rank computes",
            units.paths()
        );
        thread::yield_now();
    }
}

/// All-gathers of blocks that have one before them, in the order in which they were done: of each
/// the block.
fn gathers(events: &[Event], during: TrainingState) -> impl Iterator<Item = (usize, &Event)> {
    let done = events.iter().filter(move |event| {
        event.kind == EventKind::Done(Op::AllGather) && event.training_state == during
    });
    done.map(|event| {
        (
            event.unit.strip_prefix("blocks.").unwrap().parse().unwrap(),
            event,
        )
    })
}

/// When each block's backward begins.
fn starts_of_backward(events: &[Event]) -> Vec<Instant> {
    let start = |at: usize| {
        let unit = format!("blocks.{at}");
        events
            .iter()
            .find(|event| event.kind == EventKind::PreBackward && *event.unit == *unit)
            .unwrap()
            .at
    };
    (0..BLOCKS).map(start).collect()
}

/// Whether the thread that communicates has taken an all-gather up before a unit computes, and
/// moved all of it since, before the rank requested it.
fn is_behind(event: &Event, computes: Instant) -> bool {
    let OpTiming {
        transfer:
            TransferTiming {
                send_started,
                started,
                completed,
            },
        requested,
        ..
    } = event.timing.expect("several ranks");
    send_started.is_some_and(|sent| sent < computes)
        && [computes, started, completed, requested].is_sorted()
}

/// Enough of those that have a unit before them.
fn are_enough(behind: usize) -> bool {
    10 * behind >= 9 * (BLOCKS - 1)
}

/// Forward and backward from `x` on, in which one rank's forward is `observed`. Returns the events
/// of both, and when blocks computed in forward.
fn pass(
    model: &Stack,
    comm: &Communicator,
    observed: bool,
    x: Tensor<2>,
) -> (Vec<Event>, Vec<Event>, Vec<Instant>) {
    let meet = || comm.barrier("between".into()).wait().unwrap();
    // Whoever is out of the second has heard of the others' first, and so of all that they posted
    // before.
    let meet_twice = || iter::repeat_with(meet).take(2).for_each(drop);
    let blocks = model.units();
    // The first block's ranks have gathered the second one by then.
    let is_gated = |at: usize| (1..BLOCKS - 1).contains(&at);
    let mut starts = Vec::new();
    let before = |at: usize| {
        if !observed && is_gated(at) {
            meet_twice();
            meet();
        }
    };
    let inside = |at: usize| {
        if observed && is_gated(at) {
            meet_twice();
        }
        starts.push(Instant::now());
        if observed && is_gated(at) {
            meet();
        }
        blocks
            .get(at + 1)
            .into_iter()
            .filter(|_| observed)
            .for_each(await_gathered);
    };
    let (loss, forward) = record_events(|| model.forward(x, before, inside).sum());
    meet_twice();
    let (_, backward) = record_events(|| loss.backward());
    (forward, backward, starts)
}

fn program(world: &World, width: usize) -> Result<()> {
    let device = world.device().clone().autodiff();
    let linear = LinearConfig::new(width, width);
    let model = Stack {
        blocks: (0..BLOCKS).map(|_| linear.init(&device)).collect(),
    };
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(ReshardAfterForward::Always);
    let (model, comm) = (
        fully_shard(model, &mesh, config)?,
        world.all().duplicate("beside"),
    );
    // Forward learns its order by the first.
    let x = || Tensor::ones([2, width], &device).require_grad();
    drop(model.forward(x(), |_| (), |_| ()).sum().backward());
    for observed in 0..world.size() {
        let is_observed = world.rank() == observed;
        let (forward, backward, starts) = pass(&model, &comm, is_observed, x());
        let enough = |overlap: Overlap| {
            assert_eq!(overlap.gathers, BLOCKS - 1);
            are_enough(overlap.prefetched) && are_enough(overlap.hidden)
        };
        if is_observed {
            let behind =
                |(at, event): &(usize, &Event)| *at > 0 && is_behind(event, starts[*at - 1]);
            let behind = gathers(&forward, TrainingState::Forward)
                .filter(behind)
                .count();
            let overlap = Timeline::of(observed, &forward).overlap();
            assert!(
                are_enough(behind) && enough(overlap),
                "forward: {behind} of {}; {overlap}",
                BLOCKS - 1
            );
        }
        let starts = starts_of_backward(&backward);
        let behind =
            |(at, event): &(usize, &Event)| *at + 1 < BLOCKS && is_behind(event, starts[*at + 1]);
        let behind = gathers(&backward, TrainingState::PreBackward)
            .filter(behind)
            .count();
        let overlap = Timeline::of(world.rank(), &backward).overlap();
        assert!(
            are_enough(behind) && enough(overlap),
            "backward: {behind} of {}; {overlap}",
            BLOCKS - 1
        );
        world.run_on(0, || {
            println!("width {width}, rank {observed} observed; backward of rank 0: {behind} behind; {overlap}")
        });
    }
    Ok(())
}

/// Small parameters that travel with what is said of them, and large ones that land where they will
/// be.
fn gathers_go_on_behind_computing(ranks: usize) {
    let text = ProcessTest::new(ranks)
        .with_deadline(Duration::from_secs(120))
        .run(|| {
            for width in [6, 600] {
                launch(Launch::from_env(ranks).unwrap(), |world| {
                    program(world, width)
                })
                .unwrap();
            }
        });
    text.iter()
        .flat_map(|text| text.lines())
        .filter(|line| line.contains("observed"))
        .for_each(|line| println!("{line}"));
}

#[test]
fn gathers_go_on_behind_computing_on_two_processes() {
    gathers_go_on_behind_computing(2);
}

#[test]
fn gathers_go_on_behind_computing_on_three_processes() {
    gathers_go_on_behind_computing(3);
}
