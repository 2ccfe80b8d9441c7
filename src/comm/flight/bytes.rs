//! Bytes in words, and small numbers in few bytes.

use super::words::WORD;

/// The words that hold `bytes`, eight each, the last filled up with zeros.
pub(super) fn pack(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks(WORD).map(|chunk| {
        let mut word = [0; WORD];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

/// The first `count` bytes of words.
pub(super) fn unpack(words: &[u64], count: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take(count).collect()
}

/// As much of a text as fits into `most` bytes, whole characters.
pub(super) fn truncate(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// Bytes of fixed room, filled from the front.
#[derive(Debug)]
pub(super) struct Room<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Room<N> {
    pub fn new() -> Self {
        Self { bytes: [0; N], used: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Takes back all behind the first `used`.
    pub fn truncate(&mut self, used: usize) {
        self.used = used;
    }

    /// False, and nothing, if there is no room.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let Some(room) = self.bytes[self.used..].get_mut(..bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.used += bytes.len();
        true
    }

    /// Seven bits a byte, the lowest first; all but the last are marked (LEB128). False if there is no room.
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

/// Takes what [`Room::push_number`] has written from the front.
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
            let mut room = Room::<10>::new();
            assert!(room.push_number(number));
            let mut bytes = room.bytes();
            assert_eq!((take_number(&mut bytes), bytes.len()), (Some(number), 0));
        }
        assert!(!Room::<1>::new().push_number(128));
        assert_eq!(take_number(&mut &[0x80][..]), None);
    }

    #[test]
    fn texts_are_truncated_between_characters() {
        assert_eq!([truncate("äöü", 4), truncate("äöü", 3), truncate("ab", 9)], ["äö", "ä", "ab"]);
        let words: Vec<_> = pack(b"flight recorder").collect();
        assert_eq!((words.len(), unpack(&words, 15)), (2, b"flight recorder".to_vec()));
    }
}
