//! [`check_specs`]: all ranks of a parameter's mesh have the same layout of it.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use itertools::Itertools;
use twox_hash::XxHash3_64;

use super::{DistributedParameter, ParamError};
use crate::Result;
use crate::comm::{Call, Communicator};
use crate::dtensor::DTensorSpec;

/// Checks that each of these parameters has the same path, layout, global shape and dtype on all
/// ranks of its own mesh. `label` names the call.
///
/// Every rank computes the layouts for itself, from the model, the configuration and its own shard
/// of tensor parallelism. If two ranks disagree, later collectives of the parameter would fail, or
/// return wrong values where shapes agree by chance. Ranks of different meshes, such as stages or
/// experts, may differ.
///
/// # Collective
/// Every rank of the parameters' meshes: one all-gather of a number for each mesh.
///
/// # Errors
/// [`ParamError::LayoutsDiffer`], on every rank of the mesh; a failure of another rank.
pub(crate) fn check_specs<'a>(
    params: impl Iterator<Item = &'a DistributedParameter>,
    label: &str,
) -> Result<()> {
    let params = params.map(|param| param.info()).collect_vec();
    // In the order of the parameters, which is the same on all ranks of a mesh.
    for mesh in params.iter().map(|param| param.spec.mesh()).unique() {
        if mesh.size() == 1 {
            continue;
        }
        let of_mesh = params.iter().filter(|param| param.spec.mesh() == mesh);
        let placed = of_mesh
            .map(|param| (&*param.path, &param.spec))
            .collect_vec();
        check_over(&mesh.all()?, &placed, &format!("{label}, layouts"))?;
    }
    Ok(())
}

fn check_over(
    ranks: &Communicator,
    placed: &[(&str, &Arc<DTensorSpec>)],
    label: &str,
) -> Result<()> {
    let digests = ranks.all_gather_numbers(Call::new(label), &[digest(placed) as usize])?;
    let Some(other) = digests.iter().position(|digest| *digest != digests[0]) else {
        return Ok(());
    };
    // All ranks have found the difference, so all of them exchange the texts.
    let describe = |(path, spec): &(&str, &Arc<DTensorSpec>)| {
        (
            path.to_string(),
            format!(
                "{:?} {} as {}",
                spec.shape().as_slice(),
                spec.dtype().name(),
                spec.layout()
            ),
        )
    };
    let texts =
        ranks.all_gather_object(Call::new(label), &placed.iter().map(describe).collect_vec())?;
    let none = ("none".to_string(), "no parameter".to_string());
    let of_rank = |rank: usize, at: usize| texts[rank].get(at).unwrap_or(&none);
    let count = texts[0].len().max(texts[other].len());
    let at = (0..count)
        .find(|&at| of_rank(0, at) != of_rank(other, at))
        .unwrap_or_default();
    let (param, layout) = of_rank(0, at);
    let (other_param, other_layout) = of_rank(other, at);
    let global = ranks.group().ranks();
    Err(ParamError::LayoutsDiffer {
        param: param.clone(),
        rank: global[0],
        layout: layout.clone(),
        other_param: other_param.clone(),
        other_rank: global[other],
        other_layout: other_layout.clone(),
    }
    .into())
}

/// Returns a hash that is the same in all processes.
fn digest(placed: &[(&str, &Arc<DTensorSpec>)]) -> u64 {
    let mut hasher = XxHash3_64::new();
    for (path, spec) in placed {
        (path, spec.layout(), spec.shape().as_slice(), spec.dtype()).hash(&mut hasher);
    }
    hasher.finish()
}
