//! Collectives of a group of ranks.

mod cases;
mod collectives;
mod groups;
mod ledger;
mod memory;
mod numbers;
mod only;
mod plain;
mod waits;
mod works;
