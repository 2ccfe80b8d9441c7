//! Checkpoints that earlier versions have written, in `tests/golden/checkpoints`: every later
//! version loads them, on any mesh.
//!
//! | folder | written by |
//! |---|---|
//! | `6b9affde` | that commit, before saves had a folder of their own |
//! | `folder-renamed` | the first version that renames the folder of a save to its name |
//!
//! With `WRITE_FROZEN=PATH` this test writes such a checkpoint there instead.

use std::env;
use std::path::{Path, PathBuf};

use burn::module::Param;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::checkpoint::{self, Checkpoint, LoadOptions, State, StateDict};
use burn_dtensor::dtensor::Kind;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::random_net::INTS;

const FROZEN: [&str; 2] = ["6b9affde", "folder-renamed"];
const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
/// Uneven on two ranks and on three.
const SHAPE: [usize; 2] = [7, 3];
const BATCH: usize = 4;

/// Numbers that every dtype has.
fn numbers(dtype: DType) -> TensorData {
    let numbers = (0..SHAPE[0] * SHAPE[1]).map(|at| (at * 5 % 101) as i64);
    TensorData::new(numbers.collect::<Vec<_>>(), SHAPE).convert_dtype(dtype)
}

fn flags() -> TensorData {
    TensorData::new((0..9).map(|at| at % 3 == 1).collect::<Vec<_>>(), [9])
}

/// Values of the weight, or with them as `x` the input.
fn quarters(rows: usize, columns: usize) -> TensorData {
    let quarters = (0..rows * columns).map(|at| at as f32 / 4.0 - 2.0);
    TensorData::new(quarters.collect::<Vec<_>>(), [rows, columns])
}

fn linear(weight: TensorData, bias: f32, mesh: &DeviceMesh, device: &Device) -> Result<Linear> {
    let bias = TensorData::new(vec![bias; SHAPE[1]], [SHAPE[1]]);
    let linear = Linear {
        weight: Param::from_data(weight, device),
        bias: Some(Param::from_data(bias, device)),
    };
    let config = FullyShard::new().with_layer_warnings(false);
    fully_shard(linear, mesh, config)
}

fn placed<const D: usize, K: Kind>(data: TensorData, mesh: &DeviceMesh) -> Result<DTensor<D, K>> {
    let dtype = data.dtype();
    let full = Tensor::<D, K>::from_data(data, (mesh.device(), dtype));
    let mut placements = vec![Placement::Replicate; mesh.ndim()];
    placements[mesh.ndim() - 1] = Placement::Shard(0);
    DTensor::distribute_replicated(full, mesh, &placements)
}

fn key(dtype: DType) -> String {
    format!("numbers.{}", dtype.name())
}

/// Writes the checkpoint from 2 x 2 ranks.
fn write(path: &Path) {
    MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut state = State::new(mesh)
            .with_step(100)
            .with_value("epoch", &(3_u32, "three".to_owned(), f64::INFINITY))?
            .with_rank_value("rank", &mesh.rank())?;
        for dtype in FLOATS.into_iter().chain(INTS) {
            state = match dtype.is_float() {
                true => state.with_tensor(
                    &key(dtype),
                    placed::<2, burn::tensor::Float>(numbers(dtype), mesh)?,
                )?,
                false => state.with_tensor(&key(dtype), placed::<2, Int>(numbers(dtype), mesh)?)?,
            };
        }
        state = state.with_tensor("flags", placed::<1, Bool>(flags(), mesh)?)?;
        let model = linear(quarters(SHAPE[0], SHAPE[1]), 0.5, mesh, &device)?;
        state = state.with_model("model", &model)?;
        let x = Tensor::<2>::from_data(quarters(BATCH, SHAPE[0]), &device);
        let loss = unit(&model, x, |model, x| model.forward(x)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let mut optim = sharded(AdamWConfig::new());
        let stepped = optim.step(1e-3, model, grads)?;
        state = state.with_optimizer("optimizer", &optim.state(&stepped)?)?;
        checkpoint::save(path, &state)
    });
}

