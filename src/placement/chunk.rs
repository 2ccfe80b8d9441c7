//! [`chunk`]: the interval of one shard.

use std::ops::Range;

/// Returns the `index`-th of `parts` chunks of `0..len`.
///
/// Every chunk is `ceil(len / parts)` long, except that the last ones are shorter or empty:
///
/// ```text
/// len 5, parts 4, so 2 each:   | 0 1 | 2 3 | 4 | |
/// ```
///
/// An empty chunk is `len..len`.
///
/// # Panics
/// If `index` is not below `parts`.
pub fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(index < parts, "chunk {index} of {parts} chunks");
    let size = len.div_ceil(parts);
    index.saturating_mul(size).min(len)..(index + 1).saturating_mul(size).min(len)
}

#[cfg(test)]
mod tests {
    use super::chunk;

    #[test]
    fn tails_are_short_or_empty() {
        // Expected values: those of `torch.chunk`, padded with empty chunks.
        let cases: [(usize, usize, &[usize]); 6] = [
            (5, 4, &[2, 2, 1, 0]),
            (4, 3, &[2, 2, 0]),
            (7, 2, &[4, 3]),
            (0, 2, &[0, 0]),
            (1, 3, &[1, 0, 0]),
            (13, 8, &[2, 2, 2, 2, 2, 2, 1, 0]),
        ];
        for (len, parts, lengths) in cases {
            let mut start = 0;
            for (index, &length) in lengths.iter().enumerate() {
                assert_eq!(
                    chunk(len, parts, index),
                    start..start + length,
                    "chunk {index} of {len} / {parts}"
                );
                start += length;
            }
            assert_eq!(start, len);
        }
    }

    #[test]
    #[should_panic(expected = "chunk 2 of 2 chunks")]
    fn an_index_past_the_end_panics() {
        chunk(4, 2, 2);
    }
}
