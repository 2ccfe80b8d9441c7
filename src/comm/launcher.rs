//! Detects the launcher that started this process, the number of its processes, and the index of
//! this one: [`place`].
//!
//! This is read from the environment, so that a single process never starts MPI. The first launcher
//! counts for which both variables are set:
//!
//! | launcher | number of processes | index of this process |
//! |---|---|---|
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_RANK` |
//! | MVAPICH's `mpirun_rsh` | `MV2_COMM_WORLD_SIZE` | `MV2_COMM_WORLD_RANK` |
//! | `mpiexec` of MPICH, Intel MPI and others with PMI, `srun --mpi=pmi2` | `PMI_SIZE` | `PMI_RANK` |
//! | Slurm's `srun` | `SLURM_STEP_NUM_TASKS` | `SLURM_PROCID` |
//!
//! The processes on one host share its cores. [`neighbours`] returns their number, from
//! `OMPI_COMM_WORLD_LOCAL_SIZE`, `MV2_COMM_WORLD_LOCAL_SIZE`, `MPI_LOCALNRANKS` or
//! `SLURM_STEP_TASKS_PER_NODE`.
//!
//! Slurm also sets `SLURM_NTASKS` for a batch script, which is a single process and not a task. The
//! variable is therefore not used.

/// The index of this process, and the number of processes that were started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessRank {
    /// Number of processes, at least 2.
    pub processes: usize,
    /// Index of this process, from 0.
    pub here: usize,
}

/// Returns the index of this process; 0 if no launcher started it.
pub(super) fn process_index() -> usize {
    place().ok().flatten().map_or(0, |place| place.here)
}

/// Returns true in one of the processes that a launcher has started, the one with rank 0, and in a
/// process that no launcher has started.
///
/// Before and after [`launch`](super::launch()), every process of `mpirun -n 4 program` runs the
/// program. Use this function to print or to write a file once there. On a rank, use
/// [`World::run_on`](super::World::run_on).
///
/// Local: it reads the environment, as [`Launch::from_env`](super::Launch::from_env) does, and
/// connects nothing. It needs no feature. If the launcher's variables contradict each other, it
/// returns true; `from_env` returns the error.
///
/// ```
/// use burn_dtensor::comm::is_first_process;
///
/// if is_first_process() {
///     println!("training on 4 ranks");
/// }
/// ```
pub fn is_first_process() -> bool {
    is_first(place())
}

fn is_first(place: Result<Option<ProcessRank>, StartError>) -> bool {
    !matches!(place, Ok(Some(ProcessRank { here: 1.., .. })))
}

