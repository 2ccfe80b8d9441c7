//! [`ProgramExit`]: how a rank's program has ended.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::bytes::{pack, truncate, unpack};
use super::fold::Fold;
use super::layout::END_WORDS;

/// How a rank's program has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramExit {
    /// Whether it returned, with or without an error, panicked or exited.
    pub how: ExitKind,
    /// When, since the launch's start.
    pub at: Duration,
    /// What it said: the error's text or the panic's, as much of it as fits. Of one that has exited, who has ended the process.
    pub text: String,
    /// The first failure of the launch, as far as the rank has heard of it: another rank's exit, if that has ended its process.
    pub failure: Option<FirstFailure>,
}

/// In which way a rank's program has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitKind {
    /// It returned `Ok`.
    Returned,
    /// It returned an error, or unwound with one.
    Failed,
    /// It panicked.
    Panicked,
    /// Its process has ended, such as by [`exit`](std::process::exit), while it ran.
    Exited,
}

/// The first failure of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstFailure {
    /// The rank at fault, as `CommError::rank` says.
    pub rank: usize,
    /// Whether it is that rank's program that failed, and not a collective.
    pub is_own: bool,
    /// Whether it is that ranks differ: in what they call, or in what all hold alike.
    pub is_difference: bool,
    /// Its text, as much of it as fits.
    pub text: String,
}

/// Check, kind and lengths, nanoseconds, rank.
const HEAD: usize = 4;

/// Bytes of each text.
const TEXT: usize = (END_WORDS - HEAD) / 2 * 8;

impl ProgramExit {
    /// Writes it, once.
    pub(super) fn write(&self, words: &[AtomicU64]) {
        let text = truncate(&self.text, TEXT);
        let failure = self.failure.as_ref();
        let first = failure.map_or("", |failure| truncate(&failure.text, TEXT));
        let flag = |is: fn(&FirstFailure) -> bool, bit: u32| u64::from(failure.is_some_and(is)) << bit;
        let flags = flag(|failure| failure.is_own, 8) | flag(|failure| failure.is_difference, 9);
        let kind = self.how as u64 | flags | (text.len() as u64) << 16 | (first.len() as u64) << 32;
        let rank = failure.map_or(0, |failure| failure.rank as u64 + 1);
        let head = [kind, self.at.as_nanos() as u64, rank];
        let all = || head.into_iter().chain(pack(text.as_bytes())).chain(pack(first.as_bytes()));
        for (word, value) in words[1..].iter().zip(all()) {
            word.store(value, Ordering::Relaxed);
        }
        words[0].store(Fold::of(all()), Ordering::Release);
    }

    /// `None`: the program runs, or was about to say how it ended.
    pub(super) fn read(words: &[u64]) -> Option<Self> {
        let &[check, kind, at, rank] = words.first_chunk()?;
        let (text, first) = ((kind >> 16 & 0xffff) as usize, (kind >> 32 & 0xffff) as usize);
        let used = HEAD + text.div_ceil(8) + first.div_ceil(8);
        if check != Fold::of(words.get(1..used)?.iter().copied()) {
            return None;
        }
        let read = |words: &[u64], count| String::from_utf8_lossy(&unpack(words, count)).into_owned();
        let failure = rank.checked_sub(1).map(|rank| FirstFailure {
            rank: rank as usize,
            is_own: kind >> 8 & 1 == 1,
            is_difference: kind >> 9 & 1 == 1,
            text: read(&words[HEAD + text.div_ceil(8)..], first),
        });
        let how =
            *[ExitKind::Returned, ExitKind::Failed, ExitKind::Panicked, ExitKind::Exited].get(kind as usize & 0xff)?;
        Some(Self { how, at: Duration::from_nanos(at), text: read(&words[HEAD..], text), failure })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_comes_back_or_not_at_all() {
        let failure = FirstFailure { rank: 7, is_own: false, is_difference: true, text: "é".repeat(2000) };
        let at = Duration::from_nanos(12_345);
        let ending = ProgramExit { how: ExitKind::Panicked, at, text: "boom".into(), failure: Some(failure) };
        let words: Vec<AtomicU64> = (0..END_WORDS).map(|_| AtomicU64::new(0)).collect();
        let read = || ProgramExit::read(&words.iter().map(|word| word.load(Ordering::Relaxed)).collect::<Vec<_>>());
        assert_eq!(read(), None);
        ending.write(&words);
        let found = read().unwrap();
        assert_eq!((found.how, found.at, &*found.text), (ExitKind::Panicked, at, "boom"));
        let first = found.failure.unwrap();
        assert_eq!((first.rank, first.is_own, first.is_difference), (7, false, true));
        assert_eq!(first.text, "é".repeat(TEXT / 2));
        words[3].store(9, Ordering::Relaxed);
        assert_eq!(read(), None, "torn");
    }
}
