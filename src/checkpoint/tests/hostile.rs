//! Checkpoints that no save has written, with checksums that are right.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Bool, DType, Int, IntDType, Tensor};
use itertools::Itertools;
use safetensors::Dtype;

use crate::checkpoint::fs::recorder::Recorder;
use crate::checkpoint::fs::{FileSystem, MANIFEST};
use crate::checkpoint::inspect::inspect_in;
use crate::checkpoint::manifest::{
    ChunkEntry, FileEntry, Manifest, MeshEntry, TensorEntry, block_checksums,
};
use crate::checkpoint::region::Region;
use crate::checkpoint::{Checkpoint, CheckpointError, ReshardOptions};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

const FOLDER: &str = "/hostile";

/// Returns a manifest of one file with these bytes, which are the data of one tensor.
fn manifest(file: &str, key: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Manifest {
    let region = Region::full(shape);
    let chunk = ChunkEntry {
        region,
        file: 0,
        begin: 0,
        checksums: block_checksums(bytes),
    };
    let dtype = dtype.try_into().unwrap();
    let entry = TensorEntry {
        shape: shape.to_vec(),
        dtype,
        placements: String::new(),
        chunks: vec![chunk],
    };
    Manifest {
        step: None,
        required_features: Vec::new(),
        software: String::new(),
        mesh: MeshEntry {
            shape: vec![1],
            names: vec!["shard".into()],
        },
        files: vec![FileEntry::new(file, bytes.len() as u64)],
        tensors: BTreeMap::from([(key.into(), entry)]),
        values: BTreeMap::new(),
        rank_values: BTreeMap::new(),
    }
}

fn write(manifest: &Manifest, bytes: &[u8]) -> Recorder {
    let fs = Recorder::new();
    fs.create_dir(Path::new(FOLDER)).unwrap();
    for (name, bytes) in [
        (manifest.files[0].name.as_str(), bytes),
        (MANIFEST, &manifest.to_bytes()),
    ] {
        fs.create(&Path::new(FOLDER).join(name))
            .unwrap()
            .write_all(bytes)
            .unwrap();
    }
    fs
}

/// Returns the error that both of two ranks return.
fn error_of<T>(
    fs: &Recorder,
    load: impl Fn(&Checkpoint, &DeviceMesh) -> Result<T> + Sync,
) -> CheckpointError {
    let errors = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let checkpoint = Checkpoint::open_in(Arc::new(fs.clone()), Path::new(FOLDER), &mesh)?;
        match load(&checkpoint, &mesh)
            .map(drop)
            .expect_err("it cannot be loaded")
        {
            crate::Error::Checkpoint(error) => Ok(error),
            other => Err(other),
        }
    });
    let errors = errors
        .unwrap()
        .into_iter()
        .map(|(_, error)| error)
        .collect_vec();
    assert_eq!(errors[0], errors[1]);
    errors[0].clone()
}

/// No folder is given for the copy: nothing may come so far.
fn reshard(checkpoint: &Checkpoint) -> Result<()> {
    checkpoint
        .reshard(Path::new("/dev/null/copy"), &ReshardOptions::new())
        .map(drop)
}

#[test]
fn tensors_that_burn_does_not_have_are_named() {
    let key = "a";
    for (dtype, shape, expected) in [
        (
            Dtype::U8,
            &[1; 9][..],
            CheckpointError::Dims {
                key: key.into(),
                dims: 9,
            },
        ),
        (
            Dtype::U8,
            &[],
            CheckpointError::Dims {
                key: key.into(),
                dims: 0,
            },
        ),
        (
            Dtype::F8_E4M3,
            &[1],
            CheckpointError::StoredDType {
                key: key.into(),
                dtype: "F8_E4M3".into(),
            },
        ),
        (
            Dtype::BOOL,
            &[1],
            CheckpointError::NotBool {
                key: key.into(),
                byte: 2,
            },
        ),
    ] {
        let fs = write(
            &manifest("rank-00000.safetensors", key, dtype, shape, &[2]),
            &[2],
        );
        assert_eq!(error_of(&fs, |checkpoint, _| reshard(checkpoint)), expected);
        assert_eq!(
            inspect_in(&fs, Path::new(FOLDER)).unwrap().tensors[key].shape,
            shape
        );
    }
    let fs = write(
        &manifest(
            "rank-00000.safetensors",
            "__metadata__",
            Dtype::U8,
            &[1],
            &[2],
        ),
        &[2],
    );
    let error = error_of(&fs, |checkpoint, _| reshard(checkpoint));
    assert!(
        matches!(&error, CheckpointError::Name { key, .. } if key == "__metadata__"),
        "{error}"
    );
}

