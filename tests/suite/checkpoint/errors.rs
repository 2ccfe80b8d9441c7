//! Errors of saves and loads: every rank returns the same, and nothing that was saved before is lost.

use std::collections::HashMap;
use std::path::Path;
use std::{array, fs};

use burn::module::{Module, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::quantization::Calibration;
use burn::tensor::{DType, Tensor};
use burn_dtensor::checkpoint::{self, Checkpoint, CheckpointError, CheckpointManager, LoadOptions, State};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::optim::{OptimError, sharded};
use burn_dtensor::placement::PartialOp;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::folder::Folder;
use super::random_net::grads;

fn pair() -> MeshTest {
    MeshTest::new([2], ["shard"])
}

/// Returns the error that every rank of two returns.
fn error_of<T>(body: impl Fn(&DeviceMesh) -> Result<T> + Sync) -> CheckpointError {
    let errors: [_; 2] = pair()
        .run(|mesh| match body(mesh).map(drop).expect_err("it is wrong") {
            Error::Checkpoint(error) => Ok(error),
            other => Err(other),
        })
        .try_into()
        .expect("one for each rank");
    assert_eq!(errors[0], errors[1]);
    let [error, _] = errors;
    error
}

fn matrix(mesh: &DeviceMesh, value: f32, placement: Placement) -> Result<DTensor<2>> {
    DTensor::distribute_replicated(Tensor::full([4, 4], value, mesh.device()), mesh, &[placement])
}

/// A state with a tensor `rows`, all of whose elements are `value`.
fn state(mesh: &DeviceMesh, value: f32) -> Result<State> {
    State::new(mesh).with_step(1).with_tensor("rows", matrix(mesh, value, Placement::Shard(0))?)
}

/// Loads `rows`, sharded by columns.
fn load(path: &Path, mesh: &DeviceMesh) -> Result<Vec<f32>> {
    let like = matrix(mesh, 0.0, Placement::Shard(1))?;
    let rows = Checkpoint::open(path, mesh)?.load_tensor("rows", &like)?;
    Ok(rows.full_tensor()?.into_data().try_to_vec()?)
}

fn save(path: &Path, value: f32) {
    pair().run(|mesh| checkpoint::save(path, &state(mesh, value)?));
}

fn assert_loads(path: &Path, value: f32) {
    assert_eq!(pair().run(|mesh| load(path, mesh)), [vec![value; 16], vec![value; 16]]);
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn a_complete_checkpoint_is_not_overwritten() {
    let folder = Folder::new("taken");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    let before = folder.files();
    let error = error_of(|mesh| checkpoint::save(&path, &state(mesh, 2.0)?));
    assert_eq!(error, CheckpointError::Exists { path: path.clone() });
    assert_eq!(folder.files(), before);
    assert_loads(&path, 1.0);

    let manager = |mesh: &DeviceMesh| CheckpointManager::new(folder.join("run"), mesh).with_keep(1);
    pair().run(|mesh| manager(mesh).save(&state(mesh, 1.0)?));
    let error = error_of(|mesh| manager(mesh).save(&state(mesh, 2.0)?));
    assert_eq!(error, CheckpointError::Exists { path: folder.join("run/step-1") });
    assert_loads(&folder.join("run/step-1"), 1.0);
}

#[test]
fn a_folder_with_other_files_is_left_as_it_is() {
    let folder = Folder::new("occupied");
    for name in ["notes.txt", "rank-notes/notes.txt", "rank-0.log", "probe-notes"] {
        let path = folder.join(format!("in-{}", name.len()));
        fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        fs::write(path.join("rank-00000.safetensors"), "debris").unwrap();
        fs::write(path.join(name), "notes").unwrap();
        let before = folder.files();
        let error = error_of(|mesh| checkpoint::save(&path, &state(mesh, 1.0)?));
        let name = name.split('/').next().unwrap().to_owned();
        assert_eq!(error, CheckpointError::Occupied { path: path.clone(), name });
        assert_eq!(folder.files(), before);
    }
}

/// Each rank's hash map has an order of its own.
#[test]
fn hash_maps_with_the_same_entries_are_one_value() {
    let folder = Folder::new("maps");
    pair().run(|mesh| {
        let map: HashMap<String, Vec<usize>> = (0..40).map(|at| (format!("key {at}"), vec![at; 3])).collect();
        checkpoint::save(folder.join("checkpoint"), &state(mesh, 1.0)?.with_value("map", &map)?)?;
        assert_eq!(Checkpoint::open(folder.join("checkpoint"), mesh)?.value::<HashMap<_, _>>("map")?, map);
        Ok(())
    });
}

#[test]
fn an_interrupted_save_is_replaced() {
    let folder = Folder::new("debris");
    for debris in ["rank-00007.safetensors", "rank-00001.safetensors", "probe-0123456789abcdef", "manifest.json.tmp"] {
        fs::write(folder.join(debris), "debris").unwrap();
    }
    assert_eq!(error_of(|mesh| load(&folder, mesh)), CheckpointError::Incomplete { path: folder.to_path_buf() });
    save(&folder, 1.0);
    let names: Vec<_> = folder.files().into_keys().collect();
    let expected = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"];
    assert_eq!(names, expected.map(|name| folder.join(name)));
    assert_loads(&folder, 1.0);
}

/// The error of a save of this state, which writes nothing.
fn refused(state: impl Fn(&DeviceMesh) -> Result<State> + Sync) -> CheckpointError {
    let folder = Folder::new(&format!("refused-{:?}", std::thread::current().id()));
    let error = error_of(|mesh| checkpoint::save(folder.join("run/checkpoint"), &state(mesh)?));
    assert!(is_empty(&folder), "{error}");
    error
}

#[test]
fn tensors_without_values_to_save_are_refused() {
    let partial = |mesh: &DeviceMesh| {
        let ones = Tensor::<2>::ones([4, 4], mesh.device());
        DTensor::from_local(ones, mesh, &[Placement::Partial(PartialOp::Sum)])
    };
    let expected = CheckpointError::Partial { key: "sums".into(), placements: "[P(sum)]".into() };
    assert_eq!(refused(|mesh| state(mesh, 1.0)?.with_tensor("sums", partial(mesh)?)), expected);
    // On one rank alone.
    let error = refused(|mesh| match mesh.rank() {
        0 => state(mesh, 1.0)?.with_tensor("sums", matrix(mesh, 1.0, Placement::Shard(0))?),
        _ => state(mesh, 1.0)?.with_tensor("sums", partial(mesh)?),
    });
    assert_eq!(error, expected);
    let folder = Folder::new("partial");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    let error = error_of(|mesh| Checkpoint::open(&path, mesh)?.load_tensor("rows", &partial(mesh)?));
    assert_eq!(error, CheckpointError::Partial { key: "rows".into(), placements: "[P(sum)]".into() });
}

#[test]
fn quantized_weights_are_refused_by_name() {
    let error = refused(|mesh| {
        let scheme = mesh.device().settings().quantization.scheme;
        let layer = LinearConfig::new(32, 32).with_bias(false).init(mesh.device());
        let layer = layer.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme));
        State::new(mesh).with_model("model", &layer)
    });
    let CheckpointError::DType { key, dtype } = &error else { panic!("{error}") };
    assert_eq!((key.as_str(), dtype.as_str()), ("model.weight", "qfloat"));
}

