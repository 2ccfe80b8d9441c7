//! [`UnitName`]: paths of a unit's modules in a model, and the unit's label.

use std::sync::Arc;

use itertools::Itertools;
use smallvec::SmallVec;

use crate::pattern::PathPattern;

/// Paths of a unit's modules in a model, usually a single one. The path of the model itself is
/// empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct UnitName {
    modules: SmallVec<[Arc<str>; 1]>,
    /// Name of the unit in messages and records.
    label: Arc<str>,
}

impl UnitName {
    /// Names the unit of one module.
    pub(crate) fn of(module: &str) -> Self {
        Self::of_modules([module])
    }

    /// Names the unit of all these modules.
    pub(crate) fn of_modules<'a>(modules: impl IntoIterator<Item = &'a str>) -> Self {
        let modules: SmallVec<[Arc<str>; 1]> =
            modules.into_iter().unique().map(Arc::from).collect();
        let label = match &modules[..] {
            [root] if root.is_empty() => "root".into(),
            [module] => module.clone(),
            several => several.iter().join(", ").into(),
        };
        Self { modules, label }
    }

    /// Names the units of parameters that were in one unit before and are now in these modules. If
    /// `was_group`, all of them form one unit; otherwise each is in the unit of its module.
    pub(crate) fn regrouped(was_group: bool, modules: &[String]) -> Vec<Self> {
        match was_group {
            true => vec![Self::of_modules(modules.iter().map(String::as_str)); modules.len()],
            false => modules.iter().map(|module| Self::of(module)).collect(),
        }
    }

    /// Returns the path, `root` for the model itself, or all paths if the unit has several modules.
    pub(crate) fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub(crate) fn modules(&self) -> &[Arc<str>] {
        &self.modules
    }

    /// Returns true if it names the model itself.
    pub(crate) fn is_root(&self) -> bool {
        self.modules.iter().any(|module| module.is_empty())
    }

    /// Returns true if the unit has several modules.
    pub(crate) fn is_group(&self) -> bool {
        self.modules.len() > 1
    }

    /// Returns true if the pattern matches one of the modules. The model itself has the name
    /// `root`.
    pub(crate) fn is_taken_by(&self, pattern: &PathPattern) -> bool {
        match self.is_root() {
            true => pattern.matches(&self.label),
            false => self.modules.iter().any(|module| pattern.matches(module)),
        }
    }

    /// Returns true if one of its modules contains one of `other`'s. Both must be of the same
    /// model.
    pub(crate) fn encloses(&self, other: &Self) -> bool {
        let holds = |around: &str, path: &str| {
            path.strip_prefix(around)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        let pairs = self.modules.iter().cartesian_product(&other.modules);
        self.is_root() || pairs.into_iter().any(|(around, path)| holds(around, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_one_module_of_several_and_of_the_model() {
        let root = UnitName::of("");
        let block = UnitName::of("blocks.0");
        let ends = UnitName::of_modules(["embed", "head", "embed"]);
        assert_eq!(
            [&root, &block, &ends].map(|path| &**path.label()),
            ["root", "blocks.0", "embed, head"]
        );
        assert_eq!(
            [&root, &block, &ends].map(UnitName::is_group),
            [false, false, true]
        );
        assert_eq!(ends, UnitName::of_modules(["embed", "head"]));
        let inner = UnitName::of("head.norm");
        assert!(
            root.encloses(&ends)
                && ends.encloses(&inner)
                && !inner.encloses(&ends)
                && !block.encloses(&inner)
        );
        assert!(!UnitName::of("head").encloses(&UnitName::of("header")));
        let takes =
            |path: &UnitName, pattern| path.is_taken_by(&PathPattern::parse(pattern).unwrap());
        assert!(takes(&ends, "head") && takes(&root, "root") && !takes(&block, "root"));
        let modules = ["a".to_string(), "b".into(), "a".into()];
        assert_eq!(
            UnitName::regrouped(true, &modules),
            [(); 3].map(|()| UnitName::of_modules(["a", "b"]))
        );
        assert_eq!(
            UnitName::regrouped(false, &modules),
            ["a", "b", "a"].map(UnitName::of)
        );
    }
}