/// On one rank alone: the other does not wait for it.
#[test]
fn bytes_that_are_no_booleans_are_an_error_of_every_rank() {
    let bytes = [0, 1, 1, 0, 255, 1];
    let fs = write(
        &manifest("rank-00000.safetensors", "mask", Dtype::BOOL, &[6], &bytes),
        &bytes,
    );
    let error = error_of(&fs, |checkpoint, mesh| {
        let like = Tensor::<1, Bool>::from_data([false; 6], mesh.device());
        checkpoint.load_tensor(
            "mask",
            &DTensor::distribute_replicated(like, mesh, &[Placement::Shard(0)])?,
        )
    });
    assert_eq!(
        error,
        CheckpointError::NotBool {
            key: "mask".into(),
            byte: 255
        }
    );
}

/// One rank's part has no such integer.
#[test]
fn integers_that_a_models_dtype_cannot_represent_are_an_error_of_every_rank() {
    let bytes: Vec<u8> = [1_i64, -2, 3, 1 << 40]
        .into_iter()
        .flat_map(i64::to_le_bytes)
        .collect();
    let fs = write(
        &manifest("rank-00000.safetensors", "ids", Dtype::I64, &[4], &bytes),
        &bytes,
    );
    let load = |dtype: IntDType| {
        error_of(&fs, |checkpoint, mesh| {
            let like = Tensor::<1, Int>::zeros([4], (mesh.device(), DType::from(dtype)));
            checkpoint.load_tensor(
                "ids",
                &DTensor::distribute_replicated(like, mesh, &[Placement::Shard(0)])?,
            )
        })
    };
    let error = |value: i64, dtype: &str| CheckpointError::IntegerRange {
        key: "ids".into(),
        value: value.to_string(),
        dtype: dtype.into(),
    };
    assert_eq!(load(IntDType::I32), error(1 << 40, "i32"));
    assert_eq!(load(IntDType::U64), error(-2, "u64"));
}

#[test]
fn a_mesh_and_ranks_of_any_size_are_shown_without_memory_for_them() {
    let of_rank = |rank: usize| Manifest {
        mesh: MeshEntry {
            shape: vec![usize::MAX, 1],
            names: vec!["a".into(), "b".into()],
        },
        ..manifest(
            &format!("rank-{rank}.safetensors"),
            "a",
            Dtype::U8,
            &[2],
            &[1, 2],
        )
    };
    for rank in [usize::MAX, 1 << 40] {
        let fs = write(&of_rank(rank), &[1, 2]);
        let summary = inspect_in(&fs, Path::new(FOLDER)).unwrap();
        assert_eq!(
            (&summary.mesh[0], summary.files[0].rank),
            (&("a".into(), usize::MAX), rank)
        );
        assert_eq!(summary.bytes_by_rank(), [0; 0]);
        assert!(summary.tensors["a"].to_string().contains(&rank.to_string()));
    }
    // A value for each rank there cannot be.
    let values = BTreeMap::from([("seed".into(), vec!["00".into()])]);
    let fs = write(
        &Manifest {
            rank_values: values,
            ..of_rank(0)
        },
        &[1, 2],
    );
    let error = inspect_in(&fs, Path::new(FOLDER)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`seed` has 1 values, but the mesh has 18446744073709551615 ranks"),
        "{error}"
    );
}
