//! What a launch returned.

/// What this process's ranks returned, in order of ranks, without their numbers.
pub fn values<T>(ranks: Vec<(usize, T)>) -> Vec<T> {
    ranks.into_iter().map(|(_, value)| value).collect()
}
