//! Golden kind 2: `redistribute`, forward and backward.
//!
//! Every case runs on thread ranks and is held to two references: PyTorch's recorded values, and
//! the definition of the placements computed by brute force from the inputs of all ranks.
//!
//! PyTorch's gradients are followed with one exception. Through a reduction other than a sum it
//! passes the gradient on unchanged; here a gradient is the derivative. So a recorded gradient is
//! divided by the ranks of a reduced `P(avg)`, and left out where a `P(max)`, `P(min)` or
//! `P(product)` is reduced: there the brute-force derivative alone decides.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::{Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, Phase, World, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, PartialOp, PlacementError, StridedLayout, StridedPlacement};
use itertools::Itertools;
use serde::Deserialize;

use super::brute::Model;
use crate::launched;

/// A shape and row-major values.
pub type Array = (Vec<usize>, Vec<f32>);

#[derive(Deserialize)]
struct Case {
    mesh: Vec<usize>,
    shape: Vec<usize>,
    src: Vec<String>,
    dst: Vec<String>,
    #[serde(rename = "in")]
    input: Option<Ranks>,
    out: Option<Ranks>,
    xgrad: Option<Ranks>,
    #[serde(default)]
    comm: BTreeMap<String, u64>,
    #[serde(default)]
    comm_bwd: BTreeMap<String, u64>,
    torch_error: Option<String>,
}

/// Arrays of all ranks.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ranks {
    Same(Array),
    PerRank(Vec<Array>),
}

impl Ranks {
    fn at(&self, rank: usize) -> &Array {
        match self {
            Self::Same(array) => array,
            Self::PerRank(arrays) => &arrays[rank],
        }
    }
}

fn relocated(ranks: &Ranks, mesh: &[usize], placements: &[String], shape: &[usize]) -> Vec<Array> {
    let parsed: Vec<StridedPlacement> = placements
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    let strided = StridedLayout::new(mesh, &parsed).unwrap();
    let layout = super::layout(mesh, placements).unwrap();
    let coordinates = super::coordinates(mesh);
    let product = |dims: Vec<Vec<usize>>| dims.into_iter().multi_cartesian_product();
    let held = |rank: usize| {
        let runs = strided.local_runs(shape, &coordinates[rank]).into_iter();
        let elements = product(
            runs.map(|runs| runs.into_iter().flatten().collect())
                .collect(),
        );
        elements
            .zip(ranks.at(rank).1.iter().copied())
            .collect::<HashMap<_, _>>()
    };
    let held: Vec<_> = (0..coordinates.len()).map(held).collect();
    let shards = |placement: &String| placement.starts_with('S');
    let array = |own: &Vec<usize>| {
        // Ranks that differ from this one along sharded mesh dimensions only.
        let same = |other: &Vec<usize>| {
            (0..mesh.len()).all(|dim| own[dim] == other[dim] || shards(&placements[dim]))
        };
        let same: Vec<_> = (0..held.len())
            .filter(|&rank| same(&coordinates[rank]))
            .collect();
        let value = |element: Vec<usize>| {
            same.iter()
                .find_map(|&rank| held[rank].get(&element))
                .copied()
                .expect("some rank holds every element")
        };
        let slices = layout.local_slices(shape, own);
        let lens = slices.iter().map(ExactSizeIterator::len).collect();
        (
            lens,
            product(slices.into_iter().map(Iterator::collect).collect())
                .map(value)
                .collect(),
        )
    };
    coordinates.iter().map(array).collect()
}

/// What one rank made of a case.
struct Outcome {
    out: Array,
    grad: Array,
    forward: u64,
    backward: u64,
}

impl Case {
    fn layout(&self, placements: &[String]) -> Result<Layout, Error> {
        Ok(super::layout(&self.mesh, placements)?)
    }

