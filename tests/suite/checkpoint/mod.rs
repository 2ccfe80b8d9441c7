//! State dicts, and checkpoints in files.

mod errors;
mod folder;
mod frozen;
mod killed;
mod net;
mod random_net;
mod resume;
mod round_trip;
mod runs;
mod safetensors;
mod sharding;
mod state_dict;
mod tools;
