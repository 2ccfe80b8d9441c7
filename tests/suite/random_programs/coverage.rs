//! [`Coverage`]: which operators programs have met, and what became of their results.

use std::collections::BTreeMap;
use std::fmt;

use super::program::Program;

/// How often operators were drawn.
#[derive(Default)]
pub struct Coverage {
    operators: BTreeMap<&'static str, Counts>,
}

#[derive(Default)]
struct Counts {
    /// Steps of the operator.
    drawn: usize,
    /// Of them, those of which a result was redistributed.
    redistributed: usize,
}

impl Coverage {
    /// Counts the steps of a program.
    pub fn add(&mut self, program: &Program) {
        for step in &program.steps {
            let goes_on = |later: &super::program::Step| {
                later.operator == "redistribute" && later.operands.iter().any(|id| step.results.contains(id))
            };
            let counts = self.operators.entry(step.operator).or_default();
            counts.drawn += 1;
            counts.redistributed += usize::from(program.steps.iter().any(goes_on));
        }
    }

    /// Operators that were drawn less often than this, or whose results were redistributed less often.
    pub fn lacking(&self, least: usize) -> Vec<&'static str> {
        let few = |counts: &Counts| counts.drawn < least || counts.redistributed < least;
        let few = self.operators.iter().filter(|(name, counts)| **name != "redistribute" && few(counts));
        few.map(|(name, _)| *name).collect()
    }
}

/// A line an operator: how often it was drawn, and how often a result of it was redistributed.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:34} {:>8} {:>14}", "operator", "drawn", "redistributed")?;
        self.operators.iter().try_for_each(|(name, Counts { drawn, redistributed })| {
            writeln!(f, "{name:34} {drawn:>8} {redistributed:>14}")
        })
    }
}
