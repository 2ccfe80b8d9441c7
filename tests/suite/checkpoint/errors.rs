//! Errors of saves and loads: every rank returns the same, and nothing that was saved before is
//! lost.

use std::collections::HashMap;
use std::path::Path;
use std::{array, fs};

use burn::module::{Module, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::quantization::Calibration;
use burn::tensor::{DType, Tensor};
use burn_dtensor::checkpoint::{
    self, Checkpoint, CheckpointError, CheckpointManager, LoadKind, LoadOptions, State, StateDict,
};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::optim::{parameter_specs, sharded};
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
        .run(
            |mesh| match body(mesh).map(drop).expect_err("it is wrong") {
                Error::Checkpoint(error) => Ok(error),
                other => Err(other),
            },
        )
        .try_into()
        .expect("one for each rank");
    assert_eq!(errors[0], errors[1]);
    let [error, _] = errors;
    error
}

fn matrix(mesh: &DeviceMesh, value: f32, placement: Placement) -> Result<DTensor<2>> {
    DTensor::distribute_replicated(
        Tensor::full([4, 4], value, mesh.device()),
        mesh,
        &[placement],
    )
}

/// A state with a tensor `rows`, all of whose elements are `value`.
fn state(mesh: &DeviceMesh, value: f32) -> Result<State> {
    State::new(mesh)
        .with_step(1)
        .with_tensor("rows", matrix(mesh, value, Placement::Shard(0))?)
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
    assert_eq!(
        pair().run(|mesh| load(path, mesh)),
        [vec![value; 16], vec![value; 16]]
    );
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
    assert_eq!(
        error,
        CheckpointError::Exists {
            path: folder.join("run/step-1")
        }
    );
    assert_loads(&folder.join("run/step-1"), 1.0);
}

#[test]
fn a_folder_with_other_files_is_left_as_it_is() {
    let folder = Folder::new("occupied");
    for name in [
        "notes.txt",
        "rank-notes/notes.txt",
        "rank-0.log",
        "probe-notes",
    ] {
        let path = folder.join(format!("in-{}", name.len()));
        fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        fs::write(path.join("rank-00000.safetensors"), "debris").unwrap();
        fs::write(path.join(name), "notes").unwrap();
        let before = folder.files();
        let error = error_of(|mesh| checkpoint::save(&path, &state(mesh, 1.0)?));
        let name = name.split('/').next().unwrap().to_owned();
        assert_eq!(
            error,
            CheckpointError::Occupied {
                path: path.clone(),
                name
            }
        );
        assert_eq!(folder.files(), before);
    }
}

/// Each rank's hash map has an order of its own.
#[test]
fn hash_maps_with_the_same_entries_are_one_value() {
    let folder = Folder::new("maps");
    pair().run(|mesh| {
        let map: HashMap<String, Vec<usize>> = (0..40)
            .map(|at| (format!("key {at}"), vec![at; 3]))
            .collect();
        checkpoint::save(
            folder.join("checkpoint"),
            &state(mesh, 1.0)?.with_value("map", &map)?,
        )?;
        assert_eq!(
            Checkpoint::open(folder.join("checkpoint"), mesh)?.value::<HashMap<_, _>>("map")?,
            map
        );
        Ok(())
    });
}

#[test]
fn hash_maps_inside_values_with_the_same_entries_are_one_value() {
    let folder = Folder::new("nested-maps");
    let path = folder.join("checkpoint");
    pair().run(|mesh| {
        let inner = |at: usize| (0..40).map(|key| (format!("key {key}"), at)).collect();
        let maps: HashMap<usize, HashMap<String, usize>> =
            (0..3).map(|at| (at, inner(at))).collect();
        checkpoint::save(&path, &state(mesh, 1.0)?.with_value("maps", &maps)?)?;
        let saved: HashMap<_, _> = Checkpoint::open(&path, mesh)?.value("maps")?;
        assert_eq!(saved, maps);
        Ok(())
    });
}