#[test]
fn ranks_that_hold_different_things_are_told_apart() {
    let disagree = |key: &str, found: &str, expected: &str| CheckpointError::Disagree {
        key: key.into(),
        rank: 1,
        found: found.into(),
        of: 0,
        expected: expected.into(),
    };
    let replicated = |mesh: &DeviceMesh, rows: usize, dtype: DType| {
        let zeros = Tensor::<2>::zeros([rows, 3], (mesh.device(), dtype));
        state(mesh, 1.0)?.with_tensor("table", DTensor::from_local(zeros, mesh, &[Placement::Replicate])?)
    };
    let error = refused(|mesh| replicated(mesh, 4 + mesh.rank(), DType::F32));
    assert_eq!(error, disagree("table", "shape [5, 3] in F32", "shape [4, 3] in F32"));
    let error = refused(|mesh| replicated(mesh, 4, [DType::F32, DType::F64][mesh.rank()]));
    assert_eq!(error, disagree("table", "shape [4, 3] in F64", "shape [4, 3] in F32"));

    let error = refused(|mesh| state(mesh, 1.0)?.with_value("epoch", &mesh.rank()));
    assert_eq!(error, disagree("epoch", "another value", "a value"));
    let some = |mesh: &DeviceMesh, key: &str| {
        let state = state(mesh, 1.0)?.with_value("epoch", &3)?;
        if mesh.rank() == 0 { state.with_value(key, &3) } else { Ok(state) }
    };
    assert_eq!(refused(|mesh| some(mesh, "batch")), disagree("batch", "no value", "a value"));
    assert_eq!(refused(|mesh| some(mesh, "rate")), disagree("rate", "no value", "a value"));
    let error = refused(|mesh| match mesh.rank() {
        0 => state(mesh, 1.0),
        _ => state(mesh, 1.0)?.with_rank_value("seed", &7),
    });
    assert_eq!(error, disagree("seed", "another value of its own", "no value of its own"));
    let error = refused(|mesh| Ok(state(mesh, 1.0)?.with_step(mesh.rank() as u64)));
    assert_eq!(error, disagree("step", "1", "0"));

    let error = refused(|mesh| if mesh.rank() == 0 { state(mesh, 1.0) } else { Ok(State::new(mesh).with_step(1)) });
    assert_eq!(error, CheckpointError::Cover { key: "rows".into(), shape: vec![4, 4], found: 8, expected: 16 });
    let error = refused(|mesh| {
        let placement = Placement::Shard(mesh.rank());
        State::new(mesh).with_tensor("rows", matrix(mesh, 1.0, Placement::Replicate)?.redistribute(&[placement])?)
    });
    assert_eq!(error, CheckpointError::Overlap { key: "rows".into(), shape: vec![4, 4] });
}

