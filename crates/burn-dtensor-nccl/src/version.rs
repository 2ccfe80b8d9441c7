//! [`Version`]: a version of NCCL.

use std::ffi::c_int;
use std::fmt;

/// Oldest version that is accepted. 2.28 is the first minor version of which the tests compile a
/// header, so the signatures of older libraries are not known to be those of the table. It is also
/// the first that can revoke a communicator, from 2.28.7 on.
pub const MINIMUM_VERSION: Version = Version::new(2, 28, 0);

/// A version of NCCL. Later versions are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch level.
    pub patch: u32,
}

impl Version {
    /// Returns the version of these numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// Returns the version of which `code` is the `NCCL_VERSION_CODE`, as `ncclGetVersion` returns
    /// it. The encoding changed in 2.9: 2.8.4 is 2804, and 2.28.9 is 22809.
    pub const fn from_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        let major_factor = if code < 10_000 { 1_000 } else { 10_000 };
        Self::new(code / major_factor, code % major_factor / 100, code % 100)
    }

    /// Returns the `NCCL_VERSION_CODE` of the version, which is at least 2.9.
    pub(crate) const fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_both_encodings_are_decoded() {
        assert_eq!(Version::from_code(2_804), Version::new(2, 8, 4));
        assert_eq!(Version::from_code(22_809), Version::new(2, 28, 9));
        assert_eq!(Version::new(2, 28, 9).code(), 22_809);
        assert_eq!(Version::from_code(23_203).to_string(), "2.32.3");
        assert!(Version::from_code(2_804) < Version::from_code(20_906));
    }
}
