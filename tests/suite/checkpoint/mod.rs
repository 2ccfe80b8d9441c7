//! State dicts, and checkpoints in files.

mod net;
mod state_dict;
