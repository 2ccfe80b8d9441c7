//! Muon on shards: each full matrix is orthogonalized on one rank.
//!
//! ```text
//!          shards                 all-to-all           full on its owner       all-to-all
//! rank 0   a0  b0  c0  d0    ──▶  a0 a1 = a       ──▶  orthogonal a        ──▶  a0' b0'      then c and d,
//! rank 1   a1  b1  c1  d1         b0 b1 = b            orthogonal b             a1' b1'      in the next round
//! ```
//!
//! Momentum works element by element, on shards. The shards of its output are sent to the owners of
//! a round's matrices, and the updates are sent back. Each element is sent twice, whereas an
//! all-gather would send it to every rank. In one round a rank owns at most as many elements as the
//! largest matrix has, so in addition to its shards it holds a few times the largest matrix instead
//! of the model. If several mesh dimensions shard a matrix, it is moved along one after the other,
//! and back in reverse order. Each group of ranks that holds a replica of a matrix makes the same
//! computation.
//!
//! | to find | look in |
//! |---|---|
//! | owner of each matrix, and its round | `rounds` |
//! | assembly of a matrix from its shards | `join` |
//! | communication | `exchange` |
//! | computation on shards, before and after | `shards` |

mod exchange;
mod join;
mod rounds;
mod shards;

pub(super) use exchange::{MuonMatrix, orthogonalized};
pub(super) use shards::{Stages, Velocity};
