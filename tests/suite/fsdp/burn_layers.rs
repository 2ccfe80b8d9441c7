//! Every burn-nn module with parameters, sharded and not, on inputs that differ by rank.

use burn::module::Module;
use burn::nn::activation::{PRelu, PReluConfig, SwiGlu, SwiGluConfig};
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
};
use burn::nn::conv::*;
use burn::nn::transformer::*;
use burn::nn::*;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{
    FullyShard, ParamInfo, ReshardAfterForward, full_model, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;

use super::support::{max_diff, on_device, tensor, values};
use crate::launched;

const RANKS: usize = 2;

/// One output, flat, and the gradients of the sum of its squares.
fn run<M: Module>(
    model: &M,
    rank: usize,
    forward: fn(&M, u64, &Device) -> Tensor<1>,
    device: &Device,
) -> (Vec<f32>, GradientsParams) {
    let output = forward(model, rank as u64 + 1, device);
    let loss = (output.clone() * output.clone()).sum();
    let grads = GradientsParams::from_grads(loss.backward(), model);
    (output.into_data().try_to_vec().unwrap(), grads)
}

fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.flatten(0, D - 1)
}

/// Checks one module under every strategy and cut.
fn check<M: Module + Sync + 'static>(
    name: &str,
    build: fn(&Device) -> M,
    forward: fn(&M, u64, &Device) -> Tensor<1>,
) {
    let device = Device::flex();
    // Initialized once, here: ranks that drew at once would interleave the process's one stream.
    let model = build(&device);
    let initial = values(&model, None);
    for checkpointing in [false, true] {
        for last_dim in [false, true] {
            let results = launch(Launch::threads(RANKS), |world| {
                let device = match checkpointing {
                    false => world.device().clone().autodiff(),
                    true => world.device().clone().autodiff().gradient_checkpointing(),
                };
                let plain = on_device(&model, &device);
                let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
                let config =
                    FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
                let config = match last_dim {
                    false => config,
                    true => config.with_shard_placement_fn(|param: ParamInfo| {
                        // `None` where burn's layer needs the stored shape.
                        let free =
                            !param.path.contains("gamma") && !param.path.contains("linear_inner");
                        free.then_some(Placement::Shard(param.shape.len() - 1))
                    }),
                };
                let sharded = fully_shard(plain.clone(), &mesh, config)?;
                let (output, mut grads) = {
                    let output = unit(&sharded, (), |sharded, ()| {
                        forward(sharded, world.rank() as u64 + 1, &device)
                    });
                    let loss = (output.clone() * output.clone()).sum();
                    let grads = GradientsParams::from_grads(loss.backward(), &sharded);
                    (output.into_data().try_to_vec::<f32>().unwrap(), grads)
                };
                let (plain_output, plain_grads) = run(&plain, world.rank(), forward, &device);
                let full_grads = gather_grads(&sharded, &mut grads)?;
                let restored = values(&full_model(&sharded)?, None);
                Ok((
                    output,
                    plain_output,
                    full_grads,
                    values(&plain, Some(&plain_grads)),
                    restored,
                ))
            })
            .map(launched::values)
            .unwrap_or_else(|error| panic!("{name}: {error}"));

            let mut mean = results[0].3.clone();
            for (path, grad) in &mut mean {
                for (i, value) in grad.iter_mut().enumerate() {
                    *value = results.iter().map(|rank| rank.3[path][i]).sum::<f32>() / RANKS as f32;
                }
            }
            for (output, plain_output, full_grads, _, restored) in &results {
                assert_eq!(
                    output, plain_output,
                    "{name}: output, checkpointing {checkpointing}"
                );
                let diff = max_diff(full_grads, &mean);
                assert!(
                    diff < 1e-5,
                    "{name}: gradients differ by {diff}, checkpointing {checkpointing}, last dim {last_dim}"
                );
                assert_eq!(
                    restored, &initial,
                    "{name}: full_model returns the values it was given"
                );
            }
        }
    }
}

/// Whole gradients of a sharded module, through `full_model` of a module that holds them.
fn gather_grads<M: Module>(
    model: &M,
    grads: &mut GradientsParams,
) -> burn_dtensor::Result<std::collections::BTreeMap<String, Vec<f32>>> {
    let holder = model.clone().map(&mut Replace(grads));
    Ok(values(&full_model(&holder)?, None))
}

struct Replace<'a>(&'a mut GradientsParams);

impl burn::module::ModuleMapper for Replace<'_> {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<D>>,
    ) -> burn::module::Param<Tensor<D>> {
        let grad = self.0.remove::<D>(param.id);
        param.map(|base| match grad {
            Some(grad) => Tensor::from_data(grad.into_data(), &base.device()).require_grad(),
            // Buffers of a batch norm, which clones of a module share.
            None => base,
        })
    }
}

macro_rules! modules {
    ($($test:ident: $ty:ty = $build:expr, |$model:ident, $seed:ident, $device:ident| $forward:expr;)*) => {$(
        #[test]
        fn $test() {
            fn forward($model: &$ty, $seed: u64, $device: &Device) -> Tensor<1> {
                flat($forward)
            }
            fn build(device: &Device) -> $ty {
                device.seed(11);
                ($build).init(device)
            }
            check(stringify!($test), build, forward);
        }
    )*};
}

