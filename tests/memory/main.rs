//! What sharded models hold in memory: this binary has nothing else in it.

mod chain;
mod full;
mod live;
mod order;
mod tables;
