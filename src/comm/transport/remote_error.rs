//! Encoding of the error in a [`RankReport`](crate::comm::RankReport), by which a process reports
//! the outcome of a rank to the others.
//!
//! A [`CommError`] is transferred as a value. Of any other error, only the message and those of its
//! sources are transferred.

use std::error::Error as StdError;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Error;
use crate::comm::CommError;

/// Maximum number of messages of an error and its sources that are transferred.
const MOST: usize = 64;

/// An error as it is transferred: a value, or the messages of the error and of its sources.
type SentError = Result<CommError, Vec<String>>;

/// Message of an error of another process, with its sources.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct RemoteErrorText {
    text: String,
    source: Option<Box<Self>>,
}

impl RemoteErrorText {
    /// Builds the error from its message, followed by the messages of its sources. Returns `None`
    /// if `texts` is empty.
    fn new(texts: Vec<String>) -> Option<Self> {
        texts.into_iter().rev().fold(None, |source, text| {
            Some(Self {
                text,
                source: source.map(Box::new),
            })
        })
    }
}

fn sent(error: &Error) -> SentError {
    if let Error::Comm(error) = error {
        return Ok(error.clone());
    }
    // Other errors of this crate contain the messages of their sources in their own.
    let has_sources = matches!(error, Error::Other(_));
    let errors = std::iter::successors(Some(error as &dyn StdError), |error| {
        (*error).source().filter(|_| has_sources)
    });
    Err(errors.take(MOST).map(ToString::to_string).collect())
}

pub(in crate::comm) fn serialize<S: Serializer>(
    error: &Option<Error>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    error.as_ref().map(sent).serialize(serializer)
}

pub(in crate::comm) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Error>, D::Error> {
    let error = |sent: SentError| match sent {
        Ok(error) => Ok(Error::Comm(error)),
        Err(texts) if texts.len() > MOST => Err(D::Error::custom("an error with too many sources")),
        Err(texts) => RemoteErrorText::new(texts)
            .map(Error::other)
            .ok_or_else(|| D::Error::custom("an error without a message")),
    };
    Option::deserialize(deserializer)?.map(error).transpose()
}
