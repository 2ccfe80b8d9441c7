//! [`IdleBackoff`]: how long the communicating thread sleeps between looks at MPI.

#[cfg(target_os = "linux")]
use std::ffi::{c_int, c_ulong};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// Without sleep for this long after something has come, or gone, or a rank has begun to sleep: more may come, when a rank
/// elsewhere has copied or added some megabytes. Between looks it lets others have the core: a rank that has just got its
/// result, or is about to call.
const AWAKE: Duration = Duration::from_millis(2);

/// How long a parcel may wait for the thread, and the thread's sleep beside a rank that helps.
pub(super) const SHORT: Duration = Duration::from_millis(1);

/// Without sleep for this long where something is under way and a core is free: MPI moves a message bit by bit, whenever
/// it is called, and does not say how far it has come.
const PATIENT: Duration = Duration::from_millis(50);

/// The longest sleep while something is under way: what sockets hold lasts about as long.
const UNDER_WAY: Duration = Duration::from_micros(50);

/// The longest sleep while nothing is: it takes half a hundredth of a core.
const IDLE: Duration = Duration::from_millis(4);

/// What has come cannot wake the thread, which has to look. It sleeps an eighth of the time for which nothing has come,
/// so a wait is an eighth longer at most; and a thread that sleeps most of the time is let onto a core that ranks keep
/// busy as soon as it wakes, where one that looks all the time would have to take turns with them. A parcel to be sent
/// wakes it from a sleep longer than [`SHORT`], and so does a rank that sleeps until something comes: here, not in the process
/// that it waits for, whose thread may rest as long as its own ranks compute.
///
/// While a rank [helps](super::MpiTransport::progress) the thread need not look, only see that somebody does.
pub(super) struct IdleBackoff {
    last: Instant,
    /// Since the last pause.
    helped: bool,
    cores: Cores,
}

impl IdleBackoff {
    /// Of the calling thread.
    pub fn new() -> Self {
        #[cfg(target_os = "linux")]
        sleep_exactly();
        Self { last: Instant::now(), helped: false, cores: Cores::new() }
    }

    /// Something has come, or gone, or is waited for by a rank that sleeps.
    pub fn was_busy(&mut self) {
        self.last = Instant::now();
    }

    /// A rank has looked.
    pub fn was_helped(&mut self) {
        self.helped = true;
        self.was_busy();
    }

    /// How long to sleep, now that nothing has.
    pub fn pause(&mut self, under_way: bool) -> Duration {
        if std::mem::take(&mut self.helped) {
            return SHORT;
        }
        sleep(self.last.elapsed(), under_way, || self.cores.one_is_free())
    }
}

fn sleep(nothing_for: Duration, under_way: bool, core_is_free: impl FnOnce() -> bool) -> Duration {
    if nothing_for < AWAKE || (under_way && nothing_for < PATIENT && core_is_free()) {
        return Duration::ZERO;
    }
    (nothing_for / 8).min(if under_way { UNDER_WAY } else { IDLE })
}

/// The machine's cores, where the system says how many threads run.
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
        // This one among them.
        running(&text[..length]).is_some_and(|threads| threads <= self.number)
    }
}

/// How many threads run or want to, by the text of `/proc/loadavg`, such as `0.20 0.18 0.12 1/80 11206`.
fn running(load: &[u8]) -> Option<usize> {
    str::from_utf8(load).ok()?.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

/// Has sleeps of the calling thread end when they should: Linux lets them last 50 microseconds longer.
#[cfg(target_os = "linux")]
fn sleep_exactly() {
    const PR_SET_TIMERSLACK: c_int = 29;
    const NANOSECONDS: c_ulong = 1000;
    unsafe extern "C" {
        fn prctl(option: c_int, ...) -> c_int;
    }
    // SAFETY: this option takes one unsigned long, and changes nothing but when the thread's sleeps end.
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
