//! [`Library`]: the few functions of MPI that are called, each with its error.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;

use mpi::ffi::{
    MPI_Abort, MPI_Allgather, MPI_Comm, MPI_Comm_dup, MPI_Comm_rank, MPI_Comm_set_errhandler, MPI_Comm_size,
    MPI_ERR_IN_STATUS, MPI_Finalize, MPI_Get_count, MPI_Improbe, MPI_Imrecv, MPI_Init_thread, MPI_Initialized,
    MPI_Irecv, MPI_Isend, MPI_Message, MPI_Request, MPI_Status, MPI_Testsome, RSMPI_ANY_SOURCE, RSMPI_COMM_NULL,
    RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN, RSMPI_MESSAGE_NULL, RSMPI_THREAD_FUNNELED, RSMPI_THREAD_SERIALIZED,
    RSMPI_UINT8_T,
};

use super::error::{MpiError, check};
use super::ulfm::Ulfm;
use crate::comm::launcher::{ProcessRank, StartError};

/// MPI, for one thread at a time: the one that has initialized it, which also [ends](Self::finalize) it, or where it is
/// [`serialized`](Self::is_serialized) any other.
pub(super) struct Library {
    /// Of all processes, and of nobody else's messages.
    comm: MPI_Comm,
    failures: Option<Ulfm>,
    serialized: bool,
    /// Threads may not call it at once.
    thread: PhantomData<*const ()>,
}

/// A message that has come, to be received.
pub(super) struct ProbedMessage {
    pub from: usize,
    pub bytes: usize,
    handle: MPI_Message,
}

/// A request that is over, by its place, and whether it has failed.
pub(super) type FinishedRequest = (usize, Result<(), MpiError>);

impl Library {
    /// Initializes MPI on the calling thread, where the launcher says that this process has `place`.
    pub fn start(place: ProcessRank) -> Result<Self, StartError> {
        let mut initialized = 0;
        // SAFETY: may be called at any time.
        check("MPI_Initialized", unsafe { MPI_Initialized(&mut initialized) })?;
        if initialized != 0 {
            return Err(StartError::Initialized);
        }
        let (mut level, mut processes, mut here) = (0, 0, 0);
        // SAFETY: MPI is not initialized, and takes no arguments of the program's; afterwards this is its main thread.
        // Constants of the library's are there once it is loaded.
        unsafe {
            check(
                "MPI_Init_thread",
                MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), RSMPI_THREAD_SERIALIZED, &mut level),
            )?;
            check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN))?;
            check("MPI_Comm_size", MPI_Comm_size(RSMPI_COMM_WORLD, &mut processes))?;
            check("MPI_Comm_rank", MPI_Comm_rank(RSMPI_COMM_WORLD, &mut here))?;
            let place = check_place(place, processes as usize, here as usize);
            let level = if level < RSMPI_THREAD_FUNNELED { Err(StartError::SingleThreaded) } else { Ok(()) };
            if let Err(error) = level.and(place) {
                // The program may go on without.
                check("MPI_Finalize", MPI_Finalize())?;
                return Err(error);
            }
        }
        // SAFETY: all processes duplicate the same communicator, which passes on how errors are handled.
        let comm = unsafe {
            let mut comm = RSMPI_COMM_NULL;
            check("MPI_Comm_dup", MPI_Comm_dup(RSMPI_COMM_WORLD, &mut comm))?;
            comm
        };
        // SAFETY: it is initialized, and ends with this; a constant of the library's.
        let (failures, serialized) = unsafe { (Ulfm::of(comm)?, level >= RSMPI_THREAD_SERIALIZED) };
        Ok(Self { comm, failures, serialized, thread: PhantomData })
    }

    /// Whether other threads may call it than the one that has initialized it.
    pub fn is_serialized(&self) -> bool {
        self.serialized
    }

    /// What every process has, one after another: as many bytes of each.
    ///
    /// # Collective
    /// Of all processes: returns when all have called it.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<u8>, MpiError> {
        let (mut processes, length) = (0, count(own.len()));
        // SAFETY: there is room for as many bytes of each process as each gives.
        unsafe {
            check("MPI_Comm_size", MPI_Comm_size(self.comm, &mut processes))?;
            let mut all = vec![0_u8; own.len() * processes as usize];
            let (from, to, kind) = (own.as_ptr().cast(), all.as_mut_ptr().cast(), RSMPI_UINT8_T);
            check("MPI_Allgather", MPI_Allgather(from, length, kind, to, length, kind, self.comm))?;
            Ok(all)
        }
    }

    /// The processes that have failed, where MPI goes on without them.
    pub fn failed(&self) -> Result<Vec<usize>, MpiError> {
        self.failures.as_ref().map_or(Ok(Vec::new()), Ulfm::all)
    }

    /// Begins to send a message.
    ///
    /// # Safety
    /// The `length` bytes at `bytes` are there and do not change until the request is done.
    pub unsafe fn send(&self, bytes: *const u8, length: usize, to: usize, tag: c_int) -> Result<MPI_Request, MpiError> {
        // SAFETY: as the caller says. The request is written before it is read.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code = MPI_Isend(bytes.cast(), count(length), RSMPI_UINT8_T, to as c_int, tag, self.comm, &mut request);
            check("MPI_Isend", code)?;
            Ok(request)
        }
    }

    /// Begins to receive the next message of that sender and tag, of `length` bytes.
    ///
    /// # Safety
    /// The `length` bytes at `space` are there, and nobody else's, until the request is done.
    pub unsafe fn receive(
        &self,
        space: *mut u8,
        length: usize,
        from: usize,
        tag: c_int,
    ) -> Result<MPI_Request, MpiError> {
        // SAFETY: as the caller says.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code =
                MPI_Irecv(space.cast(), count(length), RSMPI_UINT8_T, from as c_int, tag, self.comm, &mut request);
            check("MPI_Irecv", code)?;
            Ok(request)
        }
    }

    /// The next message of that tag, of any sender, if one has come.
    pub fn next(&self, tag: c_int) -> Result<Option<ProbedMessage>, MpiError> {
        let mut there = 0;
        let mut bytes = 0;
        // SAFETY: the status is read only once it is written; zeros are a status too, one of integers.
        unsafe {
            let (mut handle, mut status) = (RSMPI_MESSAGE_NULL, std::mem::zeroed::<MPI_Status>());
            let code = MPI_Improbe(RSMPI_ANY_SOURCE, tag, self.comm, &mut there, &mut handle, &mut status);
            check("MPI_Improbe", code)?;
            if there == 0 {
                return Ok(None);
            }
            check("MPI_Get_count", MPI_Get_count(&status, RSMPI_UINT8_T, &mut bytes))?;
            Ok(Some(ProbedMessage { from: status.MPI_SOURCE as usize, bytes: bytes as usize, handle }))
        }
    }

    /// Begins to receive a message that has come.
    ///
    /// # Safety
    /// As many bytes as it has are at `space`, and nobody else's, until the request is done.
    pub unsafe fn take(&self, mut message: ProbedMessage, space: *mut u8) -> Result<MPI_Request, MpiError> {
        // SAFETY: as the caller says; the message has not been received, which would have taken it.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code = MPI_Imrecv(space.cast(), count(message.bytes), RSMPI_UINT8_T, &mut message.handle, &mut request);
            check("MPI_Imrecv", code)?;
            Ok(request)
        }
    }

    /// Which of `requests` are done, ascending, or why one is not; all of them make progress.
    pub fn done(&self, requests: &mut [MPI_Request]) -> Result<Vec<FinishedRequest>, MpiError> {
        let mut number = 0;
        let mut done = vec![0; requests.len()];
        let mut statuses = Vec::<MPI_Status>::with_capacity(requests.len());
        // SAFETY: there is room for as many as there are requests, which are active. Of statuses, MPI writes `number`.
        let code = unsafe {
            let length = count(requests.len());
            let (requests, indices) = (requests.as_mut_ptr(), done.as_mut_ptr());
            let code = MPI_Testsome(length, requests, &mut number, indices, statuses.as_mut_ptr());
            // Negative where no request is active.
            statuses.set_len(number.max(0) as usize);
            code
        };
        // Of several that are done, some may have failed, and only the statuses say why.
        let each_says = code as u32 == MPI_ERR_IN_STATUS;
        if !each_says {
            check("MPI_Testsome", code)?;
        }
        let outcome = |status: &MPI_Status| check("MPI_Testsome", if each_says { status.MPI_ERROR } else { 0 });
        let done = done.into_iter().zip(&statuses).map(|(index, status)| (index as usize, outcome(status)));
        let mut done: Vec<_> = done.collect();
        done.sort_unstable_by_key(|(index, _)| *index);
        Ok(done)
    }

    /// Ends MPI, once all processes have come here. Nothing of it is called afterwards.
    pub fn finalize(&self) -> Result<(), MpiError> {
        if self.failures.is_some() && !Ulfm::may_finalize() {
            return Ok(());
        }
        // SAFETY: this is the thread that has initialized MPI, and no request is active.
        check("MPI_Finalize", unsafe { MPI_Finalize() })
    }
}

