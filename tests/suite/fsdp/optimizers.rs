//! burn's optimizers on shards: the table in the docs of `fsdp`, row by row.
//!
//! Gradients are given, whole ones to the whole model and this rank's part to the sharded one: what
//! reduces them has tests of its own.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams,
    LBFGSConfig, LambConfig, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Slice, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, on_device, tensor, values};

pub type Init = fn() -> ModuleOptimizer;

/// Each optimizer in every configuration that does something else.
pub const EQUAL: [(&str, &[Init]); 8] = [
    (
        "Sgd",
        &[
            || SgdConfig::new().init(),
            || {
                SgdConfig::new()
                    .with_momentum(Some(MomentumConfig::new()))
                    .with_weight_decay(decay())
                    .init()
            },
            || {
                SgdConfig::new()
                    .with_momentum(Some(MomentumConfig::new().with_nesterov(true)))
                    .init()
            },
        ],
    ),
    (
        "Adam",
        &[
            || AdamConfig::new().init(),
            || {
                AdamConfig::new()
                    .with_amsgrad(true)
                    .with_weight_decay(decay())
                    .init()
            },
        ],
    ),
    (
        "AdamW",
        &[
            || AdamWConfig::new().init(),
            || {
                AdamWConfig::new()
                    .with_amsgrad(true)
                    .with_weight_decay(0.1)
                    .init()
            },
            || {
                AdamWConfig::new()
                    .with_cautious_weight_decay(true)
                    .with_weight_decay(0.1)
                    .init()
            },
        ],
    ),
    (
        "AdaGrad",
        &[
            || AdaGradConfig::new().init(),
            || {
                AdaGradConfig::new()
                    .with_lr_decay(0.1)
                    .with_weight_decay(decay())
                    .init()
            },
        ],
    ),
    (
        "RmsProp",
        &[
            || RmsPropConfig::new().init(),
            || {
                RmsPropConfig::new()
                    .with_centered(true)
                    .with_weight_decay(decay())
                    .init()
            },
        ],
    ),
    (
        "Adan",
        &[
            || AdanConfig::new().init(),
            || AdanConfig::new().with_weight_decay(0.1).init(),
            || {
                AdanConfig::new()
                    .with_weight_decay(0.1)
                    .with_no_prox(true)
                    .init()
            },
        ],
    ),
    (
        "Lion",
        &[
            || LionConfig::new().init(),
            || LionConfig::new().with_weight_decay(0.1).init(),
        ],
    ),
    (
        "GradientClipping::Value",
        &[|| {
            SgdConfig::new()
                .with_gradient_clipping(Some(GradientClippingConfig::Value(0.1)))
                .init()
        }],
    ),
];

const DIFFERENT: [(&str, Init); 4] = [
    ("Lamb", || LambConfig::new().init()),
    ("Adafactor", || AdafactorConfig::new().init()),
    ("Muon", || MuonConfig::new().init()),
    ("GradientClipping::Norm", || {
        SgdConfig::new()
            .with_gradient_clipping(Some(GradientClippingConfig::Norm(0.1)))
            .init()
    }),
];

const LBFGS: &str = "LBFGS";

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(0.1))
}

#[test]
fn elementwise_optimizers_step_shards_as_full_parameters() {
    for (name, configurations) in EQUAL {
        for (at, init) in configurations.iter().enumerate() {
            for ranks in [2, 3] {
                let apart = stepped(ranks, true, |model| train(init(), model));
                assert_eq!(apart, 0.0, "{name}, configuration {at}, on {ranks} ranks");
            }
        }
    }
}

/// So that the table says no less than is true.
#[test]
fn what_looks_at_more_than_an_element_does_not() {
    for (name, init) in DIFFERENT {
        // Muon takes nothing but matrices.
        let apart = stepped(2, name != "Muon", |model| train(init(), model));
        assert!(apart > 1e-4, "{name} is {apart} apart");
    }
    let apart = stepped(2, true, |model| {
        let mut optim = LBFGSConfig::new().with_max_iter(2).init();
        optim.step(0.1, model, |model| (1.0, grads(&model, 0))).0
    });
    assert!(apart > 1e-4, "{LBFGS} is {apart} apart");
}

