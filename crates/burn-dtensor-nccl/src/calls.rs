//! Calls of the table's functions, which return errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicPtr;

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclScalarResidence_t,
    ncclUniqueId, ncclWindow_t, ncclWindow_vidmem,
};

use crate::error::NcclError;
use crate::functions::since;
use crate::library::NcclLibrary;
use crate::types::{Progress, RedOp, ResultCode};

/// Calls a required function, and converts what it returns.
macro_rules! call {
    ($nccl:ident.$function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: guaranteed by the caller of the method, unless no argument is a pointer or the
        // pointers are to locals.
        let code = unsafe { ($nccl.functions.$function)($($argument),*) };
        $nccl.progress(stringify!($function), code)
    }};
}

/// Calls an optional function, and converts what it returns.
macro_rules! call_optional {
    ($nccl:ident.$function:ident($($argument:expr),* $(,)?)) => {{
        match $nccl.functions.$function {
            Some(function) => {
                // SAFETY: guaranteed by the caller of the method.
                let code = unsafe { function($($argument),*) };
                $nccl.progress(stringify!($function), code)
            }
            None => Err($nccl.unavailable(stringify!($function))),
        }
    }};
}

/// Communicators.
///
/// The functions that make one are collective: they complete when all ranks of the communicator
/// have called them.
impl NcclLibrary {
    /// Returns a new identity for a communicator. One rank calls this, and sends the identity to
    /// the others.
    pub fn unique_id(&self) -> Result<ncclUniqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        completed(call!(self.ncclGetUniqueId(&mut id)))?;
        Ok(id)
    }

    /// Creates a communicator on the current CUDA device, as `rank` of `ranks`.
    ///
    /// Writes it to `comm` before it returns. A communicator that is not null must be destroyed or
    /// aborted, also if the result is an error.
    ///
    /// # Errors
    /// Fails as described for [`NcclError`]. Where CUDA is not usable, NCCL 2.30.7 fails with a
    /// group of calls left open on this thread, which [`group_end`](Self::group_end) closes.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn comm_init_rank_config(
        &self,
        comm: &mut ncclComm_t,
        ranks: c_int,
        id: ncclUniqueId,
        rank: c_int,
        config: &mut ncclConfig_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclCommInitRankConfig(comm, ranks, id, rank, config))
    }

    /// Splits a communicator: ranks that pass the same color become members of one new
    /// communicator, in the order of their keys. Without a configuration it has that of its parent.
    ///
    /// If the parent is not blocking, a thread of NCCL writes `new`, after the call has returned.
    /// It is null until then, and remains null with
    /// [`NCCL_SPLIT_NOCOLOR`](crate::NCCL_SPLIT_NOCOLOR).
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). `new` must remain where it is until
    /// [`comm_async_error`](Self::comm_async_error) of the parent no longer returns
    /// [`Progress::InProgress`].
    pub unsafe fn comm_split(
        &self,
        comm: ncclComm_t,
        color: c_int,
        key: c_int,
        new: &AtomicPtr<ncclComm>,
        config: Option<&mut ncclConfig_t>,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclCommSplit(comm, color, key, new.as_ptr(), pointer(config)))
    }

    /// Creates a communicator of the ranks that are not `excluded`. Excluded ranks do not call
    /// this. `flags` is [`NCCL_SHRINK_DEFAULT`](crate::NCCL_SHRINK_DEFAULT) or
    /// [`NCCL_SHRINK_ABORT`](crate::NCCL_SHRINK_ABORT).
    ///
    /// # Safety
    /// As for [`comm_split`](Self::comm_split), which describes `new`.
    pub unsafe fn comm_shrink(
        &self,
        comm: ncclComm_t,
        excluded: &[c_int],
        new: &AtomicPtr<ncclComm>,
        config: Option<&mut ncclConfig_t>,
        flags: c_int,
    ) -> Result<Progress, NcclError> {
        // NCCL sorts the list in place, and copies it.
        let mut excluded = excluded.to_vec();
        let count = c_int::try_from(excluded.len()).expect("there are fewer than 2^31 ranks");
        call_optional!(self.ncclCommShrink(
            comm,
            excluded.as_mut_ptr(),
            count,
            new.as_ptr(),
            pointer(config),
            flags,
        ))
    }

    /// Stops the operations of a communicator on this rank. Afterwards it can be split, shrunk and
    /// destroyed, but not finalized.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn comm_revoke(&self, comm: ncclComm_t) -> Result<Progress, NcclError> {
        /// The only flag that exists (`NCCL_REVOKE_DEFAULT`).
        const DEFAULT: c_int = 0;
        call_optional!(self.ncclCommRevoke(comm, DEFAULT))
    }

    /// Completes the operations of a communicator on all its ranks, so that
    /// [`comm_destroy`](Self::comm_destroy) does not wait for other ranks.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn comm_finalize(&self, comm: ncclComm_t) -> Result<Progress, NcclError> {
        call!(self.ncclCommFinalize(comm))
    }

    /// Frees a communicator.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). The communicator must not be used afterwards.
    pub unsafe fn comm_destroy(&self, comm: ncclComm_t) -> Result<(), NcclError> {
        completed(call!(self.ncclCommDestroy(comm)))
    }

    /// Ends the operations of a communicator on this rank without the other ranks, and frees it.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). The communicator must not be used afterwards.
    pub unsafe fn comm_abort(&self, comm: ncclComm_t) -> Result<(), NcclError> {
        completed(call!(self.ncclCommAbort(comm)))
    }

    /// Returns the state of a communicator: [`Progress::InProgress`] while a call continues in the
    /// background.
    ///
    /// # Errors
    /// Fails with [`NcclError::Asynchronous`] if an operation of the communicator has failed since
    /// it was started.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn comm_async_error(&self, comm: ncclComm_t) -> Result<Progress, NcclError> {
        let mut state = ResultCode::SUCCESS;
        completed(call!(self.ncclCommGetAsyncError(comm, &mut state)))?;
        match state {
            ResultCode::SUCCESS => Ok(Progress::Done),
            ResultCode::IN_PROGRESS => Ok(Progress::InProgress),
            code => Err(NcclError::Asynchronous {
                code,
                last_error: self.last_error_or_description(code),
            }),
        }
    }
}

