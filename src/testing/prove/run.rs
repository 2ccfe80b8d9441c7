//! Execution of combinations of layouts, on every rank of a mesh.

use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Device;
use parking_lot::Mutex;

use super::case::{Case, CaseInput, ShardedInput};
use super::layouts::{combinations, layouts, uneven};
use super::output::FullOutput;
use super::report::{Combination, CombinationOutcome, Difference, DifferenceKind, LaidOut, Tried};
use super::truth::{Truth, furthest, loss};
use crate::comm::{Launch, launch};
use crate::dtensor::ops::RedistributePolicy;
use crate::dtensor::{DTensorError, DTensorSpec};
use crate::mesh::DeviceMesh;
use crate::placement::Layout;
use crate::{Error, Result};

/// One combination of layouts of the inputs of one case.
#[derive(Debug, Clone, Copy)]
struct Job {
    case: usize,
    /// Index of each input's layout, as a mixed-radix number.
    combination: usize,
}

/// Time for which a rank waits for the others. A combination takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// Number of failures of a case on a mesh after which the rest of the case is skipped there.
const FAILURES: usize = 10;

/// All combinations to try on one mesh.
pub(super) struct ProofPlan<'a> {
    mesh_shape: &'a [usize],
    cases: &'a [Case],
    truths: &'a [Truth],
    /// Layouts of each input of each case.
    layouts: Vec<Vec<Vec<Layout>>>,
    jobs: Vec<Job>,
    /// Number of combinations of each case.
    pub(super) possible: Vec<usize>,
}

impl<'a> ProofPlan<'a> {
    /// Creates a plan of at most `caps` combinations of each case: of one input, and of several.
    pub(super) fn new(
        mesh_shape: &'a [usize],
        cases: &'a [Case],
        truths: &'a [Truth],
        caps: [usize; 2],
    ) -> Self {
        let of = |input: &CaseInput| layouts(mesh_shape, input.shape.len(), &input.values);
        Self::of(mesh_shape, cases, truths, caps, of)
    }

    /// Like [`new`](Self::new), with uneven shard sizes.
    pub(super) fn uneven(
        mesh_shape: &'a [usize],
        cases: &'a [Case],
        truths: &'a [Truth],
        caps: [usize; 2],
    ) -> Self {
        let of = |input: &CaseInput| uneven(mesh_shape, &input.shape, &input.values);
        Self::of(mesh_shape, cases, truths, caps, of)
    }

    fn of(
        mesh_shape: &'a [usize],
        cases: &'a [Case],
        truths: &'a [Truth],
        caps: [usize; 2],
        of: impl Fn(&CaseInput) -> Vec<Layout>,
    ) -> Self {
        let layouts: Vec<Vec<Vec<Layout>>> = cases
            .iter()
            .map(|case| case.inputs.iter().map(&of).collect())
            .collect();
        let possible: Vec<usize> = layouts
            .iter()
            .map(|inputs| inputs.iter().map(Vec::len).product())
            .collect();
        let jobs = layouts.iter().enumerate().flat_map(|(case, inputs)| {
            combinations(inputs, caps[usize::from(inputs.len() > 1)])
                .into_iter()
                .map(move |combination| Job { case, combination })
        });
        let jobs = jobs.collect();
        Self {
            mesh_shape,
            cases,
            truths,
            layouts,
            jobs,
            possible,
        }
    }

    /// Returns the index of each input's layout.
    fn digits(&self, job: Job) -> Vec<usize> {
        let mut rest = job.combination;
        self.layouts[job.case]
            .iter()
            .map(|layouts| {
                let digit = rest % layouts.len();
                rest /= layouts.len();
                digit
            })
            .collect()
    }

    fn combination(&self, job: Job) -> Combination {
        let inputs = self.cases[job.case]
            .inputs
            .iter()
            .zip(&self.layouts[job.case])
            .zip(self.digits(job));
        let inputs = inputs.map(|((input, layouts), digit)| LaidOut {
            name: input.name,
            shape: input.shape.clone(),
            layout: layouts[digit].clone(),
        });
        Combination {
            mesh: self.mesh_shape.to_vec(),
            inputs: inputs.collect(),
        }
    }

