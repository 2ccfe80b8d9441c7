//! [`Library`]: safe wrappers of the MPI functions that are used, which return errors.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;

use mpi::ffi::{
    MPI_Abort, MPI_Comm, MPI_Comm_dup, MPI_Comm_rank, MPI_Comm_set_errhandler, MPI_Comm_size,
    MPI_ERR_IN_STATUS, MPI_Finalize, MPI_Get_count, MPI_Improbe, MPI_Imrecv, MPI_Init_thread,
    MPI_Initialized, MPI_Irecv, MPI_Isend, MPI_Message, MPI_Request, MPI_Status, MPI_Testsome,
    RSMPI_ANY_SOURCE, RSMPI_COMM_NULL, RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN, RSMPI_MESSAGE_NULL,
    RSMPI_THREAD_FUNNELED, RSMPI_THREAD_SERIALIZED, RSMPI_UINT8_T,
};

use super::error::{MpiError, check};
use super::ulfm::Ulfm;
use crate::comm::launcher::{ProcessRank, StartError};

/// MPI, used by one thread at a time. The thread that initialized it must also
/// [finalize](Self::finalize) it. Other threads may use it if the library [is
/// serialized](Self::is_serialized).
pub(super) struct Library {
    /// Duplicate of the world communicator, so that messages of other code do not match.
    comm: MPI_Comm,
    failures: Option<Ulfm>,
    serialized: bool,
    /// Makes the type neither `Send` nor `Sync`, because threads must not use MPI at the same time.
    thread: PhantomData<*const ()>,
}

/// A message that a probe has found and that can be received (`MPI_Message`).
pub(super) struct ProbedMessage {
    pub from: usize,
    pub bytes: usize,
    handle: MPI_Message,
}

/// Index of a completed request, and its outcome.
pub(super) type FinishedRequest = (usize, Result<(), MpiError>);

