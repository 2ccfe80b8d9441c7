//! Encoding of the error in a [`RankReport`](crate::comm::RankReport), by which a process reports the outcome of a rank
//! to the others.
//!
//! A [`CommError`] is transferred as a value. Of any other error, only the message and those of its sources are
//! transferred.

use std::error::Error as StdError;
use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Error;
use crate::comm::CommError;

/// Maximum number of messages of an error and its sources that are transferred.
const MOST: usize = 64;

/// An error as it is transferred.
#[derive(Serialize, Deserialize)]
enum SentError {
    Comm(CommError),
    /// Messages of the error and of its sources.
    Texts(Vec<String>),
}

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

impl From<&Error> for SentError {
    fn from(error: &Error) -> Self {
        if let Error::Comm(error) = error {
            return Self::Comm(error.clone());
        }
        // Other errors of this crate contain the messages of their sources in their own.
        let has_sources = matches!(error, Error::Other(_));
        let errors =
            std::iter::successors(Some(error as &dyn StdError), |error| (*error).source().filter(|_| has_sources));
        Self::Texts(errors.take(MOST).map(ToString::to_string).collect())
    }
}

pub(in crate::comm) fn serialize<S: Serializer>(error: &Option<Error>, serializer: S) -> Result<S::Ok, S::Error> {
    error.as_ref().map(SentError::from).serialize(serializer)
}

pub(in crate::comm) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Error>, D::Error> {
    let error = |sent| match sent {
        SentError::Comm(error) => Ok(Error::Comm(error)),
        SentError::Texts(texts) if texts.len() > MOST => Err(D::Error::custom("an error with too many sources")),
        SentError::Texts(texts) => {
            RemoteErrorText::new(texts).map(Error::other).ok_or_else(|| D::Error::custom("an error without a message"))
        }
    };
    Option::deserialize(deserializer)?.map(error).transpose()
}
