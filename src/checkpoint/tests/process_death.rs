//! A process of several is killed while all save: the others end with an error that names it, and
//! continue from what was saved.
//!
//! The process is killed at one of its calls of the file system, drawn by the seed, or some time
//! after it. `KILLED_SAVES` says how often, `KILLED_SAVES_FROM` the first seed.

use std::env;
use std::fmt::{self, Debug, Formatter};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::states::{is_saved, state};
use crate::checkpoint::fs::{Entry, FileSystem, Links, ReadFile, WriteFile, real};
use crate::checkpoint::{AsyncCheckpointer, Checkpoint, CheckpointManager};
use crate::comm::CommError;
use crate::mesh::DeviceMesh;
use crate::prelude::*;
use crate::testing::ProcessTest;

/// The operating system's file system, at one of whose calls this process is killed.
#[derive(Clone)]
struct Deadly {
    fs: Arc<dyn FileSystem>,
    /// Calls until then.
    left: Arc<AtomicI64>,
    /// Time from that call to the kill, if it is made at all.
    after: Option<Duration>,
}

impl Deadly {
    /// Counts a call, and kills this process if it is its turn.
    fn call(&self) {
        if !self.is_last() {
            return;
        }
        match self.after {
            None => kill(),
            Some(after) => drop(thread::spawn(move || {
                thread::sleep(after);
                kill();
            })),
        }
    }

    fn is_last(&self) -> bool {
        self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }
}

fn kill() -> ! {
    drop(
        Command::new("kill")
            .args(["-KILL", &process::id().to_string()])
            .status(),
    );
    loop {
        thread::park();
    }
}

impl Debug for Deadly {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Deadly({})", self.left.load(Ordering::Relaxed))
    }
}

impl FileSystem for Deadly {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        self.call();
        self.fs.create_dir(dir)
    }

    fn is_dir(&self, path: &Path, links: Links) -> io::Result<bool> {
        self.call();
        self.fs.is_dir(path, links)
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.call();
        Ok(Box::new(DeadlyWriter {
            file: self.fs.create(file)?,
            fs: self.clone(),
        }))
    }

    fn open(&self, file: &Path, links: Links) -> io::Result<Arc<dyn ReadFile>> {
        self.call();
        self.fs.open(file, links)
    }

    fn identity(&self, dir: &Path) -> PathBuf {
        self.fs.identity(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.call();
        self.fs.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call();
        self.fs.rename(from, to)
    }

    fn remove_file(&self, file: &Path) -> io::Result<()> {
        self.call();
        self.fs.remove_file(file)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        self.call();
        self.fs.remove_dir(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.call();
        self.fs.sync_dir(dir)
    }
}

struct DeadlyWriter {
    file: Box<dyn WriteFile>,
    fs: Deadly,
}

impl WriteFile for DeadlyWriter {
    /// Writes half before the kill.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        self.file.write_all(first)?;
        self.fs.call();
        self.file.write_all(second)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.fs.call();
        self.file.sync()
    }
}

/// Steps whose saves have returned, each by one rank of the first launch. A process that is killed
/// has said it, too.
struct Returned {
    folder: PathBuf,
    rank: usize,
}

impl Returned {
    fn add(&self, step: u64) -> io::Result<()> {
        let file = self.folder.join(format!("returned-{}", self.rank));
        // One call: it is there or it is not.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(file)?
            .write_all(&step.to_le_bytes())
    }

    /// Returns the last step of any rank.
    fn last(folder: &Path) -> u64 {
        let files = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let files = files.filter(|file| {
            file.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("returned-")
        });
        let steps = files.flat_map(|file| {
            let bytes = fs::read(file).unwrap();
            bytes
                .chunks_exact(8)
                .map(|step| u64::from_le_bytes(step.try_into().unwrap()))
                .collect::<Vec<_>>()
        });
        steps.max().unwrap_or_default()
    }
}

fn manager(fs: Arc<dyn FileSystem>, folder: &Path, mesh: &DeviceMesh) -> CheckpointManager {
    CheckpointManager::new_in(fs, folder.join("run"), mesh).with_keep(2)
}

/// Loads all checkpoints of the run and returns the step of the latest, which is that of the last
/// save that returned or one after it. 0 if there is none.
fn check(folder: &Path, mesh: &DeviceMesh) -> Result<u64> {
    let run = manager(real(), folder, mesh);
    let load = |checkpoint: &Checkpoint, step: u64| {
        let ranks = checkpoint.rank_values::<u64>("random")?.len() as u64;
        is_saved(checkpoint, mesh, ranks, step)
            .unwrap_or_else(|fault| panic!("step {step}: {fault}"));
        Ok::<_, Error>(())
    };
    let steps = run.steps()?;
    for &step in &steps {
        load(&run.open(step)?, step)?;
    }
    let returned = Returned::last(folder);
    let Some(latest) = run.latest()? else {
        assert_eq!((returned, steps), (0, vec![]), "there is no latest");
        return Ok(0);
    };
    let step = latest.step().expect("it was saved with a step");
    load(&latest, step)?;
    assert!(
        step >= returned && steps.last() == Some(&step),
        "{step} is the latest of {steps:?}, {returned} had returned"
    );
    Ok(step)
}