#[test]
fn an_interrupted_save_is_replaced() {
    let folder = Folder::new("debris");
    for debris in [
        "rank-00007.safetensors",
        "rank-00001.safetensors",
        "probe-0123456789abcdef",
        "manifest.json.tmp",
    ] {
        fs::write(folder.join(debris), "debris").unwrap();
    }
    assert_eq!(
        error_of(|mesh| load(&folder, mesh)),
        CheckpointError::Incomplete {
            path: folder.to_path_buf()
        }
    );
    save(&folder, 1.0);
    let names: Vec<_> = folder.files().into_keys().collect();
    let expected = [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ];
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
    let expected = CheckpointError::Partial {
        key: "sums".into(),
        placements: "[P(sum)]".into(),
    };
    assert_eq!(
        refused(|mesh| state(mesh, 1.0)?.with_tensor("sums", partial(mesh)?)),
        expected
    );
    // On one rank alone.
    let error = refused(|mesh| match mesh.rank() {
        0 => state(mesh, 1.0)?.with_tensor("sums", matrix(mesh, 1.0, Placement::Shard(0))?),
        _ => state(mesh, 1.0)?.with_tensor("sums", partial(mesh)?),
    });
    assert_eq!(error, expected);
    let folder = Folder::new("partial");
    let path = folder.join("checkpoint");
    save(&path, 1.0);
    let error =
        error_of(|mesh| Checkpoint::open(&path, mesh)?.load_tensor("rows", &partial(mesh)?));
    assert_eq!(
        error,
        CheckpointError::Partial {
            key: "rows".into(),
            placements: "[P(sum)]".into()
        }
    );
}

#[test]
fn quantized_weights_are_refused_by_name() {
    let error = refused(|mesh| {
        let scheme = mesh.device().settings().quantization.scheme;
        let layer = LinearConfig::new(32, 32)
            .with_bias(false)
            .init(mesh.device());
        let layer = layer.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme));
        State::new(mesh).with_model("model", &layer)
    });
    let CheckpointError::DType { key, dtype } = &error else {
        panic!("{error}")
    };
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
        state(mesh, 1.0)?.with_tensor(
            "table",
            DTensor::from_local(zeros, mesh, &[Placement::Replicate])?,
        )
    };
    let error = refused(|mesh| replicated(mesh, 4 + mesh.rank(), DType::F32));
    assert_eq!(
        error,
        disagree("table", "shape [5, 3] in F32", "shape [4, 3] in F32")
    );
    let error = refused(|mesh| replicated(mesh, 4, [DType::F32, DType::F64][mesh.rank()]));
    assert_eq!(
        error,
        disagree("table", "shape [4, 3] in F64", "shape [4, 3] in F32")
    );

    let error = refused(|mesh| state(mesh, 1.0)?.with_value("epoch", &mesh.rank()));
    assert_eq!(error, disagree("epoch", "another value", "a value"));
    let some = |mesh: &DeviceMesh, key: &str| {
        let state = state(mesh, 1.0)?.with_value("epoch", &3)?;
        if mesh.rank() == 0 {
            state.with_value(key, &3)
        } else {
            Ok(state)
        }
    };
    assert_eq!(
        refused(|mesh| some(mesh, "batch")),
        disagree("batch", "no value", "a value")
    );
    assert_eq!(
        refused(|mesh| some(mesh, "rate")),
        disagree("rate", "no value", "a value")
    );
    let error = refused(|mesh| match mesh.rank() {
        0 => state(mesh, 1.0),
        _ => state(mesh, 1.0)?.with_rank_value("seed", &7),
    });
    assert_eq!(
        error,
        disagree("seed", "another value of its own", "no value of its own")
    );
    let error = refused(|mesh| Ok(state(mesh, 1.0)?.with_step(mesh.rank() as u64)));
    assert_eq!(error, disagree("step", "1", "0"));

    let error = refused(|mesh| {
        if mesh.rank() == 0 {
            state(mesh, 1.0)
        } else {
            Ok(State::new(mesh).with_step(1))
        }
    });
    assert_eq!(
        error,
        CheckpointError::Cover {
            key: "rows".into(),
            shape: vec![4, 4],
            found: 8,
            expected: 16
        }
    );
    let error = refused(|mesh| {
        let placement = Placement::Shard(mesh.rank());
        State::new(mesh).with_tensor(
            "rows",
            matrix(mesh, 1.0, Placement::Replicate)?.redistribute(&[placement])?,
        )
    });
    assert_eq!(
        error,
        CheckpointError::Overlap {
            key: "rows".into(),
            shape: vec![4, 4]
        }
    );
}

