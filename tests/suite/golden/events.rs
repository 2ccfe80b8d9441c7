//! Kind 5: what PyTorch's FSDP2 does, event by event: units gathered, freed and reduced, under
//! prefetch too.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{
    Event, EventKind, FsdpModule, FullyShard, TrainingState, fully_shard, record_events, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use serde::Deserialize;
use serde_json::Value;

use super::training::reshard;
use crate::fsdp::support::{Shapes, tensor};
use crate::launched;
use crate::models::Affine;

#[derive(Deserialize)]
struct Golden {
    runs: BTreeMap<String, Run>,
}

#[derive(Deserialize)]
struct Run {
    nlayers: usize,
    raf: Value,
    root_has_param: bool,
    ws: usize,
    fp: usize,
    bp: usize,
    iters: Vec<BTreeMap<String, Vec<[String; 3]>>>,
}

const WIDTH: usize = 6;

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Affine>,
    out: Option<Affine>,
}

impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |stack, mut x| {
            for layer in &stack.layers {
                x = unit(layer, x, |layer, x| {
                    burn::tensor::activation::relu(layer.forward(x))
                });
            }
            match &stack.out {
                Some(out) => out.forward(x),
                None => x,
            }
        })
    }
}

/// An event as PyTorch's file has it: what, of which unit, in which state.
fn named(event: &Event) -> Option<[String; 3]> {
    let kind = match event.kind {
        EventKind::Unshard => "unshard",
        EventKind::Reshard => "reshard",
        EventKind::PostBackward => "post_backward",
        _ => return None,
    };
    let state = match event.training_state {
        TrainingState::Idle => "IDLE",
        TrainingState::Forward => "FORWARD",
        TrainingState::PreBackward => "PRE_BACKWARD",
        TrainingState::PostBackward => "POST_BACKWARD",
    };
    let unit = if &*event.unit == "root" {
        ""
    } else {
        &event.unit
    };
    Some([kind.into(), unit.into(), state.into()])
}

/// PyTorch runs a unit without a differentiable input, and the root, in the final callback: the
/// root first. Here a unit inside another is through before it, whatever its inputs are, which may
/// differ between ranks.
fn root_last(mut events: Vec<[String; 3]>) -> Vec<[String; 3]> {
    let of_root = |event: &[String; 3]| event[1].is_empty() && event[2] == "POST_BACKWARD";
    let (root, mut others): (Vec<_>, Vec<_>) = events.drain(..).partition(of_root);
    others.extend(root);
    others
}

/// Gathers `by` layers ahead: of each, those after it in forward, and those before it in backward,
/// nearest first.
fn prefetch(model: &Stack, run: &Run) -> Result<()> {
    let layers: Vec<FsdpModule> = model
        .layers
        .iter()
        .map(|layer| Ok(FsdpModule::of(layer)?.own()))
        .collect::<Result<_>>()?;
    for (at, layer) in layers.iter().enumerate() {
        if run.fp > 0 {
            layer.set_forward_prefetch(layers[at + 1..].iter().take(run.fp).cloned());
        }
        if run.bp > 0 {
            layer.set_backward_prefetch(layers[..at].iter().rev().take(run.bp).cloned());
        }
    }
    Ok(())
}

#[test]
fn golden_events_one_by_one() {
    let golden: Golden = super::read("5_fsdp_events.json");
    assert!(!golden.runs.is_empty());
    let mut compared = 0;
    for (name, run) in &golden.runs {
        let ranks = launch(Launch::threads(run.ws), |world| {
            let device = world.device().clone().autodiff();
            let init = Shapes(|path| {
                if path.ends_with("weight") {
                    vec![WIDTH, WIDTH]
                } else {
                    vec![WIDTH]
                }
            });
            let affine = |path: String| Affine::new(&init, &path, true, &device);
            let model = Stack {
                layers: (0..run.nlayers)
                    .map(|i| affine(format!("layers.{i}")))
                    .collect(),
                out: run.root_has_param.then(|| affine("out".into())),
            };
            let mesh = DeviceMesh::new(world, [run.ws], ["shard"])?;
            let config = FullyShard::new()
                .with_units(["layers.*"])
                .with_reshard_after_forward(reshard(&run.raf));
            let model = fully_shard(model, &mesh, config)?;
            prefetch(&model, run)?;
            let mut compared = 0;
            let mut compare = |part: &str, events: &[Event], expected: &[[String; 3]]| {
                let events: Vec<_> = events.iter().filter_map(named).collect();
                assert_eq!(
                    root_last(events),
                    root_last(expected.to_vec()),
                    "{name}: {part}"
                );
                compared += expected.len();
            };
            for iter in &run.iters {
                if let Some(expected) = iter.get("no_grad_forward") {
                    let (_, events) = record_events(|| {
                        model.valid().forward(tensor(1, [2, WIDTH], world.device()))
                    });
                    compare("no-grad forward", &events, expected);
                    continue;
                }
                let (loss, events) =
                    record_events(|| model.forward(tensor(1, [2, WIDTH], &device)).sum());
                compare("forward", &events, &iter["forward"]);
                let (_, events) = record_events(|| loss.backward());
                compare("backward", &events, &iter["backward"]);
            }
            Ok(compared)
        });
        compared += launched::values(ranks.unwrap_or_else(|error| panic!("{name}: {error}")))
            .iter()
            .sum::<usize>();
    }
    println!("{} runs, {compared} events", golden.runs.len());
}
