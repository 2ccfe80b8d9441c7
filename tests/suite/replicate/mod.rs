//! Data parallelism by name: `replicate`.

mod buckets;
mod hooks;
mod nested;
mod parity;
mod uneven;