#[test]
fn keys_are_unique_and_a_managed_checkpoint_has_a_step() {
    let duplicate = |key: &str| CheckpointError::Duplicate { key: key.into() };
    let error = error_of(|mesh| state(mesh, 1.0)?.with_tensor("rows", matrix(mesh, 1.0, Placement::Replicate)?));
    assert_eq!(error, duplicate("rows"));
    assert_eq!(error_of(|mesh| State::new(mesh).with_value("a", &1)?.with_value("a", &2)), duplicate("a"));
    assert_eq!(error_of(|mesh| State::new(mesh).with_rank_value("a", &1)?.with_rank_value("a", &2)), duplicate("a"));

    let folder = Folder::new("no-step");
    let save = |mesh: &DeviceMesh, state| CheckpointManager::new(folder.join("run"), mesh).save(&state);
    assert_eq!(error_of(|mesh| save(mesh, State::new(mesh))), CheckpointError::NoStep);
    // On one rank alone: the others do not wait for it.
    let error =
        error_of(|mesh| save(mesh, if mesh.rank() == 0 { State::new(mesh) } else { State::new(mesh).with_step(3) }));
    let (found, expected) = ("3".into(), "no step".into());
    assert_eq!(error, CheckpointError::Disagree { key: "step".into(), rank: 1, found, of: 0, expected });
    assert!(is_empty(&folder));
}

