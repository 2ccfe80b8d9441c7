//! Path patterns: `blocks.*`, `**.norm`, `blocks.[0-3]`.

use glob::{MatchOptions, Pattern};

use super::FsdpError;

/// A parsed path pattern.
pub(super) struct PathPattern {
    text: String,
    pattern: Pattern,
}

impl PathPattern {
    pub(super) fn parse(text: &str) -> Result<Self, FsdpError> {
        let pattern = Pattern::new(&text.replace('.', "/"))
            .map_err(|error| FsdpError::Pattern { pattern: text.into(), reason: error.msg.into() })?;
        Ok(Self { text: text.into(), pattern })
    }

    pub(super) fn parse_all(texts: &[String]) -> Result<Vec<Self>, FsdpError> {
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the dotted `path` matches. `*` stays within one part.
    pub(super) fn matches(&self, path: &str) -> bool {
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        self.pattern.matches_with(&path.replace('.', "/"), options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stays_within_one_part() {
        let pattern = PathPattern::parse("blocks.*").unwrap();
        assert!(pattern.matches("blocks.11"));
        assert!(!pattern.matches("blocks.11.norm"));
        assert!(!pattern.matches("blocks"));
        assert!(PathPattern::parse("**.norm").unwrap().matches("blocks.3.norm"));
        assert!(PathPattern::parse("blocks.[0-3]").unwrap().matches("blocks.2"));
        assert!(!PathPattern::parse("blocks.[0-3]").unwrap().matches("blocks.4"));
    }

    #[test]
    fn a_broken_pattern_is_an_error() {
        assert!(matches!(PathPattern::parse("blocks.[0"), Err(FsdpError::Pattern { .. })));
    }
}
