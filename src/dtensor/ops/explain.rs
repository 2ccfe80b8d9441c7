//! [`explain`]: lists the layouts that an operator could choose from, with their costs.

use std::cell::RefCell;
use std::fmt::{self, Write};

use itertools::Itertools;

use super::ShardingRule;
use super::cost_model::DecisionScope;
use super::operand::Arg;
use super::resolve_sharding::{CandidateStrategies, incoming};
use super::select_strategy::{SelectionProblem, Weighed, asked_for, select_strategy, weighed};
use super::strategy_cost::{Infeasible, OperandTraffic, sends};
use crate::Result;
use crate::placement::{CommVolume, Layout};

/// Runs `f` and explains every operator in it: which layouts were considered, and what they cost.
/// This includes operators whose decisions are cached.
///
/// ```
/// use burn_dtensor::dtensor::ops::explain;
/// # use burn_dtensor::prelude::*;
/// # use burn_dtensor::placement::Placement::{Replicate, Shard};
/// # launch(Launch::threads(2), |world| {
/// let mesh = DeviceMesh::new(world, [2], ["tp"])?;
/// let x = DTensor::<2>::ones([4, 6], &mesh, &[Shard(1)], world.device())?;
/// let w = DTensor::<2>::ones([6, 8], &mesh, &[Replicate], world.device())?;
/// let (y, why) = explain(|| x.matmul(w));
/// assert_eq!(y.dims(), [4, 8]);
/// assert_eq!(format!("\n{why}"), "
/// matmul of [4, 6] [S(1)], [6, 8] [R] on DeviceMesh(tp=2; ranks 0..2)
///   | inputs                       | output   | forward         | backward
/// * | [S(1)], [R] -> [S(0)]        | [P(sum)] |                 | all-gather 96 B
///   | [S(1)] -> [S(0)], [R]        | [S(0)]   | all-to-all 24 B | all-to-all 24 B, all-reduce 192 B
///   | [S(1)] -> [R], [R]           | [R]      | all-gather 48 B |
///   | [S(1)] -> [R], [R] -> [S(1)] | [S(1)]   | all-gather 48 B | reduce-scatter 48 B, all-gather 96 B
/// excluded, input not partial: P(sum), R -> P(sum); P(avg), R -> P(avg); R, P(sum) -> P(sum); R, P(avg) -> P(avg)
/// ");
/// # Ok::<_, burn_dtensor::Error>(())
/// # })?;
/// # Ok::<_, burn_dtensor::comm::LaunchError>(())
/// ```
///
/// The first line is marked as chosen. The others cost more, in the order of [how layouts are
/// chosen](super#how-layouts-are-chosen). Bytes are the volume that a rank sends if shards are
/// even. The column `backward` counts inputs that can have gradients, whether or not one is
/// computed. Under a [`CostModel`](super::CostModel), another column shows the times.
///
/// If explanations are nested, the innermost one gets the tables.
///
/// # Collective
/// As `f`.
pub fn explain<T>(f: impl FnOnce() -> T) -> (T, Explanation) {
    /// Restores the tables of the enclosing explanations, also if `f` unwinds.
    struct OuterExplanations(Vec<String>);
    impl Drop for OuterExplanations {
        fn drop(&mut self) {
            RECORDED.replace(std::mem::take(&mut self.0));
        }
    }
    let around = OuterExplanations(RECORDED.take());
    let result = DecisionScope {
        explained: true,
        ..DecisionScope::current()
    }
    .run(f);
    let tables = RECORDED.take();
    drop(around);
    (result, Explanation { tables })
}

/// Result of [`explain`]: a table for each operator, in the order in which they ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    tables: Vec<String>,
}

impl Explanation {
    /// Returns the table of each operator.
    pub fn tables(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tables.iter().map(String::as_str)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.tables.iter().format("\n"))
    }
}

