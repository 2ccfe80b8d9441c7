//! The reference: burn's optimizers on whole tensors, one by one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, DynOptimizer, DynState,
    LambConfig, LionConfig, MuonConfig, RmsPropConfig, SgdConfig, StateSink,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::optim::{DTensorOptimizer, FullOptimizerState};

use super::own::RowScaled;
use crate::fsdp::support::fill;

/// An optimizer of ours and burn's own.
pub struct Case {
    pub name: &'static str,
    pub make: fn() -> (DTensorOptimizer, Arc<dyn DynOptimizer>),
    /// Looks at parameters as a whole.
    pub is_full: bool,
}

macro_rules! case {
    ($full:literal, $name:literal, $config:expr) => {
        Case {
            name: $name,
            make: || {
                (
                    DTensorOptimizer::new($config.build()),
                    Arc::new($config.build()),
                )
            },
            is_full: $full,
        }
    };
}

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(0.1))
}

pub fn cases() -> Vec<Case> {
    vec![
        case!(false, "Sgd", SgdConfig::new()),
        case!(
            false,
            "Sgd with momentum",
            SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new()))
                .with_weight_decay(decay())
        ),
        case!(false, "Adam", AdamConfig::new().with_weight_decay(decay())),
        case!(
            false,
            "Adam with amsgrad",
            AdamConfig::new().with_amsgrad(true)
        ),
        case!(
            false,
            "AdamW",
            AdamWConfig::new()
                .with_cautious_weight_decay(true)
                .with_weight_decay(0.1)
        ),
        case!(false, "AdaGrad", AdaGradConfig::new().with_lr_decay(0.1)),
        case!(false, "RmsProp", RmsPropConfig::new()),
        case!(
            false,
            "RmsProp, centered",
            RmsPropConfig::new().with_centered(true)
        ),
        case!(false, "Adan", AdanConfig::new().with_weight_decay(0.1)),
        case!(false, "Lion", LionConfig::new().with_weight_decay(0.1)),
        case!(true, "Lamb", LambConfig::new()),
        case!(true, "Adafactor", AdafactorConfig::new()),
        case!(true, "Muon", MuonConfig::new()),
        Case {
            name: "an optimizer of one's own",
            make: || {
                (
                    DTensorOptimizer::new(RowScaled).with_full_parameters(),
                    Arc::new(RowScaled),
                )
            },
            is_full: true,
        },
    ]
}

/// Matrices whose rows and columns ranks cannot share evenly; of three rows the last of four ranks
/// has none.
pub const PARAMS: [(&str, [usize; 2]); 3] = [
    ("blocks.0.up", [5, 4]),
    ("blocks.0.upper", [3, 7]),
    ("head", [6, 6]),
];
pub const LR: f64 = 0.05;

pub fn start(index: usize) -> TensorData {
    fill(index as u64 + 1, &PARAMS[index].1)
}

/// Gradients of both signs, other ones in every step.
pub fn gradient(index: usize, step: usize) -> TensorData {
    fill((100 * (step + 1) + index) as u64, &PARAMS[index].1)
}

/// Parameters after some steps, and what the optimizer remembers.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    pub params: Vec<TensorData>,
    pub state: FullOptimizerState,
}

pub fn trained(optim: &dyn DynOptimizer, steps: Range<usize>) -> Trained {
    let device = Device::flex();
    let mut params = Vec::new();
    let (mut tensors, mut scalars) = (BTreeMap::new(), BTreeMap::new());
    for (index, (path, _)) in PARAMS.iter().enumerate() {
        let mut param = Tensor::<2>::from_data(start(index), &device);
        let mut state: Option<DynState> = None;
        for step in steps.clone() {
            let grad = Tensor::<2>::from_data(gradient(index, step), &device);
            let (next, remembered) =
                optim.step_dyn(2, LR, param.into_bridge(), grad.into_bridge(), state);
            (param, state) = (Tensor::from_bridge(next), remembered);
        }
        params.push(param.into_data());
        let mut sink = StateSink::default();
        optim.state_flatten(path, &state.expect("it has stepped"), &mut sink);
        tensors.extend(sink.tensors);
        scalars.extend(sink.scalars);
    }
    Trained {
        params,
        state: FullOptimizerState { tensors, scalars },
    }
}
