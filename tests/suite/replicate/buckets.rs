//! Buckets: which units share an all-reduce, and when it is posted.

use burn::tensor::Device;
use burn_dtensor::comm::{Launch, Op, launch};
use burn_dtensor::fsdp::{EventKind, record_events};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::replicate::{DataParallel, replicate};

use crate::fsdp::collective_counts::{BLOCKS, WIDTH, stack};
use crate::fsdp::support::{on_device, tensor};
use crate::launched;

/// Bytes of one linear layer with bias.
const LAYER: usize = (WIDTH * WIDTH + WIDTH) * 4;

/// What happens in backward, in order: `I` for the all-reduce of a unit that is posted, `B` for the
/// end of a unit's backward.
fn trace(buckets: [usize; 2]) -> (Vec<String>, Vec<String>) {
    let model = stack(&Device::flex());
    let results = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["dp"])?;
        let config = DataParallel::new().with_bucket_bytes(buckets[0], buckets[1]);
        let model = replicate(
            on_device(&model, &device),
            &mesh,
            config.with_units(["first", "blocks.*"]),
        )?;
        let loss = model.forward(tensor(1, [2, WIDTH], &device)).sum();
        world.ledger().reset();
        let (_, events) = record_events(|| loss.backward());
        let letter = |kind| match kind {
            EventKind::Issued(Op::AllReduce) => Some("I"),
            EventKind::PostBackward => Some("B"),
            _ => None,
        };
        let events = events
            .into_iter()
            .filter_map(|event| Some(format!("{} {}", letter(event.kind)?, event.unit)));
        let entries = world.ledger().recent();
        let reduced = entries
            .into_iter()
            .filter(|entry| entry.op == Op::AllReduce)
            .map(|entry| entry.label.to_string());
        Ok((events.collect::<Vec<_>>(), reduced.collect::<Vec<_>>()))
    });
    let mut of_ranks = launched::values(results.unwrap());
    assert_eq!(of_ranks[0], of_ranks[1]);
    of_ranks.remove(0)
}

#[test]
fn a_bucket_is_posted_when_it_is_full_and_each_but_the_last_before_backward_ends() {
    assert_eq!(BLOCKS, 3);
    let (events, labels) = trace([LAYER, 2 * LAYER]);
    assert_eq!(labels, ["blocks.2", "blocks.1, blocks.0", "first"]);
    assert_eq!(
        events,
        [
            "I blocks.2",
            "B blocks.2",
            "B blocks.1",
            "I blocks.1",
            "I blocks.0",
            "B blocks.0",
            "B first",
            "I first",
        ]
    );
    let (events, labels) = trace([0, 0]);
    assert_eq!(labels.len(), 4);
    assert_eq!(
        events[..4],
        ["I blocks.2", "B blocks.2", "I blocks.1", "B blocks.1"]
    );
    let (events, labels) = trace([100 * LAYER, 0]);
    assert_eq!(labels, ["blocks.2..first"]);
    assert_eq!(
        events[4..],
        ["I blocks.2", "I blocks.1", "I blocks.0", "I first"]
    );
}
