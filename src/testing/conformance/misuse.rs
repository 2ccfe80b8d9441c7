//! Programs with mistakes, each of which must get an error that names the mistake, on every rank.

use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Shape, Tensor};
use serde::{Serialize, Serializer};

use crate::comm::{
    Call, CommError, Communicator, Digests, Launch, ReduceOp, ReplicatedValue, ShardedTensor,
    TensorMeta, World, launch,
};
use crate::placement::ShardSizes;
use crate::{Error, Result};

/// A misuse: its name, the program of a rank, and a text that the error contains.
type Misuse = (
    &'static str,
    fn(&World, &Communicator) -> Result<()>,
    &'static str,
);

/// A value that serde cannot serialize.
struct Unwritable;

impl Serialize for Unwritable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("it is unwritable"))
    }
}

fn ones(world: &World, len: usize) -> DispatchTensor {
    Tensor::<1>::ones([len], world.device()).into_dispatch()
}

fn ints(world: &World) -> DispatchTensor {
    Tensor::<1, Int>::ones([2], world.device()).into_dispatch()
}

fn meta(len: usize) -> TensorMeta {
    TensorMeta {
        shape: Shape::from([len]),
        dtype: DType::F32,
    }
}

fn call() -> Call {
    Call::new("misuse")
}

/// Returns a call of ranks that hold the same `a`, and this `b`.
fn holding(step: u64, b: u64) -> Call {
    let names = ["a".into(), "b".into()].into();
    let values = [Some(0), Some(b)].into();
    call().with_digests(vec![Digests {
        of: ReplicatedValue::Weight,
        step,
        names,
        values,
    }])
}

