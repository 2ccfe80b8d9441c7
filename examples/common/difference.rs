//! `--check`: the difference between a run and the unsharded one.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::prelude::*;

/// Largest differences that pass, of losses and of weights.
const BOUNDS: [f64; 2] = [1e-5, 1e-4];
/// The same on CUDA, where burn rounds the operands of matrix products to TF32, which has 10 bits
/// of fraction.
const TF32_BOUNDS: [f64; 2] = [1e-3, 1e-2];

/// Losses of each step, and weights by path.
pub type Run<'a> = (&'a [f32], BTreeMap<String, Vec<f32>>);

/// The largest differences between a sharded run and the unsharded one.
pub struct Difference {
    loss: f64,
    weight: f64,
    /// Path of the parameter with the largest difference.
    path: String,
    bounds: [f64; 2],
}

impl Difference {
    /// Compares two runs of the same steps and parameters on `device`.
    pub fn new(
        (losses, found): Run<'_>,
        (expected_losses, expected): Run<'_>,
        device: &Device,
    ) -> Self {
        assert!(
            found.keys().eq(expected.keys()),
            "both runs have the same parameters"
        );
        let parts = found
            .into_iter()
            .map(|(path, values)| (largest(&values, &expected[&path]), path));
        let (weight, path) = parts.fold((0.0, String::new()), |worst, part| {
            if beyond(part.0, worst.0) { part } else { worst }
        });
        let bounds = if format!("{device:?}").contains("Cuda") {
            TF32_BOUNDS
        } else {
            BOUNDS
        };
        Self {
            loss: largest(losses, expected_losses),
            weight,
            path,
            bounds,
        }
    }

    /// Returns true if both are within the bounds.
    pub fn passes(&self) -> bool {
        !beyond(self.loss, self.bounds[0]) && !beyond(self.weight, self.bounds[1])
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.path.is_empty() {
            String::new()
        } else {
            format!(", in {}", self.path)
        };
        writeln!(
            f,
            "Compared with the unsharded model, trained on the same device and data"
        )?;
        writeln!(
            f,
            "  largest loss difference    {:.1e}  (bound {:.0e})",
            self.loss, self.bounds[0]
        )?;
        writeln!(
            f,
            "  largest weight difference  {:.1e}  (bound {:.0e}){place}",
            self.weight, self.bounds[1]
        )?;
        write!(f, "  {}", if self.passes() { "agrees" } else { "DIFFERS" })
    }
}

fn largest(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(
        a.len(),
        b.len(),
        "both runs have the same steps and parameters"
    );
    let parts = a
        .iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    parts.fold(
        0.0,
        |worst, part| if beyond(part, worst) { part } else { worst },
    )
}

/// Returns true if `value` exceeds `bound` or is NaN.
fn beyond(value: f64, bound: f64) -> bool {
    value.is_nan() || value > bound
}

/// Returns the values of every parameter of these models by name and path. Running statistics are
/// excluded, because they depend on the batches of each rank.
pub fn weights<'a, M: Module + 'a>(
    models: impl IntoIterator<Item = (&'a str, &'a M)>,
) -> BTreeMap<String, Vec<f32>> {
    let mut values = Values::default();
    for (name, model) in models {
        values.enter_module(name, "");
        model.visit(&mut values);
        values.exit_module(name, "");
    }
    values.found
}

#[derive(Default)]
struct Values {
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self
            .path
            .last()
            .is_some_and(|name| !name.starts_with("running_"))
        {
            let values = param
                .val()
                .into_data()
                .try_to_vec()
                .expect("the model is f32");
            self.found.insert(self.path.join("."), values);
        }
    }
}
