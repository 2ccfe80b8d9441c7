//! Ranks in several processes, without processes: each is a thread, connected with the others by [`loopback`].

mod conformance;
mod headers;
mod loopback;
