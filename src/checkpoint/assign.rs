//! Which rank writes what: every rank computes the same assignment.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::manifest::StoredDType;
use super::region::Region;
use super::{CheckpointError, State};
use crate::Result;
use crate::comm::{Call, Communicator, agree};
use crate::dtensor::{DTensorSpec, DynDTensor};

/// Bytes above which a region that several ranks hold is divided among them.
const FRAGMENT: usize = 16 << 20;

/// A tensor as the ranks of the group hold it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TensorDescription {
    pub key: String,
    pub shape: Vec<usize>,
    pub dtype: StoredDType,
    pub placements: String,
    /// The region that this rank holds, or, once all ranks are known, the regions and the group
    /// ranks that hold them.
    pub regions: Vec<(Region, Vec<usize>)>,
}

/// A part of a tensor, and the group rank that writes it.
#[derive(Debug, Clone)]
pub(super) struct AssignedRegion {
    pub region: Region,
    pub writer: usize,
}

/// Returns the tensors of all ranks, in the order of their keys.
///
/// If every tensor is on a mesh of all ranks, which digests show, every rank knows all regions from
/// its own specs. Otherwise the ranks exchange them.
///
/// # Collective
/// Every rank of `comm`.
///
/// # Errors
/// [`CheckpointError::Partial`], [`CheckpointError::DType`], [`CheckpointError::Disagree`],
/// [`CheckpointError::Cover`] and [`CheckpointError::Overlap`], on all ranks.
pub(super) fn describe_tensors(
    state: &State,
    comm: &Communicator,
) -> Result<Vec<TensorDescription>> {
    let own = describe_local(state);
    let everywhere = state
        .tensors
        .values()
        .all(|tensor| is_on_all(tensor.spec(), comm));
    let digest = own
        .as_ref()
        .ok()
        .filter(|_| everywhere)
        .map(|_| digest(state));
    let digests = comm.all_gather_object(Call::new("checkpoint_state"), &digest)?;
    let held = if digests[0].is_some() && digests.iter().all(|digest| *digest == digests[0]) {
        let specs = state.tensors.values().map(|tensor| tensor.spec());
        own?.into_iter()
            .zip(specs)
            .map(|(held, spec)| TensorDescription {
                regions: regions(spec, comm),
                ..held
            })
            .collect()
    } else {
        let of_ranks = agree(comm, "checkpoint_state_exchange", own)?;
        merge(of_ranks, comm.group().ranks())?
    };
    check_cover(&held)?;
    Ok(held)
}

/// Returns a rank for each part of each tensor. Of the ranks that hold it, the one with the fewest
/// bytes so far writes it. Nothing is written of a tensor without elements.
pub(super) fn assign(held: &[TensorDescription], ranks: usize) -> Vec<Vec<AssignedRegion>> {
    let mut bytes = vec![0usize; ranks];
    let mut assign = |held: &TensorDescription| {
        let size = held.dtype.bytes();
        let mut fragments = Vec::new();
        for (region, holders) in held.regions.iter().filter(|(region, _)| !region.is_empty()) {
            let most = if holders.len() > 1 {
                FRAGMENT / size
            } else {
                usize::MAX
            };
            for region in region.split(most) {
                let writer = *holders
                    .iter()
                    .min_by_key(|&&rank| (bytes[rank], rank))
                    .expect("a rank holds it");
                bytes[writer] += region.num_elements() * size;
                fragments.push(AssignedRegion { region, writer });
            }
        }
        fragments
    };
    held.iter().map(&mut assign).collect()
}

/// Returns the region that this rank's shard is.
pub(super) fn shard_region(spec: &DTensorSpec) -> Region {
    Region::of_slices(&spec.layout().local_slices(spec.shape(), spec.coordinate()))
}

/// Describes the tensors of this rank.
fn describe_local(state: &State) -> Result<Vec<TensorDescription>, CheckpointError> {
    let describe = |(key, tensor): (&String, &DynDTensor)| {
        let spec = tensor.spec();
        if spec.layout().has_partial() {
            return Err(CheckpointError::Partial {
                key: key.clone(),
                placements: spec.layout().to_string(),
            });
        }
        let dtype = StoredDType::of(spec.dtype());
        let dtype = dtype.ok_or_else(|| CheckpointError::DType {
            key: key.clone(),
            dtype: spec.dtype().name().into(),
        })?;
        let regions = vec![(shard_region(spec), Vec::new())];
        let shape = spec.shape().to_vec();
        let placements = spec.layout().to_string();
        Ok(TensorDescription {
            key: key.clone(),
            shape,
            dtype,
            placements,
            regions,
        })
    };
    state.tensors.iter().map(describe).collect()
}

