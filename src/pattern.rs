//! Patterns for the paths of modules and parameters: `blocks.*`, `**.norm`, `blocks.[0-3]`.

use glob::{MatchOptions, Pattern};

/// A parsed path pattern.
#[derive(Debug)]
pub(crate) struct PathPattern {
    text: String,
    pattern: Pattern,
}

/// A text that is not a valid path pattern, and the reason.
#[derive(Debug)]
pub(crate) struct PatternError {
    pub(crate) pattern: String,
    pub(crate) reason: String,
}

impl PathPattern {
    pub(crate) fn parse(text: &str) -> Result<Self, PatternError> {
        let pattern = Pattern::new(&text.replace('.', "/")).map_err(|error| PatternError {
            pattern: text.into(),
            reason: error.msg.into(),
        })?;
        Ok(Self {
            text: text.into(),
            pattern,
        })
    }

    pub(crate) fn parse_all(texts: &[String]) -> Result<Vec<Self>, PatternError> {
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns true if the dotted `path` matches. `*` matches within one path component only.
    pub(crate) fn matches(&self, path: &str) -> bool {
        let options = MatchOptions {
            require_literal_separator: true,
            ..MatchOptions::new()
        };
        self.pattern.matches_with(&path.replace('.', "/"), options)
    }

    /// Returns the path that is most similar to the pattern, if at most two letters differ, for the
    /// suggestion in an error message. Paths are compared component by component; a component with
    /// wildcards must match.
    pub(crate) fn nearest<'a>(&self, paths: &'a [String]) -> Option<&'a String> {
        let far = paths
            .iter()
            .filter_map(|path| Some((self.letters_from(path)?, path)));
        far.filter(|(letters, _)| *letters <= 2)
            .min_by_key(|(letters, _)| *letters)
            .map(|(_, path)| path)
    }

    /// Returns the number of letters by which `path` differs from the pattern, or `None` if the
    /// number of components differs or a component with wildcards does not match.
    fn letters_from(&self, path: &str) -> Option<usize> {
        let own: Vec<_> = self.text.split('.').collect();
        let parts: Vec<_> = path.split('.').collect();
        let letters = |(own, part): (&&str, &&str)| match own.contains(['*', '?', '[']) {
            true => Pattern::new(own).ok()?.matches(part).then_some(0),
            false => Some(edits(own, part)),
        };
        (own.len() == parts.len()).then(|| own.iter().zip(&parts).map(letters).sum())?
    }
}

/// Returns the Levenshtein distance: the smallest number of insertions, deletions and substitutions
/// that turn `a` into `b`.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut above_left = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.chars().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (above + 1)
                .min(row[j] + 1)
                .min(above_left + usize::from(letter != other));
            above_left = above;
        }
    }
    row[row.len() - 1]
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
        assert!(
            PathPattern::parse("**.norm")
                .unwrap()
                .matches("blocks.3.norm")
        );
        assert!(
            PathPattern::parse("blocks.[0-3]")
                .unwrap()
                .matches("blocks.2")
        );
        assert!(
            !PathPattern::parse("blocks.[0-3]")
                .unwrap()
                .matches("blocks.4")
        );
    }

    #[test]
    fn the_nearest_path_differs_by_two_letters_at_most() {
        let paths = [
            "blocks.0.attention.query",
            "blocks.0.attention.key",
            "blocks.0.up",
            "head",
        ]
        .map(String::from);
        let nearest = |text| {
            PathPattern::parse(text)
                .unwrap()
                .nearest(&paths)
                .map(|path| &**path)
        };
        assert_eq!(
            nearest("blocks.*.atention.key"),
            Some("blocks.0.attention.key")
        );
        assert_eq!(nearest("block.*.qp"), Some("blocks.0.up"));
        assert_eq!(nearest("haed"), Some("head"));
        assert_eq!(nearest("layers.*.up"), None, "too many letters");
        assert_eq!(
            nearest("blocks.[1-9].ub"),
            None,
            "its wildcard does not match"
        );
        assert_eq!(nearest("blocks.up"), None, "another number of components");
        assert_eq!(["kitten", ""].map(|word| edits(word, "sitting")), [3, 7]);
    }

    #[test]
    fn a_broken_pattern_is_an_error() {
        assert_eq!(
            PathPattern::parse("blocks.[0")
                .err()
                .map(|error| error.pattern),
            Some("blocks.[0".into())
        );
    }
}
