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
            Some((rank, most)) if self.0.len() > 1 => {
                write!(f, ", {:.3} ms on rank {rank}", millis(*most))
            }
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

/// The collectives of training and validation on rank 0, with their formulas. Those that are not
/// used are omitted.
pub struct Collectives(Vec<Row>);

impl Collectives {
    /// Compares `outcome`'s ledger with the formulas of fully sharded training.
    pub fn new(settings: &Settings, outcome: &Outcome, device: &Device) -> Self {
        let args = &settings.args;
        let shards = settings.mesh[settings.mesh.len() - 1];
        let replicas = settings.ranks() / shards;
        let units = settings.model.layers as u64 + 1;
        let full = params(&settings.model, device);
        let blocks = full
            - params(
                &GptConfig {
                    layers: 0,
                    ..settings.model
                },
                device,
            );
        let shard = outcome.local_params as u64;
        // A reduction contains one flag per parameter and rank: 1 if the rank has a gradient of it.
        let used = tensors(&settings.model, device);
        let batches = args.accumulate as u64;
        let batch = if batches == 1 {
            "steps"
        } else {
            "steps x batches"
        };
        let (again, again_params, again_formula) = match args.reshard {
            ReshardAfterForward::Never | ReshardAfterForward::Ranks(1) => (0, 0, String::new()),
            ReshardAfterForward::Auto => (
                units - 1,
                blocks,
                format!("{batch} x blocks: the root is kept"),
            ),
            ReshardAfterForward::Always | ReshardAfterForward::Ranks(_) => {
                (units, full, format!("{batch} x (blocks + root)"))
            }
        };
        let [weight, gradient] =
            [args.param_dtype, args.reduce_dtype].map(|dtype| dtype.size() as u64);
        let steps = outcome.steps as u64;
        let losses = outcome.validated as u64;
        // Weights are gathered for every batch. Gradients are reduced with the last batch of a
        // step.
        let trained = steps * batches;
        let forwards = trained + losses;
        let total = |times: u64, calls: u64, bytes: u64| CallTotals {
            calls: times * calls,
            bytes: times * bytes,
        };
        let row = |op: Op, phase: Phase, group: usize, expected: CallTotals, formula: &str| Row {
            operation: op.to_string(),
            phase: phase.to_string(),
            counted: outcome
                .ledger
                .total(|key| key.op == op && key.phase == phase),
            // A group of one rank does not communicate.
            expected: if group > 1 {
                expected
            } else {
                CallTotals::default()
            },
            formula: formula.into(),
        };
        // Steps that overflow compute no norm. A norm is sent as sums of large, ordinary and small
        // squares.
        let norms = if args.clip.is_some() && shards > 1 {
            outcome.made as u64
        } else {
            0
        };
        let overflows = if args.param_dtype == DType::F16 {
            steps
        } else {
            0
        };
        let single = steps + losses + overflows;
        let other = CallTotals {
            calls: single + norms,
            bytes: (single + 3 * norms) * ELEMENT,
        };
        let reduced = total(steps, units, (full + used * shards as u64) * gradient);
        let mut rows = vec![
            row(
                Op::AllGather,
                Phase::Forward,
                shards,
                total(forwards, units, full * weight),
                &format!("({batch} + validation) x (blocks + root)"),
            ),
            row(
                Op::AllGather,
                Phase::Backward,
                shards,
                total(trained, again, again_params * weight),
                &again_formula,
            ),
            row(
                Op::ReduceScatter,
                Phase::Backward,
                shards,
                reduced,
                "steps x (blocks + root), and flags",
            ),
            row(
                Op::AllReduce,
                Phase::Backward,
                replicas,
                total(steps, units, (shard + used) * gradient),
                "steps x (blocks + root), of shards",
            ),
            row(
                Op::AllReduce,
                Phase::Other,
                settings.ranks(),
                other,
                "losses, norms of --clip, overflow of f16",
            ),
        ];
        if args.offload {
            // Weights that a smaller group of ranks keeps after forward are on the device.
            let is_kept_in_part =
                matches!(args.reshard, ReshardAfterForward::Ranks(ranks) if ranks != shards);
            let (again, again_params) = if is_kept_in_part {
                (0, 0)
            } else {
                (again, again_params)
            };
            let OffloadTraffic { to_device, to_host } = outcome.host_copies;
            let copy = |operation: &str, counted, expected, formula: &str| Row {
                operation: operation.into(),
                phase: "".into(),
                counted,
                expected,
                formula: formula.into(),
            };
            let gathered = CallTotals {
                calls: forwards * units + trained * again,
                bytes: (forwards * full + trained * again_params) * weight,
            };
            rows.extend([
                copy("to device", to_device, gathered, "bytes of all all-gathers"),
                copy(
                    "to host",
                    to_host,
                    total(steps, units, shard * gradient),
                    "steps x (blocks + root), of shards",
                ),
            ]);
        }
        rows.retain(|row| row.counted.calls + row.expected.calls > 0);
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
        write!(
            f,
            "  {:<14} {:<8} {:>7} {:>14}  {:<42} agrees",
            "operation", "pass", "calls", "bytes", "formula"
        )?;
        for row in &self.0 {
            let Row {
                operation,
                phase,
                counted: CallTotals { calls, bytes },
                formula,
                ..
            } = row;
            let agrees = if row.agrees() {
                "yes".into()
            } else {
                format!("NO, expected {:?}", row.expected)
            };
            write!(
                f,
                "\n  {operation:<14} {phase:<8} {calls:>7} {bytes:>14}  {formula:<42} {agrees}"
            )?;
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
        Self {
            sharded: outcome.local_params as u64,
            unsharded: params(&settings.model, device),
        }
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sharded, unsharded } = self;
        let mb = |elements: u64| format!("{:.2} MB", (elements * ELEMENT) as f64 / 1e6);
        writeln!(f, "Memory of rank 0")?;
        write!(f, "  {:<24} {:>12} {:>12}", "", "sharded", "unsharded")?;
        for (what, copies) in [
            ("parameters", 1),
            ("gradients", 1),
            ("AdamW moments", 2),
            ("total", 4),
        ] {
            write!(
                f,
                "\n  {what:<24} {:>12} {:>12}",
                mb(copies * sharded),
                mb(copies * unsharded)
            )?;
        }
        Ok(())
    }
}

/// Formats `[2, 2]` as `2x2`.
pub fn by(shape: &[usize]) -> String {
    shape
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("x")
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
