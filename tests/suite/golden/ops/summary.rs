//! The totals, as text and as numbers.

use std::collections::BTreeMap;
use std::fmt;

use super::Job;
use super::judge::Verdict;

#[derive(Default)]
pub struct Summary {
    totals: Totals,
    /// By operator: the cases in which it takes more collectives than torch's.
    dearer: BTreeMap<String, Vec<String>>,
    problems: Vec<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Right in forward.
    pub forward: usize,
    /// Local outputs placed as torch's, and equal to them.
    pub locals: usize,
    /// Right in backward, too.
    pub gradients: usize,
    /// Of these, where torch refuses, crashes or is wrong.
    pub wins_forward: usize,
    pub wins_gradients: usize,
    /// Held to the local operator, as torch has no values in any case.
    pub local_outs: usize,
    pub local_gradients: usize,
    /// Outputs pending the same reduction as torch's, of other terms.
    pub terms_differ: usize,
    /// Where the operator takes more collectives than torch's, and fewer.
    pub dearer: usize,
    pub cheaper: usize,
    /// Collectives in forward of all cases whose counts torch has.
    pub calls: u64,
    pub calls_of_torch: u64,
}

impl Summary {
    pub fn problem(&mut self, at: &str, what: &str) {
        self.problems.push(format!("{at}: {what}"));
    }

    pub fn count(&mut self, &(name, _, case): &Job<'_>, verdict: &Verdict) {
        let totals = &mut self.totals;
        totals.forward += 1;
        totals.locals += verdict.locals;
        totals.gradients += usize::from(verdict.gradients);
        totals.wins_forward += usize::from(case.torch_fails_forward());
        totals.wins_gradients += usize::from(verdict.gradients && case.torch_fails_backward());
        totals.local_outs += usize::from(verdict.local_outs);
        totals.local_gradients += usize::from(verdict.local_gradients);
        totals.terms_differ += verdict.terms_differ;
        let (Some(ours), theirs) = (verdict.sent, case.calls()) else {
            return;
        };
        totals.calls += ours.calls;
        totals.calls_of_torch += theirs;
        totals.cheaper += usize::from(ours.calls < theirs);
        totals.dearer += usize::from(ours.calls > theirs);
        if ours.calls > theirs {
            let inputs: Vec<_> = case
                .in_pl
                .iter()
                .map(|placements| placements.join(""))
                .collect();
            let line = format!(
                "{} {theirs} -> {} ({} B)",
                inputs.join(", "),
                ours.calls,
                ours.bytes
            );
            self.dearer.entry(name.to_string()).or_default().push(line);
        }
    }

    /// # Panics
    /// If there was a problem.
    pub fn check(self) -> Totals {
        assert!(
            self.problems.is_empty(),
            "{} problems:\n{}",
            self.problems.len(),
            self.problems.join("\n")
        );
        self.totals
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = &self.totals;
        let Totals {
            forward,
            locals,
            gradients,
            wins_forward,
            wins_gradients,
            ..
        } = totals;
        writeln!(
            f,
            "{forward} cases right in forward, {gradients} of them with gradients"
        )?;
        let (outs, grads) = (totals.local_outs, totals.local_gradients);
        writeln!(
            f,
            "  held to the local operator, for want of torch's values: {outs} and {grads}"
        )?;
        writeln!(
            f,
            "  where torch refuses, crashes or is wrong: {wins_forward} and {wins_gradients}"
        )?;
        writeln!(
            f,
            "{locals} outputs placed as torch's, and equal to them on every rank"
        )?;
        writeln!(
            f,
            "  {} more pend the same reduction, of other terms",
            totals.terms_differ
        )?;
        let Totals {
            cheaper,
            dearer,
            calls,
            calls_of_torch,
            ..
        } = totals;
        write!(
            f,
            "collectives in forward: {calls}, torch {calls_of_torch}; "
        )?;
        writeln!(
            f,
            "{cheaper} cases take fewer than torch's, {dearer} take more:"
        )?;
        for (name, cases) in &self.dearer {
            writeln!(f, "  {name}: {}", cases.join("; "))?;
        }
        Ok(())
    }
}
