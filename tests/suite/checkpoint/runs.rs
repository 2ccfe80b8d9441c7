//! The folder of a run: several jobs that save into it, programs that read it meanwhile, and going
//! back to an older step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, fs, thread};

use burn::module::Param;
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_dtensor::checkpoint::{
    self, Checkpoint, CheckpointError, CheckpointManager, LoadOptions, State, StateDTypes,
    StateDict,
};
use burn_dtensor::fsdp::sync_buffers;
use burn_dtensor::optim::{OptimError, OptimizerState, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::folder::Folder;
use crate::effort::setting;
use crate::launched;
use crate::logged::warnings;

/// A weight of equal elements.
fn weight(value: f32, mesh: &DeviceMesh) -> Result<DTensor<2>> {
    let full = Tensor::<2>::full([30, 10], value, mesh.device());
    DTensor::distribute_replicated(full, mesh, &[Placement::Shard(0)])
}

fn state(step: u64, mesh: &DeviceMesh) -> Result<State> {
    State::new(mesh)
        .with_step(step)
        .with_tensor("weight", weight(step as f32, mesh)?)
}

/// Checks that a checkpoint has the values of its step, and returns the step.
fn check(checkpoint: &Checkpoint, mesh: &DeviceMesh) -> Result<u64> {
    let step = checkpoint.step().expect("it was saved with a step");
    let loaded = checkpoint.load_tensor("weight", &weight(0.0, mesh)?)?;
    let values = loaded.full_tensor()?.into_data().try_to_vec::<f32>()?;
    assert_eq!(values, [step as f32; 300]);
    Ok(step)
}

/// Saves a step on two ranks, as a job of its own. Returns false if another job has saved it.
fn save(folder: &Path, step: u64, keep: usize) -> bool {
    let saved = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let run = CheckpointManager::new(folder, &mesh).with_keep(keep);
        match run.save(&state(step, &mesh)?) {
            Ok(_) => Ok(true),
            Err(Error::Checkpoint(CheckpointError::Exists { path })) => {
                assert_eq!(path, folder.join(format!("step-{step}")));
                Ok(false)
            }
            // The other job has gone on.
            Err(Error::Checkpoint(CheckpointError::LaterStep { later, .. })) => {
                assert!(later > step);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    });
    launched::values(saved.unwrap()).remove(0)
}

fn latest(folder: &Path) -> Option<u64> {
    let found = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let latest = CheckpointManager::new(folder, &mesh).latest()?;
        latest.map(|latest| check(&latest, &mesh)).transpose()
    });
    launched::values(found.unwrap()).remove(0)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// As a job that is started again while the one before still dies.
#[test]
fn of_two_jobs_that_save_a_step_one_succeeds_and_its_checkpoint_loads() {
    let folder = Folder::new("two-jobs");
    for step in 1..=setting("SAVED_TWICE", 20) {
        let keep = if step % 2 == 0 { 1 } else { 2 };
        let saved = thread::scope(|scope| {
            let jobs = [(); 2].map(|()| scope.spawn(|| save(&folder, step, keep)));
            jobs.map(|job| job.join().unwrap())
        });
        assert_eq!(
            saved.iter().filter(|saved| **saved).count(),
            1,
            "step {step}"
        );
        assert_eq!(latest(&folder), Some(step));
    }
}

/// The folder of the run, in a process that saves; not set in the process that starts two of them.
const FOLDER: &str = "BURN_DTENSOR_TWO_PROCESSES";
const NAME: &str =
    "checkpoint::runs::of_two_processes_that_save_the_same_steps_each_step_is_saved_once";

#[test]
fn of_two_processes_that_save_the_same_steps_each_step_is_saved_once() {
    let steps = setting("SAVED_TWICE", 20);
    if let Some(folder) = env::var_os(FOLDER) {
        let folder = PathBuf::from(folder);
        let saved = (1..=steps).filter(|&step| save(&folder, step, 2));
        let saved: Vec<_> = saved.map(|step| step.to_string()).collect();
        return println!("saved: {}", saved.join(" "));
    }
    let folder = Folder::new("two-processes");
    let start = || {
        let mut program = Command::new(env::current_exe().unwrap());
        program
            .args([NAME, "--exact", "--nocapture"])
            .env(FOLDER, &*folder)
            .stdout(Stdio::piped());
        program.spawn().unwrap()
    };
    let mut times = BTreeMap::<u64, usize>::new();
    for process in [start(), start()] {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        let (_, saved) = text.split_once("saved: ").expect("it says what it saved");
        for step in saved.lines().next().unwrap().split_whitespace() {
            *times.entry(step.parse().unwrap()).or_default() += 1;
        }
    }
    assert_eq!(times, (1..=steps).map(|step| (step, 1)).collect());
    assert_eq!(latest(&folder), Some(steps));
    assert_eq!(
        names(&folder),
        [steps - 1, steps].map(|step| format!("step-{step}"))
    );
}