#[test]
fn keys_are_unique_and_a_managed_checkpoint_has_a_step() {
    let duplicate = |key: &str| CheckpointError::Duplicate { key: key.into() };
    let error = error_of(|mesh| {
        state(mesh, 1.0)?.with_tensor("rows", matrix(mesh, 1.0, Placement::Replicate)?)
    });
    assert_eq!(error, duplicate("rows"));
    assert_eq!(
        error_of(|mesh| State::new(mesh).with_value("a", &1)?.with_value("a", &2)),
        duplicate("a")
    );
    assert_eq!(
        error_of(|mesh| State::new(mesh)
            .with_rank_value("a", &1)?
            .with_rank_value("a", &2)),
        duplicate("a")
    );

    let folder = Folder::new("no-step");
    let save =
        |mesh: &DeviceMesh, state| CheckpointManager::new(folder.join("run"), mesh).save(&state);
    assert_eq!(
        error_of(|mesh| save(mesh, State::new(mesh))),
        CheckpointError::NoStep
    );
    // On one rank alone: the others do not wait for it.
    let error = error_of(|mesh| {
        save(
            mesh,
            if mesh.rank() == 0 {
                State::new(mesh)
            } else {
                State::new(mesh).with_step(3)
            },
        )
    });
    let (found, expected) = ("3".into(), "no step".into());
    assert_eq!(
        error,
        CheckpointError::Disagree {
            key: "step".into(),
            rank: 1,
            found,
            of: 0,
            expected
        }
    );
    assert!(is_empty(&folder));
}

/// A load of one would find tensors of the other.
#[test]
fn keys_below_each_other_are_refused() {
    let rows = |mesh: &DeviceMesh| matrix(mesh, 1.0, Placement::Replicate);
    let dict = |mesh: &DeviceMesh| {
        let data = rows(mesh)?.full_tensor()?.into_data();
        StateDict::from_full([("weight".to_owned(), data)], mesh)
    };
    let nested = |key: &str, other: &str| CheckpointError::Nested {
        key: key.into(),
        other: other.into(),
    };
    for (first, second) in [
        ("m", "m.ema"),
        ("m.ema", "m"),
        ("m", "m"),
        ("a.b", "a.b.c.d"),
    ] {
        let state = |mesh: &DeviceMesh| State::new(mesh).with_state_dict(first, &dict(mesh)?);
        assert_eq!(
            error_of(|mesh| state(mesh)?.with_state_dict(second, &dict(mesh)?)),
            nested(second, first)
        );
        assert_eq!(
            error_of(|mesh| state(mesh)?.with_model(second, &none(mesh))),
            nested(second, first)
        );
    }
    let error = error_of(|mesh| {
        State::new(mesh)
            .with_state_dict("m", &dict(mesh)?)?
            .with_tensor("m.x", rows(mesh)?)
    });
    assert_eq!(error, nested("m.x", "m"));
    let error = error_of(|mesh| {
        State::new(mesh)
            .with_tensor("m.x", rows(mesh)?)?
            .with_state_dict("m", &dict(mesh)?)
    });
    assert_eq!(error, nested("m", "m.x"));

    // Keys that only begin with the same letters are loaded one by one.
    let folder = Folder::new("groups");
    pair().run(|mesh| {
        let state = State::new(mesh)
            .with_model("m", &none(mesh))?
            .with_model("m_ema", &none(mesh))?;
        checkpoint::save(
            folder.join("checkpoint"),
            &state.with_tensor("m", rows(mesh)?)?,
        )?;
        for key in ["m", "m_ema"] {
            let checkpoint = Checkpoint::open(folder.join("checkpoint"), mesh)?;
            let (_, report) = checkpoint.load_model(key, none(mesh), &LoadOptions::new())?;
            assert_eq!(report.loaded, ["bias", "weight"]);
        }
        Ok(())
    });
}

