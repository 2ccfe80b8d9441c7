//! Types of arguments and results that the bindings of cudarc lack or cannot hold.

use std::ffi::c_int;
use std::fmt;
use std::mem;
use std::ptr;

use cudarc::nccl::sys::{ncclConfig_t, ncclRedOp_t, ncclResult_t};

use crate::version::Version;

/// Color of [`comm_split`](crate::NcclLibrary::comm_split) of a rank that becomes a member of no
/// new communicator.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;

/// Flag of [`comm_shrink`](crate::NcclLibrary::comm_shrink) for a parent without operations in
/// flight.
pub const NCCL_SHRINK_DEFAULT: c_int = 0;

/// Flag of [`comm_shrink`](crate::NcclLibrary::comm_shrink) that aborts the operations of the
/// parent first.
pub const NCCL_SHRINK_ABORT: c_int = 1;

/// Flag of [`comm_window_register`](crate::NcclLibrary::comm_window_register) for memory that is
/// allocated differently on the ranks.
pub const NCCL_WIN_DEFAULT: c_int = 0;

/// Flag of [`comm_window_register`](crate::NcclLibrary::comm_window_register) for memory that all
/// ranks register at the same offset, which enables the symmetric kernels.
pub const NCCL_WIN_COLL_SYMMETRIC: c_int = 1;

/// Value of the field `magic` of a valid configuration (`NCCL_API_MAGIC`).
const MAGIC: u32 = 0xcafe_beef;

/// Version whose fields cudarc's `ncclConfig_t` has.
const CONFIG_VERSION: Version = Version::new(2, 30, 0);

/// A value of `ncclResult_t`. It is an integer because a library may return a value that did not
/// exist when the bindings were generated, such as `ncclTimeout` since 2.30. An enum could not hold
/// it.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResultCode(pub u32);

impl ResultCode {
    /// The call succeeded.
    pub const SUCCESS: Self = Self(ncclResult_t::ncclSuccess as u32);
    /// The call has started work that continues in the background.
    pub const IN_PROGRESS: Self = Self(ncclResult_t::ncclInProgress as u32);

    /// Names of the values, in ascending order.
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];

    /// Returns the enumerator's name, such as `ncclInvalidUsage`, if the value is known.
    pub fn name(self) -> Option<&'static str> {
        Self::NAMES.get(self.0 as usize).copied()
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "ncclResult_t {}", self.0),
        }
    }
}

/// A value of `ncclRedOp_t`. It is an integer because NCCL numbers the operators that
/// [`red_op_create_pre_mul_sum`](crate::NcclLibrary::red_op_create_pre_mul_sum) creates, so their
/// values are not enumerators.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RedOp(pub u32);

impl RedOp {
    /// Sum of the operands.
    pub const SUM: Self = Self(ncclRedOp_t::ncclSum as u32);
    /// Product of the operands.
    pub const PROD: Self = Self(ncclRedOp_t::ncclProd as u32);
    /// Largest operand.
    pub const MAX: Self = Self(ncclRedOp_t::ncclMax as u32);
    /// Smallest operand.
    pub const MIN: Self = Self(ncclRedOp_t::ncclMin as u32);
    /// Mean of the operands.
    pub const AVG: Self = Self(ncclRedOp_t::ncclAvg as u32);
}

/// Progress of a call that has not failed.
#[must_use = "a call in progress is complete only when `comm_async_error` returns `Done`"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// The call is complete (`ncclSuccess`). Operations on streams are enqueued, and not
    /// necessarily executed.
    Done,
    /// The call continues in the background (`ncclInProgress`).
    InProgress,
}

/// Returns a configuration in which no field is set (`NCCL_CONFIG_INITIALIZER`) except `blocking`,
/// which is 0, so that calls return [`Progress::InProgress`] instead of waiting for other ranks.
///
/// The version of the configuration is that of cudarc's struct, not that of the library: NCCL reads
/// as many fields as both have. With a later version it would read fields of 2.30.5 from the
/// padding at the end of the struct.
pub fn nonblocking_config() -> ncclConfig_t {
    /// Value of an integer that is not set (`NCCL_CONFIG_UNDEF_INT`).
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: mem::size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: CONFIG_VERSION.code(),
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