/// Ends all processes of the job, by way of its launcher.
pub(super) fn abort() {
    // SAFETY: MPI is initialized, and on this thread.
    unsafe { MPI_Abort(RSMPI_COMM_WORLD, 1) };
}

fn check_place(place: ProcessRank, processes: usize, here: usize) -> Result<(), StartError> {
    if place == (ProcessRank { processes, here }) {
        return Ok(());
    }
    let (mpi_processes, mpi_here) = (processes, here);
    Err(StartError::OtherLauncher { processes: place.processes, here: place.here, mpi_processes, mpi_here })
}

/// As MPI counts; messages are cut so that it can.
fn count(length: usize) -> c_int {
    length.try_into().expect("a message is no longer than the limit, and a program has fewer than 2^31 of them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::launcher::place;
    use crate::testing::ProcessTest;

    #[test]
    fn errors_of_mpi_are_returned_with_its_text() {
        ProcessTest::new(2).run(|| {
            let place = place().unwrap().unwrap();
            let library = Library::start(place).unwrap();
            // SAFETY: a message of no bytes.
            let error = unsafe { library.send(ptr::null(), 0, 7, 0) }.unwrap_err();
            assert!(error.to_string().starts_with("MPI_Isend failed: MPI_ERR_RANK"), "{error}");
            assert!(matches!(error.into(), StartError::Mpi { call: "MPI_Isend", .. }));
            library.finalize().unwrap();
        });
    }

    #[test]
    fn a_launcher_that_is_not_this_librarys_is_told() {
        // To MPI, the process is alone.
        ProcessTest::new(1).run(|| {
            let error = Library::start(ProcessRank { processes: 4, here: 2 }).map(|_| ()).unwrap_err().to_string();
            let told = "the launcher has started process 2 of 4, which to MPI is process 0 of 1";
            assert!(error.starts_with(told), "{error}");
            assert!(mpi::environment::is_finalized());
        });
    }
}
