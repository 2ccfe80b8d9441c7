#[cfg(test)] use super::*;