    /// Moves elements to the ranks where the order of cuts puts them.
    ///
    /// Where strided shards are uneven they may put a few elements elsewhere; see
    /// [`StridedLayout`](burn_dtensor::placement::StridedLayout). The tensor is the same.
    fn relocate(&mut self) {
        let (mesh, shape, src, dst) = (&self.mesh, &self.shape, &self.src, &self.dst);
        for (ranks, placements) in [
            (&mut self.input, src),
            (&mut self.out, dst),
            (&mut self.xgrad, src),
        ] {
            if let Some(ranks) = ranks
                && placements.iter().any(|text| text.starts_with("SS"))
            {
                *ranks = Ranks::PerRank(relocated(ranks, mesh, placements, shape));
            }
        }
    }

    fn name(&self) -> String {
        format!(
            "mesh {:?} shape {:?}: {:?} -> {:?}",
            self.mesh, self.shape, self.src, self.dst
        )
    }

    /// The global gradient of the result: `g[i] = (i * 7 + 3) % 11 - 5`.
    fn upstream(&self) -> Vec<f32> {
        let len = self.shape.iter().product::<usize>();
        (0..len).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect()
    }

    fn run(&self, world: &World) -> Result<Outcome, Error> {
        match self.shape.len() {
            1 => self.run_in::<1>(world),
            2 => self.run_in::<2>(world),
            3 => self.run_in::<3>(world),
            4 => self.run_in::<4>(world),
            dims => panic!("{dims} dims"),
        }
    }

    fn run_in<const D: usize>(&self, world: &World) -> Result<Outcome, Error> {
        let (src, dst) = (self.layout(&self.src)?, self.layout(&self.dst)?);
        let names: Vec<_> = (0..self.mesh.len()).map(|dim| format!("m{dim}")).collect();
        let mesh = DeviceMesh::new(world, &self.mesh, names)?;
        let device = world.device().clone().autodiff();
        let tensor = |(shape, values): Array| {
            Tensor::<D>::from_data(TensorData::new(values, shape), &device)
        };
        let input = self
            .input
            .as_ref()
            .ok_or_else(|| Error::other("no inputs"))?;
        let leaf = tensor(input.at(world.rank()).clone()).require_grad();
        let x = DTensor::from_local_with_layout(leaf.clone(), &mesh, src, self.shape.clone())?;
        world.ledger().reset();
        let y = x.redistribute_to(&dst)?;
        assert_eq!(y.layout(), &dst);
        let y = y.to_local();
        let out = array(y.clone());
        let upstream = (self.shape.clone(), self.upstream());
        let slices = dst.local_slices(&self.shape, mesh.coordinate().unwrap());
        let upstream = tensor(super::part(&upstream, &slices));
        let grads = (y * upstream).sum().backward();
        let calls = |phase| world.ledger().total(|key| key.phase == phase).calls;
        Ok(Outcome {
            out,
            grad: array(leaf.grad(&grads).expect("a leaf has a gradient")),
            forward: calls(Phase::Forward),
            backward: calls(Phase::Backward),
        })
    }

    /// Mesh dimensions whose partial value is reduced on the way, with the operation.
    fn reduced(&self) -> Result<Vec<(usize, PartialOp)>, Error> {
        let (src, dst) = (self.layout(&self.src)?, self.layout(&self.dst)?);
        let pairs = src.placements().iter().zip(dst.placements()).enumerate();
        Ok(pairs
            .filter(|(_, (from, to))| from != to)
            .filter_map(|(dim, (from, _))| Some((dim, from.partial_op()?)))
            .collect())
    }

    /// Whether partial values that placements ask for have reductions that do not commute: sums and
    /// averages do, and any reduction with itself.
    fn is_mixed(placements: &[String]) -> bool {
        let mut kinds =
            placements
                .iter()
                .filter(|text| text.starts_with('P'))
                .map(|text| match text.as_str() {
                    "P(avg)" => "P(sum)",
                    other => other,
                });
        !kinds.all_equal()
    }

    /// Whether a target asks for a partial value that cannot be made.
    fn asks_for_partial(&self) -> bool {
        self.src.iter().zip(&self.dst).any(|(from, to)| {
            to.starts_with('P') && from != to && (to != "P(sum)" || from.starts_with('P'))
        })
    }
}

fn array<const D: usize>(tensor: Tensor<D>) -> Array {
    let shape = tensor.dims().to_vec();
    (shape, tensor.into_data().try_into_vec().unwrap())
}

