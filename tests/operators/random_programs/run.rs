//! Running a program whole and sharded, and what differs.

use std::cell::RefCell;
use std::time::Duration;

use burn::tensor::Device;
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::mesh::DeviceMesh;

use super::layouts::held;
use super::program::{Id, Program, Step};
use super::value::{Data, Value};
use crate::launched;

/// A program takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// What a program gives on ordinary tensors.
struct Truth {
    /// Inputs in their own dtypes.
    inputs: Vec<Data>,
    results: Vec<(Id, Data)>,
    gradients: Vec<Option<Data>>,
}

impl Truth {
    fn of(program: &Program) -> Result<Self> {
        let device = Device::flex().autodiff();
        let typed = |data: &Data| Data {
            dtype: program.profile.dtype(data.kind),
            ..data.clone()
        };
        let inputs: Vec<Data> = program
            .leaves
            .iter()
            .map(|leaf| typed(&leaf.data))
            .collect();
        let leaves: Vec<Value> = inputs.iter().map(|data| data.tensor(&device)).collect();
        let mut results = Vec::new();
        let ends = program.run(
            &leaves,
            |step, operands| (step.plain)(operands),
            |step, values| {
                for (&id, value) in step.results.iter().zip(values) {
                    results.push((id, value.full()?));
                }
                Ok(())
            },
        )?;
        let grads = program.backward(&ends)?;
        let gradients = leaves
            .iter()
            .map(|leaf| leaf.gradient(grads.as_ref()?))
            .collect();
        Ok(Self {
            inputs,
            results,
            gradients,
        })
    }

    fn result(&self, id: Id) -> &Data {
        &self
            .results
            .iter()
            .find(|(known, _)| *known == id)
            .expect("every result is known")
            .1
    }
}

/// Runs the program both ways; in words what differs, if anything does.
pub fn fails(program: &Program) -> Option<String> {
    let truth = Truth::of(program).expect("nothing is sent");
    let ranks = program.mesh.iter().product();
    let ended = launch(Launch::threads(ranks).with_deadline(DEADLINE), |world| {
        let mesh = DeviceMesh::new(world, &program.mesh, &["a", "b", "c"][..program.mesh.len()])?;
        Rank {
            program,
            truth: &truth,
            mesh: &mesh,
            differences: Vec::new(),
        }
        .run()
    });
    match ended {
        Ok(ranks) => {
            let (differences, depths): (Vec<_>, Vec<_>) =
                launched::values(ranks).into_iter().unzip();
            differences
                .into_iter()
                .flatten()
                .next()
                .or_else(|| out_of_step(program, &depths))
        }
        Err(error) => Some(error.to_string()),
    }
}

/// Which result lies deeper in the graph of one rank than of another. `depths` is by rank.
///
/// Ranks that are out of step may run the collectives of backward in different orders.
fn out_of_step(program: &Program, depths: &[Depths]) -> Option<String> {
    let by_result =
        (0..depths[0].len()).map(|at| depths.iter().map(|ranks| ranks[at].1).collect::<Vec<_>>());
    let (at, ranks) = by_result
        .enumerate()
        .find(|(_, ranks)| ranks.iter().any(|depth| *depth != ranks[0]))?;
    let id = depths[0][at].0;
    let step = program
        .steps
        .iter()
        .find(|step| step.results.contains(&id))?;
    Some(format!(
        "v{id} ({step}) lies at the depths {ranks:?} of ranks' graphs"
    ))
}

/// Results, and how deep in a rank's graph they lie.
type Depths = Vec<(Id, Option<usize>)>;

/// One rank at work. It goes on after a difference, since the others may not see it.
struct Rank<'a> {
    program: &'a Program,
    truth: &'a Truth,
    mesh: &'a DeviceMesh,
    differences: Vec<String>,
}

