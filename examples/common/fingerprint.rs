//! A hash of values, to compare runs bit for bit.

/// Returns the FNV-1a hash of the bits of the values.
pub fn of(values: &[f32]) -> u64 {
    let bytes = values
        .iter()
        .flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
