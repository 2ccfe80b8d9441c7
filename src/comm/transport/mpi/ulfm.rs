//! [`Ulfm`]: reports failed processes, if the MPI library can continue without them.
//!
//! User-Level Failure Mitigation (ULFM) is an MPI extension that few libraries have, and that
//! launchers enable only on request (Open MPI: `mpirun --with-ft ulfm`). Its functions are looked
//! up at run time. A program that was built with a library without ULFM can therefore use a library
//! that has it. Messages between surviving processes continue on the same communicator, so only the
//! list of failed processes is needed.

use std::ffi::c_int;

use libloading::os::unix::{Library as Loaded, Symbol};
use mpi::ffi::{
    MPI_Comm, MPI_Comm_group, MPI_Group, MPI_Group_free, MPI_Group_size, MPI_Group_translate_ranks,
    RSMPI_GROUP_NULL,
};

use super::error::{MpiError, check};

/// `MPIX_Comm_get_failed`: returns the group of the processes of a communicator that are known to
/// have failed.
type GetFailed = unsafe extern "C" fn(MPI_Comm, *mut MPI_Group) -> c_int;

/// `MPIX_Comm_ack_failed`: acknowledges the first `n` failed processes, so that receives from any
/// source continue without them.
type AckFailed = unsafe extern "C" fn(MPI_Comm, c_int, *mut c_int) -> c_int;

/// ULFM functions, with the communicator whose failed processes they report.
pub(super) struct Ulfm {
    get: Symbol<GetFailed>,
    ack: Symbol<AckFailed>,
    comm: MPI_Comm,
    /// Group of the communicator.
    group: MPI_Group,
}

impl Ulfm {
    /// Looks up the functions. Returns `None` if the library does not have them.
    ///
    /// # Safety
    /// MPI must be initialized, and must not be finalized while the value is used.
    pub unsafe fn of(comm: MPI_Comm) -> Result<Option<Self>, MpiError> {
        let loaded = Loaded::this();
        // SAFETY: functions of these names have these types in every library.
        let functions = unsafe {
            (
                loaded.get(b"MPIX_Comm_get_failed\0"),
                loaded.get(b"MPIX_Comm_ack_failed\0"),
            )
        };
        let (Ok(get), Ok(ack)) = functions else {
            return Ok(None);
        };
        // SAFETY: the null group is a constant of the library; MPI is initialized, as the caller
        // guarantees.
        let group = unsafe {
            let mut group = RSMPI_GROUP_NULL;
            check("MPI_Comm_group", MPI_Comm_group(comm, &mut group))?;
            group
        };
        Ok(Some(Self {
            get,
            ack,
            comm,
            group,
        }))
    }

    /// Returns true if MPI may be finalized. Open MPI 5.0 hangs in `MPI_Finalize` if its failure
    /// detector is enabled.
    pub fn may_finalize() -> bool {
        std::env::var_os("OMPI_MCA_mpi_ft_detector").is_none()
    }

    /// Returns and acknowledges all processes that have failed so far.
    pub fn all(&self) -> Result<Vec<usize>, MpiError> {
        // SAFETY: MPI is initialized, as required by `Self::of`. Both groups belong to this
        // communicator; the one created here is freed here.
        unsafe {
            let mut failed = RSMPI_GROUP_NULL;
            let mut size = 0;
            let mut acknowledged = 0;
            check("MPIX_Comm_get_failed", (self.get)(self.comm, &mut failed))?;
            check("MPI_Group_size", MPI_Group_size(failed, &mut size))?;
            let places: Vec<c_int> = (0..size).collect();
            let mut ranks = vec![0; places.len()];
            if size > 0 {
                let translated = MPI_Group_translate_ranks(
                    failed,
                    size,
                    places.as_ptr(),
                    self.group,
                    ranks.as_mut_ptr(),
                );
                check("MPI_Group_translate_ranks", translated)?;
                check(
                    "MPIX_Comm_ack_failed",
                    (self.ack)(self.comm, size, &mut acknowledged),
                )?;
            }
            check("MPI_Group_free", MPI_Group_free(&mut failed))?;
            Ok(ranks.into_iter().map(|rank| rank as usize).collect())
        }
    }
}