/// Saves steps, half of them behind training, until a call fails.
fn save_until_failure(
    run: &CheckpointManager,
    mesh: &DeviceMesh,
    returned: &Returned,
    first: u64,
) -> Result<Error> {
    let mut behind = AsyncCheckpointer::new(run.clone())?;
    let mut save = |step: u64| {
        let state = state(mesh, step, 0)?;
        if step % 4 < 2 {
            behind
                .save(&state)?
                .previous
                .map_or(Ok(()), |_| returned.add(step - 1))?;
            return Ok(behind.poll()?.map_or(Ok(()), |_| returned.add(step))?);
        }
        behind
            .finish()?
            .map_or(Ok(()), |_| returned.add(step - 1))?;
        run.save(&state)?;
        Ok::<_, Error>(returned.add(step)?)
    };
    Ok((first..)
        .find_map(|step| save(step).err())
        .expect("it saves until a call fails"))
}

/// Loses one process after the other until one is left.
fn lose_all_but_one(world: &World, processes: usize, folder: &Path, seed: u64) -> Result<()> {
    let each = world.size() / processes;
    let returned = Returned {
        folder: folder.into(),
        rank: world.rank(),
    };
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = world.clone();
    loop {
        let mesh = DeviceMesh::new(&world, [world.size()], ["shard"])?;
        let found = check(folder, &mesh)?;
        let left = world.size() / each;
        if left == 1 {
            println!("one process is left: step {found} of seed {seed}");
            return Ok(());
        }
        // All ranks draw the same.
        let victim = rng.random_range(0..left) * each;
        // The first rank writes the manifest, and makes several times as many calls as another.
        let call = rng.random_range(1..=if victim == 0 { 120 } else { 25 });
        let after = rng
            .random_bool(0.4)
            .then(|| Duration::from_micros(rng.random_range(0..5000)));
        let fs: Arc<dyn FileSystem> = match world.rank() == victim {
            true => Arc::new(Deadly {
                fs: real(),
                left: Arc::new(AtomicI64::new(call)),
                after,
            }),
            false => real(),
        };
        let failure = save_until_failure(&manager(fs, folder, &mesh), &mesh, &returned, found + 1)?;
        match &failure {
            Error::Comm(CommError::Disconnected { rank, .. }) if *rank == victim => {}
            _ => panic!(
                "rank {victim} was killed at call {call} (seed {seed}), but rank {}: {failure}",
                world.rank()
            ),
        }
        world = world.shrink()?;
        assert_eq!(world.size(), (left - 1) * each);
        if world.rank() == 0 {
            let after = after.map_or(String::new(), |after| format!(" and {after:?}"));
            println!(
                "killed rank {victim} of {} after {call} calls{after}",
                left * each
            );
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

#[test]
fn survivors_of_a_killed_process_load_what_was_saved() {
    let kills = setting("KILLED_SAVES", 4);
    let first_seed = setting("KILLED_SAVES_FROM", 0);
    let mut killed = 0;
    for (seed, (processes, ranks)) in
        (first_seed..).zip([(4, 4), (2, 4), (2, 2)].into_iter().cycle())
    {
        if killed >= kills {
            break;
        }
        let Some(test) = ProcessTest::new(processes).with_fault_tolerance() else {
            return;
        };
        let folder = env::temp_dir().join(format!("burn-dtensor-death-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let job = [
            ("SEED", seed),
            ("PROCESSES", processes as u64),
            ("RANKS", ranks as u64),
        ];
        let test = job.iter().fold(test, |test, (name, value)| {
            test.with_env(variable(name), value.to_string())
        });
        let text = test.with_env(variable("FOLDER"), &folder).run(|| {
            // Every job is started here.
            let [seed, processes, ranks] =
                ["SEED", "PROCESSES", "RANKS"].map(|name| setting(&variable(name), 0));
            let folder = PathBuf::from(env::var_os(variable("FOLDER")).unwrap());
            let config = Launch::from_env(ranks as usize)
                .unwrap()
                .with_deadline(Duration::from_secs(40));
            let ends = launch(config, |world| {
                lose_all_but_one(world, processes as usize, &folder, seed)
            });
            ends.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        });
        let Some(text) = text else { return };
        assert_eq!(
            text.matches("one process is left: ").count(),
            ranks / processes,
            "{text}"
        );
        let lost = text
            .lines()
            .filter_map(|line| Some(line.split_once("killed ")?.1));
        lost.for_each(|lost| println!("seed {seed}: {lost}"));
        // Neither the ranks that saved it nor their processes are there any more.
        launch(Launch::threads(3), |world| {
            check(&folder, &DeviceMesh::new(world, [3], ["shard"])?)
        })
        .unwrap_or_else(|error| panic!("seed {seed}: {error}\n{text}"));
        fs::remove_dir_all(folder).unwrap();
        killed += processes as u64 - 1;
    }
    println!("killed {killed} processes");
}

fn variable(name: &str) -> String {
    format!("BURN_DTENSOR_DEATH_{name}")
}
