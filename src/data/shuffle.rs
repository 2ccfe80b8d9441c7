//! Random orders of rows that are the same on every platform.

use crate::dtensor::philox::philox4x32;

/// The fourth part of each counter, which keeps these random words apart from those of random
/// tensors of the same seed.
const DOMAIN: u32 = u32::from_be_bytes(*b"rows");

/// Returns the rows `0..len` in the random order of (seed, epoch).
///
/// This is the shuffle of Fisher and Yates: for `last` from `len - 1` down to 1, row `last` changes
/// places with one of the rows `0..=last`, chosen by 64 random bits. A choice is uniform up to a
/// relative error of `len / 2^64`.
pub(super) fn shuffled(len: usize, seed: u64, epoch: usize) -> Vec<usize> {
    let key = [seed as u32, (seed >> 32) as u32];
    let mut rows: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        let [low, high, ..] = philox4x32(
            [
                last as u32,
                (last as u64 >> 32) as u32,
                epoch as u32,
                DOMAIN,
            ],
            key,
        );
        let random = u128::from(high) << 32 | u128::from(low);
        rows.swap(last, ((random * (last as u128 + 1)) >> 64) as usize);
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::shuffled;

    /// Expected values: the same algorithm in Python, on a Philox that reproduces Random123's
    /// `kat_vectors`.
    #[test]
    fn known_orders() {
        assert_eq!(shuffled(10, 42, 0), [1, 9, 8, 7, 2, 4, 5, 3, 6, 0]);
        assert_eq!(shuffled(10, 42, 1), [8, 9, 4, 5, 0, 1, 7, 6, 3, 2]);
        assert_eq!(
            shuffled(10, 42 | 7 << 32, 0),
            [7, 0, 4, 8, 9, 2, 3, 1, 5, 6]
        );
        assert_eq!(
            shuffled(100, 5, 3)[..10],
            [54, 7, 82, 94, 26, 40, 49, 5, 50, 76]
        );
    }

    /// With 5000 epochs, each of the 24 orders of 4 rows is expected 208 times, with a standard
    /// deviation of 14.
    #[test]
    fn every_order_is_equally_likely() {
        let mut counts: HashMap<Vec<usize>, usize> = HashMap::new();
        (0..5000).for_each(|epoch| *counts.entry(shuffled(4, 7, epoch)).or_default() += 1);
        assert_eq!(counts.len(), 24);
        assert!(
            counts.values().all(|count| (150..270).contains(count)),
            "{counts:?}"
        );
    }
}
