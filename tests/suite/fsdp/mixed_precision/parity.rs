//! Training in mixed precision: to the bit as the unsharded model that is cast by hand.

use std::collections::BTreeMap;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor};
use burn_dtensor::Result;
use burn_dtensor::fsdp::{
    FullyShard, MixedPrecisionPolicy, ReshardAfterForward, full_model, fully_shard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use super::reference::{average, with_weights_in};
use crate::fsdp::ddp_fsdp_hsdp_parity::{batch, gpt};
use crate::fsdp::support::values;
use crate::models::Gpt;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// One dimension shards; of two the first replicates.
    mesh: &'static [usize],
    param: DType,
    reduce: Option<DType>,
    reshard: ReshardAfterForward,
    checkpointing: bool,
}

impl Case {
    fn policy(&self) -> MixedPrecisionPolicy {
        let policy = MixedPrecisionPolicy::new().with_param_dtype(self.param);
        self.reduce
            .into_iter()
            .fold(policy, MixedPrecisionPolicy::with_reduce_dtype)
    }

    fn config(&self) -> FullyShard {
        FullyShard::new()
            .with_units(["layers.*"])
            .with_reshard_after_forward(self.reshard)
            .with_mixed_precision(self.policy().with_output_dtype(DType::F32))
            .with_mixed_precision_for(["layers.*"], self.policy())
            .with_replica_check_every(1)
            .with_weight_check(true)
    }
}

/// Mean cross entropy in single precision, whatever the logits are in.
fn loss(model: &Gpt, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
    let logits = log_softmax(model.forward(tokens).cast(DType::F32), 2);
    logits.gather(2, targets.unsqueeze_dim::<3>(2)).mean().neg()
}

/// Losses of this rank and, by path, all weights after some steps.
type Trained = (Vec<f32>, BTreeMap<String, Vec<f32>>);

fn train(mesh: &DeviceMesh, case: Case, sharded: bool) -> Result<Trained> {
    let device = mesh.device().clone().autodiff();
    let device = if case.checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    };
    let mut model = gpt(false, &device);
    model = match sharded {
        true => fully_shard(model, mesh, case.config())?,
        false => with_weights_in(model, |_| Some(case.param)),
    };
    let mut optim = AdamWConfig::new().init();
    let (mut losses, rank) = (Vec::new(), mesh.rank());
    for step in 0..4 {
        let loss = loss(
            &model,
            batch(step, rank, 0, &device),
            batch(step, rank, 1, &device),
        );
        losses.push(loss.clone().into_scalar::<f32>());
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        if !sharded {
            grads = average(&model, grads, mesh, |_| case.reduce.unwrap_or(DType::F32));
        }
        model = optim.step(1e-2, model, grads);
    }
    let model = if sharded { full_model(&model)? } else { model };
    Ok((losses, values(&model, None)))
}

fn to_the_bit(case: Case) {
    let names = &["replicate", "shard"][2 - case.mesh.len()..];
    let ranks = MeshTest::new(case.mesh, names)
        .run(|mesh| Ok((train(mesh, case, true)?, train(mesh, case, false)?)));
    for (rank, (sharded, by_hand)) in ranks.into_iter().enumerate() {
        assert!(
            by_hand.1.values().flatten().all(|x| x.is_finite()),
            "{case:?}"
        );
        assert_eq!(sharded, by_hand, "rank {rank}, {case:?}");
    }
}

const BF16: Case = Case {
    mesh: &[2],
    param: DType::BF16,
    reduce: Some(DType::F32),
    reshard: ReshardAfterForward::Auto,
    checkpointing: false,
};

#[test]
fn training_is_to_the_bit_that_of_a_model_cast_by_hand() {
    for mesh in [&[1][..], &[2], &[3], &[4], &[2, 2]] {
        for reduce in [Some(DType::F32), Some(DType::BF16), None] {
            to_the_bit(Case {
                mesh,
                reduce,
                ..BF16
            });
        }
        to_the_bit(Case {
            mesh,
            param: DType::F16,
            ..BF16
        });
    }
}

#[test]
fn training_in_mixed_precision_is_the_same_whenever_weights_are_freed() {
    for checkpointing in [false, true] {
        for reshard in [
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            ReshardAfterForward::Ranks(2),
        ] {
            to_the_bit(Case {
                mesh: &[4],
                reshard,
                checkpointing,
                ..BF16
            });
        }
    }
}

/// Gradients lose digits in what they are added up in, and in nothing else.
#[test]
fn single_precision_weights_may_be_reduced_in_half() {
    to_the_bit(Case {
        mesh: &[3],
        param: DType::F32,
        reduce: Some(DType::BF16),
        ..BF16
    });
}
