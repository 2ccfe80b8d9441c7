//! Encoding and decoding of headers, including invalid ones.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{BoolStore, DType, Shape};
use burn_dtensor_flight::LaunchId;

use super::super::header::{
    ControlMessage, DataMode, EncodedSignature, Header, PayloadDesc, RemoteGroupId, RemoteGroupInfo, Said,
    SharedMemoryMessage,
};
use crate::Error;
use crate::comm::backend::{CallSignature, Failure, PairwiseSignature, ShardSignature, TensorSignature};
use crate::comm::local::MembershipMessage;
use crate::comm::{
    Call, CollectiveId, CommError, Digests, Op, RankReport, ReduceOp, ReplicatedValue, ShardedModel, StartError,
    TensorMeta,
};
use crate::memory::shared_memory::SharedMemoryHandle;
use crate::placement::ShardSizes;

fn meta(shape: &[usize], dtype: DType) -> TensorMeta {
    TensorMeta { shape: Shape::from(shape.to_vec()), dtype }
}

fn tensor(shape: &[usize], dtype: DType) -> TensorSignature {
    let sharding = Some(ShardSignature::new(0, &ShardSizes::Chunked(4)));
    let to = Some(ShardSignature::new(1, &ShardSizes::Uneven([1, 300, 0].into())));
    TensorSignature { shape: Shape::from(shape.to_vec()), dtype, sharding, to }
}

/// Returns signatures that together have every field, operation and reduction.
fn prints() -> Vec<CallSignature> {
    let call = Call::new("blocks.3").with_forward_index(1 << 40).with_names(["a".into(), "b".into()]);
    let model = Some(ShardedModel { number: 3, states: [0, 1 << 50].into(), origin: "Linear".into() });
    let call =
        Call { model, global_tensor: Some(meta(&[4, 0], DType::F32)), operand_shapes: Some("[4, 8]".into()), ..call };
    let tensors = vec![tensor(&[4, 8], DType::BF16), tensor(&[], DType::Bool(BoolStore::Native))];
    let full = CallSignature {
        root: Some(200),
        any: true,
        pairs: Some(Box::new(PairwiseSignature {
            member: 1,
            given: vec![None, Some(meta(&[7], DType::U16))],
            taken: vec![None; 2],
        })),
        ..CallSignature::new(Op::AllToAllList, &call, tensors)
    };
    let mut prints = vec![full, CallSignature::new(Op::Barrier, &Call::default(), Vec::new())];
    use Op::*;
    for op in [AllGather, ReduceScatter, AllReduce, AllToAll, Broadcast, Scatter, Reduce, Gather, Send, Receive] {
        prints.push(CallSignature::new(op, &call, Vec::new()));
    }
    use ReduceOp::*;
    for reduce in [Sum, Avg, Min, Max, Product, BitAnd, BitOr, BitXor, ReduceOp::premul_sum(0.1)] {
        prints.push(CallSignature { reduce: Some(reduce), ..CallSignature::new(AllReduce, &call, Vec::new()) });
    }
    prints
}

/// Returns digests of every kind of value.
fn digests() -> Arc<[Digests]> {
    let names: Arc<[_]> = ["a".into(), "b".into()].into();
    let values: Arc<[_]> = [Some(u64::MAX), None].into();
    use ReplicatedValue::{GatheredWeight, Gradient, LocalTensor, Weight};
    let kinds = [Weight, GatheredWeight, Gradient, LocalTensor];
    kinds.map(|of| Digests { of, step: 300, names: names.clone(), values: values.clone() }).into()
}

