//! Outputs and gradients of every layer, under every style that places it.

use burn::module::{Module, ModuleDisplay};
use burn::nn::attention::{
    MhaInput as PlainMhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
};
use burn::nn::{
    CosineSimilarityConfig, DropoutConfig, EmbeddingConfig, GroupNormConfig, LayerNormConfig,
    LinearConfig, PairwiseDistanceConfig, PositionalEncodingConfig, RmsNormConfig,
    RotaryEncodingConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::dtensor::Kind;
use burn_dtensor::dtensor::ops::{RedistributePolicy, random};
use burn_dtensor::nn::{MhaInput, MhaOutput};
use burn_dtensor::parallel::ParallelError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::misuse::refused;
use super::same::{loss, same, same_under};
use super::{Only, floats, near};
use crate::fsdp::support::{on_device, tensor, values};
use crate::parallel::support::full_grads;

use Placement::{Replicate as R, Shard as S};

#[test]
fn linear_equals_burns() {
    let device = Device::flex();
    for (d_in, d_out) in [(6, 8), (5, 7), (3, 3)] {
        for bias in [true, false] {
            let layer = || LinearConfig::new(d_in, d_out).with_bias(bias).init(&device);
            same_under!(
                layer(),
                [3, 4, d_in],
                [
                    Plan::new(),
                    Plan::new().with_style("layer", Style::colwise()),
                    Plan::new().with_style("layer", Style::colwise().with_output(R)),
                    Plan::new().with_style("layer", Style::rowwise()),
                    Plan::new().with_style("layer", Style::rowwise().with_output(S(1))),
                ]
            );
        }
    }
}

/// Whatever the layer: its style is what it goes by.
#[test]
fn every_layer_brings_its_input_and_output_as_its_style_says() {
    let device = Device::flex();
    fn brings<L: Module + ModuleDisplay + Sync, const D: usize, K: Kind, const E: usize>(
        layer: L,
        x: impl Fn(&Device) -> Tensor<D, K> + Sync,
        forward: impl Fn(&L, DTensor<D, K>) -> DTensor<E> + Sync,
    ) {
        let _ = values(
            &Only {
                layer: layer.clone(),
            },
            None,
        ); // Draw now, on one thread.
        MeshTest::new([2], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let name = std::any::type_name::<L>();
            let placed = |style| {
                let model = parallelize(
                    Only {
                        layer: on_device(&layer, &device),
                    },
                    mesh,
                    Plan::new().with_style("layer", style),
                )?;
                let x = DTensor::distribute_replicated(x(&device), mesh, &[R])?;
                Ok::<_, Error>(forward(&model.layer, x).placements().to_vec())
            };
            assert_eq!(placed(Style::placed(R))?, [R], "{name}, nothing said");
            assert_eq!(
                placed(Style::placed(R).with_input(S(0)))?,
                [S(0)],
                "{name}, input"
            );
            assert_eq!(
                placed(Style::placed(R).with_output(S(1)))?,
                [S(1)],
                "{name}, output"
            );
            assert_eq!(
                placed(Style::placed(R).with_input(S(0)).with_output(R))?,
                [R],
                "{name}, both"
            );
            Ok(())
        });
    }
    let floats = |device: &Device| tensor(3, [4, 6, 6], device);
    brings(LinearConfig::new(6, 4).init(&device), floats, |layer, x| {
        layer.forward_dtensor(x)
    });
    brings(LayerNormConfig::new(6).init(&device), floats, |layer, x| {
        layer.forward_dtensor(x)
    });
    brings(RmsNormConfig::new(6).init(&device), floats, |layer, x| {
        layer.forward_dtensor(x)
    });
    brings(
        GroupNormConfig::new(2, 6).init(&device),
        floats,
        |layer, x| layer.forward_dtensor(x),
    );
    let tokens = |device: &Device| Tensor::<2, Int>::zeros([4, 6], device);
    brings(
        EmbeddingConfig::new(7, 6).init(&device),
        tokens,
        |layer, x| layer.forward_dtensor(x),
    );
}

