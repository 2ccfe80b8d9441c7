//! Where things lie in a recorder's memory, and so in its file.
//!
//! ```text
//! word 0            512                8704              8704 + 32 * 1024
//! ┌─────────┬───────┬──────────────────┬────────┬────────┬───┐
//! │ header  │ end   │ channels         │ record │ record │ ..│
//! └─────────┴───────┴──────────────────┴────────┴────────┴───┘
//! ```
//!
//! The header is written once, but for two counters. The end is written once, when the rank's program ends. Channels are
//! added one behind the other. Records are a ring: operation `i` is in record `i % 1024`.
//!
//! Whoever reads may do so at any moment of a program that runs, or was killed at any moment. Every part has a check of its
//! words, without which it counts as not there. A word by itself is whole: it is stored at once.

/// How many operations are kept.
pub const OPERATIONS: usize = 1024;

/// The first word of a file: `bdflight`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"bdflight");

/// What the file's layout is called.
pub const VERSION: u64 = 1;

/// Words of the header.
pub mod header {
    /// Says what file it is, of what version, and the rank, the number of ranks, the launch, the process and its start, the
    /// wall clock's nanoseconds at the launch's start, and the host: one word each, the last [`HOST`] words.
    pub const FIXED: usize = 8 + HOST;
    /// Words of the host's name: its length in bytes, and these.
    pub const HOST: usize = 9;
    /// Of the fixed ones.
    pub const CHECK: usize = FIXED;
    /// How many operations there have been.
    pub const POSTED: usize = CHECK + 1;
    /// Words of channels.
    pub const CHANNELS: usize = POSTED + 1;
}

/// The first word of how the program ended.
pub const END: usize = 64;

/// Words of that.
pub const END_WORDS: usize = CHANNELS - END;

/// The first word of channels.
pub const CHANNELS: usize = 512;

/// Words of channels.
pub const CHANNEL_WORDS: usize = 8192;

/// The first word of records.
pub const RECORDS: usize = CHANNELS + CHANNEL_WORDS;

/// Words of a record: half a kilobyte would hold no more of most calls.
pub const RECORD_WORDS: usize = 32;

/// All there are.
pub const WORDS: usize = RECORDS + RECORD_WORDS * OPERATIONS;
