//! [`LaunchId`]: identifies a launch in all its processes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Identifies a world among those whose ranks write to one folder. All its ranks have the same id,
/// whatever else their processes have launched.
///
/// Displays as `launch 2`, `launch 2 of process 1` or `launch 2 after 1 shrink`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaunchId {
    /// Index of the launch, from 0: among those that all processes make together, in the same
    /// order, or among those of [`process`](Self::process).
    pub number: u64,
    /// Number of times that `World::shrink` has replaced the world of the launch.
    pub shrunk: u64,
    /// Index of the process that makes the launch alone; `None` if all processes of a job make it
    /// together. A program that no launcher started is process 0.
    pub process: Option<u64>,
}

impl LaunchId {
    /// Returns the id of the initial world of launch `number`, which all processes of a job make
    /// together.
    pub fn first(number: u64) -> Self {
        Self {
            number,
            shrunk: 0,
            process: None,
        }
    }

    /// Returns the id of launch `number` of `process`, which makes it alone.
    pub fn of_process(process: usize, number: u64) -> Self {
        Self {
            number,
            shrunk: 0,
            process: Some(process as u64),
        }
    }

    /// Returns the id of the world that `World::shrink` creates from this one.
    pub fn next(self) -> Self {
        Self {
            shrunk: self.shrunk + 1,
            ..self
        }
    }

    /// Returns the name of a rank's file: `launch-2-rank-3.flight`,
    /// `launch-2-process-1-rank-3.flight` or `launch-2-shrunk-1-rank-3.flight`.
    pub fn file_name(self, rank: usize) -> String {
        let Self {
            number,
            shrunk,
            process,
        } = self;
        let process = process
            .map(|process| format!("-process-{process}"))
            .unwrap_or_default();
        let shrunk = if shrunk > 0 {
            format!("-shrunk-{shrunk}")
        } else {
            String::new()
        };
        format!("launch-{number}{process}{shrunk}-rank-{rank}.flight")
    }
}

impl fmt::Display for LaunchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "launch {}", self.number)?;
        if let Some(process) = self.process {
            write!(f, " of process {process}")?;
        }
        match self.shrunk {
            0 => Ok(()),
            1 => f.write_str(" after 1 shrink"),
            times => write!(f, " after {times} shrinks"),
        }
    }
}
