//! What layers send: the communication that tensor and sequence parallelism must have, and no more.

use burn::module::{Module, ModuleDisplay};
use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int};
use burn_dtensor::comm::{Op, Phase, Snapshot};
use burn_dtensor::dtensor::Kind;
use burn_dtensor::dtensor::ops::loss::cross_entropy;
use burn_dtensor::fsdp::TensorTree;
use burn_dtensor::nn::MhaInput;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Only;
use crate::fsdp::support::tensor;

use Op::{AllGather, AllReduce, ReduceScatter};
use Phase::{Backward, Forward};
use Placement::{Replicate as R, Shard as S};

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    attention: MultiHeadAttention,
    up: Linear,
    down: Linear,
}

fn block(device: &Device) -> Block {
    Block {
        norm: LayerNormConfig::new(8).init(device),
        attention: MultiHeadAttentionConfig::new(8, 4)
            .with_dropout(0.0)
            .init(device),
        up: LinearConfig::new(8, 12).init(device),
        down: LinearConfig::new(12, 8).init(device),
    }
}

fn mlp(block: &Block, x: DTensor<3>) -> DTensor<3> {
    block
        .down
        .forward_dtensor(block.up.forward_dtensor(x).tanh())
}

fn attend(block: &Block, x: DTensor<3>) -> DTensor<3> {
    block
        .attention
        .forward_dtensor(MhaInput::self_attn(x))
        .context
}

fn plan(between: Placement) -> Plan {
    let plan = Plan::new()
        .with_style("attention.*", Style::colwise().with_heads(4))
        .with_style(
            "attention.output",
            Style::rowwise().with_heads(4).with_output(between),
        )
        .with_style("up", Style::colwise())
        .with_style("down", Style::rowwise().with_output(between));
    if between == R {
        plan
    } else {
        plan.with_style("norm", Style::sequence_parallel())
    }
}

/// Collectives of `forward` and its backward, by kind and pass, on one rank of two.
fn sent(
    between: Placement,
    forward: fn(&Block, DTensor<3>) -> DTensor<3>,
) -> Vec<(Op, Phase, u64)> {
    let counts = MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(block(&device), mesh, plan(between))?;
        let x = DTensor::distribute_replicated(tensor(1, [2, 4, 8], &device), mesh, &[between])?
            .require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let y = unit(&model, x, forward);
        assert_eq!(y.placements(), [between]);
        // Local sums are the same in number on every rank: nothing of the loss is sent.
        y.to_local().sum().backward();
        let counts = ledger
            .by_phase()
            .into_iter()
            .map(|((op, phase), total)| (op, phase, total.calls));
        Ok(counts.collect::<Vec<_>>())
    });
    counts.into_iter().next().expect("a rank")
}

/// Collectives of one layer of this style, read from `x`, and of its backward, on one rank of two.
fn layer_sends<L, const D: usize, K: Kind>(
    layer: fn(&Device) -> L,
    style: Style,
    x: fn(&DeviceMesh, &Device) -> Result<DTensor<D, K>>,
) -> Vec<(Op, Phase, u64)>
where
    L: Module + ModuleDisplay + DTensorForward<DTensor<D, K>, Output = DTensor<3>>,
    DTensor<D, K>: TensorTree,
{
    let counts = MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(
            Only {
                layer: layer(&device),
            },
            mesh,
            Plan::new().with_style("layer", style),
        )?;
        let x = x(mesh, &device)?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        unit(&model, x, |model, x| model.layer.forward_dtensor(x))
            .to_local()
            .sum()
            .backward();
        let counts = ledger
            .by_phase()
            .into_iter()
            .map(|((op, phase), total)| (op, phase, total.calls));
        Ok(counts.collect::<Vec<_>>())
    });
    counts.into_iter().next().expect("a rank")
}

