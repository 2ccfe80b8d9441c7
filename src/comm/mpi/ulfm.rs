//! [`Ulfm`]: the processes that MPI has lost, where it goes on without them.
//!
//! That is User-Level Failure Mitigation (ULFM): an extension, which few libraries have, and launchers only if asked
//! (Open MPI's `mpirun --with-ft ulfm`). Its functions are looked up when the program runs, so one that was built with a
//! library without them runs on one that has them. Messages between processes that are left go on as before, on the same
//! communicator, so no more of it is needed than who has failed.

use std::ffi::c_int;

use libloading::os::unix::{Library as Loaded, Symbol};
use mpi::ffi::{
    MPI_Comm, MPI_Comm_group, MPI_Group, MPI_Group_free, MPI_Group_size, MPI_Group_translate_ranks, RSMPI_GROUP_NULL,
};

use super::error::{MpiError, check};

/// `MPIX_Comm_get_failed`: the processes of a communicator that are known to have failed.
type GetFailed = unsafe extern "C" fn(MPI_Comm, *mut MPI_Group) -> c_int;

/// `MPIX_Comm_ack_failed`: from now on, receives from anyone go on without the first so many of these.
type AckFailed = unsafe extern "C" fn(MPI_Comm, c_int, *mut c_int) -> c_int;

/// Who has failed, of a communicator's processes.
pub(super) struct Ulfm {
    get: Symbol<GetFailed>,
    ack: Symbol<AckFailed>,
    comm: MPI_Comm,
    /// The communicator's.
    group: MPI_Group,
}

impl Ulfm {
    /// `None` if the library does not say.
    ///
    /// # Safety
    /// MPI is initialized, and stays so.
    pub unsafe fn of(comm: MPI_Comm) -> Result<Option<Self>, MpiError> {
        let loaded = Loaded::this();
        // SAFETY: functions of these names have these types, whatever library they are of.
        let functions = unsafe { (loaded.get(b"MPIX_Comm_get_failed\0"), loaded.get(b"MPIX_Comm_ack_failed\0")) };
        let (Ok(get), Ok(ack)) = functions else { return Ok(None) };
        // SAFETY: a constant of the library's, and as the caller says.
        let group = unsafe {
            let mut group = RSMPI_GROUP_NULL;
            check("MPI_Comm_group", MPI_Comm_group(comm, &mut group))?;
            group
        };
        Ok(Some(Self { get, ack, comm, group }))
    }

    /// Whether MPI may be finalized: Open MPI 5.0 does not come to an end with its failure detector.
    pub fn may_finalize() -> bool {
        std::env::var_os("OMPI_MCA_mpi_ft_detector").is_none()
    }

    /// All that have failed so far.
    pub fn all(&self) -> Result<Vec<usize>, MpiError> {
        // SAFETY: `Self::of` was called where MPI may be; the groups are this communicator's, of which one is freed here.
        unsafe {
            let (mut failed, mut size, mut acknowledged) = (RSMPI_GROUP_NULL, 0, 0);
            check("MPIX_Comm_get_failed", (self.get)(self.comm, &mut failed))?;
            check("MPI_Group_size", MPI_Group_size(failed, &mut size))?;
            let places: Vec<c_int> = (0..size).collect();
            let mut ranks = vec![0; places.len()];
            if size > 0 {
                let translated =
                    MPI_Group_translate_ranks(failed, size, places.as_ptr(), self.group, ranks.as_mut_ptr());
                check("MPI_Group_translate_ranks", translated)?;
                check("MPIX_Comm_ack_failed", (self.ack)(self.comm, size, &mut acknowledged))?;
            }
            check("MPI_Group_free", MPI_Group_free(&mut failed))?;
            Ok(ranks.into_iter().map(|rank| rank as usize).collect())
        }
    }
}
