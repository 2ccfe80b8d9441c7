//! Channels of a rank: groups and names, each with the number of collectives in which the rank has
//! taken part.
//!
//! ```text
//! check  bytes  posted  text
//! ┌──────┬──────┬──────┬─────────────────────────────────────────────────────┬──
//! │      │      │      │ length, name, number of ranks, distance, the ranks  │ the next
//! └──────┴──────┴──────┴─────────────────────────────────────────────────────┴──
//! ```
//!
//! If ranks are equally far apart, as those of a mesh dimension, only the first rank and the
//! distance are stored. Otherwise the distance is 0.

use std::sync::atomic::{AtomicU64, Ordering};

use super::bytes::{FixedBuf, pack, take_number, truncate, unpack};
use super::hash::StableHasher;

/// Number of words before the text.
const HEAD: usize = 3;

/// Index of the counter of a channel.
const POSTED: usize = 2;

/// Maximum number of bytes of a channel's text. A group whose ranks need more is not recorded.
const MOST: usize = 4096;

/// A channel as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupRecord {
    pub name: String,
    pub ranks: Vec<usize>,
    /// Number of collectives that the backend has accepted.
    pub posted: u64,
}

/// Writes a channel to the unused words `words`. Returns the number of words used, or `None` if the
/// capacity is too small.
pub(super) fn write(words: &[AtomicU64], name: &str, ranks: &[usize]) -> Option<usize> {
    let text = text(name, ranks)?;
    let used = words.get(..HEAD + text.bytes().len().div_ceil(8))?;
    used[1].store(text.bytes().len() as u64, Ordering::Relaxed);
    for (word, value) in used[HEAD..].iter().zip(pack(text.bytes())) {
        word.store(value, Ordering::Relaxed);
    }
    used[0].store(StableHasher::of(pack(text.bytes())), Ordering::Release);
    Some(used.len())
}

/// Encodes the name and the ranks.
fn text(name: &str, ranks: &[usize]) -> Option<FixedBuf<MOST>> {
    let mut text = FixedBuf::new();
    let name = truncate(name, 200);
    let apart = match ranks {
        [first, second, ..] => second.checked_sub(*first),
        _ => None,
    };
    let apart =
        apart.filter(|apart| *apart > 0 && ranks.windows(2).all(|two| two[0] + apart == two[1]));
    let mut fits = text.push_number(name.len() as u64) && text.push(name.as_bytes());
    fits =
        fits && text.push_number(ranks.len() as u64) && text.push_number(apart.unwrap_or(0) as u64);
    let said = if apart.is_some() { &ranks[..1] } else { ranks };
    fits = fits && said.iter().all(|rank| text.push_number(*rank as u64));
    fits.then_some(text)
}

/// Sets the counter of the channel at `words` to `posted`, unless it is larger already.
pub(super) fn count(words: &[AtomicU64], posted: u64) {
    words[POSTED].fetch_max(posted, Ordering::Release);
}

/// Decodes the channels in the used words. Their numbers are their indices plus 1.
pub(super) fn read(mut words: &[u64]) -> Vec<GroupRecord> {
    std::iter::from_fn(|| {
        let &[check, bytes, posted] = words.first_chunk()?;
        let length = (bytes as usize).checked_add(7)? / 8;
        let text = words.get(HEAD..length.checked_add(HEAD)?)?;
        words = &words[HEAD + length..];
        let text = unpack(text, bytes as usize);
        if check != StableHasher::of(pack(&text)) {
            return None;
        }
        let mut text = &text[..];
        let length = take_number(&mut text)? as usize;
        let name = String::from_utf8_lossy(text.split_off(..length)?).into_owned();
        let count = take_number(&mut text)? as usize;
        let apart = take_number(&mut text)? as usize;
        let mut rank = || Some(take_number(&mut text)? as usize);
        let ranks = if apart > 0 {
            let first = rank()?;
            (0..count).map(|place| first + place * apart).collect()
        } else {
            (0..count).map(|_| rank()).collect::<Option<_>>()?
        };
        Some(GroupRecord {
            name,
            ranks,
            posted,
        })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_come_back_one_behind_the_other() {
        let words: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let groups: [(&str, &[usize]); 5] = [
            ("", &[0, 1, 2]),
            ("reduced", &[5]),
            ("", &[3, 0, 300]),
            ("a", &[0, 4, 8, 12]),
            ("down", &[2, 1, 0]),
        ];
        let mut used = 0;
        for (at, (name, ranks)) in groups.into_iter().enumerate() {
            let begin = used;
            used += write(&words[used..], name, ranks).unwrap();
            count(&words[begin..], at as u64 * 3);
        }
        assert_eq!(write(&words[60..], "does not fit", &[1]), None);
        let read = |used: usize| {
            read(
                &words[..used]
                    .iter()
                    .map(|word| word.load(Ordering::Relaxed))
                    .collect::<Vec<_>>(),
            )
        };
        let found = read(used);
        assert_eq!(found.len(), groups.len());
        for (
            at,
            (
                GroupRecord {
                    name,
                    ranks,
                    posted,
                },
                group,
            ),
        ) in found.iter().zip(groups).enumerate()
        {
            assert_eq!(
                ((name.as_str(), &ranks[..]), *posted),
                (group, at as u64 * 3)
            );
        }
        assert_eq!(read(used - 1).len(), 4, "an incomplete channel is not read");
        words[HEAD].fetch_xor(1 << 9, Ordering::Relaxed);
        assert_eq!(
            read(used).len(),
            0,
            "a channel with a wrong checksum is not read"
        );
    }

    #[test]
    fn many_ranks_that_are_evenly_apart_take_few_words() {
        let ranks: Vec<usize> = (0..4096).collect();
        let words: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        assert!(write(&words, "", &ranks).is_some());
        let read = read(
            &words
                .into_iter()
                .map(AtomicU64::into_inner)
                .collect::<Vec<_>>(),
        );
        assert_eq!(read[0].ranks, ranks);
    }
}
