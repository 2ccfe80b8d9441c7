//! [`FragmentBytes`]: the bytes of a rank's fragments, and [`write_fragments`], which writes its file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use super::State;
use super::assign::shard_region;
use super::fs::FileSystem;
use super::manifest::block_checksums;
use super::region::Region;
use super::safetensors_file::header;
use super::save_plan::{SavePlan, WrittenFile, file_name, stored_name};
use burn::tensor::{BoolStore, DType, TensorData};

/// Gives the bytes of this rank's fragments.
pub(super) trait FragmentBytes {
    fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]>;
}

/// Writes and syncs this rank's file, if it has fragments.
///
/// # Errors
/// The file and the error.
pub(super) fn write_fragments(
    fs: &dyn FileSystem,
    path: &Path,
    plan: &SavePlan,
    bytes: &mut dyn FragmentBytes,
) -> Result<WrittenFile, (PathBuf, io::Error)> {
    let rank = plan.comm.group().rank();
    let fragments: Vec<_> = plan.fragments_of(rank).collect();
    if fragments.is_empty() {
        return Ok(WrittenFile {
            len: 0,
            chunks: Vec::new(),
        });
    }
    let tensors: Vec<_> = fragments
        .iter()
        .map(|(key, region)| {
            let entry = plan.tensor(key);
            (
                stored_name(key, region, &entry.shape),
                entry.dtype,
                region.shape.clone(),
            )
        })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "burn-dtensor checkpoint".to_owned())]);
    let (head, begins) = header(&tensors, &metadata);
    let file = path.join(file_name(rank));
    let run = || {
        let mut to = fs.create(&file)?;
        to.write_all(&head)?;
        let mut len = head.len() as u64;
        let mut chunks = Vec::with_capacity(fragments.len());
        for ((key, region), begin) in fragments.iter().zip(begins) {
            debug_assert_eq!(begin, len, "chunks follow each other");
            let bytes = bytes.bytes(key, region);
            to.write_all(&bytes)?;
            len += bytes.len() as u64;
            chunks.push((begin, block_checksums(&bytes)));
        }
        to.sync()?;
        Ok(WrittenFile { len, chunks })
    };
    run().map_err(|error| (file.clone(), error))
}

/// The tensors of a state, read when they are written. One at a time is in host memory.
pub(super) struct LiveFragments<'a> {
    state: &'a State,
    current: Option<(String, TensorData)>,
}

impl<'a> LiveFragments<'a> {
    pub fn new(state: &'a State) -> Self {
        Self {
            state,
            current: None,
        }
    }
}

impl FragmentBytes for LiveFragments<'_> {
    fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]> {
        let tensor = &self.state.tensors[key];
        if self
            .current
            .as_ref()
            .is_none_or(|(current, _)| current != key)
        {
            self.current = None;
            self.current = Some((key.into(), stored(tensor.local_data())));
        }
        let (_, data) = self.current.as_ref().expect("it was just set");
        let spec = tensor.spec();
        let held = shard_region(spec);
        let element = data.dtype().size();
        let first = held.offset_of(region) * element;
        Cow::Borrowed(&data.as_bytes()[first..first + region.num_elements() * element])
    }
}

/// Converts to what the format stores: booleans have one byte.
fn stored(data: TensorData) -> TensorData {
    match data.dtype() {
        DType::Bool(BoolStore::U32) => data.convert_dtype(DType::Bool(BoolStore::Native)),
        _ => data,
    }
}