/// Decoding: of one, three or five tokens one of four ranks has none. Styles of long sequences
/// hold, and nothing moves but for them.
#[test]
fn a_sequence_too_short_to_shard_is_replicated_where_a_style_shards_it() {
    let device = Device::flex().autodiff();
    for tokens in [1, 3, 5] {
        let model = (
            Only {
                layer: LayerNormConfig::new(8).init(&device),
            },
            Only {
                layer: LinearConfig::new(8, 4).init(&device),
            },
        );
        let x = tensor(1, [2, tokens, 8], &device);
        let y = model.1.layer.forward(model.0.layer.forward(x.clone()));
        let expected = floats(y);
        let (norm, linear) = &model;
        MeshTest::new([4], ["tp"]).run(|mesh| {
            let norm = parallelize(
                norm.clone(),
                mesh,
                Plan::new().with_style("layer", Style::sequence_parallel()),
            )?;
            let placed = Style::placed(R).with_input(S(1)).with_output(S(1));
            let linear = parallelize(
                linear.clone(),
                mesh,
                Plan::new().with_style("layer", placed),
            )?;
            let x = DTensor::distribute_replicated(x.clone().detach(), mesh, &[R])?;
            let y = RedistributePolicy::Deny
                .run(|| linear.layer.forward_dtensor(norm.layer.forward_dtensor(x)));
            assert_eq!(y.placements(), [R], "{tokens} tokens");
            near(&floats(y.full_tensor()?), &expected, || {
                format!("{tokens} tokens")
            });
            Ok(())
        });
    }
}

#[test]
fn rotary_encoding_turns_each_part_by_its_place_in_the_sequence() {
    same_under!(
        RotaryEncodingConfig::new(8, 4).init(&Device::flex()),
        [2, 3, 7, 4],
        [Plan::new()]
    );
}

/// On every rank, also on one whose shard of a longer sequence fits.
#[test]
fn rotary_encoding_refuses_what_its_table_lacks() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device();
        let layer = RotaryEncodingConfig::new(8, 4).init(device);
        let tokens =
            |shape: [usize; 3], placement| DTensor::<3>::ones(shape, mesh, &[placement], device);
        let check =
            |error: Error| assert!(error.to_string().contains("8 tokens of width 4"), "{error}");
        for (shape, placement) in [
            ([2, 9, 4], S(1)),
            ([2, 9, 4], S(0)),
            ([2, 9, 4], R),
            ([2, 8, 6], R),
        ] {
            let x = tokens(shape, placement)?;
            check(refused(|| layer.forward_dtensor(x)));
        }
        let vector = DTensor::<1>::ones([4], mesh, &[R], device)?;
        check(refused(|| layer.forward_dtensor(vector)));
        let fits = tokens([2, 8, 4], S(1))?;
        assert_eq!(layer.forward_dtensor(fits).dims(), [2, 8, 4]);
        let attention = GroupedQueryAttentionConfig::new(8, 2, 1)
            .init(device)
            .with_rotary(layer);
        let attention = parallelize(Only { layer: attention }, mesh, Plan::new())?;
        let x = tokens([2, 9, 8], S(1))?;
        check(refused(|| attention.layer.forward_dtensor(x)));
        Ok(())
    });
}

