//! Pairs of functions before and after the all-gathers of parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{EncodedShard, FsdpModule, ParamError, ShardCodec, unshard};
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::Quantized;

use super::collective_counts::{BLOCKS, WIDTH, stack};
use super::custom_collectives::{sharded, step};
use super::support::{max_diff, mean, on_device, tensor, values};
use crate::launched;

/// Sends shards as they are, and counts them.
struct Same(Arc<AtomicUsize>);

impl ShardCodec for Same {
    fn encode(&self, shard: Tensor<1>) -> Result<EncodedShard> {
        self.0.fetch_add(1, Relaxed);
        Ok(EncodedShard {
            floats: vec![shard],
            ints: Vec::new(),
        })
    }

    fn decode(&self, mut encoded: EncodedShard, _: DType) -> Result<Tensor<1>> {
        Ok(encoded.floats.remove(0))
    }
}

/// Shards of 6 rows on 2 and 4 ranks, even and uneven, and of the second dimension on 3.
#[test]
fn shards_that_are_sent_as_they_are_train_to_the_bit_as_without_a_codec() {
    let model = stack(&Device::flex());
    for (ranks, dim) in [(2, 0), (4, 0), (3, 1)] {
        for reshard in [
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            ReshardAfterForward::Ranks(ranks),
        ] {
            let all = launch(Launch::threads(ranks), |world| {
                let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
                let place = move |param: burn_dtensor::fsdp::ParamInfo<'_>| {
                    Some(Placement::Shard(dim.min(param.shape.len() - 1)))
                };
                let config = FullyShard::new()
                    .with_units(["blocks.*"])
                    .with_reshard_after_forward(reshard)
                    .with_shard_placement_fn(place);
                let device = world.device().clone().autodiff();
                let model = fully_shard(on_device(&model, &device), &mesh, config)?;
                let expected = step(&model, world)?;
                let encoded = Arc::new(AtomicUsize::new(0));
                FsdpModule::of(&model)?.set_shard_codec(Same(encoded.clone()));
                assert_eq!(step(&model, world)?, expected, "{ranks} ranks, {reshard:?}");
                let count = encoded.load(Relaxed);
                assert!(count > 0);
                FsdpModule::of(&model)?.remove_shard_codec();
                assert_eq!(step(&model, world)?, expected);
                assert_eq!(encoded.load(Relaxed), count);
                Ok(())
            });
            all.unwrap();
        }
    }
}

/// Returns a shard after 8 bits with one scale.
fn in_eight_bits(shard: &[f32]) -> Vec<f32> {
    let least = shard.iter().copied().fold(0.0_f32, f32::min);
    let greatest = shard.iter().copied().fold(0.0_f32, f32::max);
    let scale = ((greatest - least) / 255.0).max(f32::EPSILON);
    let zero = (-(least / scale).round_ties_even()).clamp(0.0, 255.0);
    let decoded = |x: &f32| {
        let q = ((x / scale).round_ties_even() + zero).clamp(0.0, 255.0);
        (q - zero) * scale
    };
    shard.iter().map(decoded).collect()
}

/// Replaces each parameter by what `ranks` ranks decode of their rows of it.
struct Decoded(usize);

impl ModuleMapper for Decoded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let (shape, device) = (tensor.dims(), tensor.device());
            let values: Vec<f32> = tensor.into_data().try_to_vec().unwrap();
            let row = values.len() / shape[0];
            let part = shape[0].div_ceil(self.0) * row;
            let decoded: Vec<f32> = values.chunks(part).flat_map(in_eight_bits).collect();
            Tensor::from_data(TensorData::new(decoded, shape), &device)
        })
    }
}