/// All misuses. Each runs in a world of at least two ranks, all of which make the mistake unless
/// the program checks the rank.
const MISUSES: [Misuse; 55] = [
    (
        "a root outside the group",
        |w, c| {
            drop_of(
                c.broadcast(call(), Some(vec![ones(w, 2)]), vec![meta(2)], 99)
                    .wait(),
            )
        },
        "root 99 is outside a group of",
    ),
    (
        "a root that is a global rank",
        |w, c| {
            drop_of(
                c.reduce(call(), vec![ones(w, 2)], ReduceOp::Sum, w.size())
                    .wait(),
            )
        },
        "Pass a group rank, not a global rank",
    ),
    (
        "roots that differ",
        |w, c| {
            drop_of(
                c.reduce(call(), vec![ones(w, 2)], ReduceOp::Sum, w.rank().min(1))
                    .wait(),
            )
        },
        ": root ",
    ),
    (
        "a root without tensors",
        |_, c| drop_of(c.broadcast(call(), None, vec![meta(2)], 0).wait()),
        "the root passes no tensors",
    ),
    (
        "other tensors than described",
        |w, c| {
            drop_of(
                c.broadcast(call(), Some(vec![ones(w, 3)]), vec![meta(2)], 0)
                    .wait(),
            )
        },
        "but `metas` describes [2] f32",
    ),
    (
        "fewer descriptions than tensors",
        |w, c| {
            drop_of(
                c.broadcast(call(), Some(vec![ones(w, 3)]), vec![], 0)
                    .wait(),
            )
        },
        "1 tensors, but 0 `metas`",
    ),
    (
        "a gather's root that expects nothing",
        |w, c| drop_of(c.gather(call(), ones(w, 2), None, 0).wait()),
        "the root passes no metas",
    ),
    (
        "a gather whose others expect something",
        |w, c| {
            drop_of(
                c.gather(call(), ones(w, 2), Some(vec![meta(2); c.group().size()]), 0)
                    .wait(),
            )
        },
        "passes metas, the root is 0",
    ),
    (
        "a gather of other shapes",
        |w, c| {
            let metas = (w.rank() == 0)
                .then(|| [vec![meta(2)], vec![meta(3); c.group().size() - 1]].concat());
            drop_of(c.gather(call(), ones(w, 2), metas, 0).wait())
        },
        "tensor of group rank",
    ),
    (
        "a gather of too few",
        |w, c| {
            drop_of(
                c.gather(
                    call(),
                    ones(w, 2),
                    (w.rank() == 0).then(|| vec![meta(2)]),
                    0,
                )
                .wait(),
            )
        },
        "Pass one of each per rank of the group",
    ),
    (
        "a scatter without a list",
        |_, c| drop_of(c.scatter_list(call(), None, meta(2), 0).wait()),
        "the root passes no tensors",
    ),
    (
        "a scatter whose others have a list",
        |w, c| {
            drop_of(
                c.scatter_list(call(), Some(vec![ones(w, 2); c.group().size()]), meta(2), 0)
                    .wait(),
            )
        },
        "passes tensors, the root is 0",
    ),
    (
        "a scatter of too few",
        |w, c| {
            drop_of(
                c.scatter_list(
                    call(),
                    (w.rank() == 0).then(|| vec![ones(w, 2)]),
                    meta(2),
                    0,
                )
                .wait(),
            )
        },
        "1 tensors in a group of",
    ),
    (
        "shapes that differ",
        |w, c| {
            drop_of(
                c.all_reduce(call(), vec![ones(w, 2 + w.rank().min(1))], ReduceOp::Sum)
                    .wait(),
            )
        },
        "tensor 0: shape [",
    ),
    (
        "dtypes that differ",
        |w, c| {
            let tensor = if w.rank() == 0 { ints(w) } else { ones(w, 2) };
            drop_of(c.all_reduce(call(), vec![tensor], ReduceOp::Max).wait())
        },
        "tensor 0: dtype ",
    ),
    (
        "numbers of tensors that differ",
        |w, c| {
            drop_of(
                c.all_reduce(call(), vec![ones(w, 2); 1 + w.rank().min(1)], ReduceOp::Sum)
                    .wait(),
            )
        },
        "number of tensors ",
    ),
    (
        "reductions that differ",
        |w, c| {
            let op = if w.rank() == 0 {
                ReduceOp::Sum
            } else {
                ReduceOp::Max
            };
            drop_of(c.all_reduce(call(), vec![ones(w, 2)], op).wait())
        },
        "reduction ",
    ),
    (
        "factors that differ",
        |w, c| {
            drop_of(
                c.all_reduce(
                    call(),
                    vec![ones(w, 2)],
                    ReduceOp::premul_sum(w.rank().min(1) as f64),
                )
                .wait(),
            )
        },
        "PremulSum(",
    ),
    (
        "replicated values that differ",
        |w, c| drop_of(c.barrier(holding(7, u64::from(w.rank() > 0))).wait()),
        "hold different values of weight `b` in step 7 (found in barrier",
    ),
    (
        "other values to compare",
        |w, c| drop_of(c.barrier(holding(7 + w.rank().min(1) as u64, 0)).wait()),
        "values to compare weights of step ",
    ),
    (
        "labels that differ",
        |w, c| {
            drop_of(
                c.barrier(Call::new(format!("at {}", w.rank().min(1))))
                    .wait(),
            )
        },
        "label `at ",
    ),
    (
        "operations that differ",
        |w, c| match w.rank() {
            0 => drop_of(c.barrier(call()).wait()),
            _ => drop_of(c.all_reduce(call(), vec![ones(w, 2)], ReduceOp::Sum).wait()),
        },
        "operation ",
    ),
    (
        "a call too few",
        |w, c| {
            if w.rank() == 0 {
                Ok(())
            } else {
                drop_of(c.barrier(call()).wait())
            }
        },
        "rank 0 has returned, but barrier",
    ),
    (
        "a bitwise reduction of floats",
        |w, c| {
            drop_of(
                c.all_reduce(call(), vec![ones(w, 2)], ReduceOp::BitXor)
                    .wait(),
            )
        },
        "tensor 0 is f32, which has no BitXor",
    ),
    (
        "a sum of bools",
        |w, c| {
            let bools = Tensor::<1, Int>::ones([2], w.device())
                .bool()
                .into_dispatch();
            drop_of(c.reduce(call(), vec![bools], ReduceOp::Sum, 0).wait())
        },
        "which has no Sum. Use Max (any), Min (all), or convert it to int",
    ),
    (
        "a factor for integers",
        |w, c| {
            drop_of(
                c.all_reduce(call(), vec![ints(w)], ReduceOp::premul_sum(0.5))
                    .wait(),
            )
        },
        "which has no PremulSum(0.5)",
    ),
    (
        "a dimension out of range",
        |w, c| {
            let shard = ShardedTensor {
                tensor: ones(w, 2),
                dim: 1,
                sizes: ShardSizes::Chunked(2 * w.size()),
            };
            drop_of(c.all_gather(call(), vec![shard]).wait())
        },
        "tensor 0 has 1 dimensions, so dimension 1 is out of range",
    ),
    (
        "a shard of another length",
        |w, c| {
            let shard = ShardedTensor {
                tensor: ones(w, 3),
                dim: 0,
                sizes: ShardSizes::Chunked(2 * w.size()),
            };
            drop_of(c.all_gather(call(), vec![shard]).wait())
        },
        "tensor 0 has length 3 in dimension 0",
    ),
    (
        "shard sizes for other ranks",
        |w, c| {
            let full = ShardedTensor {
                tensor: ones(w, 3),
                dim: 0,
                sizes: ShardSizes::Uneven([3].into()),
            };
            drop_of(c.reduce_scatter(call(), vec![full], ReduceOp::Sum).wait())
        },
        "Pass one shard size per rank of the group",
    ),
    (
        "parts for other ranks",
        |w, c| {
            drop_of(
                c.reduce_scatter_list(call(), vec![ones(w, 2)], ReduceOp::Sum)
                    .wait(),
            )
        },
        "1 parts in a group of",
    ),
    (
        "splits that are not all rows",
        |w, c| {
            let splits = vec![1; c.group().size()];
            drop_of(
                c.all_to_all_single(call(), ones(w, 99), &splits, &splits)
                    .wait(),
            )
        },
        "but the tensor has 99 rows",
    ),
    (
        "splits whose sum overflows",
        |w, c| {
            let size = c.group().size();
            let own = c.group().rank();
            let mut sent = vec![0; size];
            let received = vec![0; size];
            (sent[(own + 1) % size], sent[own]) = (usize::MAX, 3);
            drop_of(
                c.all_to_all_single(call(), ones(w, 2), &sent, &received)
                    .wait(),
            )
        },
        "add up to more rows than memory can hold",
    ),
    (
        "expected splits whose sum overflows",
        |w, c| {
            let size = c.group().size();
            let own = c.group().rank();
            let mut sent = vec![0; size];
            let mut received = vec![0; size];
            (sent[own], received[own]) = (2, 2);
            received[(own + 1) % size] = usize::MAX;
            drop_of(
                c.all_to_all_single(call(), ones(w, 2), &sent, &received)
                    .wait(),
            )
        },
        "receive counts [",
    ),
    (
        "more expected rows than memory can hold",
        |w, c| {
            let size = c.group().size();
            let mut received = vec![0; size];
            received[(c.group().rank() + 1) % size] = usize::MAX / 2;
            drop_of(
                c.all_to_all_single(call(), ones(w, 0), &vec![0; size], &received)
                    .wait(),
            )
        },
        "add up to more rows than memory can hold",
    ),
    (
        "shard sizes whose sum overflows",
        |w, c| {
            let mut sizes = vec![2; c.group().size()];
            sizes[(c.group().rank() + 1) % c.group().size()] = usize::MAX;
            let shard = ShardedTensor {
                tensor: ones(w, 2),
                dim: 0,
                sizes: ShardSizes::Uneven(sizes.into()),
            };
            drop_of(c.all_gather(call(), vec![shard]).wait())
        },
        "whose sum overflows",
    ),
    (
        "a description of more than memory can hold",
        |w, c| {
            drop_of(
                c.broadcast(call(), Some(vec![ones(w, 2)]), vec![meta(usize::MAX)], 0)
                    .wait(),
            )
        },
        "has more bytes than memory can hold",
    ),
    (
        "a tensor of nine dimensions",
        |w, c| {
            let tensor = Tensor::<9>::ones([1; 9], w.device()).into_dispatch();
            drop_of(c.all_reduce(call(), vec![tensor], ReduceOp::Sum).wait())
        },
        "tensor 0 has 9 dimensions, but collectives support at most 8",
    ),
    (
        "a receive of nine dimensions",
        |w, c| {
            let meta = TensorMeta {
                shape: Shape::from([1; 9]),
                dtype: DType::F32,
            };
            drop_of(c.receive(call(), Some(vec![meta]), w.rank(), 0).wait())
        },
        "tensor 0 has 9 dimensions",
    ),
    (
        "splits that keep more than they give",
        |w, c| {
            let given = vec![1; c.group().size()];
            let mut taken = vec![1; c.group().size()];
            taken[c.group().rank()] = 2;
            drop_of(
                c.all_to_all_single(call(), ones(w, given.len()), &given, &taken)
                    .wait(),
            )
        },
        "this rank sends itself 1 rows but expects 2 from itself",
    ),
    (
        "splits that others do not expect",
        |w, c| {
            let given = vec![2; c.group().size()];
            let mut taken = vec![2 + w.rank().min(1); c.group().size()];
            taken[c.group().rank()] = 2;
            drop_of(
                c.all_to_all_single(call(), ones(w, 2 * c.group().size()), &given, &taken)
                    .wait(),
            )
        },
        "tensor of group rank",
    ),
    (
        "a receiver outside the group",
        |w, c| drop_of(c.send(call(), vec![ones(w, 2)], 99, 0).wait()),
        "to 99 is outside a group of",
    ),
    (
        "a message of another shape",
        |w, c| match w.rank() {
            0 => drop_of(c.send(call(), vec![ones(w, 2)], 1, 0).wait())
                .and_then(|()| drop_of(c.barrier(call()).wait())),
            1 => drop_of(c.receive(call(), Some(vec![meta(3)]), 0, 0).wait()),
            _ => drop_of(c.barrier(call()).wait()),
        },
        "tensor 0: shape [3] vs [2]",
    ),
    (
        "a message that is never sent",
        |w, c| {
            if w.rank() == 0 {
                drop_of(c.receive(call(), None, 1, 0).wait())
            } else {
                Ok(())
            }
        },
        "rank 1 has returned, but receive",
    ),
    (
        "a message that no rank sends",
        |w, c| {
            if w.rank() == 0 {
                drop_of(c.receive(call(), None, None, 0).wait())
            } else {
                Ok(())
            }
        },
        "has returned, but receive",
    ),
    (
        "an object that cannot be written",
        |_, c| drop_of(c.send_object(call(), &Unwritable, 0, 0).wait()),
        "it is unwritable",
    ),
    (
        "an object of another type",
        |w, c| {
            c.send_object(call(), &"text", w.rank(), 0).wait()?;
            drop_of(c.receive_object::<u8>(call(), w.rank(), 0))
        },
        "the received object is not a u8",
    ),
    (
        "a message that is no object",
        |w, c| {
            c.send(call(), vec![ones(w, 2), ones(w, 2)], w.rank(), 0)
                .wait()?;
            drop_of(c.receive_object::<u8>(call(), w.rank(), 0))
        },
        "is not an object",
    ),
    (
        "a list for all ranks and a list for each",
        |w, c| match w.rank() {
            0 => drop_of(c.scatter(call(), Some(vec![]), vec![], vec![], 0).wait()),
            _ => drop_of(c.scatter_list(call(), None, meta(2), 0).wait()),
        },
        "tensors of each ",
    ),
    (
        "a rank that does not arrive in time",
        |w, c| {
            if w.rank() == 0 {
                // Polls instead of waiting, so that a backend that detects deadlocks does not find
                // one.
                let work = c.receive(call(), None, None, 1);
                while !work.is_complete() {
                    std::thread::yield_now();
                }
                return drop_of(work.wait());
            }
            drop_of(c.barrier(call()).wait_timeout(Duration::from_millis(50)))
        },
        ": ranks [0",
    ),
    (
        "a plan for tensors of another shape",
        |w, c| {
            drop_of(
                c.execute_plan(
                    call(),
                    &c.plan_all_reduce(&[meta(2)], ReduceOp::Sum)?,
                    vec![ones(w, 3)],
                )
                .wait(),
            )
        },
        "tensor 0 is [3] f32, but the plan is for [2] f32",
    ),
    (
        "a plan for more tensors",
        |w, c| {
            drop_of(
                c.execute_plan(
                    call(),
                    &c.plan_all_reduce(&[meta(2), meta(2)], ReduceOp::Sum)?,
                    vec![ones(w, 2)],
                )
                .wait(),
            )
        },
        "1 tensors, but a plan for 2",
    ),
    (
        "plans that differ",
        |w, c| {
            let len = 4 + 2 * w.rank().min(1);
            let plan = c.plan_reduce_scatter(
                vec![(meta(len), 0, ShardSizes::Chunked(len))],
                ReduceOp::Sum,
            )?;
            drop_of(c.execute_plan(call(), &plan, vec![ones(w, len)]).wait())
        },
        "tensor 0: shape [",
    ),
    (
        "a plan with shard sizes of another length",
        |_, c| drop_of(c.plan_all_gather(vec![(meta(4), 0, ShardSizes::Chunked(5))])),
        "but its shard sizes add up to 5",
    ),
    (
        "a plan of a group of another size",
        |w, c| {
            let plan = w
                .group(&[w.rank()])?
                .plan_all_reduce(&[meta(2)], ReduceOp::Sum)?;
            drop_of(c.execute_plan(call(), &plan, vec![ones(w, 2)]).wait())
        },
        "a plan for 1 ranks in a group of ",
    ),
    (
        "a group with a rank twice",
        |w, _| drop_of(w.subgroup([vec![0, 1], vec![1]])),
        "Name each rank at most once",
    ),
];