#[test]
fn positions_are_those_in_the_full_sequence() {
    let layer = PositionalEncodingConfig::new(4)
        .with_max_sequence_size(9)
        .init(&Device::flex());
    same_under!(layer, [2, 7, 4], [Plan::new()]);
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let layer = PositionalEncodingConfig::new(4)
            .with_max_sequence_size(9)
            .init(mesh.device());
        for shape in [[2, 10, 4], [2, 9, 6]] {
            let x = DTensor::<3>::ones(shape, mesh, &[R], mesh.device())?;
            let error = refused(|| layer.forward_dtensor(x));
            assert!(error.to_string().contains("9 tokens of width 4"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn distances_equal_burns() {
    macro_rules! distances {
        ($($layer:expr),* $(,)?) => {$(same(
            $layer,
            &Plan::new,
            [5, 4],
            |layer, x| layer.forward(x.clone(), x.square() - 0.3),
            |layer, x| layer.forward_dtensor((x.clone(), x.square() - 0.3)),
        );)*};
    }
    distances! {
        CosineSimilarityConfig::new().init(), CosineSimilarityConfig::new().with_dim(-2).with_eps(0.9).init(),
        PairwiseDistanceConfig::new().init(), PairwiseDistanceConfig::new().with_p(3.0).with_eps(0.1).init(),
    }
}

#[test]
fn embedding_equals_burns_by_vocabulary_and_by_feature() {
    let layer = EmbeddingConfig::new(7, 6).init(&Device::flex());
    let tokens = |device: &Device| Tensor::<2, Int>::from_data([[0, 6, 3], [3, 1, 5]], device);
    // The gradient of tokens is none: that of the table is what is compared.
    let styles: [fn() -> Plan; 4] = [
        Plan::new,
        || Plan::new().with_style("layer", Style::rowwise()),
        || Plan::new().with_style("layer", Style::rowwise().with_output(S(1))),
        || Plan::new().with_style("layer", Style::colwise()),
    ];
    for plan in styles {
        let forward = |scale: Tensor<1>, y: Tensor<3>| y * scale.unsqueeze();
        same(
            layer.clone(),
            &plan,
            [1],
            |layer, x| forward(x.clone(), layer.forward(tokens(&x.device()))),
            |layer, x| {
                let tokens =
                    DTensor::distribute_replicated(tokens(x.mesh().device()), x.mesh(), &[R])
                        .expect("replicated");
                let x = x.redistribute(&[R]).expect("a vector").reshape([1, 1, 1]);
                layer.forward_dtensor(tokens) * x
            },
        );
    }
}

fn attention(heads: usize) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(8, heads)
        .with_dropout(0.0)
        .init(&Device::flex())
}

fn split_heads() -> Plan {
    Plan::new()
        .with_style("layer.*", Style::colwise())
        .with_style("layer.output", Style::rowwise())
}

#[test]
fn attention_equals_burns_with_and_without_masks() {
    let causal = |device: &Device| {
        Tensor::<2, Bool>::tril_mask([5, 5], 0, device)
            .unsqueeze::<3>()
            .repeat_dim(0, 2)
    };
    let padded = |device: &Device| {
        Tensor::<2>::from_data([[0., 0., 0., 0., 1.], [0., 0., 0., 0., 0.]], device).bool()
    };
    for plan in [Plan::new, split_heads] {
        same(
            attention(4),
            &plan,
            [2, 5, 8],
            |layer, x| {
                let device = x.device();
                let input = PlainMhaInput::self_attn(x)
                    .mask_attn(causal(&device))
                    .mask_pad(padded(&device));
                layer.forward(input).context
            },
            |layer, x| {
                let mesh = x.mesh().clone();
                let mask_attn = DTensor::distribute_replicated(causal(mesh.device()), &mesh, &[R])
                    .expect("replicated");
                let mask_pad = DTensor::distribute_replicated(padded(mesh.device()), &mesh, &[R])
                    .expect("replicated");
                layer
                    .forward_dtensor(
                        MhaInput::self_attn(x)
                            .mask_attn(mask_attn)
                            .mask_pad(mask_pad),
                    )
                    .context
            },
        );
    }
}

/// Against the same attention written with burn only.
#[test]
fn grouped_attention_that_is_not_causal_sees_all_tokens() {
    let layer = GroupedQueryAttentionConfig::new(16, 8, 4)
        .with_causal(false)
        .init(&Device::flex());
    let expected = |layer: &GroupedQueryAttention, x: Tensor<3>| {
        let heads = |x: Tensor<3>, heads: usize| x.reshape([2, 5, heads, 2]).swap_dims(1, 2);
        let twice = |x: Tensor<4>| {
            let both = x.unsqueeze_dim::<5>(2).repeat_dim(2, 2);
            both.reshape([2, 8, 5, 2])
        };
        let query = heads(layer.query.forward(x.clone()), 8);
        let key = twice(heads(layer.key.forward(x.clone()), 4));
        let value = twice(heads(layer.value.forward(x), 4));
        let weights = softmax(query.matmul(key.transpose()) / 2_f64.sqrt(), 3);
        let context = weights.matmul(value).swap_dims(1, 2);
        layer.output.forward(context.reshape([2, 5, 16]))
    };
    for plan in [Plan::new, split_heads] {
        same(layer.clone(), &plan, [2, 5, 16], expected, |layer, x| {
            layer.forward_dtensor(x)
        });
    }
}

#[test]
fn heads_that_ranks_cannot_share_are_a_typed_error() {
    MeshTest::new([4], ["tp"]).run(|mesh| {
        let model = parallelize(
            Only {
                layer: attention(2),
            },
            mesh,
            split_heads(),
        )?;
        let x = DTensor::<3>::ones([2, 5, 8], mesh, &[R], mesh.device())?;
        let run = || model.layer.forward_dtensor(MhaInput::self_attn(x.clone()));
        let error = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
            .expect_err("2 heads, 4 ranks");
        let error = error.downcast::<Error>().expect("a typed error");
        let Error::Parallel(ParallelError::Heads {
            param,
            heads: 2,
            size: 4,
            mesh_dim,
            ..
        }) = &*error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (param.as_str(), mesh_dim.as_str()),
            ("layer.query.weight", "tp")
        );
        Ok(())
    });
}

#[test]
fn attention_refuses_batches_that_differ() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let model = parallelize(
            Only {
                layer: attention(2),
            },
            mesh,
            split_heads(),
        )?;
        let x = |batch: usize| DTensor::<3>::ones([batch, 5, 8], mesh, &[R], mesh.device());
        for [query, key, value] in [[2, 1, 1], [1, 2, 2], [2, 2, 1], [2, 1, 2]] {
            let input = MhaInput::new(x(query)?, x(key)?, x(value)?);
            let error = refused(|| model.layer.forward_dtensor(input));
            assert!(
                error.to_string().contains("values of equal batches"),
                "{error}"
            );
        }
        Ok(())
    });
}

