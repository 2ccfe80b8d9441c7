//! Debugging tools: which collectives a program runs and why, and which rank holds which shard.
//!
//! [`trace_comm`] runs a closure on this rank and records its communication: collectives counted by
//! module and operator, and each change of layout with the source line that caused it. Tracing does
//! not change what the program does.
//!
//! ```
//! use burn_dtensor::debug::trace_comm;
//! use burn_dtensor::prelude::*;
//! use burn_dtensor::placement::Placement::{Replicate, Shard};
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let x = DTensor::<2>::ones([4, 6], &mesh, &[Shard(1)], world.device())?;
//!     let (y, trace) = trace_comm(|| x.tanh().redistribute(&[Replicate]));
//!     assert_eq!(y?.dims(), [4, 6]);
//!     let changes = trace.changes();
//!     assert_eq!(changes[0].origin.operator, "redistribute");
//!     assert_eq!(changes[0].bytes(), 4 * 6 * 4);
//!     world.run_on(0, || println!("{trace}"));
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | to see | call |
//! |---|---|
//! | collectives by module and operator, as a table or JSON | [`CommTrace::counts`] |
//! | changes of layout and their causes | [`CommTrace::changes`] |
//! | the layout of one tensor | [`visualize_sharding`](crate::dtensor::visualize_sharding) |
//! | the layout of a model, as text or a page | [`visualize_model`] |
//! | parameters in a table | [`describe`](crate::fsdp::describe) |
//! | when units computed, and when they communicated | [`Timeline`], [`chrome_trace`], [`timeline_picture`] |
//! | how many all-gathers overlapped with computation | [`Timeline::overlap`] |
//! | all collectives of a rank, traced or not | [`Ledger`](crate::comm::Ledger) |

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
