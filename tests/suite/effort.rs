//! The amount that tests try, as the environment says.

use std::env;

/// Returns true if everything is tried, as `.ci/long` has time for. Of cases that are much the
/// same, `cargo test` tries some.
pub fn is_long() -> bool {
    env::var_os("LONG_TESTS").is_some()
}

/// Returns true if a sample is enough, as for `.ci/quick smoke` between two edits.
pub fn is_smoke() -> bool {
    env::var_os("SMOKE_TESTS").is_some()
}

/// Returns the number in the environment variable `name`, or `default` if it is not set.
pub fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

/// Returns true if a run ends at its first failure, without making it small: if
/// `RANDOM_STOP_AT_FAILURE` is set.
pub fn stops_at_failure() -> bool {
    env::var_os("RANDOM_STOP_AT_FAILURE").is_some()
}
