//! Parsing of placements: `R`, `S(0)`, `P(sum)`.

use std::str::FromStr;

use super::{PartialOp, Placement, PlacementError};

impl FromStr for PartialOp {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let found = Self::ALL.into_iter().find(|op| op.to_string() == text);
        found.ok_or_else(|| PlacementError::Unreadable { text: text.into() })
    }
}

impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let inner = |prefix| text.strip_prefix(prefix)?.strip_suffix(')');
        if text == "R" {
            return Ok(Self::Replicate);
        }
        let read = inner("S(")
            .and_then(|dim| dim.parse().ok().map(Self::Shard))
            .or_else(|| inner("P(").and_then(|op| op.parse().ok().map(Self::Partial)));
        read.ok_or_else(|| PlacementError::Unreadable { text: text.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let texts = [
            "R",
            "S(0)",
            "S(12)",
            "P(sum)",
            "P(avg)",
            "P(min)",
            "P(max)",
            "P(product)",
        ];
        for text in texts {
            assert_eq!(text.parse::<Placement>().unwrap().to_string(), text);
        }
        assert_eq!("P(max)".parse(), Ok(Placement::Partial(PartialOp::Max)));
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["", "S", "S()", "S(-1)", "S(1", "P(mean)", "r", "SS(0,2)"] {
            let error = text.parse::<Placement>().unwrap_err();
            assert_eq!(error, PlacementError::Unreadable { text: text.into() });
            assert!(
                error.to_string().contains("`R`, `S(0)` or `P(sum)`"),
                "{error}"
            );
        }
    }
}
