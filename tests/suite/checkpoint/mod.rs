//! State dicts, and checkpoints in files.

mod killed;
mod tools;
