//! States whose values show which step saved them.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData};

use crate::checkpoint::fs::recorder::Recorder;
use crate::checkpoint::{Checkpoint, CheckpointManager, State};
use crate::dtensor::Kind;
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// The folder of the run.
pub(super) const RUN: &str = "/run";

/// Returns a manager of [`RUN`] that keeps everything.
pub(super) fn manager(fs: &Recorder, mesh: &DeviceMesh) -> CheckpointManager {
    CheckpointManager::new_in(Arc::new(fs.clone()), RUN.into(), mesh)
}

/// Returns the values of the weight, whose five rows are sharded unevenly.
fn weight(step: u64, variant: u64) -> TensorData {
    TensorData::new(
        (0..15)
            .map(|at| (100 * step + 1000 * variant + at) as f32 / 7.0)
            .collect(),
        [5, 3],
    )
}

/// Returns the values of a tensor that every rank has.
fn counts(step: u64, variant: u64) -> TensorData {
    TensorData::new(vec![step as i32, variant as i32, -1], [3])
}

/// Returns the state after a step, of which there may be variants.
pub(super) fn state(mesh: &DeviceMesh, step: u64, variant: u64) -> Result<State> {
    let device = mesh.device();
    let weight = Tensor::<2>::from_data(weight(step, variant), device);
    let counts = Tensor::<1, Int>::from_data(counts(step, variant), device);
    let mut state = State::new(mesh)
        .with_step(step)
        .with_value("epoch", &(step, variant))?;
    state = state.with_rank_value("random", &(10 * step + mesh.rank() as u64))?;
    let weight = DTensor::distribute_replicated(weight, mesh, &[Placement::Shard(0)])?;
    let counts = DTensor::distribute_replicated(counts, mesh, &[Placement::Replicate])?;
    state.tensors.extend([
        ("model.weight".into(), weight.into()),
        ("model.counts".into(), counts.into()),
    ]);
    Ok(state)
}

/// Returns an error unless the checkpoint has exactly the state that ranks, as many as given, saved
/// after the step.
pub(super) fn is_saved(
    checkpoint: &Checkpoint,
    mesh: &DeviceMesh,
    ranks: u64,
    step: u64,
) -> Result<(), String> {
    let text = |error: crate::Error| error.to_string();
    let like = state(mesh, 0, 0).map_err(text)?;
    check("step", &checkpoint.step(), &Some(step))?;
    check(
        "epoch",
        &checkpoint.value("epoch").map_err(text)?,
        &(step, 0),
    )?;
    check(
        "random",
        &checkpoint.rank_values("random").map_err(text)?,
        &(0..ranks).map(|rank| 10 * step + rank).collect(),
    )?;
    let weight_like = like.tensors["model.weight"]
        .dtensor::<2, burn::tensor::Float>()
        .expect("it is a matrix");
    let counts_like = like.tensors["model.counts"]
        .dtensor::<1, Int>()
        .expect("it is a vector");
    check(
        "weight",
        &load(checkpoint, "model.weight", &weight_like).map_err(text)?,
        &weight(step, 0),
    )?;
    check(
        "counts",
        &load(checkpoint, "model.counts", &counts_like).map_err(text)?,
        &counts(step, 0),
    )
}

fn load<const D: usize, K: Kind>(
    checkpoint: &Checkpoint,
    key: &str,
    like: &DTensor<D, K>,
) -> Result<TensorData> {
    Ok(checkpoint
        .load_tensor(key, like)?
        .full_tensor()?
        .into_data())
}

fn check<T: PartialEq + std::fmt::Debug>(
    name: &str,
    found: &T,
    expected: &T,
) -> Result<(), String> {
    if found == expected {
        Ok(())
    } else {
        Err(format!(
            "{name} is {found:?}, and was saved as {expected:?}"
        ))
    }
}