#[test]
fn the_documented_table_is_what_is_tested() {
    let page = include_str!("../../../src/fsdp/mod.rs");
    let table = page
        .lines()
        .skip_while(|line| *line != "//! | optimizer | on shards | why |")
        .skip(2);
    let rows = table.map_while(|line| line.strip_prefix("//! | "));
    let documented: BTreeMap<&str, &str> = rows
        .map(|row| {
            let mut cells = row.split(" | ");
            (
                cells.next().expect("a name").trim_matches('`'),
                cells.next().expect("what it does"),
            )
        })
        .collect();
    let equal = EQUAL.iter().map(|(name, _)| (*name, "equal"));
    let different = DIFFERENT
        .iter()
        .map(|(name, _)| *name)
        .chain([LBFGS])
        .map(|name| (name, "different"));
    assert_eq!(documented, equal.chain(different).collect());
}

/// Uneven shards, and on three ranks an empty one.
pub fn layers(bias: bool) -> Vec<Linear> {
    let device = Device::flex();
    device.seed(7);
    let layers = [(5, 4), (7, 3)].map(|(d_input, d_output)| {
        LinearConfig::new(d_input, d_output)
            .with_bias(bias)
            .init(&device)
    });
    let layers = layers.to_vec();
    let _ = values(&layers, None);
    layers
}

/// How far apart the weights of the sharded and the whole model are that `step` makes.
fn stepped(ranks: usize, bias: bool, step: impl Fn(Vec<Linear>) -> Vec<Linear> + Sync) -> f64 {
    let model = layers(bias);
    let apart = MeshTest::new([ranks], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let sharded = step(fully_shard(plain.clone(), mesh, FullyShard::new())?);
        let (sharded, full) = (
            values(&full_model(&sharded)?, None),
            values(&step(plain.clone()), None),
        );
        assert!(
            max_diff(&full, &values(&plain, None)) > 1e-3,
            "it has stepped"
        );
        Ok(max_diff(&sharded, &full))
    });
    apart
        .into_iter()
        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

pub fn train(mut optim: ModuleOptimizer, mut model: Vec<Linear>) -> Vec<Linear> {
    for step in 0..6 {
        let grads = grads(&model, step);
        model = optim.step(0.05, model, grads);
    }
    model
}

/// Gradients of both signs, other ones in every step: of a sharded parameter this rank's part.
pub fn grads(model: &Vec<Linear>, step: u64) -> GradientsParams {
    let named = named_parameters(model).expect("a model as it was sharded");
    let parts = named.into_iter().map(|param| {
        let shape = param.spec.shape().to_vec();
        let ranges = (0..shape.len())
            .map(|dim| param.spec.local_range(dim))
            .collect();
        (param.path, (shape, ranges))
    });
    let mut grads = Grads {
        step,
        seen: 0,
        path: vec![],
        parts: parts.collect(),
        grads: GradientsParams::new(),
    };
    model.visit(&mut grads);
    grads.grads
}

struct Grads {
    step: u64,
    seen: u64,
    path: Vec<String>,
    /// Shape, and this rank's part, of what is sharded.
    parts: BTreeMap<String, (Vec<usize>, Vec<Range<usize>>)>,
    grads: GradientsParams,
}

impl ModuleVisitor for Grads {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.seen += 1;
        let (seed, device) = (
            100 * (self.step + 1) + self.seen,
            param.base().device().inner(),
        );
        let grad = match self.parts.get(&self.path.join(".")) {
            None => tensor(seed, param.base().dims(), &device),
            Some((shape, ranges)) => {
                let full: Tensor<D> = tensor(
                    seed,
                    shape.as_slice().try_into().expect("D dimensions"),
                    &device,
                );
                let slices: Vec<_> = ranges.iter().cloned().map(Slice::from).collect();
                full.slice(slices.as_slice())
            }
        };
        self.grads.register(param.id, grad);
    }
}
