//! Path patterns: `blocks.*`, `**.norm`, `blocks.[0-3]`.

use glob::{MatchOptions, Pattern};

/// A parsed path pattern.
#[derive(Debug)]
pub(crate) struct PathPattern {
    text: String,
    pattern: Pattern,
}

/// A text that is no path pattern.
#[derive(Debug)]
pub(crate) struct PatternError {
    pub(crate) pattern: String,
    pub(crate) reason: String,
}

impl PathPattern {
    pub(crate) fn parse(text: &str) -> Result<Self, PatternError> {
        let pattern = Pattern::new(&text.replace('.', "/"))
            .map_err(|error| PatternError { pattern: text.into(), reason: error.msg.into() })?;
        Ok(Self { text: text.into(), pattern })
    }

    pub(crate) fn parse_all(texts: &[String]) -> Result<Vec<Self>, PatternError> {
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the dotted `path` matches. `*` stays within one part.
    pub(crate) fn matches(&self, path: &str) -> bool {
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
        assert_eq!(PathPattern::parse("blocks.[0").err().map(|error| error.pattern), Some("blocks.[0".into()));
    }
}
