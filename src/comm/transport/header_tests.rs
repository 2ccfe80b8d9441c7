//! Encoding and decoding of headers, including invalid ones.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{BoolStore, DType, Shape};
use burn_dtensor_flight::LaunchId;
use twox_hash::XxHash3_128;

use super::header::{
    ControlMessage, Header, KnownSignatures, MessageId, PayloadDesc, RemoteGroupId,
    RemoteGroupInfo, SentSignature, VERSION,
};
use crate::Error;
use crate::comm::backend::{
    CallSignature, Failure, PairwiseSignature, ShardSignature, TensorSignature,
};
use crate::comm::control::exchange_report::ExchangeReport;
use crate::comm::control::match_table::DataMode;
use crate::comm::control::membership::MembershipMessage;
use crate::comm::{
    Call, CollectiveId, CommError, Digests, Op, RankReport, ReduceOp, ReplicatedValue,
    ShardedModel, StartError, TensorMeta,
};
use crate::placement::ShardSizes;

fn meta(shape: &[usize], dtype: DType) -> TensorMeta {
    TensorMeta {
        shape: Shape::from(shape.to_vec()),
        dtype,
    }
}

fn tensor(shape: &[usize], dtype: DType) -> TensorSignature {
    let sharding = Some(ShardSignature::new(0, &ShardSizes::Chunked(4)));
    let to = Some(ShardSignature::new(
        1,
        &ShardSizes::Uneven([1, 300, 0].into()),
    ));
    TensorSignature {
        shape: Shape::from(shape.to_vec()),
        dtype,
        sharding,
        to,
    }
}

/// Returns signatures that together have every field, operation and reduction.
fn signatures() -> Vec<CallSignature> {
    let call = Call::new("blocks.3")
        .with_forward_index(1 << 40)
        .with_names(["a".into(), "b".into()]);
    let model = Some(ShardedModel {
        number: 3,
        states: [0, 1 << 50].into(),
        origin: "Linear".into(),
    });
    let call = Call {
        model,
        global_tensor: Some(meta(&[4, 0], DType::F32)),
        operand_shapes: Some("[4, 8]".into()),
        ..call
    };
    let tensors = vec![
        tensor(&[4, 8], DType::BF16),
        tensor(&[], DType::Bool(BoolStore::Native)),
    ];
    let full = CallSignature {
        root: Some(200),
        any: true,
        digests: Some(digests()),
        pairs: Some(Box::new(PairwiseSignature {
            member: 1,
            sent: vec![None, Some(meta(&[7], DType::U16))],
            received: vec![None; 2],
        })),
        ..CallSignature::new(Op::AllToAllList, &call, tensors)
    };
    let mut signatures = vec![
        full,
        CallSignature::new(Op::Barrier, &Call::default(), Vec::new()),
    ];
    use Op::*;
    for op in [
        AllGather,
        ReduceScatter,
        AllReduce,
        AllToAll,
        Broadcast,
        Scatter,
        Reduce,
        Gather,
        Send,
        Receive,
    ] {
        signatures.push(CallSignature::new(op, &call, Vec::new()));
    }
    use ReduceOp::*;
    for reduce in [
        Sum,
        Avg,
        Min,
        Max,
        Product,
        BitAnd,
        BitOr,
        BitXor,
        ReduceOp::premul_sum(0.1),
    ] {
        signatures.push(CallSignature {
            reduce: Some(reduce),
            ..CallSignature::new(AllReduce, &call, Vec::new())
        });
    }
    signatures
}

/// Returns digests of every kind of value.
fn digests() -> Arc<[Digests]> {
    let names: Arc<[_]> = ["a".into(), "b".into()].into();
    let values: Arc<[_]> = [Some(u64::MAX), None].into();
    use ReplicatedValue::{GatheredWeight, Gradient, LocalTensor, Weight};
    let kinds = [Weight, GatheredWeight, Gradient, LocalTensor];
    kinds
        .map(|of| Digests {
            of,
            step: 300,
            names: names.clone(),
            values: values.clone(),
        })
        .into()
}

