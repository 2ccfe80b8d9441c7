//! Watching from outside: what a program sends and why, and which rank holds what.
//!
//! [`trace_comm`] runs a part of a program on this rank and says what it sent meanwhile: counted by module and
//! operator, and every tensor that changed its layout with the line of the program that asked for it. The
//! program is the same, watched or not.
//!
//! ```
//! use burn_dtensor::debug::trace_comm;
//! use burn_dtensor::prelude::*;
//! use burn_dtensor::placement::Placement::{Replicate, Shard};
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let x = DTensor::<2>::ones([4, 6], &mesh, &[Shard(1)], world.device())?;
//!     let (y, watched) = trace_comm(|| x.tanh().redistribute(&[Replicate]));
//!     assert_eq!(y?.dims(), [4, 6]);
//!     let changes = watched.changes();
//!     assert_eq!(changes[0].origin.operator, "redistribute");
//!     assert_eq!(changes[0].bytes(), 4 * 6 * 4);
//!     world.run_on(0, || println!("{watched}"));
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | to see | call |
//! |---|---|
//! | collectives by module and operator, as a table or JSON | [`CommTrace::counts`] |
//! | what changed its layout, and why | [`CommTrace::changes`] |
//! | one tensor's layout | [`picture`](crate::dtensor::visualize_sharding) |
//! | a model's, as text or a page | [`visualize_model`] |
//! | parameters in a table | [`describe`](crate::fsdp::describe) |
//! | when units computed, and when their parameters moved | [`Timeline`], [`chrome_trace`], [`timeline_picture`] |
//! | how many all-gathers went on meanwhile | [`Timeline::overlap`] |
//! | all collectives of a rank, watched or not | [`Ledger`](crate::comm::Ledger) |

mod comm_counts;
mod comm_trace;
mod model_sharding;
mod overlap;
mod page;
mod parameter;
mod timeline;

pub use crate::watch::{CallSite, LayoutChange};
pub use comm_counts::{CommCount, CommCounts};
pub use comm_trace::{CommTrace, TracedCollective, TracedLayoutChange, trace_comm};
pub use model_sharding::{ModelSharding, visualize_model};
pub use overlap::Overlap;
pub use timeline::{Timeline, chrome_trace, timeline_picture};
