//! Kind 5: how often PyTorch's FSDP2 unshards and reduces, by pass. Prefetch moves these events,
//! never their number; the order under prefetch is not compared here.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use serde::Deserialize;
use serde_json::Value;

use super::training::reshard;
use crate::fsdp::support::{Shapes, tensor};
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
                x = unit(layer, x, |layer, x| burn::tensor::activation::relu(layer.forward(x)));
            }
            match &stack.out {
                Some(out) => out.forward(x),
                None => x,
            }
        })
    }
}

fn count(events: &[[String; 3]], name: &str) -> u64 {
    events.iter().filter(|event| event[0] == name).count() as u64
}

#[test]
fn golden_events_unshard_and_reduce_counts() {
    let golden: Golden = super::read("5_fsdp_events.json");
    assert!(!golden.runs.is_empty());
    let mut passes = 0;
    for (name, run) in &golden.runs {
        launch(Launch::threads(run.ws), |world| {
            let device = world.device().clone().autodiff();
            let init = Shapes(|path| if path.ends_with("weight") { vec![WIDTH, WIDTH] } else { vec![WIDTH] });
            let affine = |path: String| Affine::new(&init, &path, true, &device);
            let model = Stack {
                layers: (0..run.nlayers).map(|i| affine(format!("layers.{i}"))).collect(),
                out: run.root_has_param.then(|| affine("out".into())),
            };
            let mesh = DeviceMesh::new(world, [run.ws], ["shard"])?;
            let config = FullyShard::new().units(["layers.*"]).reshard_after_forward(reshard(&run.raf));
            let model = fully_shard(model, &mesh, config)?;
            let ledger = world.ledger();
            for iter in &run.iters {
                ledger.reset();
                if let Some(events) = iter.get("no_grad_forward") {
                    model.valid().forward(tensor(1, [2, WIDTH], world.device()));
                    assert_eq!(ledger.calls(Op::AllGather), count(events, "unshard"), "{name}: no-grad forward");
                    continue;
                }
                let loss = model.forward(tensor(1, [2, WIDTH], &device)).sum();
                assert_eq!(ledger.calls(Op::AllGather), count(&iter["forward"], "unshard"), "{name}: forward");
                let _ = loss.backward();
                let (gathers, reduces) =
                    (ledger.calls_in(Op::AllGather, Phase::Backward), ledger.calls(Op::ReduceScatter));
                assert_eq!(gathers, count(&iter["backward"], "unshard"), "{name}: backward");
                assert_eq!(reduces, count(&iter["backward"], "post_backward"), "{name}: reductions");
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        passes += 1;
    }
    println!("{passes} runs");
}