/// Names in the files would be taken twice, or be no tensor's.
#[test]
fn keys_that_cannot_be_names_are_refused() {
    let rows = |mesh: &DeviceMesh| matrix(mesh, 1.0, Placement::Shard(0));
    for key in ["__metadata__", "rows[0:2,0:4]", "rows[no region]"] {
        let error = refused(|mesh| state(mesh, 1.0)?.with_tensor(key, rows(mesh)?));
        assert!(
            matches!(&error, CheckpointError::Name { key: found, .. } if found == key),
            "{error}"
        );
    }
    let folder = Folder::new("names");
    pair().run(|mesh| {
        let keys = ["lines[0:2,0:4]", "rows]", "model.__metadata__", "a b"];
        let state = keys.iter().try_fold(state(mesh, 1.0)?, |state, key| {
            state.with_tensor(key, rows(mesh)?)
        })?;
        checkpoint::save(folder.join("checkpoint"), &state)?;
        let checkpoint = Checkpoint::open(folder.join("checkpoint"), mesh)?;
        for key in keys {
            let loaded = checkpoint.load_tensor(key, &matrix(mesh, 0.0, Placement::Shard(1))?)?;
            assert_eq!(
                loaded.full_tensor()?.into_data(),
                rows(mesh)?.full_tensor()?.into_data(),
                "{key}"
            );
        }
        Ok(())
    });
}

/// Errors travel between ranks with the path.
#[cfg(target_os = "linux")]
#[test]
fn paths_that_are_not_text_are_saved_loaded_and_named() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = Folder::new("bytes");
    let run = folder.join(OsStr::from_bytes(b"run-\xff"));
    let path = run.join("step-1");
    pair().run(|mesh| CheckpointManager::new(&run, mesh).save(&state(mesh, 1.0)?));
    assert_loads(&path, 1.0);
    assert_eq!(
        error_of(|mesh| checkpoint::save(&path, &state(mesh, 2.0)?)),
        CheckpointError::Exists { path: path.clone() }
    );
    let json = serde_json::to_value(checkpoint::inspect(&path).unwrap()).unwrap();
    assert_eq!(json["path"], path.display().to_string());
    // Another file with such a name in the run's folder does not matter.
    fs::write(run.join(OsStr::from_bytes(b"\xfe")), "notes").unwrap();
    assert_eq!(
        pair().run(|mesh| CheckpointManager::new(&run, mesh).steps()),
        [[1], [1]]
    );
    let own = |mesh: &DeviceMesh| {
        if mesh.rank() == 0 {
            path.clone()
        } else {
            run.join("step-2")
        }
    };
    pair().run(|mesh| checkpoint::save(run.join("step-2"), &state(mesh, 3.0)?));
    let error = error_of(|mesh| Checkpoint::open(own(mesh), mesh));
    assert_eq!(
        error,
        CheckpointError::NotShared {
            path: run.join("step-2"),
            rank: 1,
            of: 0
        }
    );
}

/// A state dict would lose its numbers of steps.
#[test]
fn the_state_of_an_optimizer_is_not_added_as_a_state_dict() {
    let error = error_of(|mesh| {
        let model = LinearConfig::new(4, 2).init(&mesh.device().clone().autodiff());
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let mut optimizer = sharded(AdamWConfig::new());
        let model = optimizer.step(0.1, model.clone(), grads(&model, 1))?;
        State::new(mesh).with_state_dict(
            "optimizer",
            &StateDict::of_optimizer(&optimizer.state(&model)?),
        )
    });
    assert!(
        matches!(&error, CheckpointError::Numbers { key, .. } if key == "optimizer"),
        "{error}"
    );
    assert!(
        error.to_string().contains("`State::with_optimizer`"),
        "{error}"
    );
}