/// Returns errors of most kinds, with and without their optional fields.
fn errors() -> Vec<CommError> {
    let id = || CollectiveId { op: Op::Send, seq: 300, label: "é".into(), ranks: [0, 500].into() };
    let (rank, label, problem) = (1, String::from("l"), String::from("p"));
    vec![
        CommError::RankPanicked { rank, message: "m".into(), during: None },
        CommError::RankFailed { rank, message: "m".into(), during: Some(id()) },
        CommError::RankReturned { rank, during: id() },
        CommError::Mismatch { rank, other: 2, during: id(), differs: "d".into() },
        CommError::Deadlock { waits: vec![(0, id(), 1), (1, id(), 0)] },
        CommError::ConcurrentCalls { rank, called: id(), during: id() },
        CommError::CollectiveInRunOn { rank, called: id() },
        CommError::ForeignRankObject { rank, owner: 0, op: Op::Barrier, label: label.clone() },
        CommError::DeadlineExceeded {
            rank,
            missing: vec![0, 7],
            during: id(),
            deadline: Duration::new(5, 999_999_999),
        },
        CommError::InvalidArgument { rank, op: Op::Reduce, label, problem: problem.clone(), remedy: "r".into() },
        CommError::InvalidGroup { rank, ranks: vec![1, 1], problem: problem.clone() },
        CommError::Disconnected { rank, problem },
        CommError::Diverged {
            rank,
            other: 2,
            during: id(),
            param: "a".into(),
            of: ReplicatedValue::GatheredWeight,
            step: 300,
            majority: true,
        },
    ]
}

const LAUNCH: LaunchId = LaunchId { number: 3, shrunk: 1, process: None };

fn write(word: ControlMessage<&EncodedSignature>) -> Vec<u8> {
    Header { launch: LAUNCH, word }.write()
}

fn headers() -> Vec<Vec<u8>> {
    let channel = |is_new: bool| {
        let introduction = RemoteGroupInfo { ranks: vec![0, 200, 3], name: "reduced".into(), member: 1 };
        RemoteGroupId { number: 128, introduction: is_new.then_some(introduction) }
    };
    let at =
        SharedMemoryMessage::At { address: SharedMemoryHandle { process: 1 << 22, file: 7, number: u64::MAX - 1 } };
    let contents =
        PayloadDesc { addressees: vec![0, 0, 2], tensors: vec![meta(&[3, 5], DType::F64); 3], common: Some(at) };
    let mut headers = Vec::new();
    for print in prints() {
        let (print, contents) = (&EncodedSignature::of(&print), contents.clone());
        headers.push(write(ControlMessage::Joined {
            channel: channel(true),
            seq: 1 << 33,
            print: Said::Full { number: Some(5), print },
            digests: Some(digests()),
            when: DataMode::OnDemand,
            contents: contents.clone(),
        }));
        headers.push(write(ControlMessage::Sent { channel: channel(false), to: 2, tag: u32::MAX, print, contents }));
    }
    let print = Said::Known { number: 300 };
    let contents_of = contents.clone();
    headers.push(write(ControlMessage::Joined {
        channel: channel(false),
        seq: 0,
        print,
        digests: None,
        when: DataMode::Eager,
        contents: contents_of,
    }));
    headers.push(write(ControlMessage::Pull { channel: 300, seq: 1 << 33, wanted: true }));
    headers.push(write(ControlMessage::Data { channel: 300, seq: 1 << 33, contents }));
    for word in [SharedMemoryMessage::Wanted {}, SharedMemoryMessage::Unwanted {}] {
        let contents = PayloadDesc { common: Some(word), ..PayloadDesc::default() };
        headers.push(write(ControlMessage::Data { channel: 3, seq: 1, contents }));
    }
    let notices = [
        MembershipMessage::Came { rank: 300 },
        MembershipMessage::Gone { ranks: vec![1, 300] },
        MembershipMessage::Missed { process: 2 },
        MembershipMessage::Roster { ranks: vec![0, 300] },
    ];
    headers.extend(notices.map(|notice| write(ControlMessage::Membership(notice))));
    headers.push(write(ControlMessage::RankExited(RankReport {
        rank: 9,
        doing: "computing".into(),
        error: None,
        at: None,
    })));
    let mut failures: Vec<_> = errors().into_iter().map(Failure::Collective).collect();
    failures.push(Failure::Panicked { rank: 0, message: "boom".into() });
    failures.push(Failure::Failed { rank: 0, message: String::new() });
    for failure in failures {
        headers.push(write(ControlMessage::Failed { failure, decided: true }));
    }
    headers
}

