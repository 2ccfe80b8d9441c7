//! Tests of ranks in several processes. Each process is simulated by a thread, connected to the
//! others by queues.

mod exchanged;
mod exchanged_messages;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod failures;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod launches;