/// Without a launch, it is the checkpoint that the manager opens.
#[test]
fn the_latest_checkpoint_of_a_run_is_found() {
    let folder = Folder::new("latest");
    let run = folder.join("run");
    assert_eq!(checkpoint::latest(&run), Ok(None));
    let manager = |mesh: &DeviceMesh| CheckpointManager::new(&run, mesh);
    let found = || {
        let found = checkpoint::latest(&run).unwrap();
        let opened = pair().run(|mesh| {
            Ok(manager(mesh)
                .latest()?
                .map(|checkpoint| checkpoint.path().to_owned()))
        });
        assert_eq!(opened, [found.clone(), found.clone()]);
        found
    };
    let step = |step: u64| Some(run.join(format!("step-{step}")));
    for last in [9, 10] {
        pair().run(|mesh| manager(mesh).save(&state(mesh, 1.0)?.with_step(last)));
        assert_eq!(found(), step(last));
    }
    #[cfg(unix)]
    {
        let moved = folder.join("moved");
        fs::rename(run.join("step-10"), &moved).unwrap();
        std::os::unix::fs::symlink(&moved, run.join("step-10")).unwrap();
        assert_eq!(found(), step(10), "a link to where it was moved");
        fs::remove_file(run.join("step-10")).unwrap();
        fs::rename(&moved, run.join("step-10")).unwrap();
    }
    fs::write(run.join("latest"), "step-10\n").unwrap();
    assert_eq!(found(), step(10), "the file of a run of an earlier version");
    for named in ["step-9", "step-11", "../run/step-10", ""] {
        fs::write(run.join("latest"), named).unwrap();
        let error = checkpoint::latest(&run).unwrap_err();
        assert_eq!(error_of(|mesh| manager(mesh).latest()), error, "{named}");
        let CheckpointError::LatestFile { newest, path, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((newest, path), (Some(10), run.join("latest")));
    }
    fs::remove_file(run.join("latest")).unwrap();
    fs::remove_file(run.join("step-10/manifest.json")).unwrap();
    assert_eq!(found(), step(9));
    fs::remove_file(run.join("step-9/manifest.json")).unwrap();
    assert_eq!(found(), None);
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
    let linear = |mesh: &DeviceMesh, from, to| {
        LinearConfig::new(from, to).init(&mesh.device().clone().autodiff())
    };
    pair().run(|mesh| {
        let model = Saved {
            up: linear(mesh, 4, 3),
            down: linear(mesh, 3, 2),
        };
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let mut optimizer = sharded(AdamWConfig::new());
        let model = optimizer.step(0.1, model.clone(), grads(&model, 1))?;
        let state = State::new(mesh).with_model("model", &model)?;
        checkpoint::save(
            &path,
            &state.with_optimizer("optimizer", &optimizer.state(&model)?)?,
        )
    });
    let wanted = |mesh: &DeviceMesh| {
        fully_shard(
            Wanted {
                up: linear(mesh, 4, 5),
                head: linear(mesh, 3, 2),
            },
            mesh,
            FullyShard::new(),
        )
    };
    let error = error_of(|mesh| {
        Checkpoint::open(&path, mesh)?.load_model("model", wanted(mesh)?, &LoadOptions::new())
    });
    let CheckpointError::Keys {
        missing,
        unexpected,
        mismatched,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(missing[..], ["head.bias", "head.weight"]);
    assert_eq!(unexpected[..], ["down.bias", "down.weight"]);
    let [bias, weight] = &mismatched[..] else {
        panic!("{error}")
    };
    assert!(
        bias.contains("`up.bias` is [5] f32, but `up.bias` was saved as [3] f32"),
        "{bias}"
    );
    assert!(
        weight.contains("`up.weight` is [4, 5] f32, but `up.weight` was saved as [4, 3] f32"),
        "{weight}"
    );

    // A key that nothing was saved under.
    let error = error_of(|mesh| {
        Checkpoint::open(&path, mesh)?.load_model("ema", wanted(mesh)?, &LoadOptions::new())
    });
    let CheckpointError::NoTensors { key, present, .. } = &error else {
        panic!("{error}")
    };
    let found = (key.as_str(), present.as_str());
    assert_eq!(found, ("ema", "`model`, `optimizer`"), "{error}");

    // The same of the optimizer's state, by parameter.
    let error = error_of(|mesh| {
        Checkpoint::open(&path, mesh)?.load_optimizer(
            "optimizer",
            &wanted(mesh)?,
            &LoadOptions::new(),
        )
    });
    let CheckpointError::Keys {
        of: LoadKind::Optimizer,
        missing,
        unexpected,
        mismatched,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (&missing[..], mismatched.len()),
        (&["head.bias".into(), "head.weight".into()][..], 2),
        "{error}"
    );
    assert!(
        mismatched[0].contains("`up.bias` is [5] f32, but `up.bias` was saved as [3] f32"),
        "{error}"
    );
    assert!(
        unexpected.iter().all(|path| path.starts_with("down.")) && !unexpected.is_empty(),
        "{error}"
    );
}

/// `head` has the shapes of `down`. Some parameters have had no gradient, and have no state.
#[test]
fn an_optimizers_state_loads_renamed_and_in_part() {
    let folder = Folder::new("optimizer");
    let path = folder.join("checkpoint");
    let linear = |mesh: &DeviceMesh, from, to| {
        LinearConfig::new(from, to).init(&mesh.device().clone().autodiff())
    };
    let saved = pair().run(|mesh| {
        let model = Saved {
            up: linear(mesh, 4, 3),
            down: linear(mesh, 3, 2),
        };
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let mut optimizer = sharded(AdamWConfig::new());
        let model = optimizer.step(0.1, model.clone(), grads(&model, 1))?;
        let state = optimizer.state(&model)?;
        checkpoint::save(
            &path,
            &State::new(mesh).with_optimizer("optimizer", &state)?,
        )?;
        Ok((
            state.paths().map(str::to_owned).collect::<Vec<_>>(),
            state.full()?,
        ))
    });
    let (paths, full) = &saved[0];
    assert!(
        paths.len() < 4 && paths.iter().any(|path| path.starts_with("down.")),
        "{paths:?}"
    );
    pair().run(|mesh| {
        let model = Wanted {
            up: linear(mesh, 4, 3),
            head: linear(mesh, 3, 2),
        };
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let load = |options: LoadOptions| {
            let (state, report) =
                Checkpoint::open(&path, mesh)?.load_optimizer("optimizer", &model, &options)?;
            Ok::<_, Error>((state.full()?, report))
        };
        let renamed = |path: &str| Some(path.replace("head.", "down."));
        let (loaded, report) = load(LoadOptions::new().with_renamed(renamed))?;
        let here = |path: &String| path.replace("down.", "head.");
        assert_eq!(
            loaded.tensors,
            full.tensors
                .iter()
                .map(|(name, data)| (here(name), data.clone()))
                .collect()
        );
        assert_eq!(
            loaded.scalars,
            full.scalars
                .iter()
                .map(|(name, scalar)| (here(name), *scalar))
                .collect()
        );
        let mut expected: Vec<_> = paths.iter().map(here).collect();
        expected.sort();
        assert_eq!(
            (&report.loaded, report.missing.len(), report.skipped.len()),
            (&expected, 0, 0)
        );

        let (up, down): (Vec<String>, Vec<String>) = paths
            .iter()
            .cloned()
            .partition(|path| path.starts_with("up."));
        let (loaded, report) = load(LoadOptions::new().with_partial(true))?;
        assert_eq!(loaded.tensors.len(), 2 * up.len(), "two moments for each");
        assert_eq!(
            (report.loaded, report.unexpected),
            (up.clone(), down.clone())
        );
        assert_eq!(
            (&report.missing[..], report.skipped.len()),
            (&["head.bias".into(), "head.weight".into()][..], 0)
        );
        let left_out = |path: &str| path.starts_with("up.").then(|| path.to_owned());
        let (_, report) = load(LoadOptions::new().with_partial(true).with_renamed(left_out))?;
        assert_eq!(
            (report.loaded, report.unexpected, report.missing.len()),
            (up, down, 0)
        );
        assert_eq!(report.skipped, ["head.bias", "head.weight"]);
        // What was trained on resumes with what it had.
        let renamed = load(LoadOptions::new().with_renamed(renamed))?
            .0
            .distribute(parameter_specs(&model)?)?;
        sharded(AdamWConfig::new()).load_state(&model, renamed)?;
        Ok(())
    });
}

#[test]
fn values_that_are_missing_or_of_another_type_are_named() {
    let folder = Folder::new("values");
    let path = folder.join("checkpoint");
    pair().run(|mesh| {
        let state = state(mesh, 1.0)?
            .with_value("epoch", &3)?
            .with_rank_value("seed", &mesh.rank())?;
        checkpoint::save(&path, &state)
    });
    assert_eq!(
        pair().run(|mesh| Checkpoint::open(&path, mesh)?.rank_values::<usize>("seed"))[1],
        [0, 1]
    );
    let no_value = |key: &str, present: &str| CheckpointError::NoValue {
        key: key.into(),
        present: present.into(),
    };
    let open = |mesh: &DeviceMesh| Checkpoint::open(&path, mesh);
    assert_eq!(
        error_of(|mesh| open(mesh)?.value::<u64>("batch")),
        no_value("batch", "`epoch`")
    );
    assert_eq!(
        error_of(|mesh| open(mesh)?.rank_values::<u64>("epoch")),
        no_value("epoch", "`seed`")
    );
    let like = |mesh: &DeviceMesh| matrix(mesh, 0.0, Placement::Replicate);
    assert_eq!(
        error_of(|mesh| open(mesh)?.load_tensor("columns", &like(mesh)?)),
        no_value("columns", "`rows`")
    );
    let error = error_of(|mesh| open(mesh)?.value::<String>("epoch"));
    assert!(
        matches!(&error, CheckpointError::Value { key, .. } if key == "epoch"),
        "{error}"
    );
    let error =
        error_of(|mesh| open(mesh)?.load_optimizer("optimizer", &none(mesh), &LoadOptions::new()));
    assert_eq!(error, no_value("optimizer", "`epoch`"));
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
        let expected = CheckpointError::Corrupt {
            path: file.clone(),
            key: "rows".into(),
            first: len - 32,
            last: len,
        };
        assert_eq!(error_of(rank_1), expected);
    }
    for found in [0, len - 1, len + 1] {
        let mut other = intact.clone();
        other.resize(found as usize, 0);
        fs::write(&file, other).unwrap();
        assert_eq!(
            error_of(rank_1),
            CheckpointError::Length {
                path: file.clone(),
                found,
                expected: len
            }
        );
    }
    fs::remove_file(&file).unwrap();
    let error = error_of(rank_1);
    assert!(
        matches!(&error, CheckpointError::Io { rank: 1, path, .. } if *path == file),
        "{error}"
    );
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
        assert!(
            matches!(&error, CheckpointError::Manifest { path, .. } if *path == file),
            "{error}"
        );
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
        assert!(
            matches!(&error, CheckpointError::Io { rank: 0, path, .. } if path.starts_with(&file)),
            "{error}"
        );
        let error = error_of(|mesh| load(&path, mesh));
        assert!(
            matches!(&error, CheckpointError::Io { rank: 0, path, .. } if path.starts_with(&file)),
            "{error}"
        );
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "notes");
    for path in [Path::new("/"), Path::new("..")] {
        let error = error_of(|mesh| checkpoint::save(path, &state(mesh, 1.0)?));
        assert!(
            error.to_string().contains("the path ends in no name"),
            "{error}"
        );
    }
    // A folder in the place of the file of earlier versions.
    let run = folder.join("run");
    fs::create_dir_all(run.join("latest")).unwrap();
    let error = error_of(|mesh| CheckpointManager::new(&run, mesh).save(&state(mesh, 1.0)?));
    assert!(
        matches!(&error, CheckpointError::LatestFile { newest: None, path, .. } if *path == run.join("latest")),
        "{error}"
    );
    assert!(!run.join("step-1").exists());
}