fn text(value: &impl Debug) -> String {
    format!("{value:?}")
}

#[test]
fn a_header_is_read_as_it_was_written() {
    for (header, print) in headers().chunks(2).zip(prints()) {
        for header in header {
            let Some(Header { launch, word }) = Header::read(header) else { panic!("{header:?} cannot be decoded") };
            assert_eq!(launch, LAUNCH);
            let (ControlMessage::Joined { print: Said::Full { number: Some(5), print: read }, .. }
            | ControlMessage::Sent { print: read, .. }) = &word
            else {
                panic!("{word:?}")
            };
            assert_eq!(text(read), text(&print));
        }
    }
    let mut errors = errors().into_iter();
    for header in headers() {
        if let ControlMessage::Failed { failure: Failure::Collective(error), decided: true } =
            Header::read(&header).unwrap().word
        {
            assert_eq!(Some(error), errors.next());
        }
    }
    assert_eq!(errors.next(), None);
    let read = Header::read(&headers()[0]).unwrap();
    let ControlMessage::Joined {
        channel: RemoteGroupId { number: 128, introduction: Some(introduction) },
        seq,
        digests: Some(read_digests),
        contents,
        ..
    } = read.word
    else {
        panic!("{read:?}")
    };
    assert_eq!(read_digests, digests());
    assert_eq!(
        (&introduction.ranks[..], &introduction.name[..], introduction.member),
        (&[0, 200, 3][..], "reduced", 1)
    );
    assert_eq!((seq, contents.addressees), (1 << 33, vec![0, 0, 2]));
    assert_eq!(contents.tensors, vec![meta(&[3, 5], DType::F64); 3]);
}

#[test]
fn how_a_rank_ended_arrives_with_the_sources_of_its_error() {
    #[derive(Debug, thiserror::Error)]
    #[error("no batch left")]
    struct NoBatch(#[source] std::fmt::Error);
    let there = |error: Error| {
        let report = RankReport { rank: 9, doing: "computing".into(), error: Some(error), at: Some("a.rs:1:2".into()) };
        let ControlMessage::RankExited(report) = Header::read(&write(ControlMessage::RankExited(report))).unwrap().word
        else {
            panic!("decoded as another message")
        };
        assert_eq!((report.rank, &report.doing[..], report.at.as_deref()), (9, "computing", Some("a.rs:1:2")));
        report.error.expect("the report has an error")
    };
    for error in errors() {
        let Error::Comm(read) = there(error.clone().into()) else { panic!("{error} changed its type") };
        assert_eq!(read, error);
    }
    let read = there(Error::other(NoBatch(std::fmt::Error)));
    let source = std::error::Error::source(&read).expect("the error has a source");
    assert_eq!((read.to_string(), source.to_string()), ("no batch left".into(), std::fmt::Error.to_string()));
    assert!(source.source().is_none());
    assert_eq!(there(StartError::Initialized.into()).to_string(), StartError::Initialized.to_string());
}

/// Every truncated header, every header with one more byte, and every header with one changed byte is either
/// rejected or decoded as another header, without a panic.
#[test]
fn what_is_no_header_is_refused_without_a_panic() {
    for header in headers() {
        for end in 0..header.len() {
            assert!(Header::read(&header[..end]).is_none(), "{end} bytes of {header:?}");
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut other = header.clone();
                other[end] = byte;
                let _ = Header::read(&other);
            }
        }
        assert!(Header::read(&[&header[..], &[0]].concat()).is_none());
    }
}