/// Memory.
impl NcclLibrary {
    /// Allocates memory on the current CUDA device that can be registered as a buffer or window.
    pub fn mem_alloc(&self, bytes: usize) -> Result<*mut c_void, NcclError> {
        let mut memory = ptr::null_mut();
        completed(call!(self.ncclMemAlloc(&mut memory, bytes)))?;
        Ok(memory)
    }

    /// Frees memory of [`mem_alloc`](Self::mem_alloc).
    ///
    /// # Safety
    /// The memory must not be registered or in use, and must not be used afterwards.
    pub unsafe fn mem_free(&self, memory: *mut c_void) -> Result<(), NcclError> {
        completed(call!(self.ncclMemFree(memory)))
    }

    /// Registers memory with a communicator, so that its operations need no copy. Returns a handle
    /// for [`comm_deregister`](Self::comm_deregister), which is null if NCCL does not register the
    /// memory.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). The memory must have `bytes` bytes and must not be
    /// freed while it is registered.
    pub unsafe fn comm_register(
        &self,
        comm: ncclComm_t,
        buffer: *mut c_void,
        bytes: usize,
    ) -> Result<*mut c_void, NcclError> {
        let mut handle = ptr::null_mut();
        completed(call!(self.ncclCommRegister(
            comm,
            buffer,
            bytes,
            &mut handle
        )))?;
        Ok(handle)
    }

    /// Ends a registration of [`comm_register`](Self::comm_register).
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). No operation may use the memory at this time.
    pub unsafe fn comm_deregister(
        &self,
        comm: ncclComm_t,
        handle: *mut c_void,
    ) -> Result<(), NcclError> {
        completed(call!(self.ncclCommDeregister(comm, handle)))
    }

    /// Registers memory as a window, collectively: all ranks of the communicator pass the same
    /// number of bytes and `flags`, which is [`NCCL_WIN_DEFAULT`](crate::NCCL_WIN_DEFAULT) or
    /// [`NCCL_WIN_COLL_SYMMETRIC`](crate::NCCL_WIN_COLL_SYMMETRIC).
    ///
    /// If the communicator is not blocking, a thread of NCCL writes `window` after the call has
    /// returned [`Progress::Done`]: call [`comm_async_error`](Self::comm_async_error) until it is
    /// done. `window` should be null before the call, since NCCL leaves it as it is where windows
    /// are not supported.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). The memory must have `bytes` bytes and must not be
    /// freed while it is registered. `window` must remain where it is until
    /// [`comm_async_error`](Self::comm_async_error) no longer returns [`Progress::InProgress`].
    pub unsafe fn comm_window_register(
        &self,
        comm: ncclComm_t,
        buffer: *mut c_void,
        bytes: usize,
        window: &AtomicPtr<ncclWindow_vidmem>,
        flags: c_int,
    ) -> Result<Progress, NcclError> {
        call_optional!(self.ncclCommWindowRegister(comm, buffer, bytes, window.as_ptr(), flags))
    }

    /// Ends the registration of a window.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). No operation may use the window at this time.
    pub unsafe fn comm_window_deregister(
        &self,
        comm: ncclComm_t,
        window: ncclWindow_t,
    ) -> Result<(), NcclError> {
        completed(call_optional!(self.ncclCommWindowDeregister(comm, window)))
    }
}

/// Operations on streams.
///
/// Counts are numbers of elements. Buffers that are the same, or of which one is the rank's block
/// of the other, make an operation in place.
impl NcclLibrary {
    /// Begins a group of calls of this thread, which [`group_end`](Self::group_end) starts
    /// together.
    pub fn group_start(&self) -> Result<(), NcclError> {
        completed(call!(self.ncclGroupStart()))
    }