#[test]
fn a_path_may_end_in_a_slash() {
    let folder = Folder::new("slash");
    let path = folder.join("checkpoint/");
    save(&path, 1.0);
    assert_loads(&path, 1.0);
    let names: Vec<_> = fs::read_dir(&*folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["checkpoint"]);
}

/// As on hosts that do not share a file system.
#[test]
fn two_folders_are_found_before_anything_is_written() {
    let folder = Folder::new("two");
    let own = |mesh: &DeviceMesh| folder.join(mesh.rank().to_string());
    let error = error_of(|mesh| checkpoint::save(own(mesh), &state(mesh, 1.0)?));
    assert_eq!(
        error,
        CheckpointError::NotShared {
            path: folder.join("1"),
            rank: 1,
            of: 0
        }
    );
    assert!(is_empty(&folder));

    let [zero, one] = array::from_fn(|rank| folder.join(rank.to_string()));
    save(&one, 1.0);
    let error = error_of(|mesh| checkpoint::save(own(mesh), &state(mesh, 2.0)?));
    assert_eq!(
        error,
        CheckpointError::NotShared {
            path: one.clone(),
            rank: 1,
            of: 0
        }
    );
    assert!(!zero.exists());
    assert_loads(&one, 1.0);

    assert_eq!(
        error_of(|mesh| Checkpoint::open(own(mesh), mesh)),
        CheckpointError::Incomplete { path: zero.clone() }
    );
    save(&zero, 2.0);
    let error = error_of(|mesh| Checkpoint::open(own(mesh), mesh));
    assert_eq!(
        error,
        CheckpointError::NotShared {
            path: one,
            rank: 1,
            of: 0
        }
    );
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
    assert!(
        error.to_string().starts_with("launch failed at rank 1"),
        "{error}"
    );
    assert_loads(&path, 1.0);
    test.run(|mesh| checkpoint::save(&next, &state(mesh, 2.0)?));
    assert_loads(&next, 2.0);
}
