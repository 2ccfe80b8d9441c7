//! [`RankReport`]s as bytes: how a rank has ended, as other processes report it.
//!
//! An error of a collective is itself there again. Of any other what it says arrives: its text, and those of its sources.

use std::error::Error as StdError;
use std::fmt;

use super::wire::{Decode, Encode, wire_struct};
use crate::Error;
use crate::comm::RankReport;

wire_struct!(RankReport { rank, doing, error, at });

/// The texts of an error of another process.
#[derive(Debug)]
struct RemoteErrorText {
    text: String,
    source: Option<Box<Self>>,
}

impl RemoteErrorText {
    /// Of the texts of an error and its sources, the error's first.
    fn new(texts: Vec<String>) -> Option<Self> {
        texts.into_iter().rev().fold(None, |source, text| Some(Self { text, source: source.map(Box::new) }))
    }
}

impl fmt::Display for RemoteErrorText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl StdError for RemoteErrorText {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl Encode for Error {
    fn encode(&self, out: &mut Vec<u8>) {
        if let Self::Comm(error) = self {
            out.push(0);
            return error.encode(out);
        }
        out.push(1);
        // The sources of this crate's own are in their texts.
        let has_sources = matches!(self, Self::Other(_));
        let errors =
            std::iter::successors(Some(self as &dyn StdError), |error| (*error).source().filter(|_| has_sources));
        errors.map(ToString::to_string).collect::<Vec<_>>().encode(out);
    }
}

impl Decode for Error {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        match u8::decode(input)? {
            0 => Some(Self::Comm(Decode::decode(input)?)),
            1 => Some(Self::other(RemoteErrorText::new(Decode::decode(input)?)?)),
            _ => None,
        }
    }
}
