#[path = "../../../../../src/comm/control/match_table.rs"]
pub(crate) mod match_table;
#[path = "../../../../../src/comm/control/rendezvous.rs"]
pub(crate) mod rendezvous;
pub(crate) mod sync;
