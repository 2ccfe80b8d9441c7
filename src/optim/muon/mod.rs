//! Muon on shards: whole matrices are made orthogonal, each on one rank.
//!
//! ```text
//!          shards                 all-to-all           whole on its owner       all-to-all
//! rank 0   a0  b0  c0  d0    ──▶  a0 a1 = a       ──▶  orthogonal a        ──▶  a0' b0'      then c and d,
//! rank 1   a1  b1  c1  d1         b0 b1 = b            orthogonal b             a1' b1'      in the next round
//! ```
//!
//! Momentum works element by element, on shards. What it makes of the gradients of a round's matrices goes to their
//! owners, and comes back as steps: each element moves twice, where gathering moves it to every rank. A rank owns no
//! more of a round than the largest matrix has elements, so that beside shards it holds a few of those and not the
//! model. Where several mesh dimensions cut a matrix it moves along one after the other, and back in reverse; ranks
//! that hold it alike own it alike.
//!
//! | to find | look in |
//! |---|---|
//! | who owns which matrix, when | `rounds` |
//! | the whole of a matrix out of its parts | `join` |
//! | how they move | `exchange` |
//! | what is done on shards, before and after | `shards` |

mod exchange;
mod join;
mod rounds;
mod shards;

pub(super) use exchange::{MuonMatrix, orthogonalized};
pub(super) use shards::{Apply, Stages};