/// As an evaluation that loads whatever is the latest.
#[test]
fn a_program_that_reads_while_old_checkpoints_are_removed_loads_each() {
    let loads = setting("LOADED_MEANWHILE", 60);
    for keep in [1, 2, 3] {
        let folder = Folder::new(&format!("reader-{keep}"));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut steps = 1..;
                while !is_over.load(Ordering::Relaxed) {
                    save(&folder, steps.next().unwrap(), keep);
                }
            });
            let mut last = 0;
            let mut found = 0;
            while found < loads {
                let step = latest(&folder).unwrap_or_default();
                assert!(step >= last, "{step} after {last}");
                found += u64::from(step > 0);
                last = step;
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn at_least_one_checkpoint_is_kept() {
    let folder = Folder::new("keep-none");
    for step in [10, 20] {
        assert!(save(&folder, step, 0));
        assert_eq!(names(&folder), [format!("step-{step}")]);
        assert_eq!(latest(&folder), Some(step));
    }
}

/// As after a typing error in the path of a run to continue.
#[test]
fn a_run_without_a_folder_warns_once() {
    let folder = Folder::new("missing");
    let run = folder.join("no-such-run");
    let found = warnings("no-such-run", || {
        for _ in 0..2 {
            assert_eq!(latest(&run), None);
        }
    });
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("begins from scratch"), "{found:?}");
}

#[test]
fn a_run_goes_back_to_an_older_step_by_setting_later_ones_aside() {
    let folder = Folder::new("set-back");
    for step in [10, 20, 30] {
        assert!(save(&folder, step, 5));
    }
    fs::write(folder.join("latest"), "step-10").unwrap();
    let text = checkpoint::latest(&*folder).unwrap_err().to_string();
    for part in ["`step-10`", "step 30", "set_back"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(
        checkpoint::set_back(&*folder, 10).unwrap(),
        [30, 20].map(|step| folder.join(format!("step-{step}.set-aside")))
    );
    assert_eq!(latest(&folder), Some(10));
    assert!(save(&folder, 12, 1));
    assert_eq!(
        names(&folder),
        ["step-12", "step-20.set-aside", "step-30.set-aside"]
    );
    // A checkpoint that was set aside is one still.
    let step = MeshTest::new([2], ["shard"]).run(|mesh| {
        check(
            &Checkpoint::open(folder.join("step-30.set-aside"), mesh)?,
            mesh,
        )
    });
    assert_eq!(step, [30, 30]);
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_killed_job_left_of_another_step_is_removed() {
    let folder = Folder::new("abandoned");
    // Of an earlier version.
    let left = folder.join("step-7");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("probe-0123456789abcdef"), "").unwrap();
    fs::write(left.join("rank-00000.safetensors"), vec![1; 1 << 12]).unwrap();
    // Of a process that is there no more, and of one that is.
    let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
    let mine = claim(process.id());
    let live = folder.join(format!("step-8.saving-{mine}"));
    fs::create_dir_all(&live).unwrap();
    assert!(save(&folder, 10, 1));
    assert_eq!(
        names(&folder),
        ["step-10".to_owned(), format!("step-8.saving-{mine}")]
    );
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(save(&folder, 11, 1));
    assert_eq!(names(&folder), ["step-11"]);
}

/// Returns the claim of a save of another process of this host, which is made from one of this.
#[cfg(target_os = "linux")]
fn claim(process: u32) -> String {
    let folder = Folder::new("claim");
    let claim = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let run = CheckpointManager::new(&*folder, &mesh);
        let mut behind = checkpoint::AsyncCheckpointer::new(run)?;
        behind.save(&state(1, &mesh)?)?;
        let name = names(&folder).remove(0);
        behind.finish()?;
        Ok(name)
    });
    let name = launched::values(claim.unwrap()).remove(0);
    let (_, claim) = name.split_once(".saving-").expect("it is being saved");
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let started: u64 = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .nth(19)
        .unwrap()
        .parse()
        .unwrap();
    let parts: Vec<_> = claim.split('-').collect();
    format!(
        "{}-{process:x}-{started:x}-{}-{}",
        parts[0], parts[3], parts[4]
    )
}