/// The styles of PyTorch's tensor parallelism, one by one.
#[test]
fn each_style_sends_what_its_placements_need() {
    fn placed(placement: Placement) -> fn(&DeviceMesh, &Device) -> Result<DTensor<3>> {
        macro_rules! of {
            ($placement:expr) => {
                |mesh, device| {
                    Ok(DTensor::distribute_replicated(
                        tensor(1, [2, 4, 8], device),
                        mesh,
                        &[$placement],
                    )?
                    .require_grad())
                }
            };
        }
        match placement {
            R => of!(R),
            S(1) => of!(S(1)),
            _ => of!(S(2)),
        }
    }
    fn tokens(mesh: &DeviceMesh, device: &Device) -> Result<DTensor<2, Int>> {
        DTensor::zeros([2, 4], mesh, &[R], device)
    }
    let linear = |style, x| {
        layer_sends(
            |device| LinearConfig::new(8, 12).init(device),
            style,
            placed(x),
        )
    };
    let (gathered, scattered) = ((AllGather, Forward, 1), (ReduceScatter, Forward, 1));
    assert_eq!(linear(Style::colwise(), R), [(AllReduce, Backward, 1)]);
    assert_eq!(
        linear(Style::colwise(), S(1)),
        [gathered, (ReduceScatter, Backward, 1)]
    );
    assert_eq!(
        linear(Style::colwise().with_output(R), R),
        [gathered, (AllReduce, Backward, 1)]
    );
    assert_eq!(linear(Style::rowwise(), S(2)), [(AllReduce, Forward, 1)]);
    assert_eq!(
        linear(Style::rowwise().with_output(S(1)), S(2)),
        [(AllGather, Backward, 1), scattered]
    );

    let embedding = |style| {
        layer_sends(
            |device| EmbeddingConfig::new(7, 8).init(device),
            style,
            tokens,
        )
    };
    assert_eq!(embedding(Style::colwise()), []);
    assert_eq!(embedding(Style::rowwise()), [(AllReduce, Forward, 1)]);
    assert_eq!(
        embedding(Style::rowwise().with_output(S(1))),
        [(AllGather, Backward, 1), scattered]
    );

    let norm = |style, x| {
        layer_sends(
            |device| LayerNormConfig::new(8).init(device),
            style,
            placed(x),
        )
    };
    assert_eq!(
        norm(Style::sequence_parallel(), S(1)),
        [(AllReduce, Backward, 1)],
        "of gamma and beta together"
    );
    assert_eq!(
        norm(Style::sequence_parallel(), R),
        [(AllGather, Backward, 1), (AllReduce, Backward, 1)]
    );
}

#[test]
fn a_column_and_row_pair_makes_one_all_reduce_each_way() {
    let pair = [(AllReduce, Forward, 1), (AllReduce, Backward, 1)];
    assert_eq!(sent(R, mlp), pair);
    assert_eq!(sent(R, attend), pair, "query, key and value share theirs");
}

#[test]
fn sequence_parallelism_gathers_and_scatters_instead() {
    let pair = [
        (AllGather, Forward, 1),
        (AllGather, Backward, 1),
        (ReduceScatter, Forward, 1),
        (ReduceScatter, Backward, 1),
    ];
    assert_eq!(sent(S(1), mlp), pair);
    assert_eq!(
        sent(S(1), attend),
        pair,
        "query, key and value share theirs"
    );
}

/// As the parallel attention and feed-forward of one block read it.
#[test]
fn norms_that_read_one_activation_share_what_brings_it_to_them() {
    let counts = MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(block(&device), mesh, plan(S(1)))?;
        let x = DTensor::distribute_replicated(tensor(1, [2, 4, 8], &device), mesh, &[R])?
            .require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let y = model.norm.forward_dtensor(x.clone()) + model.norm.forward_dtensor(x);
        y.to_local().sum().backward();
        Ok(ledger.calls_in(AllGather, Backward))
    });
    assert_eq!(counts, [1, 1]);
}

#[test]
fn all_norm_gradients_of_a_unit_are_added_up_at_once() {
    let two_norms = |block: &Block, x: DTensor<3>| {
        let x = mlp(block, block.norm.forward_dtensor(x));
        block.norm.forward_dtensor(x)
    };
    let counts = sent(S(1), two_norms);
    let all_reduces: Vec<_> = counts
        .into_iter()
        .filter(|(op, ..)| *op == AllReduce)
        .collect();
    assert_eq!(all_reduces, [(AllReduce, Backward, 1)]);
}

/// Backward of a partial sum is nothing; the loss's is local.
#[test]
fn a_table_and_a_loss_sharded_by_vocabulary() {
    let counts = MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let table = Only {
            layer: EmbeddingConfig::new(7, 8).init(&device),
        };
        let table = parallelize(
            table,
            mesh,
            Plan::new().with_style("layer", Style::rowwise()),
        )?;
        let tokens = DTensor::<2, Int>::zeros([2, 3], mesh, &[R], &device)?;
        let logits = DTensor::distribute_replicated(tensor(1, [2, 3, 7], &device), mesh, &[S(2)])?
            .require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        table
            .layer
            .forward_dtensor(tokens.clone())
            .to_local()
            .sum()
            .backward();
        let embedding = ledger.snapshot();
        ledger.reset();
        cross_entropy(logits, tokens).full_tensor()?.backward();
        let calls = |snapshot: Snapshot| {
            [Forward, Backward].map(|phase| snapshot.total(|key| key.phase == phase).calls)
        };
        Ok((
            calls(embedding),
            calls(ledger.snapshot()),
            ledger.calls(AllReduce),
        ))
    });
    assert_eq!(counts, vec![([1, 0], [2, 0], 2); 2]);
}
