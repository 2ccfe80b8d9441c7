//! Calls: each method calls its function with its arguments, and returns what it answers.
#![cfg(unix)]

mod support;

use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use burn_dtensor_nccl::sys::{ncclConfig_t, ncclDataType_t, ncclScalarResidence_t};
use burn_dtensor_nccl::{
    FUNCTIONS, NCCL_SHRINK_ABORT, NCCL_SPLIT_NOCOLOR, NCCL_WIN_COLL_SYMMETRIC, NcclError, Progress,
    RedOp, ResultCode, nonblocking_config,
};
use support::stub::LoadedStub;

/// A pointer that is only passed on.
fn at<T>(address: usize) -> *mut T {
    ptr::without_provenance_mut(address)
}

fn done(result: Result<Progress, NcclError>) {
    assert_eq!(result, Ok(Progress::Done));
}

#[test]
fn methods_call_their_functions_with_their_arguments() {
    let stub = LoadedStub::new("calls.so", &[]);
    let nccl = &stub.nccl;
    let send = at::<c_void>(0x5e);
    let recv = at::<c_void>(0x4e);
    let comm = at(0xcc);
    let stream = at(0x57);
    let f32 = ncclDataType_t::ncclFloat32;
    let bf16 = ncclDataType_t::ncclBfloat16;
    let mut config = nonblocking_config();
    config.splitShare = 1;
    let size = mem::size_of::<ncclConfig_t>();
    assert_eq!(stub.take_calls(), ["ncclGetVersion"]);

    // SAFETY: the stub writes to what `new`, `window` and locals point to, and reads the scalar.
    unsafe {
        let id = nccl.unique_id().unwrap();
        let mut created = ptr::null_mut();
        done(nccl.comm_init_rank_config(&mut created, 8, id, 3, &mut config));
        assert_eq!(created, at(0xc0));

        let new = AtomicPtr::new(ptr::null_mut());
        done(nccl.comm_split(comm, 4, 5, &new, Some(&mut config)));
        assert_eq!(new.load(Ordering::Acquire), at(0xc1));
        done(nccl.comm_split(comm, NCCL_SPLIT_NOCOLOR, 0, &new, None));
        let excluded = [7, 6];
        done(nccl.comm_shrink(comm, &excluded, &new, None, NCCL_SHRINK_ABORT));
        assert_eq!(new.load(Ordering::Acquire), at(0xc2));
        assert_eq!(excluded, [7, 6]);
        done(nccl.comm_revoke(comm));
        done(nccl.comm_finalize(comm));
        nccl.comm_destroy(comm).unwrap();
        nccl.comm_abort(comm).unwrap();
        done(nccl.comm_async_error(comm));

        assert_eq!(nccl.mem_alloc(4096), Ok(at(0xa110c)));
        nccl.mem_free(recv).unwrap();
        assert_eq!(nccl.comm_register(comm, recv, 64), Ok(at(0x4e9)));
        nccl.comm_deregister(comm, send).unwrap();
        let window = AtomicPtr::new(ptr::null_mut());
        done(nccl.comm_window_register(comm, recv, 128, &window, NCCL_WIN_COLL_SYMMETRIC));
        assert_eq!(window.load(Ordering::Acquire), at(0x317d));
        nccl.comm_window_deregister(comm, at(0x317d)).unwrap();

        nccl.group_start().unwrap();
        done(nccl.all_reduce(send, recv, 1, f32, RedOp::AVG, comm, stream));
        done(nccl.reduce_scatter(send, recv, 2, bf16, RedOp::SUM, comm, stream));
        done(nccl.all_gather(send, recv, 3, f32, comm, stream));
        done(nccl.broadcast(send, recv, 4, bf16, 2, comm, stream));
        done(nccl.send(send, 5, f32, 6, comm, stream));
        done(nccl.recv(recv, 7, bf16, 8, comm, stream));
        done(nccl.group_end());

        let mut scalar = 0.25_f32;
        let host = ncclScalarResidence_t::ncclScalarHostImmediate;
        let op = nccl
            .red_op_create_pre_mul_sum((&raw mut scalar).cast(), f32, host, comm)
            .unwrap();
        assert_eq!(op, RedOp(7));
        nccl.red_op_destroy(op, comm).unwrap();
    }
    assert_eq!(nccl.error_string(ResultCode(5)), "description of 5");
    assert_eq!(nccl.last_error(), "");

    let calls = stub.take_calls();
    assert_eq!(
        calls,
        [
            "ncclGetUniqueId",
            &format!("ncclCommInitRankConfig 8 128 3 [{size} cafebeef 23000 0 1]"),
            &format!("ncclCommSplit cc 4 5 [{size} cafebeef 23000 0 1]"),
            "ncclCommSplit cc -1 0 null",
            "ncclCommShrink cc 2 7 6 null 1",
            "ncclCommRevoke cc 0",
            "ncclCommFinalize cc",
            "ncclCommDestroy cc",
            "ncclCommAbort cc",
            "ncclCommGetAsyncError cc",
            "ncclMemAlloc 4096",
            "ncclMemFree 4e",
            "ncclCommRegister cc 4e 64",
            "ncclCommDeregister cc 5e",
            "ncclCommWindowRegister cc 4e 128 1",
            "ncclCommWindowDeregister cc 317d",
            "ncclGroupStart",
            "ncclAllReduce 5e 4e 1 7 4 cc 57",
            "ncclReduceScatter 5e 4e 2 9 0 cc 57",
            "ncclAllGather 5e 4e 3 7 cc 57",
            "ncclBroadcast 5e 4e 4 9 2 cc 57",
            "ncclSend 5e 5 7 6 cc 57",
            "ncclRecv 4e 7 9 8 cc 57",
            "ncclGroupEnd",
            "ncclRedOpCreatePreMulSum 0.25 7 1 cc",
            "ncclRedOpDestroy 7 cc",
            "ncclGetErrorString 5",
            "ncclGetLastError 0",
        ]
    );
    for function in &FUNCTIONS[1..] {
        let is_call = |call: &String| call.split(' ').next() == Some(function.name);
        assert!(calls.iter().any(is_call), "{}", function.name);
    }
}