fn mean(net: &BatchNorm) -> Vec<f32> {
    net.running_mean.value().into_data().try_to_vec().unwrap()
}

/// A model that a program goes on with, after it has loaded into a clone.
#[test]
fn running_statistics_of_a_clone_stay_when_a_checkpoint_is_loaded() {
    let folder = Folder::new("statistics");
    let path = folder.join("checkpoint");
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new().with_layer_warnings(false);
        let net: BatchNorm = fully_shard(BatchNormConfig::new(2).init(&device), mesh, config)?;
        checkpoint::save(&path, &State::new(mesh).with_model("model", &net)?)?;
        for _ in 0..20 {
            let x = Tensor::<2>::full([4, 2], 5.0, &device);
            unit(&net, x, |net, x| net.forward(x));
        }
        sync_buffers(&net)?;
        let before = mean(&net);
        assert!(before[0] > 4.0);
        let saved = Checkpoint::open(&path, mesh)?;
        let (loaded, _) = saved.load_model("model", net.clone(), &LoadOptions::new())?;
        assert_eq!((mean(&net), mean(&loaded)), (before.clone(), vec![0.0; 2]));
        // By a state dict, too.
        let values = StateDict::of_model(&loaded, mesh)?;
        let (again, _) = values.load_model(net.clone(), mesh, &LoadOptions::new())?;
        assert_eq!((mean(&net), mean(&again)), (before, vec![0.0; 2]));
        Ok(())
    });
}

fn grads(model: &Linear, device: &Device) -> GradientsParams {
    let x = Tensor::<2>::ones([2, 4], device).cast(model.weight.base().dtype());
    let loss = unit(model, x, |model, x| model.forward(x)).square().sum();
    GradientsParams::from_grads(loss.backward(), model)
}

fn step(model: Linear, optim: &mut ShardedOptimizer, device: &Device) -> Result<Linear> {
    let grads = grads(&model, device);
    optim.step(1e-2, model, grads)
}

fn unsharded(dtype: DType, device: &Device) -> Linear {
    let weight = Tensor::<1, Int>::arange(0..12, device)
        .float()
        .div_scalar(8.0);
    let weight = weight.reshape([4, 3]).cast(dtype).require_grad();
    let (weight, bias) = (Param::from_tensor(weight), None);
    Linear { weight, bias }
}

fn linear(dtype: DType, mesh: &DeviceMesh, device: &Device) -> Result<Linear> {
    let config = FullyShard::new().with_layer_warnings(false);
    fully_shard(unsharded(dtype, device), mesh, config)
}

fn dtypes_of(state: &OptimizerState) -> Result<Vec<DType>> {
    let full = StateDict::of_optimizer(state).full()?;
    Ok(full.into_values().map(|data| data.dtype()).collect())
}