/// Returns errors of most kinds, with and without their optional fields.
fn errors() -> Vec<CommError> {
    let id = || CollectiveId {
        op: Op::Send,
        seq: 300,
        label: "é".into(),
        ranks: [0, 500].into(),
    };
    let rank = 1;
    let label = String::from("l");
    let problem = String::from("p");
    vec![
        CommError::RankPanicked {
            rank,
            message: "m".into(),
            during: None,
        },
        CommError::RankFailed {
            rank,
            message: "m".into(),
            during: Some(id()),
        },
        CommError::RankReturned { rank, during: id() },
        CommError::Mismatch {
            rank,
            other: 2,
            during: id(),
            differs: "d".into(),
        },
        CommError::Deadlock {
            waits: vec![(0, id(), 1), (1, id(), 0)],
        },
        CommError::ConcurrentCalls {
            rank,
            called: id(),
            during: id(),
        },
        CommError::CollectiveInRunOn { rank, called: id() },
        CommError::ForeignRankObject {
            rank,
            owner: 0,
            op: Op::Barrier,
            label: label.clone(),
        },
        CommError::DeadlineExceeded {
            rank,
            missing: vec![0, 7],
            during: id(),
            deadline: Duration::new(5, 999_999_999),
        },
        CommError::InvalidArgument {
            rank,
            op: Op::Reduce,
            label,
            problem: problem.clone(),
            remedy: "r".into(),
        },
        CommError::InvalidGroup {
            rank,
            ranks: vec![1, 1],
            problem: problem.clone(),
        },
        CommError::Disconnected { rank, problem },
        CommError::StillRunning {
            rank,
            deadline: Duration::from_millis(3),
        },
        CommError::UnequalRanks {
            rank,
            process: 0,
            ranks: 4,
            other: 1,
            other_ranks: 300,
        },
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

/// Returns a signature as a channel sends it in its first and in its second call.
fn sent_twice(signature: &CallSignature) -> [SentSignature; 2] {
    let mut known = KnownSignatures::default();
    [(); 2].map(|()| SentSignature::new(signature).abbreviated(&mut known))
}

const LAUNCH: LaunchId = LaunchId {
    number: 3,
    shrunk: 1,
    process: None,
};

fn write(message: ControlMessage) -> Vec<u8> {
    Header {
        launch: LAUNCH,
        message,
    }
    .write()
}

fn headers() -> Vec<Vec<u8>> {
    let channel = |is_new: bool| {
        let introduction = RemoteGroupInfo {
            ranks: vec![0, 200, 3],
            name: "reduced".into(),
            member: 1,
        };
        RemoteGroupId {
            number: 128,
            introduction: is_new.then_some(introduction),
        }
    };
    let contents = PayloadDesc {
        recipients: vec![0, 0, 2],
        tensors: vec![meta(&[3, 5], DType::F64); 3],
    };
    let mut headers = Vec::new();
    for signature in signatures() {
        let contents = contents.clone();
        headers.push(write(ControlMessage::Joined {
            channel: channel(true),
            seq: 1 << 33,
            signature: SentSignature::new(&signature),
            mode: DataMode::OnDemand,
            contents: contents.clone(),
        }));
        headers.push(write(ControlMessage::Sent {
            channel: channel(false),
            to: 2,
            tag: u32::MAX,
            signature,
            contents,
            exchanged: None,
        }));
    }
    headers.push(write(ControlMessage::Sent {
        channel: channel(false),
        to: 2,
        tag: 0,
        signature: signatures().remove(0),
        contents: PayloadDesc::default(),
        exchanged: Some(300),
    }));
    let [_, again] = sent_twice(&signatures()[0]);
    for (is_new, report) in [
        (true, ExchangeReport::Agreed),
        (false, ExchangeReport::Wanted),
        (false, ExchangeReport::Declined),
    ] {
        headers.push(write(ControlMessage::ExchangeReported {
            channel: channel(is_new),
            seq: 300,
            report,
        }));
    }
    let channel = channel(false);
    let mode = DataMode::Eager;
    headers.push(write(ControlMessage::Joined {
        channel,
        seq: 0,
        signature: again,
        mode,
        contents: contents.clone(),
    }));
    headers.push(write(ControlMessage::Pull {
        channel: 300,
        seq: 1 << 33,
        wanted: true,
    }));
    headers.push(write(ControlMessage::Data {
        channel: 300,
        seq: 1 << 33,
        contents,
    }));
    let notices = [
        MembershipMessage::Came { rank: 300 },
        MembershipMessage::Gone {
            ranks: vec![1, 300],
        },
        MembershipMessage::Missed { process: 2 },
        MembershipMessage::Roster {
            ranks: vec![0, 300],
        },
    ];
    headers.extend(notices.map(|notice| write(ControlMessage::Membership(notice))));
    headers.extend([false, true].map(|is_started| {
        write(ControlMessage::ExchangeOrdered {
            owner: 1,
            channel: 128,
            seq: 300,
            is_started,
        })
    }));
    let id = MessageId {
        process: 1,
        number: 300,
    };
    headers.push(write(ControlMessage::MessageTaken(id)));
    headers.push(write(ControlMessage::MessageOrdered(id)));
    headers.push(write(ControlMessage::ExchangesEnded));
    headers.push(write(ControlMessage::Launched { each: 300 }));
    headers.push(write(ControlMessage::RankExited {
        exchanges: true,
        report: RankReport {
            rank: 9,
            activity: "computing".into(),
            error: None,
            at: None,
        },
    }));
    let mut failures: Vec<_> = errors().into_iter().map(Failure::Collective).collect();
    failures.push(Failure::Panicked {
        rank: 0,
        message: "boom".into(),
    });
    failures.push(Failure::Failed {
        rank: 0,
        message: String::new(),
    });
    for failure in failures {
        headers.push(write(ControlMessage::Failed {
            failure,
            decided: true,
        }));
    }
    headers
}

fn text(value: &impl Debug) -> String {
    format!("{value:?}")
}

#[test]
fn a_header_is_read_as_it_was_written() {
    for (header, signature) in headers().chunks(2).zip(signatures()) {
        for header in header {
            let Header { launch, message } = Header::read(header).unwrap();
            assert_eq!(launch, LAUNCH);
            let read = match message {
                ControlMessage::Joined { signature, .. } => {
                    signature.complete(&mut KnownSignatures::default()).unwrap()
                }
                ControlMessage::Sent { signature, .. } => signature,
                message => panic!("{message:?}"),
            };
            assert_eq!(text(&read), text(&signature));
        }
    }
    let mut errors = errors().into_iter();
    for header in headers() {
        if let ControlMessage::Failed {
            failure: Failure::Collective(error),
            decided: true,
        } = Header::read(&header).unwrap().message
        {
            assert_eq!(Some(error), errors.next());
        }
    }
    assert_eq!(errors.next(), None);
    let read = Header::read(&headers()[0]).unwrap();
    let ControlMessage::Joined {
        channel:
            RemoteGroupId {
                number: 128,
                introduction: Some(introduction),
            },
        seq,
        contents,
        ..
    } = read.message
    else {
        panic!("{read:?}")
    };
    assert_eq!(
        (
            &introduction.ranks[..],
            &introduction.name[..],
            introduction.member
        ),
        (&[0, 200, 3][..], "reduced", 1)
    );
    assert_eq!((seq, contents.recipients), (1 << 33, vec![0, 0, 2]));
    assert_eq!(contents.tensors, vec![meta(&[3, 5], DType::F64); 3]);
}

/// A signature is sent once, and what differs in every step, such as the states of parameters, each
/// time.
#[test]
fn a_signature_that_was_sent_is_known_by_its_hash() {
    let signature = |label: &str, step: u64| CallSignature {
        forward_index: Some(step),
        digests: Some(
            digests()
                .iter()
                .map(|digests| Digests {
                    step,
                    ..digests.clone()
                })
                .collect(),
        ),
        model: Some(ShardedModel {
            number: 1,
            states: [step].into(),
            origin: "Linear".into(),
        }),
        ..CallSignature::new(
            Op::AllGather,
            &Call::new(label),
            vec![tensor(&[4, 301], DType::F32)],
        )
    };
    let mut sender = KnownSignatures::default();
    let mut receiver = KnownSignatures::default();
    let mut sizes = Vec::new();
    // More different ones than are kept, and some of them again.
    for (step, label) in (0..1500)
        .map(|at| at.to_string())
        .chain(["1499".into(), "0".into(), "0".into()])
        .enumerate()
    {
        let signature = signature(&label, step as u64);
        let sent = SentSignature::new(&signature).abbreviated(&mut sender);
        sizes.push(postcard::to_stdvec(&sent).unwrap().len());
        assert_eq!(
            text(&sent.complete(&mut receiver).expect("both know it")),
            text(&signature)
        );
    }
    let is_long: Vec<_> = sizes.iter().map(|size| *size > sizes[1500]).collect();
    assert!(
        is_long[..1500].iter().all(|is_long| *is_long) && is_long[1500..] == [false, true, false],
        "{sizes:?}"
    );
    let [_, unknown] = sent_twice(&signature("a", 0));
    assert!(unknown.complete(&mut KnownSignatures::default()).is_none());
}

/// If this fails, the encoding has changed. Then increase the number in [`VERSION`], and enter it
/// here with the hash.
#[test]
fn the_encoding_is_that_of_the_version() {
    let messages = headers()
        .iter()
        .flat_map(|header| header[VERSION.len()..].to_vec())
        .collect::<Vec<_>>();
    let number = VERSION.rsplit('+').next().unwrap();
    assert_eq!(
        (
            number,
            format!("{:032x}", XxHash3_128::oneshot(&messages)).as_str()
        ),
        ("6", "5bb493d5865ce2712cf9072da5b658fb")
    );
}

#[test]
fn how_a_rank_ended_arrives_with_the_sources_of_its_error() {
    #[derive(Debug, thiserror::Error)]
    #[error("no batch left")]
    struct NoBatch(#[source] std::fmt::Error);
    let there = |error: Error| {
        let report = RankReport {
            rank: 9,
            activity: "computing".into(),
            error: Some(error),
            at: Some("a.rs:1:2".into()),
        };
        let exited = ControlMessage::RankExited {
            report,
            exchanges: true,
        };
        let ControlMessage::RankExited { report, .. } =
            Header::read(&write(exited)).unwrap().message
        else {
            panic!("decoded as another message")
        };
        assert_eq!(
            (report.rank, &report.activity[..], report.at.as_deref()),
            (9, "computing", Some("a.rs:1:2"))
        );
        report.error.expect("the report has an error")
    };
    for error in errors() {
        let Error::Comm(read) = there(error.clone().into()) else {
            panic!("{error} changed its type")
        };
        assert_eq!(read, error);
    }
    let read = there(Error::other(NoBatch(std::fmt::Error)));
    let source = std::error::Error::source(&read).expect("the error has a source");
    assert_eq!(
        (read.to_string(), source.to_string()),
        ("no batch left".into(), std::fmt::Error.to_string())
    );
    assert!(source.source().is_none());
    assert_eq!(
        there(StartError::Initialized.into()).to_string(),
        StartError::Initialized.to_string()
    );
}

/// Every truncated header, every header with one more byte, and every header with one changed byte
/// is either rejected or decoded as another header, without a panic. So is a length of a list or
/// text that the header does not have, for which no memory may be allocated: the allocator aborts.
#[test]
fn what_is_no_header_is_refused_without_a_panic() {
    for header in headers() {
        for end in 0..header.len() {
            assert!(
                Header::read(&header[..end]).is_err(),
                "{end} bytes of {header:?}"
            );
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut other = header.clone();
                other[end] = byte;
                let _ = Header::read(&other);
            }
            for length in [1 << 40, u64::MAX] {
                let length = postcard::to_stdvec(&length).unwrap();
                let _ = Header::read(&[&header[..end], &length, &header[end + 1..]].concat());
            }
        }
        assert!(Header::read(&[&header[..], &[0]].concat()).is_err());
    }
}
