//! Control plane: which rank has called what. It matches calls, compares their signatures, agrees
//! on the first failure, detects deadlocks and decides which ranks survive. It knows neither
//! tensors nor bytes: what a call contributes is a type parameter.
//!
//! | file | content |
//! |---|---|
//! | `match_table`, `match_entry`, `p2p_queue` | calls and messages of the ranks of a world; pure state |
//! | `stalled_wait`, `wait_for_graph` | deadlocks, in one process and among several; pure state |
//! | `arbiter` | which failure of a world is the first; pure state |
//! | `rendezvous` | the match table behind a lock, with waiting |
//! | `exchange_report` | message about a call whose tensors are exchanged |
//! | `membership` | agreement on the ranks that survive a failure |
//! | `sync` | blocking primitives, which a model checker replaces |

pub(in crate::comm) mod exchange_report;
pub(in crate::comm) mod match_table;
pub(in crate::comm) mod membership;
pub(in crate::comm) mod rendezvous;
pub(in crate::comm) mod sync;
pub(in crate::comm) mod wait_for_graph;