#[test]
fn state_of_an_optimizer_of_another_dtype_is_refused_or_converted() {
    let folder = Folder::new("state-dtypes");
    let path = folder.join("checkpoint");
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut optim = sharded(AdamWConfig::new());
        let old = step(linear(DType::F32, mesh, &device)?, &mut optim, &device)?;
        let state = optim.state(&old)?;
        checkpoint::save(
            &path,
            &State::new(mesh)
                .with_model("model", &old)?
                .with_optimizer("optim", &state)?,
        )?;
        let saved = Checkpoint::open(&path, mesh)?;
        let (new, _) = saved.load_model(
            "model",
            linear(DType::BF16, mesh, &device)?,
            &LoadOptions::new(),
        )?;
        let expected = CheckpointError::StateDType {
            param: "weight".into(),
            saved: "f32".into(),
            dtype: "bf16".into(),
        };
        let refused = |error: Error| matches!(error, Error::Checkpoint(error) if error == expected);
        assert!(refused(
            saved
                .load_optimizer("optim", &new, &LoadOptions::new())
                .unwrap_err()
        ));
        let dict = StateDict::of_optimizer(&state);
        assert!(refused(
            dict.optimizer_state(&new, &LoadOptions::new()).unwrap_err()
        ));
        let convert = LoadOptions::new().with_state_dtypes(StateDTypes::Convert);
        for (state, report) in [
            saved.load_optimizer("optim", &new, &convert)?,
            dict.optimizer_state(&new, &convert)?,
        ] {
            assert_eq!(report.cast, ["weight"]);
            assert_eq!(dtypes_of(&state)?, [DType::BF16; 2]);
            // burn holds it in the device's default dtype, which is F32 here, and so do the steps.
            let mut optim = sharded(AdamWConfig::new()).load_state(&new, state)?;
            let stepped = step(new.clone(), &mut optim, &device)?;
            assert_eq!(stepped.weight.base().dtype(), DType::BF16);
            assert_eq!(dtypes_of(&optim.state(&stepped)?)?, [DType::F32; 2]);
        }
        // The steps of state in F32 are those of the parameter and its gradient in F32.
        let keep = LoadOptions::new().with_state_dtypes(StateDTypes::Keep);
        let (kept, report) = saved.load_optimizer("optim", &new, &keep)?;
        assert!(report.cast.is_empty());
        let mut optim = sharded(AdamWConfig::new()).load_state(&new, kept)?;
        let stepped = step(new, &mut optim, &device)?;
        assert_eq!(dtypes_of(&optim.state(&stepped)?)?, [DType::F32; 2]);
        let found = StateDict::of_model(&stepped, mesh)?.full()?["weight"].clone();
        // burn's own steps: in F32, then with the weights and gradient of a model in BF16.
        let mut optim = AdamWConfig::new().init();
        let wide = unsharded(DType::F32, &device);
        let wide = optim.step(1e-2, wide.clone(), grads(&wide, &device));
        let cast = |weight: Param<Tensor<2>>, dtype| {
            weight.map(|weight| weight.cast(dtype).detach().require_grad())
        };
        let narrow = cast(wide.weight, DType::BF16);
        let (id, bias) = (narrow.id, None);
        let narrow = Linear {
            weight: narrow,
            bias,
        };
        let grad = grads(&narrow, &device)
            .remove::<2>(id)
            .expect("it is trained");
        let mut grads = GradientsParams::new();
        grads.register(id, grad.cast(DType::F32));
        let (weight, bias) = (cast(narrow.weight, DType::F32), None);
        let stepped = optim.step(1e-2, Linear { weight, bias }, grads);
        let expected = stepped.weight.val().cast(DType::BF16).into_data();
        assert_eq!(found, expected);
        Ok(())
    });
}

#[test]
fn state_that_an_optimizer_would_not_make_is_refused() {
    let folder = Folder::new("foreign-state");
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let configs = [SgdConfig::new(), momentum];
        for [saved, loaded] in [[0, 1], [1, 0]] {
            let path = folder.join(saved.to_string());
            let mut optim = sharded(configs[saved].clone());
            let model = step(linear(DType::F32, mesh, &device)?, &mut optim, &device)?;
            let state = State::new(mesh).with_optimizer("optim", &optim.state(&model)?)?;
            checkpoint::save(&path, &state)?;
            let checkpoint = Checkpoint::open(&path, mesh)?;
            let load = || checkpoint.load_optimizer("optim", &model, &LoadOptions::new());
            let (state, report) = load()?;
            assert_eq!(report.loaded, ["weight"]);
            let mut optim = sharded(configs[saved].clone()).load_state(&model, state)?;
            step(model.clone(), &mut optim, &device)?;
            let error = sharded(configs[loaded].clone()).load_state(&model, load()?.0);
            let Err(Error::Optim(OptimError::Foreign {
                path,
                missing,
                extra,
            })) = error.map(drop)
            else {
                panic!("it was loaded");
            };
            let velocity = vec!["momentum.velocity".to_owned()];
            let (lacks, unknown) = match saved {
                0 => (velocity, vec![]),
                _ => (vec![], velocity),
            };
            assert_eq!((&*path, missing, extra), ("weight", lacks, unknown));
        }
        Ok(())
    });
}
