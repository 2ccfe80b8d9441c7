//! [`Report`]: what was proven.

use std::fmt;
use std::time::Duration;

use itertools::Itertools;

use super::case::Case;
use crate::placement::Layout;

/// What the prover found, operator by operator.
#[derive(Debug, Clone)]
pub struct Report {
    /// In the order of their first cases.
    pub operators: Vec<OperatorReport>,
    /// How long it took.
    pub elapsed: Duration,
}

/// What the prover found about one operator.
#[derive(Debug, Clone)]
pub struct OperatorReport {
    /// The name of its cases.
    pub name: &'static str,
    /// How many combinations of layouts its inputs have on all meshes.
    pub possible: usize,
    /// How many of them were tried.
    pub tried: usize,
    /// Those that were right, but only after an implicit redistribution of an input.
    pub redistributed: Vec<Combination>,
    /// Those that were wrong.
    pub wrong: Vec<Wrong>,
}

/// The layouts that the inputs of an operator came in.
#[derive(Debug, Clone, PartialEq)]
pub struct Combination {
    /// Shape of the mesh.
    pub mesh: Vec<usize>,
    /// The inputs.
    pub inputs: Vec<LaidOut>,
}

/// One input of a [`Combination`].
#[derive(Debug, Clone, PartialEq)]
pub struct LaidOut {
    /// Its name.
    pub name: &'static str,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// How it came.
    pub layout: Layout,
}

/// A combination whose result is not that of the unsharded operator.
#[derive(Debug, Clone)]
pub struct Wrong {
    /// What was tried.
    pub combination: Combination,
    /// What came out wrong.
    pub differences: Vec<Difference>,
}

/// One thing that came out wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// What differs.
    pub what: DifferenceKind,
    /// The largest error among all ranks; infinite if it is not one of numbers.
    pub error: f64,
    /// In words, on the rank with the largest error.
    pub how: String,
}

/// What can come out wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The value of an output.
    Output(usize),
    /// The gradient of the input of this name, as some rank holds it.
    Gradient(&'static str),
    /// How deep in the autodiff graph the parts of an output lie: not equally deep on all ranks.
    Depth(usize),
    /// It did not come out at all.
    Failure,
}

/// What became of a combination.
#[derive(Debug, Clone, Default)]
pub(super) struct CombinationOutcome {
    pub(super) redistributed: bool,
    /// Of each output: how deep in the graph of this rank its part lies.
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
    pub(super) fn new(cases: &[Case], possible: &[usize], tried: Vec<Tried>, elapsed: Duration) -> Self {
        let empty = |name| OperatorReport { name, possible: 0, tried: 0, redistributed: Vec::new(), wrong: Vec::new() };
        let mut operators: Vec<OperatorReport> = cases.iter().map(|case| case.name).unique().map(empty).collect();
        let place = |case: &Case| operators.iter().position(|operator| operator.name == case.name);
        let places: Vec<usize> = cases.iter().map(|case| place(case).expect("every case has its operator")).collect();
        for (&place, possible) in places.iter().zip(possible) {
            operators[place].possible += possible;
        }
        for Tried { case, combination, outcome } in tried {
            let operator = &mut operators[places[case]];
            operator.tried += 1;
            if !outcome.differences.is_empty() {
                operator.wrong.push(Wrong { combination, differences: outcome.differences });
            } else if outcome.redistributed {
                operator.redistributed.push(combination);
            }
        }
        Self { operators, elapsed }
    }

    /// How many combinations were tried.
    pub fn tried(&self) -> usize {
        self.operators.iter().map(|operator| operator.tried).sum()
    }

    /// How many of them were right without any implicit redistribution.
    pub fn direct(&self) -> usize {
        self.operators.iter().map(OperatorReport::direct).sum()
    }

    /// How many of them were wrong.
    pub fn wrong(&self) -> usize {
        self.operators.iter().map(|operator| operator.wrong.len()).sum()
    }

    /// The last line of the report.
    pub fn summary(&self) -> String {
        let operators = self.operators.len();
        let (tried, direct, wrong, seconds) = (self.tried(), self.direct(), self.wrong(), self.elapsed.as_secs_f64());
        format!(
            "{operators} operators, {tried} combinations, {direct} without redistribution, {wrong} wrong \
             ({seconds:.1} s)"
        )
    }
}

impl OperatorReport {
    /// How many combinations were right without any implicit redistribution.
    pub fn direct(&self) -> usize {
        self.tried - self.redistributed.len() - self.wrong.len()
    }
}

/// One paragraph per operator, and the totals.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for operator in &self.operators {
            writeln!(f, "{operator}")?;
        }
        f.write_str(&self.summary())
    }
}

/// How many wrong combinations of an operator are printed.
const SHOWN: usize = 4;

impl fmt::Display for OperatorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, possible, tried, .. } = self;
        write!(f, "{name}: {tried} combinations")?;
        if tried < possible {
            write!(f, " of {possible}")?;
        }
        write!(f, ", {} without redistribution, {} wrong", self.direct(), self.wrong.len())?;
        if !self.redistributed.is_empty() {
            write!(f, "\n  redistributed: {}", Fallbacks(&self.redistributed))?;
        }
        for Wrong { combination, differences } in self.wrong.iter().take(SHOWN) {
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

/// `mesh [2, 2]: a [4, 6] as [S(0), R], b [6, 4] as [R, R]`
impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh {:?}: ", self.mesh)?;
        let input = |LaidOut { name, shape, layout }: &LaidOut| format!("{name} {shape:?} as {layout}");
        f.write_str(&self.inputs.iter().map(input).join(", "))
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            DifferenceKind::Output(at) | DifferenceKind::Depth(at) => write!(f, "output {at} {}", self.how),
            DifferenceKind::Gradient(input) => write!(f, "gradient of `{input}` {}", self.how),
            DifferenceKind::Failure => f.write_str(&self.how),
        }
    }
}

/// Combinations, those on meshes of one dimension by the placements of all inputs but the last:
/// `P(max)|P(min) with R S(0); S(0) with S(1); and 12 on meshes of several dimensions`.
struct Fallbacks<'a>(&'a [Combination]);

impl fmt::Display for Fallbacks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (flat, more): (Vec<_>, Vec<_>) = self.0.iter().partition(|combination| combination.mesh.len() == 1);
        let mut by_first: Vec<(String, Vec<String>)> = Vec::new();
        for combination in flat {
            let mut placements = combination.inputs.iter().map(|input| input.layout.placements()[0].to_string());
            let Some(last) = placements.next_back() else { continue };
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
        let more = (!more.is_empty()).then(|| format!("and {} on meshes of several dimensions", more.len()));
        f.write_str(&by_last.into_iter().map(part).chain(more).join("; "))
    }
}

/// Adds `value`, once, to the group of `key`. Groups keep the order of their first values.
fn push<K: PartialEq, V: PartialEq>(groups: &mut Vec<(K, Vec<V>)>, key: K, value: V) {
    match groups.iter_mut().find(|(known, _)| *known == key) {
        Some((_, values)) if values.contains(&value) => {}
        Some((_, values)) => values.push(value),
        None => groups.push((key, vec![value])),
    }
}
