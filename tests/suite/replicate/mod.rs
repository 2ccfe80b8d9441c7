//! Data parallelism by name: `replicate`.

mod buckets;
mod nested;
mod parity;
