//! The tables at the end of a run: collectives beside their formulas, and memory.

use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use burn_dtensor::comm::{Op, Phase, Total};
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::model::GptConfig;
use crate::train::Outcome;

/// Bytes of an f32.
const ELEMENT: u64 = 4;

/// One row of the table: a kind of collective, what was counted and what must have been.
struct Row {
    op: Op,
    phase: Phase,
    counted: Total,
    expected: Total,
    formula: String,
}

/// The collectives of the training steps on rank 0, beside their closed formulas.
pub struct Collectives(Vec<Row>);

impl Collectives {
    /// Counts `outcome`'s ledger against the formulas of fully sharded training.
    pub fn new(settings: &Settings, outcome: &Outcome, device: &Device) -> Self {
        let shards = settings.mesh[settings.mesh.len() - 1];
        let replicas = settings.ranks() / shards;
        let units = settings.model.layers as u64 + 1;
        let whole = params(&settings.model, device);
        let blocks = whole - params(&GptConfig { layers: 0, ..settings.model }, device);
        let shard = outcome.local_params as u64;
        // A reduction carries one number per parameter and rank: whether the rank has a gradient of it.
        let used = tensors(&settings.model, device);
        let all = "steps x (blocks + root)";
        let reduced = "the same, and a number per parameter";
        let (again, again_params, again_formula) = match settings.reshard {
            ReshardAfterForward::Never | ReshardAfterForward::Ranks(1) => (0, 0, "0: kept since forward"),
            ReshardAfterForward::Auto => (units - 1, blocks, "steps x blocks: the root is kept"),
            ReshardAfterForward::Always | ReshardAfterForward::Ranks(_) => (units, whole, all),
        };
        let norms = u64::from(settings.clip.is_some());
        let row = |op, phase, group: usize, calls: u64, elements: u64, formula: &str| {
            // A group of one rank moves nothing.
            let steps = if group > 1 { settings.steps as u64 } else { 0 };
            Row {
                op,
                phase,
                counted: outcome.ledger.total(|key| key.op == op && key.phase == phase),
                expected: Total { calls: steps * calls, bytes: steps * elements * ELEMENT },
                formula: formula.into(),
            }
        };
        Self(vec![
            row(Op::AllGather, Phase::Forward, shards, units, whole, all),
            row(Op::AllGather, Phase::Backward, shards, again, again_params, again_formula),
            row(Op::ReduceScatter, Phase::Backward, shards, units, whole + used * shards as u64, reduced),
            row(
                Op::AllReduce,
                Phase::Backward,
                replicas,
                units,
                shard + used,
                "the same, of the shards, on a 2-D mesh",
            ),
            row(Op::AllReduce, Phase::Forward, settings.ranks(), 1, 1, "steps: the loss, over all ranks"),
            row(Op::AllReduce, Phase::Other, shards, norms, norms, "steps with --clip: the norm"),
        ])
    }

    /// Whether every count equals its formula.
    pub fn agree(&self) -> bool {
        self.0.iter().all(Row::agrees)
    }
}

impl Row {
    fn agrees(&self) -> bool {
        self.counted == self.expected
    }
}

impl std::fmt::Display for Collectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "Collectives of rank 0 while training")?;
        write!(f, "  {:<14} {:<8} {:>7} {:>14}  {:<38} agrees", "operation", "pass", "calls", "bytes", "formula")?;
        for row in &self.0 {
            let Row { op, phase, counted: Total { calls, bytes }, formula, .. } = row;
            let agrees = if row.agrees() { "yes".into() } else { format!("NO, expected {:?}", row.expected) };
            write!(f, "\n  {op:<14} {phase:<8} {calls:>7} {bytes:>14}  {formula:<38} {agrees}")?;
        }
        Ok(())
    }
}

/// Memory of parameters, gradients and optimizer state on one rank.
pub struct Memory {
    sharded: u64,
    unsharded: u64,
}

impl Memory {
    /// Memory on the rank of `outcome`.
    pub fn new(settings: &Settings, outcome: &Outcome, device: &Device) -> Self {
        Self { sharded: outcome.local_params as u64, unsharded: params(&settings.model, device) }
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sharded, unsharded } = self;
        let mb = |elements: u64| format!("{:.2} MB", (elements * ELEMENT) as f64 / 1e6);
        writeln!(f, "Memory of rank 0")?;
        write!(f, "  {:<24} {:>12} {:>12}", "", "sharded", "unsharded")?;
        for (what, copies) in [("parameters", 1), ("gradients", 1), ("AdamW moments", 2), ("total", 4)] {
            write!(f, "\n  {what:<24} {:>12} {:>12}", mb(copies * sharded), mb(copies * unsharded))?;
        }
        Ok(())
    }
}

/// `[2, 2]` as `2x2`.
pub fn by(shape: &[usize]) -> String {
    shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}

/// Parameters of the unsharded model; draws nothing.
fn tensors(config: &GptConfig, device: &Device) -> u64 {
    struct Count(u64);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            self.0 += 1;
        }
    }
    let mut count = Count(0);
    config.init(device).visit(&mut count);
    count.0
}

/// Elements of the unsharded model; draws nothing.
fn params(config: &GptConfig, device: &Device) -> u64 {
    config.init(device).num_params() as u64
}