impl Rank<'_> {
    fn run(mut self) -> Result<(Vec<String>, Depths)> {
        let mut depths = Depths::new();
        let device = self.mesh.device().clone().autodiff();
        let coordinate = self
            .mesh
            .coordinate()
            .expect("every rank of the world is in the mesh")
            .to_vec();
        let (mut leaves, mut expected) = (Vec::new(), Vec::new());
        for ((leaf, data), gradient) in self
            .program
            .leaves
            .iter()
            .zip(&self.truth.inputs)
            .zip(&self.truth.gradients)
        {
            let held = held(
                data,
                gradient.as_ref(),
                &leaf.layout,
                &coordinate,
                &self.program.profile,
            );
            leaves.push(
                held.values
                    .part(self.mesh, &leaf.layout, &data.shape, &device)?,
            );
            expected.push(held.gradient);
        }
        for round in 1..=self.program.rounds {
            let program = self.program;
            let probes = RefCell::new(Vec::new());
            let probed = |(value, &id): (Value, &Id)| {
                let (value, depth) = value.probed();
                probes.borrow_mut().push((id, depth));
                value
            };
            let apply = |step: &Step, operands| {
                let results = (step.sharded)(operands);
                if program.probes {
                    results.into_iter().zip(&step.results).map(probed).collect()
                } else {
                    results
                }
            };
            let ends = program.run(&leaves, apply, |step, values| {
                if values.len() != step.results.len() {
                    self.differences
                        .push(format!("{step}: {} results", values.len()));
                }
                for (&id, value) in step.results.iter().zip(values).filter(|_| program.watches) {
                    self.compare_result(&step.to_string(), id, value)?;
                }
                Ok(())
            })?;
            for (id, value) in &ends {
                self.compare_result("at the end", *id, value)?;
            }
            let grads = program.backward(&ends)?;
            depths.extend(
                probes
                    .into_inner()
                    .into_iter()
                    .map(|(id, depth)| (id, depth.get())),
            );
            for ((leaf, input), expected) in leaves.iter().zip(&program.leaves).zip(&expected) {
                let found = grads.as_ref().and_then(|grads| leaf.gradient(grads));
                let what = format!("gradient of v{}, round {round}", input.id);
                match (found, expected) {
                    (Some(found), Some(expected)) => self.compare(&what, &found, expected),
                    // A leaf that one rank's graph has lost is a collective that the others wait
                    // in.
                    (None, Some(_)) => self.differs(&what, "is missing"),
                    (Some(found), None) if found.extent() > 0.0 => {
                        self.differs(&what, "must be none")
                    }
                    _ => {}
                }
            }
        }
        Ok((self.differences, depths))
    }

    fn compare_result(&mut self, place: &str, id: Id, value: &Value) -> Result<()> {
        let expected = self.truth.result(id);
        let what = format!("v{id} ({place})");
        let (shape, layout, local) = value
            .placed()
            .expect("an operator on DTensors gives DTensors");
        if shape != expected.shape {
            self.differs(
                &what,
                &format!("has the shape {shape:?}, must have {:?}", expected.shape),
            );
        }
        let coordinate = self
            .mesh
            .coordinate()
            .expect("every rank of the world is in the mesh");
        let part = layout.local_shape(&shape, coordinate);
        if local != part {
            self.differs(
                &what,
                &format!("holds {local:?} as {layout}, must hold {part:?}"),
            );
        }
        let found = value.full()?;
        self.compare(&what, &found, expected);
        Ok(())
    }

    fn compare(&mut self, what: &str, found: &Data, expected: &Data) {
        if (&found.shape, found.dtype) != (&expected.shape, expected.dtype) {
            let (is, must) = (
                format!("{:?} {:?}", found.dtype, found.shape),
                (expected.dtype, &expected.shape),
            );
            return self.differs(what, &format!("is {is}, must be {must:?}"));
        }
        let bound = if found.dtype.is_float() {
            self.program.profile.tolerance() * expected.extent().max(1.0)
        } else {
            0.0
        };
        let off = |(found, expected): (&f64, &f64)| {
            if (found - expected).abs() <= bound {
                0.0
            } else {
                1.0
            }
        };
        let Some(at) = found
            .values
            .iter()
            .zip(&expected.values)
            .position(|pair| off(pair) > 0.0)
        else {
            return;
        };
        self.differs(
            what,
            &format!(
                "is {} at {at}, must be {}",
                found.values[at], expected.values[at]
            ),
        );
    }

    fn differs(&mut self, what: &str, how: &str) {
        self.differences
            .push(format!("{what} {how} (rank {})", self.mesh.rank()));
    }
}