/// How a case ended, for the totals.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// Values and gradients equal PyTorch's.
    Equal,
    /// Values equal; the gradient is PyTorch's divided by the ranks of a `P(avg)`.
    EqualButAvg,
    /// Values equal; PyTorch's gradient is left out (max, min, product).
    EqualButGradient,
    /// PyTorch refuses, here it is right: `R` or a strided shard to `P(sum)`.
    OnlyHere,
    /// PyTorch fails before it has made the inputs: there is nothing to compare.
    NoInputs,
    /// Refused by both: a target no partial value of which can be made.
    PartialTarget,
    /// The same, and the target's partial values would not even commute.
    MixedTarget,
    /// Refused by both: partial values of the source whose reductions do not commute.
    MixedPartial,
}

fn judge(case: &Case, outcomes: &[&Result<Outcome, Error>]) -> Result<Verdict, String> {
    let name = case.name();
    if let Some(message) = &case.torch_error {
        let refusals: Vec<_> = outcomes
            .iter()
            .filter_map(|outcome| outcome.as_ref().err())
            .collect();
        let refused = |expected: fn(&Error) -> bool| {
            refusals.len() == outcomes.len() && refusals.iter().all(|error| expected(error))
        };
        let mixed =
            |error: &Error| matches!(error, Error::Placement(PlacementError::MixedPartial { .. }));
        let target = |error: &Error| {
            matches!(
                error,
                Error::Placement(PlacementError::PartialTarget { .. })
            )
        };
        let (refused, verdict) = match (
            Case::is_mixed(&case.src),
            Case::is_mixed(&case.dst),
            case.asks_for_partial(),
        ) {
            (true, ..) => (refused(mixed), Verdict::MixedPartial),
            (_, true, _) => (refused(mixed), Verdict::MixedTarget),
            (.., true) => (refused(target), Verdict::PartialTarget),
            // Torch refuses what has a value here: it is held to the definition alone.
            _ => (true, Verdict::OnlyHere),
        };
        if case.input.is_none()
            && verdict != Verdict::MixedPartial
            && verdict != Verdict::MixedTarget
        {
            return Ok(Verdict::NoInputs);
        }
        if !refused {
            return Err(format!(
                "{name}: not refused as {verdict:?}; torch: {message}"
            ));
        }
        if verdict != Verdict::OnlyHere {
            return Ok(verdict);
        }
    }
    let mut ranks = Vec::new();
    for (rank, outcome) in outcomes.iter().enumerate() {
        ranks.push(
            outcome
                .as_ref()
                .map_err(|error| format!("{name}, rank {rank}: {error}"))?,
        );
    }
    check_brute(case, &ranks).map_err(|problem| format!("{name}: {problem}"))?;
    if case.torch_error.is_some() {
        return Ok(Verdict::OnlyHere);
    }
    check_torch(case, &ranks).map_err(|problem| format!("{name}: {problem}"))
}

/// Against the definition of the placements.
fn check_brute(case: &Case, ranks: &[&Outcome]) -> Result<(), String> {
    let read = |placements| case.layout(placements).map_err(|error| error.to_string());
    let input = case.input.as_ref().ok_or("no inputs")?;
    let inputs = (0..ranks.len())
        .map(|rank| input.at(rank).clone())
        .collect();
    let before = Model::new(read(&case.src)?, &case.shape, inputs)?;
    let outs = ranks.iter().map(|rank| rank.out.clone()).collect();
    let after = Model::new(read(&case.dst)?, &case.shape, outs)?;
    after.check_replicas()?;
    close(&before.full(), &after.full(), "full value")?;
    let reduced = case.reduced().map_err(|error| error.to_string())?;
    for (rank, outcome) in ranks.iter().enumerate() {
        let possible = before.gradients(rank, &reduced, &case.upstream());
        let fits = possible
            .iter()
            .any(|grad| close(grad, &outcome.grad.1, "").is_ok());
        if !fits {
            return Err(format!(
                "rank {rank}: gradient {:?}, derivative {possible:?}",
                outcome.grad.1
            ));
        }
    }
    Ok(())
}

