//! [`Report`]: results of the rule prover.

use std::fmt;
use std::time::Duration;

use itertools::Itertools;

use super::case::Case;
use crate::placement::Layout;

/// Results of the prover, by operator.
#[derive(Debug, Clone)]
pub struct Report {
    /// Results of each operator, in the order of their first cases.
    pub operators: Vec<OperatorReport>,
    /// Duration of the proof.
    pub elapsed: Duration,
}

/// Results of one operator.
#[derive(Debug, Clone)]
pub struct OperatorReport {
    /// Name of the operator's cases.
    pub name: &'static str,
    /// Number of combinations of layouts that its inputs have on all meshes.
    pub possible: usize,
    /// Number of combinations that were tried.
    pub tried: usize,
    /// Combinations with correct results that needed an implicit redistribution of an input.
    pub redistributed: Vec<Combination>,
    /// Combinations with wrong results.
    pub wrong: Vec<Wrong>,
}

/// Layouts of the inputs of an operator, on one mesh.
#[derive(Debug, Clone, PartialEq)]
pub struct Combination {
    /// Shape of the mesh.
    pub mesh: Vec<usize>,
    /// Inputs with their layouts.
    pub inputs: Vec<LaidOut>,
}

/// One input of a [`Combination`].
#[derive(Debug, Clone, PartialEq)]
pub struct LaidOut {
    /// Name of the input.
    pub name: &'static str,
    /// Global shape of the input.
    pub shape: Vec<usize>,
    /// Layout of the input.
    pub layout: Layout,
}

/// A combination whose result differs from that of the unsharded operator.
#[derive(Debug, Clone)]
pub struct Wrong {
    /// The combination.
    pub combination: Combination,
    /// Differences from the unsharded operator.
    pub differences: Vec<Difference>,
}

/// One difference from the unsharded operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Kind of the difference.
    pub what: DifferenceKind,
    /// Largest error among all ranks; infinite if it is not a numerical one.
    pub error: f64,
    /// Description of the difference on the rank with the largest error.
    pub how: String,
}

/// Kind of a [`Difference`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The value of an output.
    Output(usize),
    /// The gradient of the input with this name, on some rank.
    Gradient(&'static str),
    /// The depth of an output in the autodiff graph, which is not the same on all ranks.
    Depth(usize),
    /// A rank failed, so there is no result.
    Failure,
}

/// Outcome of one combination.
#[derive(Debug, Clone, Default)]
pub(super) struct CombinationOutcome {
    pub(super) redistributed: bool,
    /// Depth of each output's local tensor in the autodiff graph of this rank.
    pub(super) depths: Vec<Option<usize>>,
    pub(super) differences: Vec<Difference>,
}

/// A combination that was tried.
pub(super) struct Tried {
    pub(super) case: usize,
    pub(super) combination: Combination,
    pub(super) outcome: CombinationOutcome,
}

impl Report {
    pub(super) fn new(
        cases: &[Case],
        possible: &[usize],
        tried: Vec<Tried>,
        elapsed: Duration,
    ) -> Self {
        let mut operators: Vec<OperatorReport> = cases
            .iter()
            .map(|case| case.name)
            .unique()
            .map(|name| OperatorReport {
                name,
                possible: 0,
                tried: 0,
                redistributed: Vec::new(),
                wrong: Vec::new(),
            })
            .collect();
        let place = |case: &Case| {
            operators
                .iter()
                .position(|operator| operator.name == case.name)
        };
        let places: Vec<usize> = cases
            .iter()
            .map(|case| place(case).expect("every case has its operator"))
            .collect();
        for (&place, possible) in places.iter().zip(possible) {
            operators[place].possible += possible;
        }
        for Tried {
            case,
            combination,
            outcome,
        } in tried
        {
            let operator = &mut operators[places[case]];
            operator.tried += 1;
            if !outcome.differences.is_empty() {
                operator.wrong.push(Wrong {
                    combination,
                    differences: outcome.differences,
                });
            } else if outcome.redistributed {
                operator.redistributed.push(combination);
            }
        }
        Self { operators, elapsed }
    }

    /// Returns the number of combinations that were tried.
    pub fn tried(&self) -> usize {
        self.operators.iter().map(|operator| operator.tried).sum()
    }

    /// Returns the number of combinations that were correct without implicit redistribution.
    pub fn direct(&self) -> usize {
        self.operators.iter().map(OperatorReport::direct).sum()
    }

    /// Returns the number of combinations that were wrong.
    pub fn wrong(&self) -> usize {
        self.operators
            .iter()
            .map(|operator| operator.wrong.len())
            .sum()
    }

