#[path = "../../../../../src/comm/local/match_table.rs"]
pub(crate) mod match_table;
#[path = "../../../../../src/comm/local/rendezvous.rs"]
pub(crate) mod rendezvous;
pub(crate) mod sync;