#[derive(Module, Debug)]
struct Saved {
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Wanted {
    up: Linear,
    head: Linear,
}

#[test]
fn all_keys_that_do_not_fit_are_in_one_error() {
    let folder = Folder::new("keys");
    let path = folder.join("checkpoint");
    let linear = |mesh: &DeviceMesh, from, to| LinearConfig::new(from, to).init(&mesh.device().clone().autodiff());
    pair().run(|mesh| {
        let model = Saved { up: linear(mesh, 4, 3), down: linear(mesh, 3, 2) };
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let mut optimizer = sharded(AdamWConfig::new());
        let model = optimizer.step(0.1, model.clone(), grads(&model, 1))?;
        let state = State::new(mesh).with_model("model", &model)?;
        checkpoint::save(&path, &state.with_optimizer("optimizer", &optimizer.state(&model)?)?)
    });
    let wanted = |mesh: &DeviceMesh| {
        fully_shard(Wanted { up: linear(mesh, 4, 5), head: linear(mesh, 3, 2) }, mesh, FullyShard::new())
    };
    let error = error_of(|mesh| Checkpoint::open(&path, mesh)?.load_model("model", wanted(mesh)?, &LoadOptions::new()));
    let CheckpointError::Keys { missing, unexpected, mismatched } = &error else { panic!("{error}") };
    assert_eq!(missing[..], ["head.bias", "head.weight"]);
    assert_eq!(unexpected[..], ["down.bias", "down.weight"]);
    let [bias, weight] = &mismatched[..] else { panic!("{error}") };
    assert!(bias.contains("`up.bias` is [5] f32 in the model, but [3] f32"), "{bias}");
    assert!(weight.contains("`up.weight` is [4, 5] f32 in the model, but [4, 3] f32"), "{weight}");

    // A key that nothing was saved under.
    let error = error_of(|mesh| Checkpoint::open(&path, mesh)?.load_model("ema", wanted(mesh)?, &LoadOptions::new()));
    let CheckpointError::Keys { missing, unexpected, .. } = &error else { panic!("{error}") };
    assert_eq!((missing.len(), unexpected.len()), (4, 0), "{error}");

    let errors = pair().run(|mesh| {
        let checkpoint = Checkpoint::open(&path, mesh)?;
        match checkpoint.load_optimizer("optimizer", &wanted(mesh)?).map(drop).expect_err("it has no `down`") {
            Error::Optim(error) => Ok(error),
            other => Err(other),
        }
    });
    let is_named =
        |error: &OptimError| matches!(error, OptimError::NoParameter { name, .. } if name.starts_with("down.bias"));
    assert!(errors.iter().all(is_named), "{errors:?}");
}

#[test]
fn values_that_are_missing_or_of_another_type_are_named() {
    let folder = Folder::new("values");
    let path = folder.join("checkpoint");
    pair().run(|mesh| {
        let state = state(mesh, 1.0)?.with_value("epoch", &3)?.with_rank_value("seed", &mesh.rank())?;
        checkpoint::save(&path, &state)
    });
    assert_eq!(pair().run(|mesh| Checkpoint::open(&path, mesh)?.rank_values::<usize>("seed"))[1], [0, 1]);
    let no_value = |key: &str, present: &str| CheckpointError::NoValue { key: key.into(), present: present.into() };
    let open = |mesh: &DeviceMesh| Checkpoint::open(&path, mesh);
    assert_eq!(error_of(|mesh| open(mesh)?.value::<u64>("batch")), no_value("batch", "`epoch`"));
    assert_eq!(error_of(|mesh| open(mesh)?.rank_values::<u64>("epoch")), no_value("epoch", "`seed`"));
    let like = |mesh: &DeviceMesh| matrix(mesh, 0.0, Placement::Replicate);
    assert_eq!(error_of(|mesh| open(mesh)?.load_tensor("columns", &like(mesh)?)), no_value("columns", "`rows`"));
    let error = error_of(|mesh| open(mesh)?.value::<String>("epoch"));
    assert!(matches!(&error, CheckpointError::Value { key, .. } if key == "epoch"), "{error}");
    assert_eq!(error_of(|mesh| open(mesh)?.load_optimizer("optimizer", &none(mesh))), no_value("optimizer", "`epoch`"));
}

fn none(mesh: &DeviceMesh) -> Linear {
    LinearConfig::new(1, 1).init(mesh.device())
}

#[test]
fn damage_is_named_on_every_rank() {
    let folder = Folder::new("damaged");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    // Its 2 rows are the end of it. Only one rank reads it.
    let file = path.join("rank-00001.safetensors");
    let intact = fs::read(&file).unwrap();
    let len = intact.len() as u64;
    let rank_1 = |mesh: &DeviceMesh| {
        let like = matrix(mesh, 0.0, Placement::Shard(0))?;
        Checkpoint::open(&path, mesh)?.load_tensor("rows", &like)
    };
    for at in [len - 32, len - 1] {
        let mut damaged = intact.clone();
        damaged[at as usize] ^= 1;
        fs::write(&file, damaged).unwrap();
        let expected = CheckpointError::Corrupt { path: file.clone(), key: "rows".into(), first: len - 32, last: len };
        assert_eq!(error_of(rank_1), expected);
    }
    for found in [0, len - 1, len + 1] {
        let mut other = intact.clone();
        other.resize(found as usize, 0);
        fs::write(&file, other).unwrap();
        assert_eq!(error_of(rank_1), CheckpointError::Length { path: file.clone(), found, expected: len });
    }
    fs::remove_file(&file).unwrap();
    let error = error_of(rank_1);
    assert!(matches!(&error, CheckpointError::Io { rank: 1, path, .. } if *path == file), "{error}");
    fs::write(&file, intact).unwrap();
    assert_loads(&path, 1.0);
}

#[test]
fn a_damaged_manifest_is_named_on_every_rank() {
    let folder = Folder::new("manifest");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    let file = path.join("manifest.json");
    let intact = fs::read(&file).unwrap();
    let mut changed = intact.clone();
    changed[intact.len() / 2] ^= 1;
    for damaged in [changed, intact[..intact.len() - 1].to_vec(), Vec::new()] {
        fs::write(&file, damaged).unwrap();
        let error = error_of(|mesh| load(&path, mesh));
        assert!(matches!(&error, CheckpointError::Manifest { path, .. } if *path == file), "{error}");
        // Damaged, it is still not debris.
        let error = error_of(|mesh| checkpoint::save(&path, &state(mesh, 2.0)?));
        assert_eq!(error, CheckpointError::Exists { path: path.clone() });
    }
    fs::write(&file, intact).unwrap();
    assert_loads(&path, 1.0);
}

#[test]
fn a_file_in_the_place_of_a_folder_is_named() {
    let folder = Folder::new("file");
    let file = folder.join("file");
    fs::write(&file, "notes").unwrap();
    for path in [file.clone(), file.join("checkpoint")] {
        let error = error_of(|mesh| checkpoint::save(&path, &state(mesh, 1.0)?));
        assert!(matches!(&error, CheckpointError::Io { rank: 0, path, .. } if path.starts_with(&file)), "{error}");
        let error = error_of(|mesh| load(&path, mesh));
        assert!(matches!(&error, CheckpointError::Io { rank: 0, path, .. } if path.starts_with(&file)), "{error}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "notes");
    // A manager's `latest` that cannot be moved: the checkpoint is complete nevertheless.
    let run = folder.join("run");
    fs::create_dir_all(run.join("latest.tmp/notes")).unwrap();
    let error = error_of(|mesh| CheckpointManager::new(&run, mesh).save(&state(mesh, 1.0)?));
    assert!(matches!(&error, CheckpointError::Io { rank: 0, path, .. } if *path == run.join("latest")), "{error}");
    assert_loads(&run.join("step-1"), 1.0);
}

/// As on hosts that do not share a file system.
#[test]
fn two_folders_are_found_before_anything_is_written() {
    let folder = Folder::new("two");
    let own = |mesh: &DeviceMesh| folder.join(mesh.rank().to_string());
    let error = error_of(|mesh| checkpoint::save(own(mesh), &state(mesh, 1.0)?));
    assert_eq!(error, CheckpointError::NotShared { path: folder.join("1"), rank: 1, of: 0 });
    assert!(is_empty(&folder));

    let [zero, one] = array::from_fn(|rank| folder.join(rank.to_string()));
    save(&one, 1.0);
    let error = error_of(|mesh| checkpoint::save(own(mesh), &state(mesh, 2.0)?));
    assert_eq!(error, CheckpointError::NotShared { path: one.clone(), rank: 1, of: 0 });
    assert!(!zero.exists());
    assert_loads(&one, 1.0);

    assert_eq!(error_of(|mesh| Checkpoint::open(own(mesh), mesh)), CheckpointError::Incomplete { path: zero.clone() });
    save(&zero, 2.0);
    let error = error_of(|mesh| Checkpoint::open(own(mesh), mesh));
    assert_eq!(error, CheckpointError::NotShared { path: one, rank: 1, of: 0 });
}

#[test]
fn a_rank_that_panics_ends_the_saves_of_the_others() {
    let folder = Folder::new("panic");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    let next = folder.join("next");
    let test = MeshTest::new([3], ["shard"]);
    let error = test.run_failing(|mesh| {
        if mesh.rank() == 1 {
            panic!("no memory");
        }
        let error = checkpoint::save(&next, &state(mesh, 2.0)?).expect_err("rank 1 is missing");
        assert!(matches!(error, Error::Comm(_)), "{error}");
        Err::<(), _>(error)
    });
    assert!(error.to_string().starts_with("launch failed at rank 1"), "{error}");
    assert_loads(&path, 1.0);
    test.run(|mesh| checkpoint::save(&next, &state(mesh, 2.0)?));
    assert_loads(&next, 2.0);
}