/// Returns true if the mesh of a tensor has all ranks of the group.
fn is_on_all(spec: &DTensorSpec, comm: &Communicator) -> bool {
    let ranks = spec.mesh().ranks();
    ranks.len() == comm.group().size()
        && ranks
            .iter()
            .all(|rank| comm.group().group_rank_of(*rank).is_some())
}

fn digest(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (key, tensor) in &state.tensors {
        let spec = tensor.spec();
        let mesh = spec.mesh();
        let layout = spec.layout();
        (
            key,
            spec.shape().as_slice(),
            spec.dtype().name(),
            mesh.ranks(),
            mesh.shape(),
        )
            .hash(&mut hasher);
        layout.hash(&mut hasher);
    }
    hasher.finish()
}

/// Returns all regions of a tensor and the group ranks that hold them.
fn regions(spec: &DTensorSpec, comm: &Communicator) -> Vec<(Region, Vec<usize>)> {
    let mesh = spec.mesh();
    let mut by_region: BTreeMap<Region, Vec<usize>> = BTreeMap::new();
    for (position, rank) in mesh.ranks().iter().enumerate() {
        let coordinate = mesh
            .coordinate_at(position)
            .expect("the mesh has this position");
        let region = Region::of_slices(&spec.layout().local_slices(spec.shape(), &coordinate));
        by_region.entry(region).or_default().push(
            comm.group()
                .group_rank_of(*rank)
                .expect("it is in the group"),
        );
    }
    by_region
        .into_iter()
        .map(|(region, mut holders)| {
            holders.sort_unstable();
            (region, holders)
        })
        .collect()
}

/// Joins what the ranks hold.
fn merge(
    of_ranks: Vec<Vec<TensorDescription>>,
    ranks: &[usize],
) -> Result<Vec<TensorDescription>, CheckpointError> {
    let mut merged: BTreeMap<String, (usize, TensorDescription)> = BTreeMap::new();
    let mut holders: HashMap<(String, Region), Vec<usize>> = HashMap::new();
    for (rank, of_rank) in of_ranks.into_iter().enumerate() {
        for held in of_rank {
            let (region, _) = held.regions[0].clone();
            let at = (held.key.clone(), region.clone());
            let (first, known) = merged.entry(held.key.clone()).or_insert_with(|| {
                (
                    rank,
                    TensorDescription {
                        regions: Vec::new(),
                        ..held.clone()
                    },
                )
            });
            let text =
                |held: &TensorDescription| format!("shape {:?} in {}", held.shape, held.dtype);
            if (&known.shape, known.dtype) != (&held.shape, held.dtype) {
                let found = text(&held);
                let expected = text(known);
                return Err(CheckpointError::Disagree {
                    key: held.key,
                    rank: ranks[rank],
                    found,
                    of: ranks[*first],
                    expected,
                });
            }
            let of_region = holders.entry(at).or_default();
            if of_region.is_empty() {
                known.regions.push((region, Vec::new()));
            }
            of_region.push(rank);
        }
    }
    let complete = |(key, (_, mut held)): (String, (usize, TensorDescription))| {
        held.regions.sort();
        for (region, of_region) in &mut held.regions {
            *of_region = holders
                .remove(&(key.clone(), region.clone()))
                .expect("every region has holders");
        }
        held
    };
    Ok(merged.into_iter().map(complete).collect())
}

fn check_cover(held: &[TensorDescription]) -> Result<(), CheckpointError> {
    for TensorDescription {
        key,
        shape,
        regions,
        ..
    } in held
    {
        let found = regions
            .iter()
            .map(|(region, _)| region.num_elements())
            .sum();
        let expected = shape.iter().product();
        if found != expected {
            return Err(CheckpointError::Cover {
                key: key.clone(),
                shape: shape.clone(),
                found,
                expected,
            });
        }
        let mut regions: Vec<_> = regions
            .iter()
            .map(|(region, _)| region)
            .filter(|region| !region.is_empty())
            .collect();
        if !Region::are_disjoint(&mut regions) {
            return Err(CheckpointError::Overlap {
                key: key.clone(),
                shape: shape.clone(),
            });
        }
    }
    Ok(())
}
