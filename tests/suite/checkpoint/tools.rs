//! Tools that need no model: `inspect`, `verify`, `consolidate` and `reshard`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::checkpoint::{
    self, Checkpoint, CheckpointError, ConsolidateOptions, ConsolidateReport, ReadOptions,
    ReshardOptions, State, StateDict, consolidate, inspect, verify,
};
use burn_dtensor::dtensor::Kind;
use burn_dtensor::placement::Placement::{Replicate, Shard};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;
use safetensors::SafeTensors;

use super::folder::Folder;
use crate::fsdp::support::fill;

/// Tensor of more than one block of checksums on each rank that writes it.
const LARGE: [usize; 2] = [701, 1000];

#[derive(Module, Debug)]
struct Net {
    up: Linear,
    down: Linear,
}

fn net(device: &Device) -> Net {
    Net {
        up: LinearConfig::new(7, 5).init(device),
        down: LinearConfig::new(5, 3).with_bias(false).init(device),
    }
}

/// Full values of the tensors that are no model's.
fn others() -> BTreeMap<&'static str, TensorData> {
    let ints = TensorData::new((0..30).map(|at: i64| at * 1_000_003).collect(), [2, 3, 5]);
    BTreeMap::from([
        ("model.large", fill(1, &LARGE)),
        ("model.half", fill(2, &[9, 2]).convert_dtype(DType::BF16)),
        ("model.ints", ints),
        (
            "model.mask",
            TensorData::new((0..11).map(|at| at % 3 == 0).collect::<Vec<_>>(), [11]),
        ),
        ("model.none", fill(3, &[0, 4])),
        ("model.wide", fill(4, &[1, 13]).convert_dtype(DType::F64)),
        ("optimizer.moment", fill(5, &[6])),
    ])
}

fn distributed<const D: usize, K: Kind>(
    data: &TensorData,
    mesh: &DeviceMesh,
    placements: [Placement; 2],
) -> DTensor<D, K> {
    let full = Tensor::from_data(data.clone(), (mesh.device(), data.dtype()));
    DTensor::distribute_replicated(full, mesh, &placements).unwrap()
}

/// Saves from 2 x 2 ranks, and returns the full model.
fn save(path: &Path) -> Net {
    let full = MeshTest::new([2, 2], ["a", "b"]).run(|mesh| {
        let model = mesh.world().run_seeded(3, || net(mesh.device()))?;
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let values = others();
        let mut state = State::new(mesh).with_step(20);
        for (path, tensor) in StateDict::of_model(&model, mesh)?.tensors() {
            state = state.with_tensor(&format!("model.{path}"), tensor.clone())?;
        }
        let state = state
            .with_tensor(
                "model.large",
                distributed::<2, burn::tensor::Float>(
                    &values["model.large"],
                    mesh,
                    [Replicate, Shard(0)],
                ),
            )?
            .with_tensor(
                "model.half",
                distributed::<2, burn::tensor::Float>(
                    &values["model.half"],
                    mesh,
                    [Shard(1), Shard(0)],
                ),
            )?
            .with_tensor(
                "model.ints",
                distributed::<3, Int>(&values["model.ints"], mesh, [Shard(2), Shard(1)]),
            )?
            .with_tensor(
                "model.mask",
                distributed::<1, Bool>(&values["model.mask"], mesh, [Shard(0), Shard(0)]),
            )?
            .with_tensor(
                "model.none",
                distributed::<2, burn::tensor::Float>(
                    &values["model.none"],
                    mesh,
                    [Shard(0), Replicate],
                ),
            )?
            .with_tensor(
                "model.wide",
                distributed::<2, burn::tensor::Float>(
                    &values["model.wide"],
                    mesh,
                    [Replicate, Shard(1)],
                ),
            )?
            .with_tensor(
                "optimizer.moment",
                distributed::<1, burn::tensor::Float>(
                    &values["optimizer.moment"],
                    mesh,
                    [Shard(0), Replicate],
                ),
            )?
            .with_value("epoch", &(3, "three", [0.5, f64::INFINITY]))?
            .with_rank_value("stream", &(10 * mesh.rank()))?;
        checkpoint::save(path, &state)?;
        full_model(&model)
    });
    full.into_iter().next().unwrap()
}

/// Returns the bytes of the elements in a file: burn's booleans may have other sizes in memory.
fn bytes(data: &TensorData) -> Vec<u8> {
    data.as_bytes().to_vec()
}