/// Checks that a tensor is loaded as it was saved.
fn check<const D: usize, K: Kind>(
    saved: &Checkpoint,
    key: &str,
    expected: TensorData,
    mesh: &DeviceMesh,
) -> Result<()> {
    let zeros = TensorData::from_bytes_vec(
        vec![0; expected.as_bytes().len()],
        expected.shape().clone(),
        expected.dtype(),
    );
    let loaded = saved.load_tensor(key, &placed::<D, K>(zeros, mesh)?)?;
    assert_eq!(loaded.full_tensor()?.into_data(), expected, "{key}");
    Ok(())
}

fn load(path: &Path, mesh: &DeviceMesh) -> Result<()> {
    let saved = Checkpoint::open(path, mesh)?;
    assert_eq!(saved.step(), Some(100));
    assert_eq!(
        saved.value::<(u32, String, f64)>("epoch")?,
        (3, "three".into(), f64::INFINITY)
    );
    assert_eq!(saved.rank_values::<usize>("rank")?, [0, 1, 2, 3]);
    for dtype in FLOATS.into_iter().chain(INTS) {
        match dtype.is_float() {
            true => check::<2, burn::tensor::Float>(&saved, &key(dtype), numbers(dtype), mesh)?,
            false => check::<2, Int>(&saved, &key(dtype), numbers(dtype), mesh)?,
        }
    }
    check::<1, Bool>(&saved, "flags", flags(), mesh)?;

    let device = mesh.device().clone().autodiff();
    let zeros = TensorData::zeros::<f32, _>(SHAPE);
    let model = linear(zeros, 0.0, mesh, &device)?;
    let (model, _) = saved.load_model("model", model, &LoadOptions::new())?;
    let full = full_model(&model)?;
    assert_eq!(full.weight.val().into_data(), quarters(SHAPE[0], SHAPE[1]));
    let bias = full.bias.expect("there is a bias").val().into_data();
    assert_eq!(bias.try_to_vec::<f32>()?, [0.5; 3]);

    // The gradient of a sum of outputs is the sum of inputs, and of the bias, the rows.
    let (state, _) = saved.load_optimizer("optimizer", &model, &LoadOptions::new())?;
    let moments = StateDict::of_optimizer(&state).full()?;
    let x = quarters(BATCH, SHAPE[0]).try_to_vec::<f32>()?;
    let sums = |row: usize| (0..BATCH).map(|at| x[at * SHAPE[0] + row]).sum::<f32>();
    let weight: Vec<_> = (0..SHAPE[0] * SHAPE[1])
        .map(|at| sums(at / SHAPE[1]))
        .collect();
    for (param, grads) in [("weight", weight), ("bias", vec![BATCH as f32; SHAPE[1]])] {
        for (moment, power, factor) in [("moment_1", 1, 0.1), ("moment_2", 2, 0.001)] {
            let key = format!("{param}.momentum.{moment}");
            let found = moments[&key].clone().try_to_vec::<f32>()?;
            for (found, grad) in found.iter().zip(&grads) {
                let expected = factor * grad.powi(power);
                assert!(
                    (found - expected).abs() <= 1e-4 * expected.abs(),
                    "{key}: {found}, {expected}"
                );
            }
        }
    }
    sharded(AdamWConfig::new()).load_state(&model, state)?;
    Ok(())
}

#[test]
fn checkpoints_of_earlier_versions_load_on_any_mesh() {
    if let Some(path) = env::var_os("WRITE_FROZEN") {
        return write(Path::new(&path));
    }
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints");
    for frozen in FROZEN {
        let path = golden.join(frozen);
        for (shape, names) in [
            (&[1][..], &["shard"][..]),
            (&[2], &["shard"]),
            (&[3], &["shard"]),
            (&[2, 2], &["replicate", "shard"]),
        ] {
            MeshTest::new(shape, names).run(|mesh| load(&path, mesh));
        }
        let verified =
            checkpoint::verify(&path, &checkpoint::ReadOptions::new(), |_, _| ()).unwrap();
        assert_eq!(verified.damage, []);
    }
}
