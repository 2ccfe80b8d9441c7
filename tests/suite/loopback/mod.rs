//! Ranks in several processes, each of which is simulated by threads and connected to the others by queues.

#[expect(clippy::result_large_err, reason = "made once per test")]
mod background;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod bits;
mod conformance;
#[cfg(feature = "cube")]
#[expect(clippy::result_large_err, reason = "made once per test")]
mod device;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod digests;
mod going_on;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod landing;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod traffic;
