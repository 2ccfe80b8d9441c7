//! burn's `SupervisedTraining` on several ranks, compared with burn alone on one device.
#![cfg(feature = "train")]

mod failures;
mod global_rows;
mod learner;
mod output;
mod resume;
mod support;
