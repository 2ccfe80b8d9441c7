//! The collectives of a run with their formulas, and the difference from the unsharded run.

use burn_dtensor::comm::{Op, Phase};

use crate::cli::Settings;
use crate::train::Outcome;

/// One kind of collective: its count on rank 0, and the expected one.
struct Row {
    op: Op,
    phase: Phase,
    counted: u64,
    expected: u64,
    formula: &'static str,
}

/// The collectives of the training steps on rank 0, with their formulas.
///
/// Every block has two pairs of products, attention and perceptron. Each pair gathers the sequence
/// before (one all-gather for all products that read it) and reduce-scatters it after. The root
/// reduce-scatters the embeddings, gathers the sequence for the head, and computes the loss from
/// logits sharded by vocabulary. In backward every gather becomes a reduce-scatter and vice versa.
/// The collectives of the FSDP units are added to these.
pub struct Collectives(Vec<Row>);

impl Collectives {
    /// Compares the ledger of `outcome` with the formulas.
    pub fn new(settings: &Settings, outcome: &Outcome) -> Self {
        let size = |name: &str| {
            let at = settings.names().iter().position(|other| *other == name);
            at.map_or(1, |at| settings.mesh[at])
        };
        let used = |name| u64::from(size(name) > 1);
        let tp = used("tp");
        let shard = used("shard");
        let replicate = used("replicate");
        let blocks = settings.model.layers as u64;
        let units = blocks + 1;
        let pairs = 2 * blocks + 1;
        let row = |op, phase, a_step: u64, formula| Row {
            op,
            phase,
            counted: outcome
                .ledger
                .total(|key| key.op == op && key.phase == phase)
                .calls,
            expected: settings.steps as u64 * a_step,
            formula,
        };
        use Op::{AllGather, AllReduce, ReduceScatter};
        use Phase::{Backward, Forward};
        Self(vec![
            row(
                AllGather,
                Forward,
                tp * pairs + shard * units,
                "tp: 2 blocks + 1; shard: units",
            ),
            row(ReduceScatter, Forward, tp * pairs, "tp: 2 blocks + 1"),
            row(
                AllReduce,
                Forward,
                tp * LOSS + shard.max(replicate),
                "tp: the loss; shard or replicate: its mean",
            ),
            row(
                AllGather,
                Backward,
                tp * pairs + shard * blocks,
                "tp: 2 blocks + 1; shard: blocks",
            ),
            row(
                ReduceScatter,
                Backward,
                tp * pairs + shard * units,
                "tp: 2 blocks + 1; shard: units",
            ),
            row(
                AllReduce,
                Backward,
                units * (tp + shard + replicate),
                "units x (tp: norms; shard: norms; replicate: shards)",
            ),
        ])
    }

    /// Returns true if every count equals its formula.
    pub fn agree(&self) -> bool {
        self.0.iter().all(|row| row.counted == row.expected)
    }
}

/// All-reduces of a loss from logits sharded by vocabulary: one of the maximum, and one of the sum
/// of exponentials together with the target's logit.
const LOSS: u64 = 2;

impl std::fmt::Display for Collectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "Collectives of rank 0 while training")?;
        write!(
            f,
            "  {:<14} {:<8} {:>6}  {:<52} agrees",
            "operation", "pass", "calls", "formula per step"
        )?;
        for Row {
            op,
            phase,
            counted,
            expected,
            formula,
        } in &self.0
        {
            let agrees = if counted == expected {
                "yes".into()
            } else {
                format!("NO, expected {expected}")
            };
            write!(
                f,
                "\n  {op:<14} {phase:<8} {counted:>6}  {formula:<52} {agrees}"
            )?;
        }
        Ok(())
    }
}

/// Largest loss difference that passes.
const BOUND: f64 = 1e-5;

/// The largest difference between the losses of two runs.
pub struct Difference(f64);

impl Difference {
    /// Compares the losses step by step.
    pub fn new(parallel: &[f32], unsharded: &[f32]) -> Self {
        assert_eq!(
            parallel.len(),
            unsharded.len(),
            "both runs have the same steps"
        );
        let parts = parallel
            .iter()
            .zip(unsharded)
            .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        Self(parts.fold(0.0, |worst, part| {
            if part.is_nan() || part > worst {
                part
            } else {
                worst
            }
        }))
    }

    /// Returns true if the difference is within the bound. A NaN is not.
    pub fn passes(&self) -> bool {
        self.0 <= BOUND
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "Compared with the model on one device, trained on the same data"
        )?;
        writeln!(
            f,
            "  largest loss difference    {:.1e}  (bound {BOUND:.0e})",
            self.0
        )?;
        write!(f, "  {}", if self.passes() { "agrees" } else { "DIFFERS" })
    }
}