    /// Runs all jobs in as few launches as possible: one, plus one after every failure.
    pub(super) fn run(&self) -> Vec<Tried> {
        let board = JobResults::new(self.mesh_shape.iter().product(), self.jobs.len());
        let mut failed: Vec<(usize, String)> = Vec::new();
        let mut given_up: Vec<usize> = Vec::new();
        loop {
            let skip = |at: usize| {
                given_up.contains(&self.jobs[at].case) || failed.iter().any(|(job, _)| *job == at)
            };
            let Some(start) = (0..self.jobs.len()).find(|&at| !skip(at) && !board.is_done(at))
            else {
                break;
            };
            let ended = launch(
                Launch::threads(board.ranks.len()).with_deadline(DEADLINE),
                |world| {
                    let names = ["a", "b", "c"];
                    let mesh =
                        DeviceMesh::new(world, self.mesh_shape, &names[..self.mesh_shape.len()])?;
                    let mut rank = ProvingRank {
                        plan: self,
                        mesh: &mesh,
                        device: world.device().clone().autodiff(),
                        held: None,
                    };
                    for at in (start..self.jobs.len()).filter(|&at| !skip(at)) {
                        board.ranks[mesh.rank()].at.store(at, Ordering::Relaxed);
                        let outcome = rank.attempt(self.jobs[at])?;
                        board.ranks[mesh.rank()].outcomes.lock()[at] = Some(outcome);
                    }
                    Ok(())
                },
            );
            let Err(error) = ended else { continue };
            let at = board.ranks[error.rank].at.load(Ordering::Relaxed);
            failed.push((at, format!("rank {}: {}", error.rank, error.cause)));
            let case = self.jobs[at].case;
            if failed
                .iter()
                .filter(|(at, _)| self.jobs[*at].case == case)
                .count()
                >= FAILURES
            {
                given_up.push(case);
            }
        }
        let tried = self.jobs.iter().enumerate().filter_map(|(at, &job)| {
            let failure = failed.iter().find(|(failed, _)| *failed == at);
            let mut outcome = board.outcome(at);
            if let Some((_, message)) = failure {
                let failure = Difference {
                    what: DifferenceKind::Failure,
                    error: f64::INFINITY,
                    how: message.clone(),
                };
                outcome.get_or_insert_default().differences.push(failure);
            }
            Some(Tried {
                case: job.case,
                combination: self.combination(job),
                outcome: outcome?,
            })
        });
        tried.collect()
    }
}

/// Results of each rank so far. They survive a launch that fails.
struct JobResults {
    ranks: Vec<RankBoard>,
}

struct RankBoard {
    /// Index of the job that the rank runs.
    at: AtomicUsize,
    outcomes: Mutex<Vec<Option<CombinationOutcome>>>,
}

impl JobResults {
    fn new(ranks: usize, jobs: usize) -> Self {
        Self {
            ranks: (0..ranks)
                .map(|_| RankBoard {
                    at: AtomicUsize::new(0),
                    outcomes: Mutex::new(vec![None; jobs]),
                })
                .collect(),
        }
    }

    fn is_done(&self, at: usize) -> bool {
        self.ranks
            .iter()
            .all(|rank| rank.outcomes.lock()[at].is_some())
    }

