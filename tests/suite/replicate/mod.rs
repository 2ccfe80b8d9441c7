//! Data parallelism by name: `replicate`.

mod buckets;
mod hooks;
mod nested;
mod options;
mod parity;
mod uneven;
