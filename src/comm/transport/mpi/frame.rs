//! Frame of a message: its first part, which the receiver reads before it receives the other
//! payloads.
//!
//! ```text
//! frame size | header size | number of payloads | size of payload 0 | payload 1 | .. | header | inlined payloads
//! ```
//!
//! Numbers have 64 bits and are little-endian. In the size of a payload, the highest bit is set if
//! the payload is inlined in the frame. The last frame of a process has [`LAST`] as the size of its
//! header.

use std::ops::Range;
use std::sync::Arc;

use crate::comm::transport::{Message, Payload};

const WORD: usize = size_of::<u64>();
const LAST: u64 = u64::MAX;
const INLINED: u64 = 1 << 63;

/// Returns the frame of `message`. Payloads of at most `inline_limit` bytes are inlined in it.
pub(super) fn of_message(message: &Message, inline_limit: usize) -> Payload {
    let payloads = || message.payloads.iter().map(|payload| (**payload).as_ref());
    let inlined = || payloads().filter(|payload| is_inlined(payload, inline_limit));
    let size = (3 + message.payloads.len()) * WORD
        + message.header.len()
        + inlined().map(<[u8]>::len).sum::<usize>();
    let mut frame = Vec::with_capacity(size);
    let lengths = payloads().map(|payload| {
        payload.len() as u64
            | if is_inlined(payload, inline_limit) {
                INLINED
            } else {
                0
            }
    });
    for word in [
        size as u64,
        message.header.len() as u64,
        message.payloads.len() as u64,
    ]
    .into_iter()
    .chain(lengths)
    {
        frame.extend(word.to_le_bytes());
    }
    frame.extend_from_slice(&message.header);
    inlined().for_each(|payload| frame.extend_from_slice(payload));
    Arc::new(frame)
}

/// Returns true if a payload is inlined in the frame.
pub(super) fn is_inlined(payload: &[u8], inline_limit: usize) -> bool {
    payload.len() <= inline_limit
}

/// Returns the last frame that a process sends to another.
pub(super) fn last() -> Payload {
    Arc::new([3 * WORD as u64, LAST, 0].map(u64::to_le_bytes).concat())
}

/// A decoded frame.
#[derive(Debug, PartialEq)]
pub(super) enum Frame<'f> {
    Message {
        header: &'f [u8],
        /// Lengths of all payloads.
        lengths: Vec<usize>,
        /// Bytes of each inlined payload; `None` for payloads that are sent separately.
        inlined: Vec<Option<&'f [u8]>>,
    },
    Last,
}

/// Returns true if `bytes` contain a complete frame.
pub(super) fn is_complete(bytes: &[u8]) -> bool {
    word(bytes, 0).is_some_and(|size| bytes.len() as u64 >= size)
}

/// Decodes a complete frame. Returns `None` if the bytes are not a valid frame.
pub(super) fn read(bytes: &[u8]) -> Option<Frame<'_>> {
    let size = word(bytes, 0)?;
    let header = word(bytes, 1)?;
    let payloads = word(bytes, 2)?;
    if size != bytes.len() as u64 {
        return None;
    }
    if header == LAST {
        return Some(Frame::Last);
    }
    // This fails, and allocates no more than the frame's size, if `payloads` is too large.
    let lengths = (0..payloads)
        .map(|payload| word(bytes, 3 + payload))
        .collect::<Option<Vec<_>>>()?;
    let mut at = (3 + lengths.len()) * WORD;
    let mut take = |length: u64| {
        let range = Range {
            start: at,
            end: at.checked_add(usize::try_from(length).ok()?)?,
        };
        at = range.end;
        bytes.get(range)
    };
    let header = take(header)?;
    let mut inlined = Vec::with_capacity(lengths.len());
    for length in &lengths {
        inlined.push(if length & INLINED == 0 {
            None
        } else {
            Some(take(length & !INLINED)?)
        });
    }
    let lengths = lengths
        .into_iter()
        .map(|length| usize::try_from(length & !INLINED).ok())
        .collect::<Option<_>>()?;
    (at == bytes.len()).then_some(Frame::Message {
        header,
        lengths,
        inlined,
    })
}

fn word(bytes: &[u8], index: u64) -> Option<u64> {
    let start = usize::try_from(index).ok()?.checked_mul(WORD)?;
    let word = bytes.get(start..start.checked_add(WORD)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(payloads: &[&'static [u8]]) -> Vec<u8> {
        let payloads = payloads
            .iter()
            .map(|payload| Arc::new(*payload) as Payload)
            .collect();
        (*of_message(
            &Message {
                header: b"all_reduce".to_vec(),
                payloads,
                taken: None,
            },
            4,
        ))
        .as_ref()
        .to_vec()
    }

    #[test]
    fn small_payloads_ride() {
        let frame = framed(&[b"", b"four", b"large", b"4321"]);
        let lengths = vec![0, 4, 5, 4];
        let inlined = vec![Some(&b""[..]), Some(b"four"), None, Some(b"4321")];
        assert_eq!(
            read(&frame),
            Some(Frame::Message {
                header: b"all_reduce",
                lengths,
                inlined
            })
        );
        assert_eq!(frame.len(), 7 * WORD + 10 + 8);
    }

    #[test]
    fn a_frame_is_complete_with_its_last_byte() {
        let frame = framed(&[b"four"]);
        for bytes in 0..frame.len() {
            assert!(!is_complete(&frame[..bytes]), "{bytes}");
        }
        assert!(is_complete(&frame));
    }

    #[test]
    fn the_last_frame_is_no_parcel() {
        let frame = last();
        assert_eq!(read((*frame).as_ref()), Some(Frame::Last));
        assert!(is_complete((*frame).as_ref()));
    }

    #[test]
    fn what_is_no_frame_is_not_read() {
        let frame = framed(&[b"four", b"large"]);
        // Truncated frames, and frames with changed numbers.
        for bytes in 0..frame.len() {
            assert_eq!(read(&frame[..bytes]), None, "{bytes}");
        }
        for word in 0..4 {
            for value in [1, 17, INLINED, INLINED | 1, u64::MAX - 1] {
                let mut frame = frame.clone();
                frame[word * WORD..(word + 1) * WORD].copy_from_slice(&u64::to_le_bytes(value));
                assert_eq!(read(&frame), None, "word {word} is {value}");
            }
        }
    }
}