    /// Ends a group of calls. Fails also if a call in the group was invalid.
    pub fn group_end(&self) -> Result<Progress, NcclError> {
        call!(self.ncclGroupEnd())
    }

    /// Reduces `count` elements of all ranks to all ranks.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    #[expect(clippy::too_many_arguments, reason = "arguments of NCCL")]
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: RedOp,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclAllReduce(send, recv, count, datatype, op, comm, stream))
    }

    /// Reduces the elements of all ranks, and writes the rank's block of `recv_count` elements.
    /// `send` has a block for each rank.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    #[expect(clippy::too_many_arguments, reason = "arguments of NCCL")]
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        recv_count: usize,
        datatype: ncclDataType_t,
        op: RedOp,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclReduceScatter(send, recv, recv_count, datatype, op, comm, stream))
    }

    /// Gathers `send_count` elements of each rank, in the order of the ranks, on all ranks.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        send_count: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclAllGather(send, recv, send_count, datatype, comm, stream))
    }

    /// Sends `count` elements of the rank `root` to all ranks. `send` is used on that rank only.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    #[expect(clippy::too_many_arguments, reason = "arguments of NCCL")]
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclBroadcast(send, recv, count, datatype, root, comm, stream))
    }

    /// Sends `count` elements to the rank `peer`, which receives as many.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn send(
        &self,
        send: *const c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclSend(send, count, datatype, peer, comm, stream))
    }

    /// Receives `count` elements from the rank `peer`, which sends as many.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn recv(
        &self,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress, NcclError> {
        call!(self.ncclRecv(recv, count, datatype, peer, comm, stream))
    }

    /// Creates an operator that multiplies the rank's operand by a scalar, and adds the products.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety). `scalar` must point to an element of the type: in
    /// host memory until the call returns, or, for `ncclScalarDevice`, in device memory as long as
    /// operations use the operator.
    pub unsafe fn red_op_create_pre_mul_sum(
        &self,
        scalar: *mut c_void,
        datatype: ncclDataType_t,
        residence: ncclScalarResidence_t,
        comm: ncclComm_t,
    ) -> Result<RedOp, NcclError> {
        let mut op = RedOp::SUM;
        completed(call!(self.ncclRedOpCreatePreMulSum(
            &mut op, scalar, datatype, residence, comm
        )))?;
        Ok(op)
    }

    /// Frees an operator. Operations that were started with it may still be in flight.
    ///
    /// # Safety
    /// [As for all calls](NcclLibrary#safety).
    pub unsafe fn red_op_destroy(&self, op: RedOp, comm: ncclComm_t) -> Result<(), NcclError> {
        completed(call!(self.ncclRedOpDestroy(op, comm)))
    }
}

/// Errors.
impl NcclLibrary {
    /// Returns NCCL's description of a value.
    pub fn error_string(&self, code: ResultCode) -> String {
        // SAFETY: the function accepts all values.
        text(unsafe { (self.functions.ncclGetErrorString)(code) })
    }

    /// Returns the text of the last error in this process, or an empty text. It may be older than
    /// the last call, and another thread's.
    pub fn last_error(&self) -> String {
        // SAFETY: the function does not use the communicator, which may be null.
        text(unsafe { (self.functions.ncclGetLastError)(ptr::null_mut()) })
    }

    fn last_error_or_description(&self, code: ResultCode) -> String {
        let text = self.last_error();
        if text.is_empty() {
            self.error_string(code)
        } else {
            text
        }
    }

    fn progress(&self, function: &'static str, code: ResultCode) -> Result<Progress, NcclError> {
        match code {
            ResultCode::SUCCESS => Ok(Progress::Done),
            ResultCode::IN_PROGRESS => Ok(Progress::InProgress),
            code => Err(NcclError::Failed {
                function,
                code,
                last_error: self.last_error_or_description(code),
            }),
        }
    }

    fn unavailable(&self, function: &'static str) -> NcclError {
        NcclError::Unavailable {
            function,
            since: since(function),
            found: self.version(),
            path: self.path().to_owned(),
        }
    }
}

/// Converts the result of a function that does not continue in the background, or that ends the
/// life of what could be asked for progress.
fn completed(result: Result<Progress, NcclError>) -> Result<(), NcclError> {
    result.map(|_progress| ())
}

/// Converts a configuration to the argument of NCCL, which is null if the parent's is used.
fn pointer(config: Option<&mut ncclConfig_t>) -> *mut ncclConfig_t {
    config.map_or(ptr::null_mut(), ptr::from_mut)
}

/// Copies a text of NCCL, which may be null.
fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's texts end with a null byte. They are constants, or a buffer whose last byte
    // NCCL never changes.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim_end().to_owned()
}
