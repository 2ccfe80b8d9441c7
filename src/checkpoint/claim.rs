//! [`Claim`]: which process writes into a folder, in the folder's name.
//!
//! A save writes into a folder `NAME.saving-CLAIM`, and renames it to `NAME` once all is there. The
//! claim says which process of which host created it, and when. So another job can tell the folder
//! of a save that continues from one that a killed process has left, and the claim is there from the
//! folder's first moment on, whatever is lost afterwards.

use std::fmt::{self, Display, Formatter};
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
#[cfg(target_os = "linux")]
use twox_hash::XxHash3_64;

/// Time after which a save of another host is taken for abandoned.
pub(super) const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Claims of the saves that this process makes.
static HELD: Mutex<Vec<Claim>> = Mutex::new(Vec::new());

/// A save's process, and a number that tells its saves apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    process: HostProcess,
    /// Seconds from 1970 to the claim.
    at: u64,
    nonce: u64,
}

/// A process, on whatever host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostProcess {
    /// Hash of the host, of its start, and of the namespace in which `id` is a process.
    host: u64,
    id: u32,
    /// Time at which it was started, in the host's own unit; 0 if the system does not tell.
    started: u64,
}

/// State of the process that made a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Liveness {
    /// It writes, or may write.
    Live,
    /// It has ended, or the save has.
    Ended,
    /// It is of another host, and the claim is not old.
    Unknown,
}

/// A claim of this process, held as long as this lives.
#[derive(Debug)]
pub(super) struct HeldClaim(Claim);

impl Claim {
    /// Returns a claim that no other save has.
    pub fn new() -> Self {
        Self {
            process: *THIS_PROCESS,
            at: seconds(SystemTime::now()),
            nonce: nonce(),
        }
    }

    /// Returns a claim of some process of another host.
    #[cfg(test)]
    pub fn of_another_host(age: Duration) -> Self {
        let claim = Self::new();
        Self {
            process: HostProcess {
                host: !claim.process.host,
                ..claim.process
            },
            at: claim.at - age.as_secs(),
            ..claim
        }
    }

    /// Reads what [`Display`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-').map(|part| u64::from_str_radix(part, 16));
        let mut next = || parts.next()?.ok();
        let claim = Self {
            process: HostProcess {
                host: next()?,
                id: next()?.try_into().ok()?,
                started: next()?,
            },
            at: next()?,
            nonce: next()?,
        };
        (claim.to_string() == text).then_some(claim)
    }

    /// Returns the id of the process on its host.
    pub fn process(&self) -> u32 {
        self.process.id
    }

    /// Returns the state of the process. Without `hold`, a save of this process has ended.
    pub fn liveness(&self) -> Liveness {
        if self.process == *THIS_PROCESS {
            return match HELD.lock().contains(self) {
                true => Liveness::Live,
                false => Liveness::Ended,
            };
        }
        let started = (self.process.host == THIS_PROCESS.host && THIS_PROCESS.started != 0)
            .then(|| start_of(self.process.id));
        let age = Duration::from_secs(seconds(SystemTime::now()).saturating_sub(self.at));
        judge(self.process.started, started, age)
    }

    /// Holds the claim of a save of this launch, on the rank that calls.
    pub fn hold(self) -> HeldClaim {
        HELD.lock().push(self);
        HeldClaim(self)
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        if let Some(at) = held.iter().position(|claim| *claim == self.0) {
            held.swap_remove(at);
        }
    }
}

impl Display for Claim {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let HostProcess { host, id, started } = self.process;
        write!(
            f,
            "{host:016x}-{id:x}-{started:x}-{:x}-{:016x}",
            self.at, self.nonce
        )
    }
}

/// Judges a claim of a process that started at `claimed`. `now` is the process that has its id now,
/// if that is known: its host is this one.
fn judge(claimed: u64, now: Option<ProcessNow>, age: Duration) -> Liveness {
    match now {
        Some(ProcessNow::None) => Liveness::Ended,
        Some(ProcessNow::Since(started)) if started != claimed => Liveness::Ended,
        Some(ProcessNow::Since(_) | ProcessNow::Unknown) => Liveness::Live,
        None if age > ABANDONED_AFTER => Liveness::Ended,
        None => Liveness::Unknown,
    }
}

/// The process of an id on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessNow {
    None,
    /// The time at which it was started.
    Since(u64),
    /// The system does not tell when it was started.
    Unknown,
}

static THIS_PROCESS: LazyLock<HostProcess> = LazyLock::new(|| {
    let id = std::process::id();
    HostProcess {
        host: host(),
        id,
        started: match start_of(id) {
            ProcessNow::Since(started) => started,
            ProcessNow::None | ProcessNow::Unknown => 0,
        },
    }
});

