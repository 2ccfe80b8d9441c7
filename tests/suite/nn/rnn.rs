//! Recurrent layers: rows shared, hidden states shared.

use burn::nn::activation::ActivationConfig;
use burn::nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, LstmState as PlainLstmState,
    RnnConfig, RnnState,
};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::nn::LstmState;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Only;
use super::same::same;
use crate::fsdp::support::tensor;

use Placement::{Replicate as R, Shard as S};

const BATCH: usize = 3;
const SEQ: usize = 3;
const INPUT: usize = 5;
/// The ranks do not divide it.
const HIDDEN: usize = 6;

/// A first state, the same on all ranks.
fn state<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor(seed, shape, device)
}

fn replicated<const D: usize>(seed: u64, shape: [usize; D], x: &DTensor<3>) -> DTensor<D> {
    DTensor::distribute_replicated(state(seed, shape, &x.local().device()), x.mesh(), &[R])
        .expect("replicated")
}

/// All hidden states and the last state, as one tensor `[.., d]`, under plans that share nothing
/// and the hidden state.
macro_rules! recurrent {
    ($gates:literal; $($layer:expr, |$plain:ident, $x:ident| $forward:expr, |$parallel:ident, $dx:ident| $forward_dtensor:expr);* $(;)?) => {$(
        for split in [false, true] {
            let plan = || if split { Plan::new().with_style($gates, Style::colwise()) } else { Plan::new() };
            same($layer, &plan, [BATCH, SEQ, INPUT], |$plain, $x| $forward, |$parallel, $dx| $forward_dtensor);
        }
    )*};
}

#[test]
fn rnns_equal_burns() {
    let device = Device::flex();
    let config = RnnConfig::new(INPUT, HIDDEN, true);
    recurrent! {
        "layer.gate.*";
        config.clone().init(&device), |layer, x| layer.forward(x, None).0, |layer, x| layer.forward_dtensor((x, None)).0;
        config.clone().with_reverse(true).with_clip(Some(0.4)).init(&device),
            |layer, x| {
                let first = state(7, [BATCH, HIDDEN], &x.device());
                layer.forward(x, Some(RnnState::new(first))).1.hidden
            },
            |layer, x| {
                let first = replicated(7, [BATCH, HIDDEN], &x);
                layer.forward_dtensor((x, Some(first))).1
            };
    }
    recurrent! {
        "layer.*.gate.*";
        BiRnnConfig::new(INPUT, HIDDEN, false).with_batch_first(false).init(&device),
            |layer, x| layer.forward(x.swap_dims(0, 1), None).0, |layer, x| layer.forward_dtensor((x.swap_dims(0, 1), None)).0;
        BiRnnConfig::new(INPUT, HIDDEN, true).init(&device),
            |layer, x| {
                let first = state(8, [2, BATCH, HIDDEN], &x.device());
                layer.forward(x, Some(RnnState::new(first))).1.hidden
            },
            |layer, x| {
                let first = replicated(8, [2, BATCH, HIDDEN], &x);
                layer.forward_dtensor((x, Some(first))).1
            };
    }
}

#[test]
fn grus_equal_burns() {
    let device = Device::flex();
    let config = GruConfig::new(INPUT, HIDDEN, true);
    recurrent! {
        "layer.*_gate.*";
        config.clone().init(&device), |layer, x| layer.forward(x, None), |layer, x| layer.forward_dtensor((x, None));
        config.clone().with_reset_after(false).with_clip(Some(0.3)).init(&device),
            |layer, x| {
                let first = state(7, [BATCH, HIDDEN], &x.device());
                layer.forward(x, Some(first))
            },
            |layer, x| {
                let first = replicated(7, [BATCH, HIDDEN], &x);
                layer.forward_dtensor((x, Some(first)))
            };
    }
    recurrent! {
        "layer.*.*_gate.*";
        BiGruConfig::new(INPUT, HIDDEN, true).init(&device),
            |layer, x| {
                let first = state(8, [2, BATCH, HIDDEN], &x.device());
                let (all, last) = layer.forward(x, Some(first));
                Tensor::cat(vec![all.flatten::<1>(0, 2), last.flatten::<1>(0, 2)], 0)
            },
            |layer, x| {
                let first = replicated(8, [2, BATCH, HIDDEN], &x);
                let (all, last) = layer.forward_dtensor((x, Some(first)));
                DTensor::cat(vec![all.flatten::<1>(0, 2), last.flatten::<1>(0, 2)], 0)
            };
        BiGruConfig::new(INPUT, HIDDEN, false).with_batch_first(false).init(&device),
            |layer, x| layer.forward(x.swap_dims(0, 1), None).0, |layer, x| layer.forward_dtensor((x.swap_dims(0, 1), None)).0;
    }
}