/// Reads what was written by the crate `safetensors`: dtype, shape and bytes by name.
fn read(
    out: &Path,
    report: &ConsolidateReport,
) -> BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for (name, len) in &report.files {
        let file = fs::read(out.join(name)).unwrap();
        assert_eq!(file.len() as u64, *len);
        let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        for (name, tensor) in SafeTensors::deserialize(&file).unwrap().iter() {
            let tensor = (
                tensor.dtype(),
                tensor.shape().to_vec(),
                tensor.data().to_vec(),
            );
            assert_eq!(
                found.insert(name.to_owned(), tensor),
                None,
                "{name} is in one file"
            );
        }
    }
    found
}

#[test]
fn consolidated_files_are_the_full_model() {
    use safetensors::Dtype::*;

    let folder = Folder::new("consolidate");
    let full = save(&folder.join("saved"));
    let mut expected = BTreeMap::new();
    let dtypes = [
        ("large", F32),
        ("half", BF16),
        ("ints", I64),
        ("mask", BOOL),
        ("none", F32),
        ("wide", F64),
    ];
    for (name, dtype) in dtypes {
        let data = &others()[format!("model.{name}").as_str()];
        expected.insert(name.to_owned(), (dtype, data.shape().to_vec(), bytes(data)));
    }
    for (name, weight) in [
        ("up.weight", &full.up.weight),
        ("down.weight", &full.down.weight),
    ] {
        let data = weight.val().into_data();
        expected.insert(name.to_owned(), (F32, data.shape().to_vec(), bytes(&data)));
    }
    let bias = full.up.bias.as_ref().unwrap().val().into_data();
    expected.insert("up.bias".into(), (F32, vec![5], bytes(&bias)));

    // One file.
    let options = ConsolidateOptions::new().with_key("model");
    let steps = RefCell::new(vec![]);
    let out = folder.join("one");
    let report = consolidate(folder.join("saved"), &out, &options, |done, total| {
        steps.borrow_mut().push((done, total))
    })
    .unwrap();
    assert_eq!(
        report.files.iter().map(|(name, _)| name).collect_vec(),
        ["model.safetensors"]
    );
    assert!(fs::read_dir(&out).unwrap().count() == 1, "and nothing else");
    assert!(read(&out, &report) == expected);
    let total = expected
        .values()
        .map(|(.., bytes)| bytes.len() as u64)
        .sum();
    assert_eq!((report.tensors, report.bytes), (expected.len(), total));
    let steps = steps.into_inner();
    assert!(
        steps.is_sorted() && steps.last() == Some(&(total, total)),
        "{steps:?}"
    );

    // What is there is not overwritten.
    let error = consolidate(folder.join("saved"), &out, &options, |_, _| ()).unwrap_err();
    assert_eq!(
        error,
        CheckpointError::Occupied {
            path: out,
            name: "model.safetensors".into()
        }
    );

    // Several, in parts of a few rows or columns, with other names and PyTorch's layout.
    let transposed = ["up.weight", "large"];
    for name in transposed {
        let (dtype, shape, _) = &expected[name];
        let (rows, columns) = (shape[0], shape[1]);
        let element =
            |row: usize, column: usize| &expected[name].2[4 * (row * columns + column)..][..4];
        let bytes = (0..columns)
            .flat_map(|c| (0..rows).flat_map(move |r| element(r, c).iter().copied()))
            .collect();
        let turned = (*dtype, vec![columns, rows], bytes);
        expected.insert(name.into(), turned);
    }
    let first = expected.remove("up.weight").unwrap();
    expected.insert("first".into(), first);
    expected.remove("ints");
    let options = options
        .with_max_file_bytes(50)
        .with_read_options(ReadOptions::new().with_memory(1 << 21))
        .with_transposed(move |name| transposed.contains(&name) || name == "up.bias")
        .with_renamed(|name| match name {
            "up.weight" => Some("first".into()),
            "ints" => None,
            other => Some(other.into()),
        });
    let out = folder.join("many");
    let report = consolidate(folder.join("saved"), &out, &options, |_, _| ()).unwrap();
    assert!(read(&out, &report) == expected);
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    let total: usize = expected.values().map(|(.., bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    for (name, (.., data)) in &expected {
        let file = index["weight_map"][name].as_str().unwrap();
        let bytes = fs::read(out.join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert!(
            tensors.tensor(name).is_ok(),
            "{name} is where the index says"
        );
        let all: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(all <= 50 || tensors.len() == 1, "{file} has {all} bytes");
        assert!(data.len() <= all);
    }
    assert_eq!(
        report.files.last().unwrap().0,
        format!("model-{0:05}-of-{0:05}.safetensors", report.files.len())
    );
    assert!(report.read.peak_memory <= 1 << 21, "{}", report.read);

    // Two with the same name, and none.
    let same = ConsolidateOptions::new().with_renamed(|_| Some("same".into()));
    let error =
        consolidate(folder.join("saved"), folder.join("same"), &same, |_, _| ()).unwrap_err();
    assert_eq!(error, CheckpointError::Duplicate { key: "same".into() });
    let none = ConsolidateOptions::new().with_key("mode");
    let error =
        consolidate(folder.join("saved"), folder.join("none"), &none, |_, _| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoValue { .. }), "{error}");

    // A damaged block: an error, and no file.
    let file = inspect(folder.join("saved")).unwrap().tensors["model.large"].chunks[0].clone();
    flip(&folder.join("saved").join(&file.file), file.begin + 5);
    let out = folder.join("damaged");
    let error = consolidate(
        folder.join("saved"),
        &out,
        &ConsolidateOptions::new(),
        |_, _| (),
    )
    .unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Corrupt { key, .. } if key == "model.large"),
        "{error}"
    );
    assert_eq!(fs::read_dir(out).unwrap().count(), 0);
}

