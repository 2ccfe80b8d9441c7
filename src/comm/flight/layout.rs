//! Layout of a recorder's memory, which is also the format of its file.
//!
//! ```text
//! word 0            512                8704              8704 + 32 * 1024
//! ┌─────────┬───────┬──────────────────┬────────┬────────┬───┐
//! │ header  │ end   │ channels         │ record │ record │ ..│
//! └─────────┴───────┴──────────────────┴────────┴────────┴───┘
//! ```
//!
//! The header is written once, except for two counters. The end is written once, when the rank's program ends.
//! Channels are appended. Records form a ring: operation `i` is in record `i % 1024`.
//!
//! A reader may copy the memory at any moment, while the program runs or after it was killed at any moment. Every
//! section therefore has a checksum, and a section with a wrong checksum counts as absent. A single word is never
//! torn, because it is stored atomically.

/// Number of operations that are kept.
pub const OPERATIONS: usize = 1024;

/// Magic number, the first word in a file: `bdflight`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"bdflight");

/// Version of the format.
pub const VERSION: u64 = 1;

/// Words of the header.
pub mod header {
    /// Number of words that are written once: magic, version, rank, number of ranks, launch, pid, start of the
    /// process and wall-clock nanoseconds of the launch's start, one word each, and then [`HOST`] words.
    pub const FIXED: usize = 8 + HOST;
    /// Number of words of the host's name: its length in bytes, and the bytes.
    pub const HOST: usize = 9;
    /// Index of the checksum of these words.
    pub const CHECK: usize = FIXED;
    /// Index of the number of operations posted.
    pub const POSTED: usize = CHECK + 1;
    /// Index of the number of words used by channels.
    pub const CHANNELS: usize = POSTED + 1;
}

/// Index where the program's end starts.
pub const END: usize = 64;

/// Number of words of the program's end.
pub const END_WORDS: usize = CHANNELS - END;

/// Index where the channels start.
pub const CHANNELS: usize = 512;

/// Number of words of the channels.
pub const CHANNEL_WORDS: usize = 8192;

/// Index where the records start.
pub const RECORDS: usize = CHANNELS + CHANNEL_WORDS;

/// Number of words of a record. Twice as many would hold no more of most calls.
pub const RECORD_WORDS: usize = 32;

/// Total number of words.
pub const WORDS: usize = RECORDS + RECORD_WORDS * OPERATIONS;
