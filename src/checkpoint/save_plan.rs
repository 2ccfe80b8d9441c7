//! [`SavePlan`]: what each rank writes of a checkpoint.

use std::collections::BTreeMap;

use super::assign::{AssignedRegion, TensorDescription, assign, describe_tensors};
use super::manifest::{ChunkEntry, FileEntry, Manifest, MeshEntry, TensorEntry};
use super::region::Region;
use super::safetensors_file::METADATA;
use super::save_values::agree_on_values;
use super::{CheckpointError, State};
use crate::Result;
use crate::comm::Communicator;
use serde::{Deserialize, Serialize};

/// Most bytes that a manifest may have.
pub(super) const LIMIT: u64 = 1 << 30;
const SHARDS: &str = "rank-";

/// Plan of a save, which every rank knows in full.
pub(super) struct SavePlan {
    pub comm: Communicator,
    /// Most bytes of the manifest.
    pub limit: u64,
    manifest: Manifest,
    fragments: Vec<(String, Vec<AssignedRegion>)>,
}

/// File that one rank wrote.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WrittenFile {
    pub len: u64,
    /// First byte and checksums of each of its fragments, in their order.
    pub chunks: Vec<(u64, Vec<u64>)>,
}

impl SavePlan {
    /// Agrees with all ranks on what is written.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    pub fn new(state: &State) -> Result<Self> {
        state.mesh.member("save a checkpoint")?;
        let comm = state.mesh.all()?;
        let held = describe_tensors(state, &comm)?;
        check_names(&held)?;
        let (values, rank_values) = agree_on_values(state, &comm)?;
        let fragments = assign(&held, comm.group().size());
        let entry = |TensorDescription {
                         shape,
                         dtype,
                         placements,
                         ..
                     }: &TensorDescription| TensorEntry {
            shape: shape.clone(),
            dtype: *dtype,
            placements: placements.clone(),
            chunks: Vec::new(),
        };
        let manifest = Manifest {
            step: state.step,
            mesh: MeshEntry {
                shape: state.mesh.shape().to_vec(),
                names: state.mesh.names().to_vec(),
            },
            required_features: Vec::new(),
            software: concat!("burn-dtensor ", env!("CARGO_PKG_VERSION")).into(),
            files: Vec::new(),
            tensors: held
                .iter()
                .map(|held| (held.key.clone(), entry(held)))
                .collect(),
            values,
            rank_values,
        };
        let fragments = held
            .into_iter()
            .map(|held| held.key)
            .zip(fragments)
            .collect();
        Ok(Self {
            comm,
            limit: LIMIT,
            manifest,
            fragments,
        })
    }

    /// Returns the fragments that a rank of the group writes, in their order.
    pub fn fragments_of(&self, rank: usize) -> impl Iterator<Item = (&str, &Region)> {
        self.fragments.iter().flat_map(move |(key, fragments)| {
            fragments
                .iter()
                .filter(move |fragment| fragment.writer == rank)
                .map(move |fragment| (key.as_str(), &fragment.region))
        })
    }

    /// Returns the manifest's entry of a tensor, without its chunks.
    pub fn tensor(&self, key: &str) -> &TensorEntry {
        &self.manifest.tensors[key]
    }

    /// Returns the bytes of the fragments that a rank of the group writes.
    pub fn bytes_of(&self, rank: usize) -> usize {
        self.fragments_of(rank)
            .map(|(key, region)| region.num_elements() * self.tensor(key).dtype.bytes())
            .sum()
    }

    /// Completes the manifest with what the ranks wrote.
    pub fn manifest(&self, written: Vec<WrittenFile>) -> Manifest {
        let mut manifest = self.manifest.clone();
        // Ranks that write nothing have no file.
        let writers: Vec<_> = (0..written.len())
            .filter(|&rank| !written[rank].chunks.is_empty())
            .collect();
        let index: BTreeMap<_, _> = writers
            .iter()
            .enumerate()
            .map(|(file, &rank)| (rank, file))
            .collect();
        manifest.files = writers
            .iter()
            .map(|&rank| FileEntry::new(file_name(rank), written[rank].len))
            .collect();
        let mut chunks: Vec<_> = written
            .into_iter()
            .map(|written| written.chunks.into_iter())
            .collect();
        for (key, fragments) in &self.fragments {
            let entry = manifest
                .tensors
                .get_mut(key)
                .expect("the manifest has every key");
            entry
                .chunks
                .extend(fragments.iter().map(|AssignedRegion { region, writer }| {
                    let (begin, checksums) = chunks[*writer]
                        .next()
                        .expect("a rank writes all its fragments");
                    ChunkEntry {
                        region: region.clone(),
                        file: index[writer],
                        begin,
                        checksums,
                    }
                }));
        }
        manifest
    }
}

/// Checks that the keys can be names of tensors in files. It does not depend on how the tensors are
/// divided, so that a state that can be saved on one mesh can be on every other.
fn check_names(held: &[TensorDescription]) -> Result<(), CheckpointError> {
    let has = |key: &str| {
        held.binary_search_by(|held| held.key.as_str().cmp(key))
            .is_ok()
    };
    for TensorDescription { key, .. } in held {
        // As `stored_name` names the regions of a tensor.
        let divided = key
            .strip_suffix(']')
            .and_then(|key| key.rsplit_once('['))
            .map(|(divided, _)| divided);
        let reason = match divided.filter(|divided| has(divided)) {
            Some(divided) => format!("a region of `{divided}` could have this name"),
            None if key == METADATA => "the format uses it for what is not a tensor".into(),
            None => continue,
        };
        return Err(CheckpointError::Name {
            key: key.clone(),
            reason,
        });
    }
    Ok(())
}

pub(super) fn file_name(rank: usize) -> String {
    format!("{SHARDS}{rank:05}.safetensors")
}

/// Returns the rank whose file has this name.
pub(super) fn rank_of_file(name: &str) -> Option<usize> {
    let digits = name.strip_prefix(SHARDS)?.strip_suffix(".safetensors")?;
    let rank = digits.parse().ok()?;
    (file_name(rank) == name).then_some(rank)
}

/// Returns the name that a region of a tensor of shape `full` has in its file.
pub(super) fn stored_name(key: &str, region: &Region, full: &[usize]) -> String {
    if region.shape == full {
        key.to_owned()
    } else {
        format!("{key}{region}")
    }
}
