//! The tables of `src/param/backward.md`, held to what backward really runs.

use std::collections::BTreeSet;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::{RanNode, trace_backward};

use super::support::tensor;

const PAGE: &str = include_str!("../../../src/param/backward.md");

/// One unit: a weight to multiply with.
#[derive(Module, Debug)]
struct Layer {
    weight: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Net {
    a: Layer,
    b: Layer,
}

const WIDTH: usize = 4;

fn net(device: &Device) -> Net {
    let layer = |seed| Layer {
        weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], device)),
    };
    Net {
        a: layer(1),
        b: layer(2),
    }
}

fn run(layer: &Layer, x: Tensor<2>) -> Tensor<2> {
    unit(layer, x, |layer, x| x.matmul(layer.weight.val()))
}

fn towers(net: &Net, x: Tensor<2>) -> Tensor<1> {
    run(&net.a, x.clone().tanh().tanh()).sum() + run(&net.b, x).sum()
}

#[test]
fn two_units() {
    compare("Two units", |net, x| run(&net.b, run(&net.a, x)).sum());
}

#[test]
fn two_towers() {
    compare("Two towers", |net, x| towers(net, x.require_grad()));
}

#[test]
fn two_towers_inside_a_module() {
    compare("Two towers inside a module", |net, x| {
        unit(net, x.require_grad(), towers)
    });
}

/// What two ranks run, with and without gradient checkpointing, is what the page's table under
/// `title` says.
fn compare(title: &str, loss: fn(&Net, Tensor<2>) -> Tensor<1>) {
    let expected = table(title);
    assert!(expected.len() > 4, "no table under `{title}`");
    for checkpointing in [false, true] {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let device = if checkpointing {
                device.gradient_checkpointing()
            } else {
                device
            };
            let mesh = DeviceMesh::new(world, [2], ["shard"])?;
            let config = FullyShard::new()
                .with_units(["a", "b"])
                .with_reshard_after_forward(ReshardAfterForward::Always);
            let net = fully_shard(net(&device), &mesh, config)?;
            let x = tensor(3, [2, WIDTH], &device);
            world.ledger().reset();
            let ((), ran) = trace_backward(|| {
                let _ = loss(&net, x).backward();
            });
            let entries = world.ledger().recent().into_iter();
            let reduced = entries
                .filter(|entry| (entry.op, entry.phase) == (Op::ReduceScatter, Phase::Backward));
            Ok(rows(&ran, reduced.map(|entry| entry.label.to_string())))
        });
        for (rank, ran) in ranks.unwrap() {
            let show = |rows: &[Row]| {
                rows.iter()
                    .map(|row| format!("| {} |\n", row.join(" | ")))
                    .collect::<String>()
            };
            assert!(
                ran == expected,
                "rank {rank}, checkpointing {checkpointing}, has run\n{}",
                show(&ran)
            );
        }
    }
}

/// A row of a table: node, unit, depth, number, what its backward does, weights, gradients.
type Row = [String; 7];

/// The rows of the table under `title`, without the marks of code.
fn table(title: &str) -> Vec<Row> {
    let section = PAGE
        .split("\n# ")
        .find_map(|section| section.strip_prefix(title)?.strip_prefix('\n'));
    let rows = section
        .expect(title)
        .lines()
        .filter(|line| line.starts_with("| `"));
    let cells = |row: &str| {
        row.split('|')
            .map(|cell| cell.replace('`', "").trim().to_owned())
            .collect::<Vec<_>>()
    };
    rows.map(|row| cells(row)[1..8].to_vec().try_into().expect("seven cells"))
        .collect()
}

/// The rows that belong to `ran`; `reduced` are the units in the order of their reductions.
fn rows(ran: &[RanNode], mut reduced: impl Iterator<Item = String>) -> Vec<Row> {
    let set = |units: &[String]| units.iter().cloned().collect::<BTreeSet<_>>();
    let (mut weights, mut gradients) = (BTreeSet::new(), BTreeSet::new());
    let row = |node: &RanNode| {
        let [before, had] = [
            std::mem::replace(&mut weights, set(&node.weights)),
            gradients.clone(),
        ];
        gradients = set(&node.gradients);
        let gone = had.difference(&gradients).count();
        let does = if weights.difference(&before).next().is_some() {
            format!(
                "gathers {}",
                weights.difference(&before).next().expect("one more")
            )
        } else if gradients.difference(&had).next().is_some() {
            "collects".into()
        } else if gone > 0 {
            format!(
                "reduces {}",
                reduced
                    .by_ref()
                    .take(gone)
                    .collect::<Vec<_>>()
                    .join(", then ")
            )
        } else if before.contains(&node.unit) && !weights.contains(&node.unit) {
            format!("holds {}", node.unit)
        } else {
            "passes on".into()
        };
        let number = node
            .place
            .map_or_else(String::new, |place| place.to_string());
        let list = |units: &[String]| units.join(", ");
        let unit = node.unit.clone();
        [
            node.node.into(),
            unit,
            node.depth.to_string(),
            number,
            does,
            list(&node.weights),
            list(&node.gradients),
        ]
    };
    let rows = ran.iter().map(row).collect();
    assert_eq!(
        reduced.next(),
        None,
        "reduced, and no node let go of gradients"
    );
    rows
}