impl Library {
    /// Initializes MPI on the calling thread. Fails if MPI's rank and number of processes differ
    /// from `place`, which the launcher has set.
    pub fn start(place: ProcessRank) -> Result<Self, StartError> {
        let mut initialized = 0;
        // SAFETY: this function may be called at any time.
        check("MPI_Initialized", unsafe {
            MPI_Initialized(&mut initialized)
        })?;
        if initialized != 0 {
            return Err(StartError::Initialized);
        }
        let mut level = 0;
        let mut processes = 0;
        let mut here = 0;
        // SAFETY: MPI is not initialized, and needs no command-line arguments; afterwards this is
        // its main thread. The constants are available because the library is loaded.
        unsafe {
            check(
                "MPI_Init_thread",
                MPI_Init_thread(
                    ptr::null_mut(),
                    ptr::null_mut(),
                    RSMPI_THREAD_SERIALIZED,
                    &mut level,
                ),
            )?;
            check(
                "MPI_Comm_set_errhandler",
                MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN),
            )?;
            check(
                "MPI_Comm_size",
                MPI_Comm_size(RSMPI_COMM_WORLD, &mut processes),
            )?;
            check("MPI_Comm_rank", MPI_Comm_rank(RSMPI_COMM_WORLD, &mut here))?;
            let place = check_place(place, processes as usize, here as usize);
            let level = if level < RSMPI_THREAD_FUNNELED {
                Err(StartError::SingleThreaded)
            } else {
                Ok(())
            };
            if let Err(error) = level.and(place) {
                // The program may continue without MPI.
                check("MPI_Finalize", MPI_Finalize())?;
                return Err(error);
            }
        }
        // SAFETY: all processes duplicate the same communicator. The duplicate inherits the error
        // handler.
        let comm = unsafe {
            let mut comm = RSMPI_COMM_NULL;
            check("MPI_Comm_dup", MPI_Comm_dup(RSMPI_COMM_WORLD, &mut comm))?;
            comm
        };
        // SAFETY: MPI is initialized, and finalized only by this value.
        let (failures, serialized) = unsafe { (Ulfm::of(comm)?, level >= RSMPI_THREAD_SERIALIZED) };
        Ok(Self {
            comm,
            failures,
            serialized,
            thread: PhantomData,
        })
    }

    /// Returns true if threads other than the one that initialized MPI may call it.
    pub fn is_serialized(&self) -> bool {
        self.serialized
    }

    /// Returns the failed processes, if MPI continues without them.
    pub fn failed(&self) -> Result<Vec<usize>, MpiError> {
        self.failures.as_ref().map_or(Ok(Vec::new()), Ulfm::all)
    }

    /// Starts to send a message.
    ///
    /// # Safety
    /// The `length` bytes at `bytes` must be valid and must not change until the request completes.
    pub unsafe fn send(
        &self,
        bytes: *const u8,
        length: usize,
        to: usize,
        tag: c_int,
    ) -> Result<MPI_Request, MpiError> {
        // SAFETY: guaranteed by the caller. The request is written before it is read.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code = MPI_Isend(
                bytes.cast(),
                count(length),
                RSMPI_UINT8_T,
                to as c_int,
                tag,
                self.comm,
                &mut request,
            );
            check("MPI_Isend", code)?;
            Ok(request)
        }
    }

    /// Starts to receive the next message of this sender and tag, which has `length` bytes.
    ///
    /// # Safety
    /// The `length` bytes at `space` must be valid for writes, and not accessed by other code,
    /// until the request completes.
    pub unsafe fn receive(
        &self,
        space: *mut u8,
        length: usize,
        from: usize,
        tag: c_int,
    ) -> Result<MPI_Request, MpiError> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code = MPI_Irecv(
                space.cast(),
                count(length),
                RSMPI_UINT8_T,
                from as c_int,
                tag,
                self.comm,
                &mut request,
            );
            check("MPI_Irecv", code)?;
            Ok(request)
        }
    }

    /// Returns the next message of this tag from any sender, if one has arrived.
    pub fn next(&self, tag: c_int) -> Result<Option<ProbedMessage>, MpiError> {
        let mut there = 0;
        let mut bytes = 0;
        // SAFETY: the status is read only after it is written. All-zero bytes are a valid status,
        // which consists of integers.
        unsafe {
            let mut handle = RSMPI_MESSAGE_NULL;
            let mut status = std::mem::zeroed::<MPI_Status>();
            let code = MPI_Improbe(
                RSMPI_ANY_SOURCE,
                tag,
                self.comm,
                &mut there,
                &mut handle,
                &mut status,
            );
            check("MPI_Improbe", code)?;
            if there == 0 {
                return Ok(None);
            }
            check(
                "MPI_Get_count",
                MPI_Get_count(&status, RSMPI_UINT8_T, &mut bytes),
            )?;
            Ok(Some(ProbedMessage {
                from: status.MPI_SOURCE as usize,
                bytes: bytes as usize,
                handle,
            }))
        }
    }

    /// Starts to receive a message that [`next`](Self::next) returned.
    ///
    /// # Safety
    /// `space` must be valid for writes of `message.bytes` bytes, and not accessed by other code,
    /// until the request completes.
    pub unsafe fn take(
        &self,
        mut message: ProbedMessage,
        space: *mut u8,
    ) -> Result<MPI_Request, MpiError> {
        // SAFETY: guaranteed by the caller. The message has not been received, because receiving it
        // consumes it.
        unsafe {
            let mut request = mpi::ffi::RSMPI_REQUEST_NULL;
            let code = MPI_Imrecv(
                space.cast(),
                count(message.bytes),
                RSMPI_UINT8_T,
                &mut message.handle,
                &mut request,
            );
            check("MPI_Imrecv", code)?;
            Ok(request)
        }
    }

    /// Returns the completed requests in ascending order, each with its outcome. All requests make
    /// progress.
    pub fn done(&self, requests: &mut [MPI_Request]) -> Result<Vec<FinishedRequest>, MpiError> {
        let mut number = 0;
        let mut done = vec![0; requests.len()];
        let mut statuses = Vec::<MPI_Status>::with_capacity(requests.len());
        // SAFETY: the arrays have capacity for all requests, which are active. MPI writes `number`
        // statuses.
        let code = unsafe {
            let length = count(requests.len());
            let requests = requests.as_mut_ptr();
            let indices = done.as_mut_ptr();
            let code = MPI_Testsome(
                length,
                requests,
                &mut number,
                indices,
                statuses.as_mut_ptr(),
            );
            // `number` is negative (`MPI_UNDEFINED`) if no request is active.
            statuses.set_len(number.max(0) as usize);
            code
        };
        // If any completed request failed, only the statuses contain the errors.
        let each_says = code as u32 == MPI_ERR_IN_STATUS;
        if !each_says {
            check("MPI_Testsome", code)?;
        }
        let outcome = |status: &MPI_Status| {
            check("MPI_Testsome", if each_says { status.MPI_ERROR } else { 0 })
        };
        let done = done
            .into_iter()
            .zip(&statuses)
            .map(|(index, status)| (index as usize, outcome(status)));
        let mut done: Vec<_> = done.collect();
        done.sort_unstable_by_key(|(index, _)| *index);
        Ok(done)
    }

    /// Finalizes MPI, after all processes have called this. No MPI function may be called
    /// afterwards.
    pub fn finalize(&self) -> Result<(), MpiError> {
        if self.failures.is_some() && !Ulfm::may_finalize() {
            return Ok(());
        }
        // SAFETY: this is the thread that initialized MPI, and no request is active.
        check("MPI_Finalize", unsafe { MPI_Finalize() })
    }
}

/// Ends all processes of the job through the launcher.
pub(super) fn abort() {
    // SAFETY: MPI is initialized, on this thread.
    unsafe { MPI_Abort(RSMPI_COMM_WORLD, 1) };
}

fn check_place(place: ProcessRank, processes: usize, here: usize) -> Result<(), StartError> {
    if place == (ProcessRank { processes, here }) {
        return Ok(());
    }
    let mpi_processes = processes;
    let mpi_here = here;
    Err(StartError::OtherLauncher {
        processes: place.processes,
        here: place.here,
        mpi_processes,
        mpi_here,
    })
}

/// Converts a length to MPI's `int`. Messages are split into fragments so that their lengths fit.
fn count(length: usize) -> c_int {
    length
        .try_into()
        .expect("fragments have at most `i32::MAX` bytes, and there are fewer than 2^31 requests")
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
            // SAFETY: the message has no bytes.
            let error = unsafe { library.send(ptr::null(), 0, 7, 0) }.unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with("MPI_Isend failed: MPI_ERR_RANK"),
                "{error}"
            );
            assert!(matches!(
                error.into(),
                StartError::Mpi {
                    call: "MPI_Isend",
                    ..
                }
            ));
            library.finalize().unwrap();
        });
    }

    #[test]
    fn a_launcher_that_is_not_this_librarys_is_told() {
        // For MPI, the process is the only one.
        ProcessTest::new(1).run(|| {
            let error = Library::start(ProcessRank {
                processes: 4,
                here: 2,
            })
            .map(|_| ())
            .unwrap_err()
            .to_string();
            let told = "the launcher started process 2 of 4, but MPI sees it as process 0 of 1";
            assert!(error.starts_with(told), "{error}");
            assert!(mpi::environment::is_finalized());
        });
    }
}
