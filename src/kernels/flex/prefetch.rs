//! Lines of the cache, and how to have them read ahead.

/// Bytes of a line of the cache.
pub(crate) const LINE: usize = 64;

/// Has the line of the cache with this byte read ahead, if there is memory: nothing else happens.
#[inline(always)]
pub(crate) fn prefetch(byte: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: of an address that leads nowhere nothing is read.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(byte.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = byte;
}