fn flip(file: &Path, at: u64) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at as usize] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn every_flipped_bit_is_found() {
    const BLOCK: u64 = 1 << 20;

    let folder = Folder::new("verify");
    let saved = folder.join("saved");
    save(&saved);
    let verified = || verify(&saved, &ReadOptions::new().with_threads(2), |_, _| ()).unwrap();
    let summary = inspect(&saved).unwrap();
    let intact = verified();
    assert!(intact.is_intact());
    assert_eq!(
        intact.bytes,
        summary
            .tensors
            .values()
            .map(|tensor| tensor.bytes)
            .sum::<u64>()
    );

    // The first and the last byte of every block, one after the other.
    for (key, tensor) in &summary.tensors {
        for chunk in &tensor.chunks {
            let (file, end) = (saved.join(&chunk.file), chunk.begin + chunk.bytes);
            for first in (chunk.begin..end).step_by(BLOCK as usize) {
                let last = (first + BLOCK).min(end);
                for at in [first, last - 1] {
                    flip(&file, at);
                    let expected = CheckpointError::Corrupt {
                        path: file.clone(),
                        key: key.clone(),
                        first,
                        last,
                    };
                    assert_eq!(verified().damage, [expected], "{key} {at}");
                    flip(&file, at);
                }
            }
        }
    }
    let blocks: usize = summary.tensors["model.large"]
        .chunks
        .iter()
        .map(|c| c.bytes.div_ceil(BLOCK) as usize)
        .sum();
    assert!(
        blocks > summary.tensors["model.large"].chunks.len(),
        "some have several blocks"
    );

    // Several at once are listed in the order of the files; headers, lengths and missing files as
    // well.
    let (large, by_rank) = (
        &summary.tensors["model.large"].chunks[0],
        summary.files.iter().map(|file| saved.join(&file.name)),
    );
    let (first, others): (Vec<_>, Vec<_>) = by_rank.partition(|file| file.ends_with(&large.file));
    let (first, [second, third, fourth]) = (&first[0], &others[..]) else {
        panic!("four files: {others:?}")
    };
    flip(first, fs::metadata(first).unwrap().len() - 1);
    flip(first, large.begin);
    // Another name, which only the comparison with the manifest finds.
    let name = fs::read(second)
        .unwrap()
        .windows(7)
        .position(|bytes| bytes == b"\"model.")
        .unwrap();
    flip(second, name as u64 + 1);
    fs::write(third, &fs::read(third).unwrap()[1..]).unwrap();
    fs::remove_file(fourth).unwrap();
    let found = verified().damage.into_iter().map(|damage| match damage {
        CheckpointError::Corrupt { path, first, .. } => (path, format!("block at {first}")),
        CheckpointError::Safetensors { path, .. } => (path, "header".into()),
        CheckpointError::Length { path, .. } => (path, "length".into()),
        CheckpointError::Io { path, action, .. } => (path, action),
        other => panic!("{other}"),
    });
    let last = summary
        .tensors
        .values()
        .flat_map(|tensor| &tensor.chunks)
        .filter(|chunk| chunk.file == large.file);
    let last = last
        .map(|chunk| chunk.begin + (chunk.bytes - 1) / BLOCK * BLOCK)
        .max()
        .unwrap();
    let expected = [
        (first, format!("block at {}", large.begin)),
        (first, format!("block at {last}")),
        (second, "header".into()),
        (third, "length".into()),
        (fourth, "open".into()),
    ];
    let expected = expected
        .map(|(path, damage)| (path.clone(), damage))
        .into_iter()
        .sorted_by_key(|(path, _)| path.clone());
    assert_eq!(found.collect_vec(), expected.collect_vec());

    // Without a manifest, or with a damaged one, nothing can be verified.
    flip(&saved.join("manifest.json"), 300);
    let error = verify(&saved, &ReadOptions::new(), |_, _| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::Manifest { .. }), "{error}");
    fs::remove_file(saved.join("manifest.json")).unwrap();
    let error = verify(&saved, &ReadOptions::new(), |_, _| ()).unwrap_err();
    assert_eq!(error, CheckpointError::Incomplete { path: saved });
}