    /// Merges the outcomes of all ranks. For each kind of difference, the largest is kept.
    fn outcome(&self, at: usize) -> Option<CombinationOutcome> {
        let found = self.ranks.iter().enumerate().filter_map(|(rank, board)| {
            let outcome = board.outcomes.lock()[at].clone()?;
            Some((rank, outcome))
        });
        let (_, all) = found.reduce(|(first, mut all), (rank, one)| {
            all.redistributed |= one.redistributed;
            let depths = all.depths.iter().zip(one.depths).enumerate();
            let uneven = depths.filter(|(_, (known, depth))| *known != depth).map(
                |(output, (known, depth))| {
                    let nodes = |depth: Option<usize>| {
                        depth.map_or("not".into(), |depth| format!("{depth} nodes deep"))
                    };
                    let depth = nodes(depth);
                    let known = nodes(*known);
                    let how = format!(
                        "lies {depth} in the graph of rank {rank}, {known} in that of rank {first}"
                    );
                    Difference {
                        what: DifferenceKind::Depth(output),
                        error: f64::INFINITY,
                        how,
                    }
                },
            );
            let differences: Vec<_> = uneven.chain(one.differences).collect();
            for difference in differences {
                match all
                    .differences
                    .iter_mut()
                    .find(|known| known.what == difference.what)
                {
                    Some(known) if known.error >= difference.error => {}
                    Some(known) => *known = difference,
                    None => all.differences.push(difference),
                }
            }
            (first, all)
        })?;
        Some(all)
    }
}

/// State of one rank while it runs jobs.
struct ProvingRank<'a> {
    plan: &'a ProofPlan<'a>,
    mesh: &'a DeviceMesh,
    device: Device,
    /// Case that the rank runs, and its local tensors of the inputs. They are computed on first
    /// use, because only few of the many layouts on a mesh of several dimensions are tried.
    held: Option<(usize, Vec<Vec<OnceCell<LocalInput>>>)>,
}

/// One input in one layout, as a rank holds it.
struct LocalInput {
    values: Vec<f64>,
    shape: Vec<usize>,
    layout: Layout,
    /// Expected gradient of the loss with respect to these values.
    gradient: Vec<f64>,
}

impl ProvingRank<'_> {
    /// Returns this rank's local tensor of every input in the layouts of `job`.
    fn parts(&mut self, job: Job) -> Vec<&LocalInput> {
        let case = job.case;
        if self.held.as_ref().is_none_or(|(held, _)| *held != case) {
            let layouts = self.plan.layouts[case].iter().map(Vec::len);
            self.held = Some((
                case,
                layouts
                    .map(|layouts| (0..layouts).map(|_| OnceCell::new()).collect())
                    .collect(),
            ));
        }
        let (_, held) = self.held.as_ref().expect("it was just created");
        let coordinate = self
            .mesh
            .coordinate()
            .expect("every rank of the world is in the mesh");
        let truth = &self.plan.truths[case];
        let inputs = self.plan.cases[case]
            .inputs
            .iter()
            .zip(held)
            .zip(self.plan.digits(job))
            .enumerate();
        let parts = inputs.map(|(at, ((input, held), digit))| {
            held[digit].get_or_init(|| {
                let layout = &self.plan.layouts[case][at][digit];
                let gradient = truth.gradients[at].as_deref();
                let held = input.values.held(
                    &truth.inputs[at],
                    gradient,
                    &input.shape,
                    layout,
                    coordinate,
                );
                let shape = layout.local_shape(&input.shape, coordinate);
                LocalInput {
                    values: held.values,
                    shape,
                    layout: layout.clone(),
                    gradient: held.gradient,
                }
            })
        });
        parts.collect()
    }

    /// Runs one combination, forward and backward, and compares the results.
    ///
    /// # Collective
    /// Every rank of the mesh must call it.
    fn attempt(&mut self, job: Job) -> Result<CombinationOutcome> {
        let (case, truth) = (&self.plan.cases[job.case], &self.plan.truths[job.case]);
        let tolerance = case.tolerance();
        let (mesh, device, rank) = (self.mesh, self.device.clone(), self.mesh.rank());
        let parts = self.parts(job);
        let sharded = parts.iter().zip(&case.inputs).map(|(part, input)| {
            let leaf = input.leaf(&part.values, &part.shape, &device);
            let dtype = burn::backend::TensorMetadata::dtype(&leaf);
            let spec =
                DTensorSpec::new(mesh, part.layout.clone(), input.shape.clone().into(), dtype)?;
            Ok(ShardedInput {
                leaf,
                spec: spec.shared(),
            })
        });
        let sharded: Vec<_> = sharded.collect::<Result<_>>()?;
        let (full_tensors, redistributed) = run(case, &sharded)?;
        let mut differences = Vec::new();
        if full_tensors.len() != truth.outputs.len() {
            let how = format!(
                "{} outputs, must be {}",
                full_tensors.len(),
                truth.outputs.len()
            );
            differences.push(Difference {
                what: DifferenceKind::Output(0),
                error: f64::INFINITY,
                how,
            });
            return Ok(CombinationOutcome {
                redistributed,
                depths: Vec::new(),
                differences,
            });
        }
        for (at, (found, expected)) in full_tensors.iter().zip(&truth.outputs).enumerate() {
            differences.extend(compare_outputs(found, expected, tolerance, rank).map(
                |(error, how)| Difference {
                    what: DifferenceKind::Output(at),
                    error,
                    how,
                },
            ));
        }
        let grads = loss(&full_tensors).map(|loss| loss.backward());
        for (at, ((input, part), sharded)) in
            case.inputs.iter().zip(parts).zip(&sharded).enumerate()
        {
            let found = grads
                .as_ref()
                .and_then(|grads| input.gradient(&sharded.leaf, grads));
            let difference = match (found, &truth.gradients[at]) {
                // If one rank's graph lost the leaf, the other ranks would wait in a collective of
                // backward.
                (None, Some(_)) => Some((f64::INFINITY, format!("is missing (rank {rank})"))),
                (None, None) => None,
                (Some((shape, values)), _) => compare(
                    (&shape, &values),
                    (&part.shape, &part.gradient),
                    tolerance,
                    rank,
                ),
            };
            let what = DifferenceKind::Gradient(input.name);
            differences.extend(difference.map(|(error, how)| Difference { what, error, how }));
        }
        let depths = full_tensors.iter().map(|full| full.depth.get()).collect();
        Ok(CombinationOutcome {
            redistributed,
            depths,
            differences,
        })
    }
}

