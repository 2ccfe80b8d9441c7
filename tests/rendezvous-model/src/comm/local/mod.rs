#[path = "../../../../../src/comm/local/board.rs"]
pub(crate) mod board;
#[path = "../../../../../src/comm/local/rendezvous.rs"]
pub(crate) mod rendezvous;
pub(crate) mod sync;