/// The same tokens are dropped on every mesh, in training alone.
#[test]
fn dropout_is_the_same_on_every_mesh_and_rests_outside_training() {
    let run = |ranks: usize| {
        let outputs = MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let layer = DropoutConfig::new(0.4).init();
            let drop = |device: &Device| {
                random::seed(11);
                let x = DTensor::<2>::ones([6, 5], mesh, &[S(0)], device)?;
                Ok(floats(layer.forward_dtensor(x).full_tensor()?.inner()))
            };
            let resting = DTensor::<2>::ones([6, 5], mesh, &[S(0)], mesh.device())?;
            let resting = floats(layer.forward_dtensor(resting).full_tensor()?);
            assert!(resting.iter().all(|&value| value == 1.0));
            drop(&mesh.device().clone().autodiff())
        });
        outputs.into_iter().next().expect("a rank")
    };
    let one = run(1);
    assert!(
        one.contains(&0.0) && one.iter().any(|&value| value > 1.0),
        "{one:?}"
    );
    assert_eq!(run(2), one);
    assert_eq!(run(4), one);
}

/// Weights are dropped by global head, query and key, wherever a head is computed.
#[test]
fn attention_drops_the_same_weights_wherever_heads_are_split() {
    let layer = MultiHeadAttentionConfig::new(8, 4)
        .with_dropout(0.3)
        .init(&Device::flex());
    let _ = values(
        &Only {
            layer: layer.clone(),
        },
        None,
    );
    let run = |ranks: usize, plan: fn() -> Plan| {
        let outputs = MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            random::seed(4);
            let model = parallelize(
                Only {
                    layer: on_device(&layer, &device),
                },
                mesh,
                plan(),
            )?;
            let x = DTensor::distribute_replicated(tensor(3, [2, 5, 8], &device), mesh, &[R])?;
            let MhaOutput { weights, context } =
                model.layer.forward_dtensor(MhaInput::self_attn(x));
            let (weights, context) = (weights.full_tensor()?, context.full_tensor()?);
            let grads = GradientsParams::from_grads(loss(context.clone()).backward(), &model);
            let grads: Vec<_> = full_grads(&model, &grads)?.into_values().collect();
            Ok((
                floats(weights.inner()),
                floats(context.inner()),
                grads.concat(),
            ))
        });
        outputs.into_iter().next().expect("a rank")
    };
    let one = run(1, Plan::new);
    assert!(one.0.contains(&0.0));
    for (ranks, plan) in [
        (2, split_heads as fn() -> Plan),
        (4, split_heads),
        (2, Plan::new),
    ] {
        let several = run(ranks, plan);
        near(&several.0, &one.0, || format!("weights on {ranks} ranks"));
        near(&several.1, &one.1, || format!("context on {ranks} ranks"));
        near(&several.2, &one.2, || format!("gradients on {ranks} ranks"));
    }
}