/// Runs the operator and reports whether it had to redistribute. To find out, it runs the operator
/// under a policy that denies redistribution first.
fn run(case: &Case, inputs: &[ShardedInput]) -> Result<(Vec<FullOutput>, bool)> {
    let denied = catch_unwind(AssertUnwindSafe(|| {
        RedistributePolicy::Deny.run(|| (case.sharded)(inputs))
    }));
    let payload = match denied {
        Ok(full_tensors) => return Ok((full_tensors?, false)),
        Err(payload) => payload,
    };
    match payload.downcast_ref() {
        Some(Error::DTensor(DTensorError::ImplicitRedistribution { .. })) => {
            Ok(((case.sharded)(inputs)?, true))
        }
        _ => resume_unwind(payload),
    }
}

fn compare_outputs(
    found: &FullOutput,
    expected: &FullOutput,
    tolerance: f64,
    rank: usize,
) -> Option<(f64, String)> {
    if found.dtype != expected.dtype {
        return Some((
            f64::INFINITY,
            format!("is of {:?}, must be of {:?}", found.dtype, expected.dtype),
        ));
    }
    compare(
        (&found.shape, &found.values),
        (&expected.shape, &expected.values),
        tolerance,
        rank,
    )
}

/// Compares shape and values with the expected ones. Returns the largest error and its description.
fn compare(
    (shape, values): (&[usize], &[f64]),
    (expected_shape, expected): (&[usize], &[f64]),
    tolerance: f64,
    rank: usize,
) -> Option<(f64, String)> {
    if shape != expected_shape || values.len() != expected.len() {
        return Some((
            f64::INFINITY,
            format!("has shape {shape:?}, must have {expected_shape:?} (rank {rank})"),
        ));
    }
    let (at, error) = furthest(values, expected, tolerance)?;
    let how = format!(
        "is off by {error:.2e}: {:.4}, must be {:.4} (rank {rank}, element {at})",
        values[at], expected[at]
    );
    Some((error, how))
}
