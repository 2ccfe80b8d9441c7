//! Errors of the program's own: they go through `launch` with their texts, their sources and their
//! types.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use anyhow::Context;
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use burn_dtensor::comm::{CommError, Launch, LaunchError, launch};
use burn_dtensor::{Error, Result};

/// An error with a source.
#[derive(Debug)]
struct Unreadable(io::Error);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no batch to train on")
    }
}

impl StdError for Unreadable {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no such file")
}

fn boxed() -> Result<(), Box<dyn StdError + Send + Sync>> {
    Err(Unreadable(missing()).into())
}

/// What two ranks end with, of which rank 1 runs `program` while rank 0 waits for it.
fn ended(program: impl Fn() -> Result<()> + Sync) -> LaunchError {
    let error = launch(Launch::threads(2), |world| {
        if world.rank() == 1 {
            program()?;
        }
        world.barrier("step")?;
        Ok(())
    })
    .unwrap_err();
    let text = error.cause.to_string();
    let Some(Error::Comm(CommError::RankFailed {
        rank: 1, message, ..
    })) = &error.others[0].error
    else {
        panic!("{error}")
    };
    assert_eq!(*message, text);
    error
}

/// The texts of an error and its sources.
fn chain(error: &dyn StdError) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    texts
}

#[test]
fn a_boxed_error_keeps_its_text_its_source_and_its_type() {
    let error = ended(|| Ok(boxed()?));
    assert_eq!(
        chain(&error.cause),
        ["no batch to train on", "no such file"]
    );
    let Error::Other(cause) = error.cause.clone() else {
        panic!("{error}")
    };
    let unreadable = cause
        .downcast_ref::<Unreadable>()
        .expect("the type that was boxed");
    assert_eq!(unreadable.0.kind(), io::ErrorKind::NotFound);
}

#[test]
fn the_report_says_what_an_error_was_caused_by() {
    let text = ended(|| Ok(boxed()?)).to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines[..2],
        [
            "launch failed at rank 1: no batch to train on",
            "  caused by: no such file"
        ],
        "{text}"
    );
    assert_eq!(text.matches("no batch to train on").count(), 1, "{text}");
    assert_eq!(lines.last(), Some(&"  rank 0 ended with it"), "{text}");
}

#[test]
fn errors_of_others_enter_by_a_question_mark() {
    let io = ended(|| Err(missing())?);
    let Error::Other(cause) = &io.cause else {
        panic!("{io}")
    };
    assert_eq!(
        cause
            .downcast_ref::<io::Error>()
            .expect("an I/O error")
            .kind(),
        io::ErrorKind::NotFound
    );
    assert_eq!(
        ended(|| "ten".parse::<usize>().map(drop).map_err(Error::from))
            .cause
            .to_string(),
        "invalid digit found in string"
    );
    let record = ended(|| {
        let layer = LinearConfig::new(2, 2).init(&Device::flex());
        layer.try_load_file("/nowhere")?;
        Ok(())
    });
    assert!(
        matches!(&record.cause, Error::Other(cause) if cause.is::<burn::store::RecordError>()),
        "{record}"
    );
}

#[test]
fn an_anyhow_error_keeps_its_contexts() {
    let error = ended(|| {
        Err::<(), _>(missing())
            .context("reading `corpus.txt`")
            .context("no data")?;
        Ok(())
    });
    assert_eq!(
        chain(&error.cause),
        ["no data", "reading `corpus.txt`", "no such file"]
    );
}
