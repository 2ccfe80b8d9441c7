//! [`ProcessState`]: state of a rank's process, read from `/proc`.

use std::time::Duration;
use std::{env, fs};

#[cfg(target_os = "linux")]
use rustix::param::clock_ticks_per_second;
#[cfg(target_os = "linux")]
use rustix::time::{ClockId, clock_gettime};

/// State of a rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// The process exists and is not stopped.
    Runs,
    /// The process is stopped, by a signal or a debugger.
    Stopped,
    /// The process no longer exists, or is a zombie.
    Gone,
    /// The process is on another host, or the system does not report its state.
    Unknown,
}

impl ProcessState {
    /// Returns the state of process `pid` of `host`, which began at `start`.
    pub(crate) fn of(host: &str, pid: u32, start: u64) -> Self {
        if host.is_empty()
            || host != self::host()
            || start == 0
            || process_start(std::process::id()).is_none()
        {
            return Self::Unknown;
        }
        match stat(pid) {
            None => Self::Gone,
            Some(stat) if stat.start != start => Self::Gone,
            // The process was killed, and its parent has not waited for it yet.
            Some(Stat {
                state: 'Z' | 'X' | 'x',
                ..
            }) => Self::Gone,
            Some(Stat {
                state: 'T' | 't', ..
            }) => Self::Stopped,
            Some(_) => Self::Runs,
        }
    }
}

/// Fields of `/proc/<pid>/stat`.
struct Stat {
    state: char,
    start: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The fields follow the program's name, which may contain any character: first the state, and
    // as the 20th the start.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some(Stat {
        state: fields.next()?.chars().next()?,
        start: fields.nth(18)?.parse().ok()?,
    })
}

/// Returns the start time of a process, in clock ticks since boot.
pub(crate) fn process_start(pid: u32) -> Option<u64> {
    Some(stat(pid)?.start)
}

/// Returns the time since the start of a process of this host, which `start` gives in clock ticks
/// since boot.
#[cfg(target_os = "linux")]
pub(crate) fn age(start: u64) -> Option<Duration> {
    let now = clock_gettime(ClockId::Boottime);
    let since_boot = Duration::new(now.tv_sec.try_into().ok()?, now.tv_nsec.try_into().ok()?);
    let start = Duration::from_millis(start * 1000 / clock_ticks_per_second());
    since_boot.checked_sub(start).filter(|_| !start.is_zero())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn age(_: u64) -> Option<Duration> {
    None
}

/// Returns the name of this host.
pub(crate) fn host() -> String {
    let named = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    named
        .map(|name| name.trim().to_string())
        .or_else(|| env::var("HOSTNAME").ok())
        .unwrap_or_default()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_start() {
        let own = std::process::id();
        let host = host();
        let start = process_start(own).unwrap();
        assert!(start > 0);
        assert!(
            age(start).unwrap() < age(1).unwrap(),
            "the first process is older"
        );
        assert_eq!(age(u64::MAX / 1000), None, "it starts in the future");
        assert_eq!(ProcessState::of(&host, own, start), ProcessState::Runs);
        assert_eq!(
            ProcessState::of(&host, own, start + 1),
            ProcessState::Gone,
            "another process has the same pid"
        );
        assert_eq!(ProcessState::of(&host, 0, start), ProcessState::Gone);
        assert_eq!(
            ProcessState::of("elsewhere", own, start),
            ProcessState::Unknown
        );
        assert_eq!(ProcessState::of(&host, own, 0), ProcessState::Unknown);
    }
}