#[test]
fn lstms_equal_burns() {
    let device = Device::flex();
    let config = LstmConfig::new(INPUT, HIDDEN, true);
    recurrent! {
        "layer.*_gate.*";
        config.clone().init(&device), |layer, x| layer.forward(x, None).0, |layer, x| layer.forward_dtensor((x, None)).0;
        config.clone().with_reverse(true).with_batch_first(false).with_clip(Some(0.2)).init(&device),
            |layer, x| layer.forward(x.swap_dims(0, 1), None).0, |layer, x| layer.forward_dtensor((x.swap_dims(0, 1), None)).0;
        config.clone().with_input_forget(true).with_cell_activation(ActivationConfig::Relu).init(&device),
            |layer, x| {
                let [cell, hidden] = [7, 8].map(|seed| state(seed, [BATCH, HIDDEN], &x.device()));
                let last = layer.forward(x, Some(PlainLstmState::new(cell, hidden))).1;
                last.cell + last.hidden
            },
            |layer, x| {
                let [cell, hidden] = [7, 8].map(|seed| replicated(seed, [BATCH, HIDDEN], &x));
                let last = layer.forward_dtensor((x, Some(LstmState { cell, hidden }))).1;
                last.cell + last.hidden
            };
    }
    recurrent! {
        "layer.*.*_gate.*";
        BiLstmConfig::new(INPUT, HIDDEN, true).init(&device),
            |layer, x| {
                let [cell, hidden] = [7, 8].map(|seed| state(seed, [2, BATCH, HIDDEN], &x.device()));
                let (all, last) = layer.forward(x, Some(PlainLstmState::new(cell, hidden)));
                Tensor::cat(vec![all.flatten::<1>(0, 2), (last.cell + last.hidden).flatten::<1>(0, 2)], 0)
            },
            |layer, x| {
                let [cell, hidden] = [7, 8].map(|seed| replicated(seed, [2, BATCH, HIDDEN], &x));
                let (all, last) = layer.forward_dtensor((x, Some(LstmState { cell, hidden })));
                DTensor::cat(vec![all.flatten::<1>(0, 2), (last.cell + last.hidden).flatten::<1>(0, 2)], 0)
            };
    }
}

/// Rows need nothing of each other; a split hidden state is gathered once a step, for all gates.
#[test]
fn a_step_of_the_sequence_gathers_the_hidden_state_once() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let run = |plan: Plan, placement| {
            let layer = Only {
                layer: LstmConfig::new(INPUT, HIDDEN, true).init(&device),
            };
            let model = parallelize(layer, mesh, plan)?;
            let x = DTensor::distribute_replicated(
                tensor(1, [4, SEQ, INPUT], &device),
                mesh,
                &[placement],
            )?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            let (y, _) = unit(&model, x, |model, x| {
                let (y, LstmState { cell, hidden }) = model.layer.forward_dtensor((x, None));
                (y, (cell, hidden))
            });
            let sent = ledger.total(|_| true).calls;
            y.to_local().sum().backward();
            let (total, calls) = (ledger.total(|_| true).calls, |op, phase| {
                ledger.calls_in(op, phase)
            });
            Ok::<_, Error>((
                sent,
                total,
                calls(Op::AllGather, Phase::Forward),
                calls(Op::ReduceScatter, Phase::Backward),
            ))
        };
        // In backward the gradients of the parameters, at once.
        assert_eq!(run(Plan::new(), S(0))?, (0, 1, 0, 0));
        // Of the first state nothing is cut yet.
        let steps = SEQ as u64 - 1;
        let (sent, _, gathered, scattered) = run(
            Plan::new().with_style("layer.*_gate.*", Style::colwise()),
            R,
        )?;
        assert_eq!((sent, gathered, scattered), (steps, steps, steps));
        Ok(())
    });
}
