//! Packing of bytes into words, and a variable-length encoding of numbers.

/// Number of bytes of a word.
pub(super) const WORD: usize = size_of::<u64>();

/// Packs bytes into little-endian words. The last word is padded with zeros.
pub(super) fn pack(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks(WORD).map(|chunk| {
        let mut word = [0; WORD];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

/// Returns the first `count` bytes of words.
pub(super) fn unpack(words: &[u64], count: usize) -> Vec<u8> {
    words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .take(count)
        .collect()
}

/// Returns the longest prefix of a text that has at most `most` bytes and ends between characters.
pub(super) fn truncate(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// Byte buffer of fixed capacity.
#[derive(Debug)]
pub(super) struct FixedBuf<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> FixedBuf<N> {
    pub fn new() -> Self {
        Self {
            bytes: [0; N],
            used: 0,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Removes all bytes after the first `used`.
    pub fn truncate(&mut self, used: usize) {
        self.used = used;
    }

    /// Appends bytes. Returns false, and appends nothing, if the capacity is too small.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let Some(buffer) = self.bytes[self.used..].get_mut(..bytes.len()) else {
            return false;
        };
        buffer.copy_from_slice(bytes);
        self.used += bytes.len();
        true
    }

    /// Appends a number with seven bits per byte, the lowest first (LEB128). Returns false if the
    /// capacity is too small; some bytes may have been appended then.
    pub fn push_number(&mut self, mut number: u64) -> bool {
        loop {
            let low = number as u8 & 0x7f;
            number >>= 7;
            if !self.push(&[if number == 0 { low } else { low | 0x80 }]) {
                return false;
            }
            if number == 0 {
                return true;
            }
        }
    }
}

/// Decodes and removes a number that [`FixedBuf::push_number`] has written at the front.
pub(super) fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let byte = bytes.split_off_first()?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for number in [0, 1, 127, 128, 300, 1 << 20, u64::MAX] {
            let mut buffer = FixedBuf::<10>::new();
            assert!(buffer.push_number(number));
            let mut bytes = buffer.bytes();
            assert_eq!((take_number(&mut bytes), bytes.len()), (Some(number), 0));
        }
        assert!(!FixedBuf::<1>::new().push_number(128));
        assert_eq!(take_number(&mut &[0x80][..]), None);
    }

    #[test]
    fn texts_are_truncated_between_characters() {
        assert_eq!(
            [truncate("äöü", 4), truncate("äöü", 3), truncate("ab", 9)],
            ["äö", "ä", "ab"]
        );
        let words: Vec<_> = pack(b"flight recorder").collect();
        assert_eq!(
            (words.len(), unpack(&words, 15)),
            (2, b"flight recorder".to_vec())
        );
    }
}