/// Returns a hash of what makes this host, its start and its process ids unique.
#[cfg(target_os = "linux")]
fn host() -> u64 {
    let text = || -> std::io::Result<Vec<u8>> {
        let mut text = std::fs::read("/proc/sys/kernel/hostname")?;
        text.extend(std::fs::read("/proc/sys/kernel/random/boot_id")?);
        // A container may have ids of its own.
        let ids = std::fs::read_link("/proc/self/ns/pid")?;
        text.extend(ids.into_os_string().into_encoded_bytes());
        Ok(text)
    };
    // What cannot be told apart is compared with nothing: this process is then a host of its own.
    text().map_or_else(|_| nonce(), |text| XxHash3_64::oneshot(&text))
}

/// Without the start of processes, the ids of a host are not compared: each process is a host of
/// its own.
#[cfg(not(target_os = "linux"))]
fn host() -> u64 {
    nonce()
}

#[cfg(target_os = "linux")]
fn start_of(id: u32) -> ProcessNow {
    let Ok(signed) = id.try_into() else {
        return ProcessNow::None;
    };
    // SAFETY: signal 0 is sent to no one, and only checked.
    if unsafe { libc::kill(signed, 0) } != 0
        && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
    {
        return ProcessNow::None;
    }
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    // The second field is a name in parentheses, which may have spaces.
    let fields: Vec<_> = stat
        .rsplit_once(')')
        .map(|(_, fields)| fields.split_whitespace().collect())
        .unwrap_or_default();
    // The third field is the state, the 22nd the start.
    match (fields.first(), fields.get(19).map(|start| start.parse())) {
        (Some(&("Z" | "X")), _) => ProcessNow::None,
        (_, Some(Ok(start))) => ProcessNow::Since(start),
        _ => ProcessNow::Unknown,
    }
}

#[cfg(not(target_os = "linux"))]
fn start_of(_: u32) -> ProcessNow {
    ProcessNow::Unknown
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Returns a number that no other call returns, with all likelihood.
pub(super) fn nonce() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_claim_is_read_as_it_was_written_and_nothing_else_is_one() {
        let claim = Claim::new();
        let text = claim.to_string();
        assert_eq!(Claim::parse(&text), Some(claim));
        for other in [
            "",
            "7",
            "0123456789abcdef",
            &text[1..],
            &format!("{text}-0"),
            &format!("{text}0"),
            &text.to_uppercase().replace(|c: char| c.is_numeric(), "A"),
        ] {
            assert_eq!(Claim::parse(other), None, "{other}");
        }
        assert_ne!(Claim::new(), claim);
    }

    #[test]
    fn a_save_of_this_process_is_live_while_a_rank_holds_its_claim() {
        let claim = Claim::new();
        assert_eq!(claim.liveness(), Liveness::Ended);
        let first = claim.hold();
        let second = claim.hold();
        drop(first);
        assert_eq!(claim.liveness(), Liveness::Live);
        drop(second);
        assert_eq!(claim.liveness(), Liveness::Ended);
    }

    #[test]
    fn a_process_is_judged_by_its_start_and_one_of_another_host_by_the_age_of_its_claim() {
        let second = Duration::from_secs(1);
        let young = Duration::ZERO;
        let old = ABANDONED_AFTER + second;
        for (now, age, expected) in [
            (Some(ProcessNow::None), young, Liveness::Ended),
            (Some(ProcessNow::Since(7)), old, Liveness::Live),
            (Some(ProcessNow::Since(8)), young, Liveness::Ended),
            (Some(ProcessNow::Unknown), old, Liveness::Live),
            (None, young, Liveness::Unknown),
            (None, ABANDONED_AFTER, Liveness::Unknown),
            (None, old, Liveness::Ended),
        ] {
            assert_eq!(judge(7, now, age), expected, "{now:?} {age:?}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn processes_of_this_host_are_found() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let claim = |id, started, host| Claim {
            process: HostProcess { host, id, started },
            ..Claim::new()
        };
        let ProcessNow::Since(started) = start_of(child.id()) else {
            panic!("the start of a process is known");
        };
        let host = THIS_PROCESS.host;
        let of_child = claim(child.id(), started, host);
        assert_eq!(of_child.liveness(), Liveness::Live);
        let reused = claim(child.id(), started + 1, host);
        assert_eq!(reused.liveness(), Liveness::Ended);
        let elsewhere = claim(child.id(), started, host ^ 1);
        assert_eq!(elsewhere.liveness(), Liveness::Unknown);
        child.kill().unwrap();
        // Also before its parent asks for its status.
        while of_child.liveness() == Liveness::Live {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(of_child.liveness(), Liveness::Ended);
    }
}