#[test]
fn parameters_in_eight_bits_train_as_the_decoded_ones_do_on_one_device() {
    let model = stack(&Device::flex());
    for ranks in [2, 3, 4] {
        let decoded = model.clone().map(&mut Decoded(ranks));
        let all = launch(Launch::threads(ranks), |world| {
            let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
            let sharded = sharded(&model, world, &mesh)?;
            let stored = values(&full_model(&sharded)?, None);
            let gathered = || world.ledger().bytes_in(Op::AllGather, Phase::Forward);
            let before = gathered();
            step(&sharded, world)?;
            let plain = gathered() - before;
            FsdpModule::of(&sharded)?.set_shard_codec(Quantized::per_tensor());
            let before = gathered();
            let found = step(&sharded, world)?;
            let encoded = gathered() - before;
            // Of each layer: rows and bias in bytes, padded to equal shards, and two scales and zero
            // points from each rank.
            let padded = (WIDTH.div_ceil(ranks) * ranks * (WIDTH + 1) + 16 * ranks) as u64;
            let saved = (BLOCKS as u64 + 1) * ((WIDTH * WIDTH + WIDTH) as u64 * 4 - padded);
            assert_eq!(plain - encoded, saved, "{ranks} ranks");
            // Parameters are read as they are stored, also if a forward without a backward keeps them.
            FsdpModule::of(&sharded)?.set_reshard_after_forward(ReshardAfterForward::Never)?;
            let valid = sharded.valid();
            valid.forward(tensor(1, [2, WIDTH], world.device()));
            assert_eq!(values(&full_model(&valid)?, None), stored);
            // Without the codec no pass uses what was decoded before.
            valid.forward(tensor(1, [2, WIDTH], world.device()));
            FsdpModule::of(&sharded)?.remove_shard_codec();
            assert_eq!(values(&full_model(&valid)?, None), stored);
            let x = || tensor(1, [2, WIDTH], world.device());
            let plain = on_device(&model, world.device()).forward(x());
            let again = valid.forward(x());
            assert!((again - plain).abs().max().into_scalar::<f32>() < 1e-5);
            let device = world.device().clone().autodiff();
            let alone = on_device(&decoded, &device);
            let x = tensor(world.rank() as u64 + 1, [2, WIDTH], &device);
            let loss = alone.forward(x).square().sum();
            let grads = GradientsParams::from_grads(loss.backward(), &alone);
            Ok((found, values(&alone, Some(&grads))))
        });
        let all = launched::values(all.unwrap());
        let expected = mean(all.iter().map(|(_, own)| own));
        for (found, _) in &all {
            let diff = max_diff(found, &expected);
            assert!(diff < 1e-4, "{ranks} ranks: {diff}");
        }
    }
}

/// Decodes too few elements.
struct Short;

impl ShardCodec for Short {
    fn encode(&self, shard: Tensor<1>) -> Result<EncodedShard> {
        Same(Arc::default()).encode(shard)
    }

    fn decode(&self, mut encoded: EncodedShard, _: DType) -> Result<Tensor<1>> {
        Ok(encoded.floats.remove(0).narrow(0, 0, 1))
    }
}

#[test]
fn a_shard_that_is_decoded_to_another_length_is_an_error_of_every_rank() {
    let all = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let device = world.device().clone().autodiff();
        let linear: Linear = LinearConfig::new(4, 2).init(&device);
        let linear = fully_shard(linear, &mesh, FullyShard::new())?;
        FsdpModule::of(&linear)?.set_shard_codec(Short);
        let x = Tensor::<2>::ones([1, 4], &device);
        let error = Error::catch(|| {
            unit(&linear, x, |linear, x| linear.forward(x));
            Ok(())
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error, Error::Param(ParamError::CodecResult { .. })),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("1 elements of F32 for a shard of 4"),
            "{error}"
        );
        // So does one that is waited for before it is used, and the ranks can continue.
        let waited = Error::catch(|| unshard(&linear)?.wait());
        assert!(
            waited
                .unwrap_err()
                .to_string()
                .contains("1 elements of F32")
        );
        let x = Tensor::<2>::ones([1, 4], &device);
        let error = Error::catch(|| {
            unit(&linear, x.clone(), |linear, x| linear.forward(x));
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("1 elements of F32"));
        FsdpModule::of(&linear)?.remove_shard_codec();
        unit(&linear, x, |linear, x| linear.forward(x));
        world.barrier("after")?;
        Ok(())
    });
    all.unwrap();
}
