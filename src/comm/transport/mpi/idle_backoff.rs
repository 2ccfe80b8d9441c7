//! Time that the progress thread sleeps between polls of MPI.
//!
//! An incoming message cannot wake the thread, which therefore polls. It sleeps for an eighth of
//! the time since the last event, so it delays a message by at most an eighth of the time that the
//! message is waited for. A thread that sleeps most of the time also gets a core that ranks keep
//! busy as soon as it wakes, whereas a thread that always polls would have to take turns with them.
//!
//! A queued message wakes the thread from a sleep longer than [`SHORT`], and so does a rank that
//! begins to block. This wakes only the thread of the rank's own process. The thread of the process
//! that the rank waits for may sleep as long as its own ranks compute.
//!
//! While a rank [makes progress](super::MpiTransport::progress), the thread need not poll: it
//! sleeps for [`SHORT`], and only checks that a rank still does.

use std::time::Duration;

/// Time for which the thread polls without sleeping after a message was sent or received, or a rank
/// began to block. More may arrive after a rank elsewhere has copied or reduced some megabytes.
/// Between polls the thread yields its core, for example to a rank that just received its result or
/// is about to call.
const AWAKE: Duration = Duration::from_millis(2);

/// Maximum time that a queued message waits until the thread's sleep ends by itself. The thread
/// also sleeps this long while a rank uses the engine.
pub(super) const SHORT: Duration = Duration::from_millis(1);

/// Maximum sleep while requests are in flight. Socket buffers hold about as much data as is
/// transferred in this time.
const UNDER_WAY: Duration = Duration::from_micros(50);

/// Maximum sleep while no request is in flight. Polling then takes 0.5 % of a core.
const IDLE: Duration = Duration::from_millis(4);

/// Returns the time to sleep after a poll that found nothing, if nothing was sent or received for
/// `nothing_for`. `under_way` is true if requests may be in flight.
pub(super) fn sleep(nothing_for: Duration, under_way: bool) -> Duration {
    if nothing_for < AWAKE {
        return Duration::ZERO;
    }
    (nothing_for / 8).min(if under_way { UNDER_WAY } else { IDLE })
}

/// Makes sleeps of the calling thread end on time. By default, Linux may extend them by 50
/// microseconds.
#[cfg(target_os = "linux")]
pub(super) fn sleep_exactly() {
    // SAFETY: this option takes one unsigned long, and affects only when the thread's sleeps end.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(nothing_for: u64, under_way: bool) -> u128 {
        sleep(Duration::from_micros(nothing_for), under_way).as_micros()
    }

    #[test]
    fn the_thread_sleeps_longer_the_longer_nothing_comes() {
        let sleeps = [0, 1999, 2400, 4000, 8000, 80_000].map(|time| micros(time, false));
        assert_eq!(sleeps, [0, 0, 300, 500, 1000, 4000]);
    }

    #[test]
    fn the_thread_sleeps_shortly_while_requests_are_in_flight() {
        assert_eq!(
            [0, 1999, 2400, 4000, 8000, 80_000].map(|time| micros(time, true)),
            [0, 0, 50, 50, 50, 50]
        );
    }
}
