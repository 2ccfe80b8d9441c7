//! [`PerUnit`]: policies of units, by patterns of their modules' paths.

use crate::Result;
use crate::param::{ModelScan, ParamError, UnitName};
use crate::pattern::PathPattern;

/// A policy for each unit.
pub(super) struct PerUnit<T> {
    /// Of the units that the patterns take; the last that matches counts.
    taken: Vec<(Vec<PathPattern>, T)>,
    /// Of all others.
    other: T,
}

impl<T> PerUnit<T> {
    /// # Errors
    /// [`ParamError::Pattern`], and what `read` finds.
    pub(super) fn new<P>(other: &P, taken: &[(Vec<String>, P)], read: impl Fn(&P) -> Result<T>) -> Result<Self> {
        let parsed = taken.iter().map(|(patterns, policy)| Ok((PathPattern::parse_all(patterns)?, read(policy)?)));
        Ok(Self { taken: parsed.collect::<Result<_>>()?, other: read(other)? })
    }

    /// Checks that each pattern takes one of these units.
    ///
    /// # Errors
    /// [`ParamError::NoMatch`].
    pub(super) fn check_units(&self, units: &[String]) -> Result<(), ParamError> {
        ModelScan::check_paths(self.taken.iter().flat_map(|(patterns, _)| patterns), "unit", units)
    }

    /// That of the unit of these modules.
    pub(super) fn of(&self, unit: &UnitName) -> &T {
        let takes = |patterns: &[PathPattern]| {
            unit.modules().iter().any(|module| patterns.iter().any(|pattern| pattern.matches(module)))
        };
        self.taken.iter().rfind(|(patterns, _)| takes(patterns)).map_or(&self.other, |(_, policy)| policy)
    }
}
