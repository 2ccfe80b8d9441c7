//! State dicts, and checkpoints in files.

mod killed;
mod net;
mod state_dict;
mod tools;