#[test]
fn a_summary_shows_who_wrote_what() {
    let folder = Folder::new("inspect");
    save(&folder.join("saved"));
    let summary = inspect(folder.join("saved")).unwrap();
    assert_eq!(
        (summary.step, summary.mesh.as_slice()),
        (Some(20), &[("a".into(), 2), ("b".into(), 2)][..])
    );
    assert_eq!(summary.values["epoch"], r#"[3, "three", [0.5, inf]]"#);
    assert_eq!(summary.rank_values["stream"], ["0", "10", "20", "30"]);
    // Each row of the mask's shards of 3 is on one rank; the matrix is divided in both dimensions.
    let expected = "\
[11] BOOL, 11 bytes, [S(0), S(0)]

       0..3   3..6   6..9   9..11
     +------+------+------+-------+
0..1 | 0    | 1    | 2    | 3     |
     +------+------+------+-------+
";
    assert_eq!(summary.tensors["model.mask"].to_string(), expected);
    let expected = "\
[9, 2] BF16, 36 bytes, [S(1), S(0)]

       0..1   1..2
     +------+------+
0..5 | 0    | 2    |
     +------+------+
5..9 | 1    | 3    |
     +------+------+
";
    assert_eq!(summary.tensors["model.half"].to_string(), expected);
    assert_eq!(
        summary.tensors["model.none"].to_string(),
        "[0, 4] F32, 0 bytes, [S(0), R]\n"
    );
    // The files have the bytes and nothing else but headers.
    for file in &summary.files {
        let on_disk = fs::metadata(folder.join("saved").join(&file.name))
            .unwrap()
            .len();
        let header = on_disk - summary.bytes_by_rank()[file.rank];
        assert_eq!((file.bytes, header % 4096), (on_disk, 0), "{}", file.name);
    }
}

#[test]
fn a_copy_by_other_ranks_has_the_same_values() {
    let folder = Folder::new("reshard");
    let full = save(&folder.join("saved"));
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let saved = Checkpoint::open(folder.join("saved"), mesh)?;
        // Random streams of four ranks cannot be those of three.
        let error = saved
            .reshard(folder.join("copy"), &ReshardOptions::new())
            .unwrap_err();
        let expected = CheckpointError::RankValues {
            key: "stream".into(),
            saved: 4,
            ranks: 3,
        };
        assert!(
            matches!(&error, Error::Checkpoint(error) if *error == expected),
            "{error}"
        );
        let options =
            ReshardOptions::new().with_keep(|key| !["stream", "optimizer.moment"].contains(&key));
        saved.reshard(folder.join("copy"), &options)?;
        let copy = Checkpoint::open(folder.join("copy"), mesh)?;
        assert_eq!(
            (
                copy.step(),
                copy.value::<(i32, String, [f64; 2])>("epoch")?.2
            ),
            (Some(20), [0.5, f64::INFINITY])
        );
        Ok(())
    });
    // Compared with the original through the file format alone.
    let [saved, copy] = ["saved", "copy"].map(|name| {
        let out = folder.join(format!("{name}-out"));
        let options = ConsolidateOptions::new().with_key("model");
        read(
            &out,
            &consolidate(folder.join(name), &out, &options, |_, _| ()).unwrap(),
        )
    });
    assert!(saved == copy);
    assert_eq!(
        copy["down.weight"].2,
        bytes(&full.down.weight.val().into_data())
    );
    let summary = inspect(folder.join("copy")).unwrap();
    assert_eq!(
        summary.tensors.len(),
        saved.len(),
        "what was left out is not there"
    );
    let written = summary.bytes_by_rank();
    assert!(
        written.len() == 3 && written.iter().max().unwrap() - written.iter().min().unwrap() < 8192,
        "{written:?}"
    );
    assert!(
        verify(folder.join("copy"), &ReadOptions::new(), |_, _| ())
            .unwrap()
            .is_intact()
    );
    // The same number of ranks keeps their values.
    MeshTest::new([4], ["shard"]).run(|mesh| {
        let options = ReshardOptions::new().with_keep(|key| key == "stream");
        Checkpoint::open(folder.join("saved"), mesh)?.reshard(folder.join("four"), &options)?;
        assert_eq!(
            Checkpoint::open(folder.join("four"), mesh)?.rank_values::<usize>("stream")?,
            [0, 10, 20, 30]
        );
        Ok(())
    });
}