/// Reason why the processes started by a launcher could not be connected, or why a launch could not
/// begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The launcher's variables contradict each other.
    #[error(
        "the environment says that this is process {here} of {processes} ({rank}, {size}), which is invalid. \
         Start the program with `mpirun` or `srun`, or unset both variables to run one process"
    )]
    Variables {
        /// Name of the variable with the number of processes.
        size: &'static str,
        /// Name of the variable with the index of this process.
        rank: &'static str,
        /// Value of the first variable.
        processes: String,
        /// Value of the second variable.
        here: String,
    },

    /// The program was built without the feature `mpi`.
    #[error(
        "the environment says that this is process {here} of {processes}, but the program was built without MPI. Build \
         it with the feature `mpi`, or start it without a launcher"
    )]
    NoMpi {
        /// Number of processes according to the launcher's variables.
        processes: usize,
        /// Index of this process according to the launcher's variables.
        here: usize,
    },

    /// The number of processes does not divide the number of ranks.
    #[error(
        "cannot distribute {ranks} ranks evenly over {processes} processes. Start a number of processes that divides \
         {ranks}"
    )]
    Uneven {
        /// Number of ranks.
        ranks: usize,
        /// Number of processes.
        processes: usize,
        /// Index of this process.
        here: usize,
    },

    /// MPI sees other processes than those the launcher started.
    #[error(
        "the launcher started process {here} of {processes}, but MPI sees it as process {mpi_here} of {mpi_processes}, \
         because the program was built with another MPI library than that of its launcher. Run it with the `mpirun` of \
         the same installation as the `mpicc` of the build, or with a value of `srun --mpi=` that this library \
         supports (`pmix`, `pmi2`)"
    )]
    OtherLauncher {
        /// Number of processes according to the launcher's variables.
        processes: usize,
        /// Index of this process according to the launcher's variables.
        here: usize,
        /// Number of processes in `MPI_COMM_WORLD`.
        mpi_processes: usize,
        /// Index of this process in `MPI_COMM_WORLD`.
        mpi_here: usize,
    },

    /// The program initialized MPI itself, on another thread.
    #[error(
        "MPI was already initialized, by a thread other than the progress thread of the ranks. Call `Launch::from_env` \
         before the program initializes MPI, or do not initialize MPI in the program"
    )]
    Initialized,

    /// The MPI library does not support threads.
    #[error(
        "the MPI library provides `MPI_THREAD_SINGLE`, but `MPI_THREAD_FUNNELED` is required. Use one with threads"
    )]
    SingleThreaded,

    /// The file of a rank's [flight recorder](crate::comm::flight) could not be created.
    #[error(
        "rank {rank} cannot create the file of its flight recorder, {}: {problem}. Name a folder to which the program \
         can write (`Launch::with_flight_recorder`, BURN_DTENSOR_FLIGHT), or no folder",
        .path.display()
    )]
    Flight {
        /// Global rank.
        rank: usize,
        /// Path of the file.
        path: std::path::PathBuf,
        /// Reason why it could not be created.
        problem: String,
    },

    /// The process has no GPU of CUDA.
    #[error(
        "no GPU of CUDA: {problem}. Install NVIDIA's driver, make a GPU visible to the process, or use another device"
    )]
    NoGpu {
        /// Description of what was looked for and not found.
        problem: String,
    },

    /// NCCL could not be loaded.
    #[error("{problem}")]
    NoNccl {
        /// Description of what was looked for, where, and of the remedy.
        problem: String,
    },

    /// The progress thread, which communicates with other processes, could not be started.
    #[error(
        "the progress thread, which communicates with other processes, could not be started: {problem}. Raise the limit on \
         threads (`ulimit -u`) or on memory, or start fewer processes on this host"
    )]
    NoThread {
        /// Reason why it could not be started.
        problem: String,
    },

    /// An MPI function failed.
    #[error(
        "{call} failed: {text}. Run a minimal MPI program with the same launcher: if it also fails, repair the installation or \
         the launcher's options"
    )]
    Mpi {
        /// Name of the function.
        call: &'static str,
        /// MPI's text for the error.
        text: String,
    },
}

const LAUNCHERS: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

/// Returns the place of this process among those the launcher started, or `None` if it is the only
/// one.
pub(crate) fn place() -> Result<Option<ProcessRank>, StartError> {
    place_by(|name| std::env::var(name).ok())
}

/// Like [`place`], with the environment read through `variable`.
fn place_by(variable: impl Fn(&str) -> Option<String>) -> Result<Option<ProcessRank>, StartError> {
    let Some((size, rank, processes, here)) = LAUNCHERS
        .iter()
        .find_map(|&(size, rank)| Some((size, rank, variable(size)?, variable(rank)?)))
    else {
        return Ok(None);
    };
    match (processes.parse(), here.parse()) {
        (Ok(1), Ok(0)) => Ok(None),
        (Ok(processes), Ok(here)) if here < processes => Ok(Some(ProcessRank { processes, here })),
        _ => Err(StartError::Variables {
            size,
            rank,
            processes,
            here,
        }),
    }
}

const NEIGHBOURS: [&str; 4] = [
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
];

/// Returns the number of processes that the launcher started on this host, including this one; 1 if
/// that is not known.
pub(crate) fn neighbours() -> usize {
    neighbours_by(|name| std::env::var(name).ok())
}

