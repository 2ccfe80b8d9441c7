//! [`ProgramExit`]: end of a rank's program.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::END_WORDS;
use super::bytes::{pack, truncate, unpack};
use super::hash::StableHasher;

/// End of a rank's program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramExit {
    /// Kind of the end.
    pub how: ExitKind,
    /// Time of the end, since the launch's start.
    pub at: Duration,
    /// Message of the error or the panic, truncated if it is long. If the process exited, this
    /// states which program ended it.
    pub text: String,
    /// The first failure of the launch, if the rank has received it. If another rank has ended the
    /// process of this rank, that exit.
    pub failure: Option<FirstFailure>,
}

/// Kind of the end of a rank's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitKind {
    /// The program returned `Ok`.
    Returned,
    /// The program returned an error, or unwound with one.
    Failed,
    /// The program panicked.
    Panicked,
    /// The process ended while the program ran, for example by [`exit`](std::process::exit).
    Exited,
}

/// First failure of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstFailure {
    /// Rank at fault, as `CommError::rank` returns it.
    pub rank: usize,
    /// True if the program of that rank failed, and not a collective.
    pub is_own: bool,
    /// True if ranks differ, either in their calls or in values that must be identical.
    pub is_difference: bool,
    /// Message of the failure, truncated if it is long.
    pub text: String,
}

/// Number of words before the texts: checksum, kind and lengths, nanoseconds, rank.
const HEAD: usize = 4;

/// Maximum number of bytes of each text.
const TEXT: usize = (END_WORDS - HEAD) / 2 * 8;

impl ProgramExit {
    /// Writes the end of the program. Must be called once.
    pub(super) fn write(&self, words: &[AtomicU64]) {
        let text = truncate(&self.text, TEXT);
        let failure = self.failure.as_ref();
        let first = failure.map_or("", |failure| truncate(&failure.text, TEXT));
        let flag =
            |is: fn(&FirstFailure) -> bool, bit: u32| u64::from(failure.is_some_and(is)) << bit;
        let flags = flag(|failure| failure.is_own, 8) | flag(|failure| failure.is_difference, 9);
        let kind = self.how as u64 | flags | (text.len() as u64) << 16 | (first.len() as u64) << 32;
        let rank = failure.map_or(0, |failure| failure.rank as u64 + 1);
        let head = [kind, self.at.as_nanos() as u64, rank];
        let all = || {
            head.into_iter()
                .chain(pack(text.as_bytes()))
                .chain(pack(first.as_bytes()))
        };
        for (word, value) in words[1..].iter().zip(all()) {
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(StableHasher::of(all()), Ordering::Release);
    }

    /// Reads the end of the program. Returns `None` if the program is running, or the end was being
    /// written.
    pub(super) fn read(words: &[u64]) -> Option<Self> {
        let &[check, kind, at, rank] = words.first_chunk()?;
        let text = (kind >> 16 & 0xffff) as usize;
        let first = (kind >> 32 & 0xffff) as usize;
        let used = HEAD + text.div_ceil(8) + first.div_ceil(8);
        if check != StableHasher::of(words.get(1..used)?.iter().copied()) {
            return None;
        }
        let read =
            |words: &[u64], count| String::from_utf8_lossy(&unpack(words, count)).into_owned();
        let failure = rank.checked_sub(1).map(|rank| FirstFailure {
            rank: rank as usize,
            is_own: kind >> 8 & 1 == 1,
            is_difference: kind >> 9 & 1 == 1,
            text: read(&words[HEAD + text.div_ceil(8)..], first),
        });
        let how = *[
            ExitKind::Returned,
            ExitKind::Failed,
            ExitKind::Panicked,
            ExitKind::Exited,
        ]
        .get(kind as usize & 0xff)?;
        Some(Self {
            how,
            at: Duration::from_nanos(at),
            text: read(&words[HEAD..], text),
            failure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_comes_back_or_not_at_all() {
        let failure = FirstFailure {
            rank: 7,
            is_own: false,
            is_difference: true,
            text: "é".repeat(2000),
        };
        let at = Duration::from_nanos(12_345);
        let ending = ProgramExit {
            how: ExitKind::Panicked,
            at,
            text: "boom".into(),
            failure: Some(failure),
        };
        let words: Vec<AtomicU64> = (0..END_WORDS).map(|_| AtomicU64::new(0)).collect();
        let read = || {
            ProgramExit::read(
                &words
                    .iter()
                    .map(|word| word.load(Ordering::Relaxed))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(read(), None);
        ending.write(&words);
        let found = read().unwrap();
        assert_eq!(
            (found.how, found.at, &*found.text),
            (ExitKind::Panicked, at, "boom")
        );
        let first = found.failure.unwrap();
        assert_eq!(
            (first.rank, first.is_own, first.is_difference),
            (7, false, true)
        );
        assert_eq!(first.text, "é".repeat(TEXT / 2));
        words[3].store(9, Ordering::Relaxed);
        assert_eq!(read(), None, "torn");
    }
}
