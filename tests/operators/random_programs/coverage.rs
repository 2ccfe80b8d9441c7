//! [`Coverage`]: which operators programs have met, and what became of their results.

use std::fmt;

use itertools::Itertools;

use super::operators::Operator;
use super::program::{Program, Step};

/// How often operators were drawn, an entry of the list for itself: the integers' `sum` is another
/// than the floats'.
pub struct Coverage {
    entries: Vec<Counts>,
}

struct Counts {
    operator: &'static str,
    /// Steps of the entry.
    drawn: usize,
    /// Of them, those of which a result was redistributed.
    redistributed: usize,
}

impl Coverage {
    /// Of programs that are drawn from this list.
    pub fn new(operators: &[Operator]) -> Self {
        let none = |operator: &Operator| Counts {
            operator: operator.name,
            drawn: 0,
            redistributed: 0,
        };
        Self {
            entries: operators.iter().map(none).collect(),
        }
    }

    /// Counts the steps of a program.
    pub fn add(&mut self, program: &Program) {
        for step in &program.steps {
            let Some(entry) = step.entry else { continue };
            let goes_on = |later: &Step| {
                later.operator == "redistribute"
                    && later.operands.iter().any(|id| step.results.contains(id))
            };
            let counts = &mut self.entries[entry];
            counts.drawn += 1;
            counts.redistributed += usize::from(program.steps.iter().any(goes_on));
        }
    }

    /// Operators that were drawn less often than this, or whose results were redistributed less
    /// often, a name for every entry.
    pub fn lacking(&self, least: usize) -> Vec<&'static str> {
        let few = |counts: &&Counts| counts.drawn < least || counts.redistributed < least;
        self.entries
            .iter()
            .filter(few)
            .map(|counts| counts.operator)
            .collect()
    }
}

/// A line an entry: how often it was drawn, and how often a result of it was redistributed.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:34} {:>8} {:>14}",
            "operator", "drawn", "redistributed"
        )?;
        let mut entries = self.entries.iter().sorted_by_key(|counts| counts.operator);
        entries.try_for_each(
            |Counts {
                 operator,
                 drawn,
                 redistributed,
             }| { writeln!(f, "{operator:34} {drawn:>8} {redistributed:>14}") },
        )
    }
}

#[test]
fn an_operator_that_no_program_has_is_lacking_whatever_others_are_called() {
    let operators = super::operators::all();
    assert_eq!(Coverage::new(&operators).lacking(1).len(), operators.len());
    let counts = |drawn| Counts {
        operator: "sum",
        drawn,
        redistributed: drawn,
    };
    assert_eq!(
        Coverage {
            entries: vec![counts(3), counts(0)]
        }
        .lacking(3),
        ["sum"]
    );
}
