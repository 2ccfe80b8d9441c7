//! Tests of ranks in several processes. Each process is simulated by a thread, connected to the others by
//! [`loopback`].

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
#[expect(clippy::result_large_err, reason = "made once per test")]
mod failures;
mod going_on;
mod headers;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod landing;
mod launches;
mod loopback;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod traffic;