    /// Returns the last line of the report.
    pub fn summary(&self) -> String {
        let operators = self.operators.len();
        let tried = self.tried();
        let direct = self.direct();
        let wrong = self.wrong();
        let seconds = self.elapsed.as_secs_f64();
        format!(
            "{operators} operators, {tried} combinations, {direct} without redistribution, {wrong} wrong \
             ({seconds:.1} s)"
        )
    }
}

impl OperatorReport {
    /// Returns the number of combinations that were correct without implicit redistribution.
    pub fn direct(&self) -> usize {
        self.tried - self.redistributed.len() - self.wrong.len()
    }
}

/// Formats one paragraph per operator, and the totals.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for operator in &self.operators {
            writeln!(f, "{operator}")?;
        }
        f.write_str(&self.summary())
    }
}

/// Maximum number of wrong combinations of an operator that are printed.
const SHOWN: usize = 4;

impl fmt::Display for OperatorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            possible,
            tried,
            ..
        } = self;
        write!(f, "{name}: {tried} combinations")?;
        if tried < possible {
            write!(f, " of {possible}")?;
        }
        write!(
            f,
            ", {} without redistribution, {} wrong",
            self.direct(),
            self.wrong.len()
        )?;
        if !self.redistributed.is_empty() {
            write!(f, "\n  redistributed: {}", Fallbacks(&self.redistributed))?;
        }
        for Wrong {
            combination,
            differences,
        } in self.wrong.iter().take(SHOWN)
        {
            write!(f, "\n  WRONG {combination}:")?;
            for difference in differences {
                write!(f, "\n    {difference}")?;
            }
        }
        if self.wrong.len() > SHOWN {
            write!(f, "\n  .. and {} more wrong", self.wrong.len() - SHOWN)?;
        }
        Ok(())
    }
}

/// Formats as `mesh [2, 2]: a [4, 6] as [S(0), R], b [6, 4] as [R, R]`.
impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh {:?}: ", self.mesh)?;
        f.write_str(
            &self
                .inputs
                .iter()
                .map(
                    |LaidOut {
                         name,
                         shape,
                         layout,
                     }| format!("{name} {shape:?} as {layout}"),
                )
                .join(", "),
        )
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            DifferenceKind::Output(at) | DifferenceKind::Depth(at) => {
                write!(f, "output {at} {}", self.how)
            }
            DifferenceKind::Gradient(input) => write!(f, "gradient of `{input}` {}", self.how),
            DifferenceKind::Failure => f.write_str(&self.how),
        }
    }
}

/// Formats combinations. Those on meshes of one dimension are grouped by the placements of all
/// inputs except the last: `P(max)|P(min) with R S(0); S(0) with S(1); and 12 on meshes of several
/// dimensions`.
struct Fallbacks<'a>(&'a [Combination]);

impl fmt::Display for Fallbacks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (flat, more): (Vec<_>, Vec<_>) = self
            .0
            .iter()
            .partition(|combination| combination.mesh.len() == 1);
        let mut by_first: Vec<(String, Vec<String>)> = Vec::new();
        for combination in flat {
            let mut placements = combination
                .inputs
                .iter()
                .map(|input| input.layout.placements()[0].to_string());
            let Some(last) = placements.next_back() else {
                continue;
            };
            push(&mut by_first, placements.join(" "), last);
        }
        let mut by_last: Vec<(Vec<String>, Vec<String>)> = Vec::new();
        for (first, mut lasts) in by_first {
            lasts.sort();
            push(&mut by_last, lasts, first);
        }
        let part = |(lasts, firsts): (Vec<String>, Vec<String>)| match &firsts[..] {
            [first] if first.is_empty() => lasts.join(" "),
            firsts => format!("{} with {}", firsts.join("|"), lasts.join(" ")),
        };
        let more = (!more.is_empty())
            .then(|| format!("and {} on meshes of several dimensions", more.len()));
        f.write_str(&by_last.into_iter().map(part).chain(more).join("; "))
    }
}

/// Adds `value` to the group of `key`, unless it is there already. Groups keep the order of their
/// first values.
fn push<K: PartialEq, V: PartialEq>(groups: &mut Vec<(K, Vec<V>)>, key: K, value: V) {
    match groups.iter_mut().find(|(known, _)| *known == key) {
        Some((_, values)) if values.contains(&value) => {}
        Some((_, values)) => values.push(value),
        None => groups.push((key, vec![value])),
    }
}
