//! [`StableHasher`]: a hash that is the same in every process.

use std::hash::Hasher;

/// Fast 64-bit hash that is the same in every process of one build. It compares data that does not
/// fit into a record, and detects torn records. It is not resistant to deliberate collisions.
#[derive(Debug, Clone, Copy, Default)]
pub struct StableHasher(u64);

impl StableHasher {
    /// Returns the hash of words.
    pub fn of(words: impl IntoIterator<Item = u64>) -> u64 {
        let mut hasher = Self::default();
        words.into_iter().for_each(|word| hasher.write_u64(word));
        hasher.finish()
    }
}

impl Hasher for StableHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words
            .iter()
            .for_each(|word| self.write_u64(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.write_u64(u64::from_le_bytes(last));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, word: u64) {
        // The multiplier of FxHash: odd, with irregular bits.
        const TIMES: u64 = 0xf135_7aea_2e62_a9c5;
        self.0 = (self.0.rotate_left(23) ^ word)
            .wrapping_add(1)
            .wrapping_mul(TIMES);
    }

    /// Returns a nonzero hash, because 0 is the checksum of memory that was never written.
    fn finish(&self) -> u64 {
        (self.0 ^ (self.0 >> 32)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_every_word_counts() {
        let words = [0, 1, u64::MAX, 7, 0, 0];
        let full = StableHasher::of(words);
        for at in 0..words.len() {
            for bit in 0..64 {
                let mut other = words;
                other[at] ^= 1 << bit;
                assert_ne!(StableHasher::of(other), full, "bit {bit} of word {at}");
            }
        }
        assert_ne!(StableHasher::of(words[..5].iter().copied()), full);
        assert_ne!(StableHasher::of([]), 0);
    }
}
