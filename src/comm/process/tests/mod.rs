//! Ranks in several processes, without processes: each is a thread, connected with the others by [`loopback`].

mod bits;
mod conformance;
#[cfg(feature = "wgpu")]
mod device;
mod failures;
mod headers;
mod launches;
mod loopback;
