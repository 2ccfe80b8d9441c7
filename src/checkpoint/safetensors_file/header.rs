//! The bytes of headers and of indexes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use itertools::Itertools;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::super::manifest::{ChunkEntry, StoredDType, TensorEntry, json};
use super::super::region::Region;

/// The data of a file that this crate writes begin at a multiple of this.
pub(super) const ALIGNMENT: usize = 4096;

/// Most bytes of a header, as the crate `safetensors` has it.
pub(super) const LONGEST: u64 = 100_000_000;

/// Name of the entry of a header that is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// Returns the beginning of a file with these tensors, up to the first byte of data, and the first
/// byte of each tensor. The data begin at a multiple of 4096, and follow each other in the order of
/// `tensors`.
///
/// # Panics
/// If two tensors have the same name, or one has that of the metadata.
pub(crate) fn header(
    tensors: &[(String, StoredDType, Vec<usize>)],
    metadata: &BTreeMap<String, String>,
) -> (Vec<u8>, Vec<u64>) {
    let mut end = 0;
    let info = |(name, dtype, shape): &(String, StoredDType, Vec<usize>)| {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.bytes();
        (
            name.clone(),
            TensorInfo {
                dtype: dtype.safetensors(),
                shape: shape.clone(),
                data_offsets: (begin, end),
            },
        )
    };
    let infos = tensors.iter().map(info).collect_vec();
    let names = infos
        .iter()
        .map(|(name, _)| name.as_str())
        .chain([METADATA]);
    assert!(
        names.clone().all_unique(),
        "names of a header differ: {:?}",
        names.duplicates().collect_vec()
    );

    let mut bytes = vec![0; 8];
    serde_json::to_writer(
        &mut bytes,
        &HeaderJson {
            metadata,
            infos: &infos,
        },
    )
    .expect("memory takes all bytes");
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), b' ');
    let len = bytes.len() - 8;
    bytes[..8].copy_from_slice(&(len as u64).to_le_bytes());
    let begins = infos
        .iter()
        .map(|(_, info)| (bytes.len() + info.data_offsets.0) as u64)
        .collect();
    (bytes, begins)
}

struct HeaderJson<'a> {
    metadata: &'a BTreeMap<String, String>,
    infos: &'a [(String, TensorInfo)],
}

impl Serialize for HeaderJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.infos.len() + 1))?;
        map.serialize_entry(METADATA, self.metadata)?;
        self.infos
            .iter()
            .try_for_each(|(name, info)| map.serialize_entry(name, info))?;
        map.end()
    }
}

/// Returns the length of the JSON of a file with `len` bytes that begins with `start`.
pub(crate) fn header_len(start: [u8; 8], len: u64) -> Result<usize, String> {
    let header = u64::from_le_bytes(start);
    if len < 8 || header > LONGEST.min(len - 8) {
        return Err(format!(
            "it has {len} bytes, but its header has {header}; at most {LONGEST} are read"
        ));
    }
    Ok(header as usize)
}

/// Reads the JSON of the header of a file with `len` bytes: the tensors in it, as tensors of the
/// manifest's file `file`. Allocates at most a constant times its length.
pub(crate) fn parse_header(
    json: &[u8],
    len: u64,
    file: usize,
) -> Result<BTreeMap<String, TensorEntry>, String> {
    let HeaderTensors(infos) = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let data = 8 + json.len() as u64;
    let entry = |(key, info): (&String, &TensorInfo)| {
        let dtype =
            StoredDType::try_from(info.dtype).map_err(|reason| format!("`{key}`: {reason}"))?;
        let chunk = ChunkEntry {
            region: Region::full(&info.shape),
            file,
            begin: data + info.data_offsets.0 as u64,
            checksums: Vec::new(),
        };
        let chunks = if chunk.region.is_empty() {
            Vec::new()
        } else {
            vec![chunk]
        };
        Ok((
            key.clone(),
            TensorEntry {
                shape: info.shape.clone(),
                dtype,
                placements: String::new(),
                chunks,
            },
        ))
    };
    // The crate checks that lengths fit shapes, and that no byte is of no tensor or of two.
    let by_offset = infos.iter().sorted_by_key(|(_, info)| info.data_offsets);
    let by_offset = by_offset
        .map(|(key, info)| (key.clone(), info.clone()))
        .collect();
    let metadata = Metadata::new(None, by_offset).map_err(|error| error.to_string())?;
    if data.checked_add(metadata.data_len() as u64) != Some(len) {
        return Err(format!(
            "it has {len} bytes, but header and data are {data} and {}",
            metadata.data_len()
        ));
    }
    infos.iter().map(entry).collect()
}

/// The tensors of a header by name.
struct HeaderTensors(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for HeaderTensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = HeaderTensors;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut access: A,
            ) -> Result<HeaderTensors, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = access.next_key::<String>()? {
                    if name == METADATA {
                        access.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    match tensors.entry(name) {
                        Entry::Occupied(taken) => {
                            return Err(A::Error::custom(format_args!(
                                "two tensors `{}`",
                                taken.key()
                            )));
                        }
                        Entry::Vacant(place) => place.insert(access.next_value()?),
                    };
                }
                Ok(HeaderTensors(tensors))
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Reads an index: the name of the file of each tensor.
pub(crate) fn parse_index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(deserialize_with = "json::unique")]
        weight_map: BTreeMap<String, String>,
    }

    let index: Index = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(index.weight_map)
}
