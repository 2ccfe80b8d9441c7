//! Encoding of [`RankReport`]s, by which a process reports the outcome of a rank to the others.
//!
//! A [`CommError`](crate::comm::CommError) is transferred as a value. Of any other error, only the message and
//! those of its sources are transferred.

use std::error::Error as StdError;
use std::fmt;

use super::wire::{Decode, Encode, wire_struct};
use crate::Error;
use crate::comm::RankReport;

wire_struct!(RankReport { rank, doing, error, at });

/// Message of an error of another process, with its sources.
#[derive(Debug)]
struct RemoteErrorText {
    text: String,
    source: Option<Box<Self>>,
}

impl RemoteErrorText {
    /// Builds the error from its message, followed by the messages of its sources. Returns `None` if `texts` is
    /// empty.
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
        // Other errors of this crate contain the messages of their sources in their own.
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