fn neighbours_by(variable: impl Fn(&str) -> Option<String>) -> usize {
    let said = NEIGHBOURS
        .iter()
        .find_map(|name| variable(name))
        .unwrap_or_default();
    // Slurm lists the hosts, as in `2(x3),1`; the largest number of tasks on a host counts.
    let of_host = said
        .split(',')
        .map(|of_host| of_host.split('(').next().unwrap_or_default());
    of_host
        .filter_map(|count| count.trim().parse().ok())
        .max()
        .filter(|count| *count > 0)
        .unwrap_or(1)
}

/// Returns true if the launcher has bound this process to some cores: the process is allowed other
/// cores than its parent. Returns false if this cannot be determined.
pub(crate) fn is_bound() -> bool {
    let allowed = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
            .map(String::from)
    };
    #[cfg(unix)]
    let launcher = std::os::unix::process::parent_id().to_string();
    #[cfg(not(unix))]
    let launcher = String::new();
    matches!((allowed("self"), allowed(&launcher)), (Some(own), Some(all)) if own != all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(set: &[(&str, &str)]) -> Result<Option<ProcessRank>, StartError> {
        place_by(|name| {
            set.iter()
                .find(|(set, _)| *set == name)
                .map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn every_launcher_says_which_process_this_is() {
        for (size, rank) in LAUNCHERS {
            assert_eq!(
                among(&[(size, "4"), (rank, "3")]),
                Ok(Some(ProcessRank {
                    processes: 4,
                    here: 3
                })),
                "{size}"
            );
        }
        // Open MPI's `mpirun` within an allocation of Slurm, whose shell is one task.
        let nested = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
        let nested = [
            &nested[..],
            &[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")],
        ]
        .concat();
        assert_eq!(
            among(&nested),
            Ok(Some(ProcessRank {
                processes: 2,
                here: 1
            }))
        );
    }

    #[test]
    fn the_processes_of_a_host_are_counted() {
        let among = |set: &[(&str, &str)]| {
            neighbours_by(|name| {
                set.iter()
                    .find(|(set, _)| *set == name)
                    .map(|(_, value)| value.to_string())
            })
        };
        assert_eq!(among(&[]), 1);
        for name in NEIGHBOURS {
            assert_eq!(
                [
                    among(&[(name, "4")]),
                    among(&[(name, "0")]),
                    among(&[(name, "many")])
                ],
                [4, 1, 1],
                "{name}"
            );
        }
        assert_eq!(among(&[("SLURM_STEP_TASKS_PER_NODE", "2(x3),3")]), 3);
    }

    #[test]
    fn a_process_alone_has_no_place() {
        assert_eq!(among(&[]), Ok(None));
        assert_eq!(
            among(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]),
            Ok(None)
        );
        // A batch script of Slurm.
        assert_eq!(
            among(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]),
            Ok(None)
        );
    }

    #[test]
    fn one_process_of_a_job_is_the_first() {
        for (size, rank) in LAUNCHERS {
            let found = ["0", "1", "2"].map(|here| is_first(among(&[(size, "3"), (rank, here)])));
            assert_eq!(found, [true, false, false], "{size}");
        }
        assert!(is_first(among(&[])), "no launcher");
        let contradicting = [("PMI_SIZE", "2"), ("PMI_RANK", "2")];
        assert!(is_first(among(&contradicting)), "its error is to be seen");
    }

    #[test]
    fn variables_that_contradict_each_other_are_told() {
        for (processes, here) in [("4", "4"), ("four", "0"), ("0", "0"), ("1", "1")] {
            let error = among(&[("PMI_SIZE", processes), ("PMI_RANK", here)]).unwrap_err();
            let told = format!("process {here} of {processes} (PMI_RANK, PMI_SIZE)");
            assert!(error.to_string().contains(&told), "{error}");
        }
    }
}
