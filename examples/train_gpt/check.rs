//! `--check`: the same training without sharding, and how far the two part.

use burn::module::{ModuleVisitor, Param};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::model::Gpt;
use crate::train::{Outcome, batches, train_step};

/// Largest loss difference that passes.
const LOSS_BOUND: f64 = 1e-5;
/// Largest weight difference that passes.
const WEIGHT_BOUND: f64 = 1e-4;

/// Trains the model from `initial` on, unsharded, on the batches of all ranks joined; returns its losses and itself.
/// On the ranks' device: others round otherwise.
///
/// # Errors
/// None without a mesh; the step's signature is that of the sharded run.
pub fn reference(settings: &Settings, initial: Gpt) -> Result<(Vec<f32>, Gpt)> {
    let device = &settings.device.device().autodiff();
    let mut model = initial.fork(device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::with_capacity(settings.steps);
    let rows = 0..settings.ranks() * settings.batch;
    for step in 0..settings.steps {
        let batches = batches(settings, step, rows.clone(), device);
        let loss;
        (model, loss, _) = train_step(model, &mut optim, None, batches, settings)?;
        losses.push(loss.into_scalar::<f32>());
    }
    Ok((losses, model))
}

/// The largest differences between a sharded run and the unsharded one.
pub struct Difference {
    loss: f64,
    weight: f64,
    /// Path of the parameter with the largest difference.
    path: String,
}

impl Difference {
    /// Compares rank 0's outcome with the reference.
    pub fn new(outcome: &Outcome, (losses, model): &(Vec<f32>, Gpt)) -> Self {
        let weights = |model: &Gpt| {
            let mut values = Values::default();
            model.visit(&mut values);
            values.found
        };
        let sharded = outcome.model.as_ref().map(weights).unwrap_or_default();
        let (mut weight, mut path) = (0.0, String::new());
        for ((name, a), (_, b)) in sharded.into_iter().zip(weights(model)) {
            let difference = largest(&a, &b);
            if beyond(difference, weight) {
                (weight, path) = (difference, name);
            }
        }
        Self { loss: largest(&outcome.losses, losses), weight, path }
    }

    /// Whether both are within the bounds.
    pub fn passes(&self) -> bool {
        !beyond(self.loss, LOSS_BOUND) && !beyond(self.weight, WEIGHT_BOUND)
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.path.is_empty() { String::new() } else { format!(", in {}", self.path) };
        writeln!(f, "Beside the unsharded model, trained on the same device and data")?;
        writeln!(f, "  largest loss difference    {:.1e}  (bound {LOSS_BOUND:.0e})", self.loss)?;
        writeln!(f, "  largest weight difference  {:.1e}  (bound {WEIGHT_BOUND:.0e}){place}", self.weight)?;
        write!(f, "  {}", if self.passes() { "agrees" } else { "DIFFERS" })
    }
}

fn largest(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "both runs have the same steps and parameters");
    a.iter().zip(b).fold(0.0, |worst, (a, b)| {
        let difference = (f64::from(*a) - f64::from(*b)).abs();
        if beyond(difference, worst) { difference } else { worst }
    })
}

/// Whether `value` exceeds `bound`; a NaN does.
fn beyond(value: f64, bound: f64) -> bool {
    value.is_nan() || value > bound
}

/// Every parameter's path and values.
#[derive(Default)]
struct Values {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().try_to_vec().expect("the model is f32");
        self.found.push((self.path.join("."), values));
    }
}
