//! [`PerUnit`]: a policy for each unit, selected by patterns of module paths.

use crate::Result;
use crate::param::{ParamError, UnitName, check_patterns};
use crate::pattern::PathPattern;

/// Policies of all units.
pub(super) struct PerUnit<T> {
    /// Policies by patterns; if several match a unit, the last one applies.
    taken: Vec<(Vec<PathPattern>, T)>,
    /// Policy of all other units.
    other: T,
}

impl<T> PerUnit<T> {
    /// Parses the patterns, and converts each policy with `read`.
    ///
    /// # Errors
    /// [`ParamError::Pattern`], and the errors of `read`.
    pub(super) fn new<P>(
        other: &P,
        taken: &[(Vec<String>, P)],
        read: impl Fn(&P) -> Result<T>,
    ) -> Result<Self> {
        let parsed = taken
            .iter()
            .map(|(patterns, policy)| Ok((PathPattern::parse_all(patterns)?, read(policy)?)));
        Ok(Self {
            taken: parsed.collect::<Result<_>>()?,
            other: read(other)?,
        })
    }

    /// Checks that each pattern matches one of these units.
    ///
    /// # Errors
    /// [`ParamError::NoMatch`].
    pub(super) fn check_units(&self, units: &[String]) -> Result<(), ParamError> {
        check_patterns(
            self.taken.iter().flat_map(|(patterns, _)| patterns),
            "unit",
            units,
        )
    }

    /// Returns the policy of the unit with these modules.
    pub(super) fn of(&self, unit: &UnitName) -> &T {
        let takes = |patterns: &[PathPattern]| {
            unit.modules()
                .iter()
                .any(|module| patterns.iter().any(|pattern| pattern.matches(module)))
        };
        self.taken
            .iter()
            .rfind(|(patterns, _)| takes(patterns))
            .map_or(&self.other, |(_, policy)| policy)
    }
}
