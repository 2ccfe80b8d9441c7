//! Values computed by PyTorch (`tests/golden/*.json`).

mod brute;
mod redistribute;