fn drop_of<T, E: Into<crate::Error>>(result: Result<T, E>) -> Result<()> {
    result.map(|_| ()).map_err(Into::into)
}

/// Runs all misuses on worlds that `config` launches. Returns their number.
pub(super) fn all(config: impl Fn() -> Launch) -> usize {
    for (name, program, text) in MISUSES {
        let error = match launch(config(), |world| program(world, &world.all())) {
            Ok(_) => panic!("{name}: every rank succeeded"),
            Err(error) => error,
        };
        let cause = error.cause.to_string();
        assert!(
            cause.contains(text),
            "{name}: expected `{text}`, got `{error}`"
        );
        // Errors that a backend detects are joint: every rank that fails gets this error, not one
        // about a failed rank.
        use CommError::{DeadlineExceeded, Diverged, Mismatch, RankReturned};
        if let Error::Comm(
            Mismatch { .. } | Diverged { .. } | RankReturned { .. } | DeadlineExceeded { .. },
        ) = error.cause
        {
            for other in &error.others {
                let joint = other
                    .error
                    .as_ref()
                    .is_none_or(|error| error.to_string() == cause);
                assert!(
                    joint,
                    "{name}: rank {} has another error: {error}",
                    other.rank
                );
            }
        }
    }
    MISUSES.len()
}
