//! Ranks whose units differ in one parameter: the error names it.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::on_device;

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

/// What differs if `differ` changes the sharded model, each rank's otherwise, between two ranks: the
/// operation, and in words.
fn told(mesh: &MeshTest, differ: fn(Pair, usize) -> Pair) -> (Op, String) {
    let layer = || LinearConfig::new(4, 4).with_bias(false).init(&Device::flex());
    let pair = Pair { first: layer(), second: layer() };
    let error = mesh.run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(on_device(&pair, &device), mesh, FullyShard::new())?;
        let model = differ(model, mesh.rank());
        unit(&model, Tensor::<2>::ones([1, 4], &device), |pair, x| pair.second.forward(pair.first.forward(x)))
            .sum()
            .backward();
        Ok(())
    });
    let Error::Comm(CommError::Mismatch { rank, during, differs, .. }) = &error.cause else { panic!("{error}") };
    // Whoever comes second is named first.
    let swapped = differs.rsplit_once(": ").and_then(|(what, pair)| {
        let (a, b) = pair.split_once(" vs ")?;
        // What is compared, such as `dtype`, stands before the first.
        let (compared, a) = a.rsplit_once(' ').map_or((String::new(), a), |(compared, a)| (format!("{compared} "), a));
        Some(format!("{what}: {compared}{b} vs {a}"))
    });
    (during.op, if *rank == 0 { differs.clone() } else { swapped.unwrap_or(differs.clone()) })
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
    assert_eq!(told(&two(), freeze), (Op::ReduceScatter, "tensor 0: `second.weight` vs `first.weight`".into()));
}

#[test]
fn a_rank_freezes_a_weight() {
    let freeze = |mut pair: Pair, rank| {
        if rank == 0 {
            pair.second = pair.second.no_grad();
        }
        pair
    };
    let (op, differs) = told(&two(), freeze);
    assert_eq!(op, Op::ReduceScatter);
    assert!(differs.ends_with("tensor 1: none vs `second.weight`"), "{differs}");
    // Replicated weights are reduced whole.
    let mesh = MeshTest::new([2, 1], ["replicate", "shard"]);
    let (op, differs) = told(&mesh, freeze);
    assert_eq!(op, Op::AllReduce);
    assert!(differs.ends_with("tensor 1: none vs `second.weight`"), "{differs}");
}

struct ToDouble;

impl ModuleMapper for ToDouble {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| base.cast(DType::F64).detach().require_grad())
    }
}

#[test]
fn a_rank_casts_a_weight() {
    let cast = |mut pair: Pair, rank| {
        if rank == 0 {
            pair.second = pair.second.map(&mut ToDouble);
        }
        pair
    };
    assert_eq!(told(&two(), cast), (Op::AllGather, "`second.weight`: dtype f64 vs f32".into()));
}