fn tokens(seed: u64, shape: [usize; 2], below: i64, device: &Device) -> Tensor<2, Int> {
    let data: Vec<i64> = (0..shape[0] * shape[1])
        .map(|i| (i as i64 * 7 + seed as i64 * 3) % below)
        .collect();
    Tensor::from_data(TensorData::new(data, shape), device)
}

// Sizes are odd on purpose: shards are uneven, some empty.
modules! {
    linear_row: Linear = LinearConfig::new(5, 3), |m, s, d| m.forward(tensor(s, [2, 7, 5], d));
    linear_col: Linear = LinearConfig::new(5, 3).with_layout(LinearLayout::Col), |m, s, d| m.forward(tensor(s, [4, 5], d));
    linear_without_bias: Linear = LinearConfig::new(1, 3).with_bias(false), |m, s, d| m.forward(tensor(s, [4, 1], d));
    embedding: Embedding = EmbeddingConfig::new(7, 5), |m, s, d| m.forward(tokens(s, [2, 4], 7, d));
    layer_norm: LayerNorm = LayerNormConfig::new(7), |m, s, d| m.forward(tensor(s, [2, 3, 7], d));
    rms_norm: RmsNorm = RmsNormConfig::new(7), |m, s, d| m.forward(tensor(s, [2, 3, 7], d));
    group_norm: GroupNorm = GroupNormConfig::new(3, 6), |m, s, d| m.forward(tensor(s, [2, 6, 5], d));
    instance_norm: InstanceNorm = InstanceNormConfig::new(3), |m, s, d| m.forward(tensor(s, [2, 3, 5], d));
    batch_norm: BatchNorm = BatchNormConfig::new(3), |m, s, d| m.forward(tensor(s, [4, 3, 5], d));
    conv1d: Conv1d = Conv1dConfig::new(3, 5, 3), |m, s, d| m.forward(tensor(s, [2, 3, 8], d));
    conv2d: Conv2d = Conv2dConfig::new([3, 5], [3, 3]), |m, s, d| m.forward(tensor(s, [2, 3, 6, 6], d));
    conv3d: Conv3d = Conv3dConfig::new([2, 3], [2, 2, 2]), |m, s, d| m.forward(tensor(s, [1, 2, 4, 4, 4], d));
    conv_transpose1d: ConvTranspose1d = ConvTranspose1dConfig::new([3, 5], 3), |m, s, d| m.forward(tensor(s, [2, 3, 6], d));
    conv_transpose2d: ConvTranspose2d = ConvTranspose2dConfig::new([3, 5], [3, 3]), |m, s, d| m.forward(tensor(s, [2, 3, 4, 4], d));
    conv_transpose3d: ConvTranspose3d = ConvTranspose3dConfig::new([2, 3], [2, 2, 2]), |m, s, d| m.forward(tensor(s, [1, 2, 3, 3, 3], d));
    deform_conv2d: DeformConv2d = DeformConv2dConfig::new([3, 5], [3, 3]), |m, s, d| m.forward(tensor(s, [1, 3, 6, 6], d), tensor(s, [1, 18, 4, 4], d), None);
    prelu: PRelu = PReluConfig::new().with_num_parameters(3), |m, s, d| m.forward(tensor(s, [2, 3, 5], d));
    swiglu: SwiGlu = SwiGluConfig::new(5, 3), |m, s, d| m.forward(tensor(s, [2, 4, 5], d));
    multi_head_attention: MultiHeadAttention = MultiHeadAttentionConfig::new(6, 2).with_dropout(0.0), |m, s, d| m.forward(MhaInput::self_attn(tensor(s, [2, 3, 6], d))).context;
    cross_attention: CrossAttention = CrossAttentionConfig::new(6, 5, 2, 1, 3).with_dropout(0.0), |m, s, d| m.forward(tensor(s, [2, 3, 6], d), tensor(s + 9, [2, 4, 5], d), None);
    position_wise_feed_forward: PositionWiseFeedForward = PositionWiseFeedForwardConfig::new(5, 7).with_dropout(0.0), |m, s, d| m.forward(tensor(s, [2, 3, 5], d));
    transformer_encoder: TransformerEncoder = TransformerEncoderConfig::new(6, 7, 2, 2).with_dropout(0.0), |m, s, d| m.forward(TransformerEncoderInput::new(tensor(s, [2, 3, 6], d)));
    transformer_decoder: TransformerDecoder = TransformerDecoderConfig::new(6, 7, 2, 2).with_dropout(0.0), |m, s, d| m.forward(TransformerDecoderInput::new(tensor(s, [2, 3, 6], d), tensor(s + 9, [2, 4, 6], d)));
    rnn: Rnn = RnnConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None).0;
    bi_rnn: BiRnn = BiRnnConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None).0;
    gru: Gru = GruConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None);
    bi_gru: BiGru = BiGruConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None).0;
    lstm: Lstm = LstmConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None).0;
    bi_lstm: BiLstm = BiLstmConfig::new(3, 5, true), |m, s, d| m.forward(tensor(s, [2, 4, 3], d), None).0;
}
