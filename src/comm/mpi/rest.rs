//! [`Rest`]: how long the communicating thread sleeps between looks at MPI.

use std::thread;
use std::time::{Duration, Instant};

/// Without sleep for this long after something has come: a reply may.
const AWAKE: Duration = Duration::from_micros(20);

/// The longest sleep while nothing is being sent or received: a hundredth of a core at most.
const IDLE: Duration = Duration::from_millis(1);

/// The longest sleep while something is: what the sockets of a network hold lasts longer.
const UNDER_WAY: Duration = Duration::from_micros(50);

/// What has come cannot wake the thread, which has to look. It sleeps an eighth of the time for which nothing has come,
/// so a wait is an eighth longer at most; and a thread that sleeps most of the time is let onto a core that ranks keep
/// busy as soon as it wakes, where one that looks all the time would have to take turns with them. A parcel to be sent
/// wakes it at once.
pub(super) struct Rest {
    last: Instant,
}

impl Rest {
    pub fn new() -> Self {
        Self { last: Instant::now() }
    }

    /// Something has come, or gone.
    pub fn was_busy(&mut self) {
        self.last = Instant::now();
    }

    /// Nothing has.
    pub fn pause(&self, under_way: bool) {
        match sleep(self.last.elapsed(), under_way) {
            Duration::ZERO => std::hint::spin_loop(),
            sleep => thread::park_timeout(sleep),
        }
    }
}

fn sleep(nothing_for: Duration, under_way: bool) -> Duration {
    if nothing_for < AWAKE {
        return Duration::ZERO;
    }
    (nothing_for / 8).min(if under_way { UNDER_WAY } else { IDLE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_sleeps_longer_the_longer_nothing_comes() {
        let micros = |nothing_for, under_way| sleep(Duration::from_micros(nothing_for), under_way).as_micros();
        assert_eq!([0, 19, 80, 800, 8000, 80_000].map(|time| micros(time, false)), [0, 0, 10, 100, 1000, 1000]);
        assert_eq!([0, 19, 80, 800, 8000, 80_000].map(|time| micros(time, true)), [0, 0, 10, 50, 50, 50]);
    }
}