#[test]
fn a_call_in_progress_is_not_an_error() {
    let stub = LoadedStub::new("progress.so", &[]);
    stub.set_answer(7);
    // SAFETY: the stub uses no communicator.
    unsafe {
        let progress = stub.nccl.comm_finalize(at(0xcc));
        assert_eq!(progress, Ok(Progress::InProgress));
        let progress = stub.nccl.comm_revoke(at(0xcc));
        assert_eq!(progress, Ok(Progress::InProgress));
        stub.set_answer(0);
        stub.set_state(7);
        let progress = stub.nccl.comm_async_error(at(0xcc));
        assert_eq!(progress, Ok(Progress::InProgress));
    }
}

#[test]
fn errors_name_the_function_and_have_its_text() {
    let stub = LoadedStub::new("errors.so", &[]);
    let nccl = &stub.nccl;
    let finalize = || {
        // SAFETY: the stub uses no communicator.
        unsafe { nccl.comm_finalize(at(0xcc)) }.unwrap_err()
    };
    stub.set_answer(5);
    let error = finalize();
    assert_eq!(
        error.to_string(),
        "`ncclCommFinalize` failed with ncclInvalidUsage: description of 5. Set the environment variable NCCL_DEBUG to WARN to see NCCL's own messages"
    );
    stub.set_last_error(c"the communicator is revoked\n");
    assert_eq!(
        finalize(),
        NcclError::Failed {
            function: "ncclCommFinalize",
            code: ResultCode(5),
            last_error: "the communicator is revoked".to_owned(),
        }
    );
    // Values that no enum of the bindings has.
    stub.set_answer(4242);
    let message = finalize().to_string();
    assert!(
        message.contains("failed with ncclResult_t 4242: "),
        "{message}"
    );
    let error = nccl.unique_id().unwrap_err();
    assert!(
        matches!(
            error,
            NcclError::Failed {
                function: "ncclGetUniqueId",
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn an_error_of_the_communicator_is_not_one_of_the_call() {
    let stub = LoadedStub::new("asynchronous.so", &[]);
    stub.set_state(6);
    stub.set_last_error(c"connection closed by peer");
    // SAFETY: the stub uses no communicator.
    let error = unsafe { stub.nccl.comm_async_error(at(0xcc)) }.unwrap_err();
    assert_eq!(
        error,
        NcclError::Asynchronous {
            code: ResultCode(6),
            last_error: "connection closed by peer".to_owned(),
        }
    );
    assert!(
        error.to_string().starts_with(
            "the communicator failed with ncclRemoteError: connection closed by peer. Set "
        ),
        "{error}"
    );
    stub.set_answer(4);
    // SAFETY: as above.
    let error = unsafe { stub.nccl.comm_async_error(at(0xcc)) }.unwrap_err();
    assert!(
        matches!(
            error,
            NcclError::Failed {
                function: "ncclCommGetAsyncError",
                code: ResultCode(4),
                ..
            }
        ),
        "{error:?}"
    );
}
