//! [`warn`]: warnings that a program without a logger sees too.

use log::{LevelFilter, log_enabled, max_level};

/// Logs a warning, or prints it to the standard error if the program has no logger, because what it
/// is about would otherwise go unnoticed.
pub(crate) fn warn(text: &str) {
    if log_enabled!(log::Level::Warn) {
        log::warn!("{text}");
    } else if max_level() == LevelFilter::Off {
        eprintln!("warning: {text}");
    }
}