thread_local! {
    static RECORDED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of lines of a table. On a mesh of several dimensions there may be hundreds of
/// combinations.
const LINES: usize = 12;

/// Records the table of `rule` for these inputs.
pub(super) fn record<R: ShardingRule>(
    rule: &R,
    inputs: &[Arg<'_>],
    scope: DecisionScope,
) -> Result<()> {
    let CandidateStrategies {
        outputs,
        rows,
        wanted,
        out,
    } = CandidateStrategies::new(rule, inputs)?;
    let mesh = inputs[0].spec.mesh();
    let operands = incoming(inputs, &wanted);
    let times = scope.times(mesh);
    let given = SelectionProblem {
        mesh_shape: mesh.shape(),
        operands: &operands,
        outputs: &outputs,
        strategies: &rows,
        takes_empty_parts: &|input, dim| rule.supports_empty_shards_along(input, dim),
        times: times.as_ref(),
    };
    let chosen = select_strategy(given);
    let mut found = Vec::new();
    let mut unfit = Vec::new();
    for Weighed {
        rows,
        found: weighed,
    } in weighed(given)
    {
        match weighed {
            Ok((cost, choice)) => {
                found.push((Some(&choice) != chosen.as_ref(), cost, rows, choice))
            }
            Err(why) => unfit.push((rows.iter().join(" x "), reason(why))),
        }
    }
    found.sort_by_key(|(other, cost, ..)| (*other, *cost));
    found.dedup_by(|(.., a), (.., b)| a == b);
    let lines = found.iter().map(|(other, cost, rows, choice)| {
        let sends = operands.iter().enumerate().map(|(at, operand)| {
            let first = (at == 0).then_some(&rows[..]);
            sends(operand, &choice.inputs[at], &choice.varying[at], first)
        });
        let sends: Vec<OperandTraffic> = sends.collect();
        let mut line = vec![
            if *other { " " } else { "*" }.into(),
            operands
                .iter()
                .zip(&choice.inputs)
                .map(|(operand, to)| moved(operand.layout, to))
                .join(", "),
            choice.outputs.iter().join(", "),
            sent(sends.iter().flat_map(|sends| &sends.forward)),
            sent(sends.iter().flat_map(|sends| &sends.backward)),
        ];
        line.extend(
            times
                .as_ref()
                .map(|_| format!("{:.1} us", cost.time as f64 / 1e6)),
        );
        line
    });
    let mut header = vec![
        " ",
        "inputs",
        if outputs.len() == 1 {
            "output"
        } else {
            "outputs"
        },
        "forward",
        "backward",
    ];
    header.extend(times.as_ref().map(|_| "time"));
    let header = header.into_iter().map(String::from).collect();
    let lines: Vec<Vec<String>> = std::iter::once(header).chain(lines).collect();
    let mut text = format!(
        "{} of {} on {mesh}\n",
        rule.name(),
        inputs.iter().map(described).join(", ")
    );
    write_table(&mut text, &lines);
    let partial = rows
        .iter()
        .filter(|row| (0..mesh.ndim()).all(|dim| !asked_for(&rows, &operands, dim).contains(row)))
        .map(|row| (row.to_string(), "input not partial"));
    let out = out
        .iter()
        .map(|(row, why)| (row.to_string(), *why))
        .chain(partial)
        .chain(unfit);
    for (why, rows) in &out
        .map(|(row, why)| (why, row))
        .into_group_map()
        .into_iter()
        .sorted()
        .collect_vec()
    {
        let more = if rows.len() > LINES {
            format!("; and {} more", rows.len() - LINES)
        } else {
            String::new()
        };
        let _ = writeln!(
            text,
            "excluded, {why}: {}{more}",
            rows.iter().take(LINES).format("; ")
        );
    }
    RECORDED.with_borrow_mut(|tables| tables.push(text));
    Ok(())
}

fn described(input: &Arg<'_>) -> String {
    let pin = input
        .pin
        .map(|pin| format!(" pinned to {pin}"))
        .unwrap_or_default();
    format!("{:?} {}{pin}", &input.spec.shape()[..], input.spec.layout())
}

fn moved(from: &Layout, to: &Layout) -> String {
    if from == to {
        from.to_string()
    } else {
        format!("{from} -> {to}")
    }
}

fn sent<'a>(sends: impl Iterator<Item = &'a (CommVolume, u64)>) -> String {
    sends
        .map(|(sent, bytes)| format!("{} {} B", sent.collective, sent.bytes(*bytes)))
        .join(", ")
}

fn reason(why: Infeasible) -> &'static str {
    match why {
        Infeasible::Empty => "a rank would have no elements",
        Infeasible::NoWay => "no redistribution to this layout",
        Infeasible::Divides => "the number of shards does not divide the required length",
        Infeasible::Dearer => "it costs more",
    }
}

/// Writes the lines with aligned columns.
fn write_table(text: &mut String, lines: &[Vec<String>]) {
    let width = |column: usize| {
        lines
            .iter()
            .take(LINES + 1)
            .map(|line| line[column].len())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    for line in lines.iter().take(LINES + 1) {
        let cells = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"));
        let _ = writeln!(text, "{}", cells.format(" | ").to_string().trim_end());
    }
    if lines.len() > LINES + 1 {
        let _ = writeln!(text, "  and {} more", lines.len() - LINES - 1);
    }
}