/// Against the recorded values; and no more collectives than PyTorch needs.
fn check_torch(case: &Case, ranks: &[&Outcome]) -> Result<Verdict, String> {
    let reduced = case.reduced().map_err(|error| error.to_string())?;
    let exact = |op: &PartialOp| matches!(op, PartialOp::Sum | PartialOp::Avg);
    let follows = reduced.iter().all(|(_, op)| exact(op));
    let averaged = reduced.iter().filter(|(_, op)| *op == PartialOp::Avg);
    let divisor: usize = averaged.map(|&(dim, _)| case.mesh[dim]).product();
    let (out, grad) = (
        case.out.as_ref().ok_or("no values")?,
        case.xgrad.as_ref().ok_or("no gradients")?,
    );
    for (rank, outcome) in ranks.iter().enumerate() {
        equal(out.at(rank), &outcome.out, &format!("rank {rank}: value"))?;
        if follows {
            let (shape, values) = grad.at(rank).clone();
            let values = values.iter().map(|value| value / divisor as f32).collect();
            equal(
                &(shape, values),
                &outcome.grad,
                &format!("rank {rank}: gradient"),
            )?;
        }
    }
    let (forward, backward) = (case.comm.values().sum(), case.comm_bwd.values().sum());
    if ranks[0].forward > forward {
        return Err(format!(
            "{} collectives forward, PyTorch {forward}",
            ranks[0].forward
        ));
    }
    if follows && ranks[0].backward > backward {
        return Err(format!(
            "{} collectives backward, PyTorch {backward}",
            ranks[0].backward
        ));
    }
    Ok(match (follows, divisor) {
        (false, _) => Verdict::EqualButGradient,
        (true, 1) => Verdict::Equal,
        (true, _) => Verdict::EqualButAvg,
    })
}

fn equal(expected: &Array, found: &Array, what: &str) -> Result<(), String> {
    if expected.0 != found.0 {
        return Err(format!(
            "{what}: shape {:?}, expected {:?}",
            found.0, expected.0
        ));
    }
    close(&expected.1, &found.1, what)
}

fn close(expected: &[f32], found: &[f32], what: &str) -> Result<(), String> {
    // Of the largest: what is small may be the difference of values that are not.
    let largest = expected
        .iter()
        .fold(1.0f32, |largest, value| largest.max(value.abs()));
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * largest;
    if expected.len() == found.len() && expected.iter().zip(found).all(near) {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, expected {expected:?}"))
}

#[test]
fn golden_redistribute() {
    let mut all: Vec<Case> = super::cases("2_redistribute.json");
    all.iter_mut().for_each(Case::relocate);
    let mut by_size: BTreeMap<usize, Vec<&Case>> = BTreeMap::new();
    for case in &all {
        by_size
            .entry(case.mesh.iter().product())
            .or_default()
            .push(case);
    }
    let (mut verdicts, mut problems) = (BTreeMap::new(), Vec::new());
    for (size, cases) in by_size {
        let ranks = launch(Launch::threads(size), |world| {
            Ok(cases.iter().map(|case| case.run(world)).collect::<Vec<_>>())
        })
        .map(launched::values)
        .unwrap();
        for (at, case) in cases.iter().enumerate() {
            match judge(
                case,
                &ranks.iter().map(|rank| &rank[at]).collect::<Vec<_>>(),
            ) {
                Ok(verdict) => *verdicts.entry(verdict).or_insert(0) += 1,
                Err(problem) => problems.push(problem),
            }
        }
    }
    println!("{} cases: {verdicts:?}", all.len());
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
    assert_eq!(verdicts.values().sum::<usize>(), all.len());
    // Every case with torch's values was held to them.
    let held = [
        Verdict::Equal,
        Verdict::EqualButAvg,
        Verdict::EqualButGradient,
    ];
    let held: usize = held
        .iter()
        .filter_map(|verdict| verdicts.get(verdict))
        .sum();
    assert_eq!(held, all.iter().filter(|case| case.out.is_some()).count());
}
