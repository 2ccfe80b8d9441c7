//! burn's `SupervisedTraining` on several ranks, beside burn alone on one device.
#![cfg(feature = "train")]

mod alike;
mod failures;
mod learner;
mod output;
mod resume;
mod support;
