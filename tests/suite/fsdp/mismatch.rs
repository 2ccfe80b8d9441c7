//! Ranks whose units differ in one parameter: the error names it.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Cast, on_device};

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

/// Between two ranks whose sharded models `differ` changes, each by its rank: the operation, what
/// differs, and what it is on either.
fn told(mesh: &MeshTest, differ: fn(Pair, usize) -> Pair) -> (Op, String, [String; 2]) {
    let layer = || {
        LinearConfig::new(4, 4)
            .with_bias(false)
            .init(&Device::flex())
    };
    let pair = Pair {
        first: layer(),
        second: layer(),
    };
    let error = mesh.run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(on_device(&pair, &device), mesh, FullyShard::new())?;
        let model = differ(model, mesh.rank());
        let x = Tensor::<2>::ones([1, 4], &device);
        unit(&model, x, |pair, x| {
            pair.second.forward(pair.first.forward(x))
        })
        .sum()
        .backward();
        Ok(())
    });
    let Error::Comm(CommError::Mismatch {
        rank,
        during,
        differs,
        ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    let (what, second) = differs.rsplit_once(" vs ").expect("two values");
    let (what, first) = what.rsplit_once(' ').expect("what it is, and a value");
    let mut values = [first, second].map(String::from);
    // Whoever came second is named first.
    values.rotate_left(*rank);
    (during.op, what.into(), values)
}

/// Of a value that differs.
fn either(of_rank_0: &str, of_rank_1: &str) -> [String; 2] {
    [of_rank_0, of_rank_1].map(String::from)
}

fn two() -> MeshTest {
    MeshTest::new([2], ["shard"])
}

/// Their gradients have equal shapes: nothing else tells them apart.
#[test]
fn a_rank_trains_one_weight_and_another_rank_another() {
    let freeze = |mut pair: Pair, rank| {
        match rank {
            0 => pair.first = pair.first.no_grad(),
            _ => pair.second = pair.second.no_grad(),
        }
        pair
    };
    let (op, what, weights) = told(&two(), freeze);
    assert_eq!((op, what.as_str()), (Op::ReduceScatter, "tensor 0:"));
    assert_eq!(weights, either("`second.weight`", "`first.weight`"));
}

#[test]
fn a_rank_freezes_a_weight() {
    let freeze = |mut pair: Pair, rank| {
        if rank == 0 {
            pair.second = pair.second.no_grad();
        }
        pair
    };
    // Replicated weights are reduced whole.
    for (mesh, reduction) in [
        (two(), Op::ReduceScatter),
        (MeshTest::new([2, 1], ["replicate", "shard"]), Op::AllReduce),
    ] {
        let (op, what, weights) = told(&mesh, freeze);
        assert_eq!(op, reduction);
        assert!(
            what.starts_with("number of tensors ") && what.ends_with("; tensor 1:"),
            "{what}"
        );
        assert_eq!(weights, either("none", "`second.weight`"));
    }
}

#[test]
fn a_rank_casts_a_weight() {
    let cast = |mut pair: Pair, rank| {
        if rank == 0 {
            pair.second = pair.second.map(&mut Cast(DType::F64));
        }
        pair
    };
    let (op, what, dtypes) = told(&two(), cast);
    assert_eq!(
        (op, what.as_str()),
        (Op::AllGather, "`second.weight`: dtype")
    );
    assert_eq!(dtypes, either("f64", "f32"));
}
