//! [`IdleBackoff`]: time that the progress thread sleeps between polls of MPI.

#[cfg(target_os = "linux")]
use std::ffi::{c_int, c_ulong};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// Time for which the thread polls without sleeping after a message was sent or received, or a rank began to
/// block. More may arrive after a rank elsewhere has copied or reduced some megabytes. Between polls the thread
/// yields its core, for example to a rank that just received its result or is about to call.
const AWAKE: Duration = Duration::from_millis(2);

/// Maximum time that a queued message waits until the thread's sleep ends by itself. The thread also sleeps this
/// long while a rank uses the engine.
pub(super) const SHORT: Duration = Duration::from_millis(1);

/// Time for which the thread polls without sleeping if requests are in flight and a core is free. MPI transfers a
/// message in steps, only while it is called, and does not report how far it is.
const PATIENT: Duration = Duration::from_millis(50);

/// Maximum sleep while requests are in flight. Socket buffers hold about as much data as is transferred in this
/// time.
const UNDER_WAY: Duration = Duration::from_micros(50);

/// Maximum sleep while no request is in flight. Polling then takes 0.5 % of a core.
const IDLE: Duration = Duration::from_millis(4);

/// Backoff policy of the progress thread.
///
/// An incoming message cannot wake the thread, which therefore polls. It sleeps for an eighth of the time since
/// the last event, so it delays a message by at most an eighth of the time that the message is waited for. A
/// thread that sleeps most of the time also gets a core that ranks keep busy as soon as it wakes, whereas a thread
/// that always polls would have to take turns with them.
///
/// A queued message wakes the thread from a sleep longer than [`SHORT`], and so does a rank that begins to block.
/// This wakes only the thread of the rank's own process. The thread of the process that the rank waits for may
/// sleep as long as its own ranks compute.
///
/// While a rank [makes progress](super::MpiTransport::progress), the thread need not poll, and only checks that a
/// rank still does.
pub(super) struct IdleBackoff {
    last: Instant,
    /// True if a rank has used the engine since the last pause.
    helped: bool,
    cores: Cores,
}

impl IdleBackoff {
    /// Creates the backoff of the calling thread, and reduces the thread's timer slack on Linux.
    pub fn new() -> Self {
        #[cfg(target_os = "linux")]
        sleep_exactly();
        Self { last: Instant::now(), helped: false, cores: Cores::new() }
    }

    /// Records that a message was sent or received, or that a rank blocks.
    pub fn was_busy(&mut self) {
        self.last = Instant::now();
    }

    /// Records that a rank has polled.
    pub fn was_helped(&mut self) {
        self.helped = true;
        self.was_busy();
    }

    /// Returns the time to sleep after a poll that found nothing. `under_way` is true if requests may be in
    /// flight.
    pub fn pause(&mut self, under_way: bool) -> Duration {
        if std::mem::take(&mut self.helped) {
            return SHORT;
        }
        sleep(self.last.elapsed(), under_way, || self.cores.one_is_free())
    }
}

/// Returns the time to sleep if nothing was sent or received for `nothing_for`.
fn sleep(nothing_for: Duration, under_way: bool, core_is_free: impl FnOnce() -> bool) -> Duration {
    if nothing_for < AWAKE || (under_way && nothing_for < PATIENT && core_is_free()) {
        return Duration::ZERO;
    }
    (nothing_for / 8).min(if under_way { UNDER_WAY } else { IDLE })
}

/// Number of cores, and the number of running threads if the system reports it.
struct Cores {
    number: usize,
    load: Option<File>,
}

impl Cores {
    fn new() -> Self {
        let number = thread::available_parallelism().map_or(1, usize::from);
        Self { number, load: File::open("/proc/loadavg").ok() }
    }

    fn one_is_free(&self) -> bool {
        let mut text = [0; 64];
        let read = |file: &File| file.read_at(&mut text, 0).ok();
        let Some(length) = self.load.as_ref().and_then(read) else { return false };
        // The calling thread is one of the running threads.
        running(&text[..length]).is_some_and(|threads| threads <= self.number)
    }
}

/// Returns the number of runnable threads from the text of `/proc/loadavg`, for example `0.20 0.18 0.12 1/80
/// 11206`.
fn running(load: &[u8]) -> Option<usize> {
    str::from_utf8(load).ok()?.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

/// Makes sleeps of the calling thread end on time. By default, Linux may extend them by 50 microseconds.
#[cfg(target_os = "linux")]
fn sleep_exactly() {
    const PR_SET_TIMERSLACK: c_int = 29;
    const NANOSECONDS: c_ulong = 1000;
    unsafe extern "C" {
        fn prctl(option: c_int, ...) -> c_int;
    }
    // SAFETY: this option takes one unsigned long, and affects only when the thread's sleeps end.
    unsafe { prctl(PR_SET_TIMERSLACK, NANOSECONDS) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(nothing_for: u64, under_way: bool, core_is_free: bool) -> u128 {
        sleep(Duration::from_micros(nothing_for), under_way, || core_is_free).as_micros()
    }

    #[test]
    fn the_thread_sleeps_longer_the_longer_nothing_comes() {
        for core_is_free in [false, true] {
            let sleeps = [0, 1999, 2400, 4000, 8000, 80_000].map(|time| micros(time, false, core_is_free));
            assert_eq!(sleeps, [0, 0, 300, 500, 1000, 4000]);
        }
    }

    #[test]
    fn the_thread_is_awake_for_what_is_under_way_where_a_core_is_free() {
        let times = [0, 1999, 2400, 4000, 8000, 80_000];
        assert_eq!(times.map(|time| micros(time, true, false)), [0, 0, 50, 50, 50, 50]);
        assert_eq!(times.map(|time| micros(time, true, true)), [0, 0, 0, 0, 0, 50]);
    }

    #[test]
    fn the_system_says_how_many_threads_run() {
        assert_eq!(running(b"0.20 0.18 0.12 3/80 11206\n"), Some(3));
        assert_eq!(running(b""), None);
    }
}
