//! The tables at the end of a run: collectives with their formulas, and memory.

use std::time::Duration;

use burn::module::{ModuleVisitor, Param};
use burn::prelude::*;
use burn::tensor::DType;
use burn_dtensor::comm::{CallTotals, OffloadTraffic, Op, Phase};
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::model::GptConfig;
use crate::train::Outcome;

/// Bytes of an f32, the dtype of losses, norms and stored values.
const ELEMENT: u64 = 4;

/// Time for which ranks waited for each other. Formats as
/// `1.204 ms of waiting for other ranks, 1.913 ms on rank 1`.
pub struct Waiting<'a>(pub &'a [Duration]);

impl std::fmt::Display for Waiting<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let mean = self.0.iter().sum::<Duration>() / self.0.len().max(1) as u32;
        write!(f, "{:.3} ms of waiting for other ranks", millis(mean))?;
        match self.0.iter().enumerate().max_by_key(|(_, time)| **time) {
            Some((rank, most)) if self.0.len() > 1 => write!(f, ", {:.3} ms on rank {rank}", millis(*most)),
            _ => Ok(()),
        }
    }
}

/// One row of the table: a kind of collective or copy, its count and the expected one.
struct Row {
    operation: String,
    phase: String,
    counted: CallTotals,
    expected: CallTotals,
    formula: String,
}

/// The collectives of the training steps on rank 0, with their formulas.
pub struct Collectives(Vec<Row>);

impl Collectives {
    /// Compares `outcome`'s ledger with the formulas of fully sharded training.
    pub fn new(settings: &Settings, outcome: &Outcome, device: &Device) -> Self {
        let shards = settings.mesh[settings.mesh.len() - 1];
        let replicas = settings.ranks() / shards;
        let units = settings.model.layers as u64 + 1;
        let full = params(&settings.model, device);
        let blocks = full - params(&GptConfig { layers: 0, ..settings.model }, device);
        let shard = outcome.local_params as u64;
        // A reduction contains one flag per parameter and rank: 1 if the rank has a gradient of it.
        let used = tensors(&settings.model, device);
        let all =
            if settings.accumulate == 1 { "steps x (blocks + root)" } else { "steps x batches x (blocks + root)" };
        let reduced = "steps x (blocks + root), and flags";
        let (again, again_params, again_formula) = match settings.reshard {
            ReshardAfterForward::Never | ReshardAfterForward::Ranks(1) => (0, 0, "0: kept since forward"),
            ReshardAfterForward::Auto => (units - 1, blocks, "steps x blocks: the root is kept"),
            ReshardAfterForward::Always | ReshardAfterForward::Ranks(_) => (units, full, all),
        };
        let (norms, scaled) = (u64::from(settings.clip.is_some()), u64::from(settings.param_dtype == DType::F16));
        let [weight, gradient] = [settings.param_dtype, settings.reduce_dtype].map(|dtype| dtype.size() as u64);
        let batches = settings.accumulate as u64;
        let row = |op: Op, phase: Phase, group: usize, calls: u64, bytes: u64, formula: &str| {
            // A group of one rank does not communicate.
            let steps = if group > 1 { settings.steps as u64 } else { 0 };
            // Weights are gathered for every batch of a step. Gradients are reduced with the last batch.
            let steps = if op == Op::AllGather { steps * batches } else { steps };
            Row {
                operation: op.to_string(),
                phase: phase.to_string(),
                counted: outcome.ledger.total(|key| key.op == op && key.phase == phase),
                expected: CallTotals { calls: steps * calls, bytes: steps * bytes },
                formula: formula.into(),
            }
        };
        // A group of one rank sends neither. Steps that overflow compute no norm.
        let norms = if shards > 1 { norms * outcome.made as u64 } else { 0 };
        let overflows = if settings.ranks() > 1 { scaled * settings.steps as u64 } else { 0 };
        // A norm is sent as sums of large, ordinary and small squares.
        let other = Row {
            expected: CallTotals { calls: norms + overflows, bytes: (3 * norms + overflows) * ELEMENT },
            ..row(Op::AllReduce, Phase::Other, 1, 0, 0, "the norm with --clip, overflow in f16")
        };
        let mut rows = vec![
            row(Op::AllGather, Phase::Forward, shards, units, full * weight, all),
            row(Op::AllGather, Phase::Backward, shards, again, again_params * weight, again_formula),
            row(Op::ReduceScatter, Phase::Backward, shards, units, (full + used * shards as u64) * gradient, reduced),
            row(
                Op::AllReduce,
                Phase::Backward,
                replicas,
                units,
                (shard + used) * gradient,
                "the same, of shards, on a 2-D mesh",
            ),
            row(Op::AllReduce, Phase::Forward, settings.ranks(), 1, ELEMENT, "steps: the loss, over all ranks"),
            other,
        ];
        if settings.offload {
            // Weights that a smaller group of ranks keeps after forward are on the device.
            let is_kept_in_part = matches!(settings.reshard, ReshardAfterForward::Ranks(ranks) if ranks != shards);
            let (again, again_params) = if is_kept_in_part { (0, 0) } else { (again, again_params) };
            let (steps, OffloadTraffic { to_device, to_host }) = (settings.steps as u64, outcome.host_copies);
            let copy = |operation: &str, counted, calls: u64, bytes: u64, formula: &str| {
                let expected = CallTotals { calls: steps * calls, bytes: steps * bytes };
                Row { operation: operation.into(), phase: "".into(), counted, expected, formula: formula.into() }
            };
            let bytes = (full + again_params) * weight;
            rows.extend([
                copy("to device", to_device, batches * (units + again), batches * bytes, "bytes of all all-gathers"),
                copy("to host", to_host, units, shard * gradient, "steps x (blocks + root), of shards"),
            ]);
        }
        Self(rows)
    }

    /// Returns true if every count equals its formula.
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
            let Row { operation, phase, counted: CallTotals { calls, bytes }, formula, .. } = row;
            let agrees = if row.agrees() { "yes".into() } else { format!("NO, expected {:?}", row.expected) };
            write!(f, "\n  {operation:<14} {phase:<8} {calls:>7} {bytes:>14}  {formula:<38} {agrees}")?;
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

/// Formats `[2, 2]` as `2x2`.
pub fn by(shape: &[usize]) -> String {
    shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}

/// Returns the number of parameter tensors of the unsharded model, without initializing them.
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

/// Returns the number of elements of the unsharded model, without initializing them.
fn params(config: &GptConfig, device: &Device) -> u64 {
    config.init(device).num_params() as u64
}
