//! Prefetching of cache lines.

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Prefetches the cache line of this byte. If the address is not mapped, nothing happens.
#[inline(always)]
pub(crate) fn prefetch(byte: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of an invalid address reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(byte.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = byte;
}