/// Each tensor is divided along the dimension that is chosen for it.
#[test]
fn a_copy_is_sharded_in_the_chosen_dimensions() {
    let folder = Folder::new("reshard-dims");
    save(&folder.join("saved"));
    let options = ReshardOptions::new()
        .with_keep(|key| key.starts_with("model."))
        .with_shard_dim(|key, shape| match key {
            "model.ints" => 1,
            _ => shape.len() - 1,
        });
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let saved = Checkpoint::open(folder.join("saved"), mesh)?;
        let wrong = ReshardOptions::new()
            .with_keep(|key| key == "model.half")
            .with_shard_dim(|_, _| 2);
        let error = saved.reshard(folder.join("copy"), &wrong).unwrap_err();
        let expected = CheckpointError::NoDim {
            key: "model.half".into(),
            dim: 2,
            shape: vec![9, 2],
        };
        assert!(
            matches!(&error, Error::Checkpoint(error) if *error == expected),
            "{error}"
        );
        saved.reshard(folder.join("copy"), &options)
    });
    let regions = |key: &str| {
        let chunks = inspect(folder.join("copy")).unwrap().tensors[key]
            .chunks
            .clone();
        chunks
            .into_iter()
            .map(|chunk| (chunk.rank, chunk.offsets, chunk.shape))
            .sorted()
            .collect_vec()
    };
    assert_eq!(
        regions("model.large"),
        [
            (0, vec![0, 0], vec![701, 500]),
            (1, vec![0, 500], vec![701, 500])
        ]
    );
    assert_eq!(
        regions("model.ints"),
        [
            (0, vec![0, 0, 0], vec![2, 2, 5]),
            (1, vec![0, 2, 0], vec![2, 1, 5])
        ]
    );
    assert_eq!(
        regions("model.half"),
        [(0, vec![0, 0], vec![9, 1]), (1, vec![0, 1], vec![9, 1])]
    );
    let [saved, copy] = ["saved", "copy"].map(|name| {
        let out = folder.join(format!("{name}-out"));
        let options = ConsolidateOptions::new().with_key("model");
        read(
            &out,
            &consolidate(folder.join(name), &out, &options, |_, _| ()).unwrap(),
        )
    });
    assert!(saved == copy);
}

/// A matrix that is many times larger than the memory is read about once, whatever the parts in
/// which it is stored.
#[test]
fn large_transposed_matrices_are_read_once() {
    let shape = [3001, 1024];
    let folder = Folder::new("transposed");
    let full = fill(7, &shape);
    for (name, placement) in [("rows", Shard(0)), ("columns", Shard(1))] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let weight = DTensor::<2>::distribute_replicated(
                Tensor::from_data(full.clone(), mesh.device()),
                mesh,
                &[placement],
            )?;
            checkpoint::save(
                folder.join(name),
                &State::new(mesh).with_tensor("weight", weight)?,
            )
        });
        let out = folder.join(format!("{name}-out"));
        let options = ConsolidateOptions::new()
            .with_transposed(|_| true)
            .with_read_options(ReadOptions::new().with_memory(16 << 20));
        let report = consolidate(folder.join(name), &out, &options, |_, _| ()).unwrap();
        let transposed = Tensor::<2>::from_data(full.clone(), &Device::flex())
            .transpose()
            .into_data();
        assert!(
            read(&out, &report)["weight"]
                == (
                    safetensors::Dtype::F32,
                    vec![1024, 3001],
                    bytes(&transposed)
                ),
            "{name}"
        );
        assert_eq!(
            fs::read_dir(&out).unwrap().count(),
            1,
            "no temporary file is left"
        );
        let (needed, all) = (
            report.read.needed,
            report.read.read + report.read.block_rounding,
        );
        assert_eq!(needed, full.as_bytes().len() as u64);
        assert!(all as f64 <= 1.8 * needed as f64, "{name}: {}", report.read);
        assert!(
            report.read.peak_memory <= 16 << 20,
            "{name}: {}",
            report.read
        );
    }
}
