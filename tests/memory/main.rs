//! What sharded models hold in memory: this binary has nothing else in it.

mod chain;
mod live;
mod order;
mod tables;
