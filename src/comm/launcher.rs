//! Which launcher has started this process, and as which of how many: [`place`].
//!
//! Read from the environment, so that a process that is alone never starts MPI. The first launcher counts of which both
//! variables are set:
//!
//! | launcher | number of processes | this one |
//! |---|---|---|
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_RANK` |
//! | MVAPICH's `mpirun_rsh` | `MV2_COMM_WORLD_SIZE` | `MV2_COMM_WORLD_RANK` |
//! | `mpiexec` of MPICH, Intel MPI and others with PMI, `srun --mpi=pmi2` | `PMI_SIZE` | `PMI_RANK` |
//! | Slurm's `srun` | `SLURM_STEP_NUM_TASKS` | `SLURM_PROCID` |
//!
//! Those on this host share its cores: [`neighbours`] says how many they are, by `OMPI_COMM_WORLD_LOCAL_SIZE`,
//! `MV2_COMM_WORLD_LOCAL_SIZE`, `MPI_LOCALNRANKS` or `SLURM_STEP_TASKS_PER_NODE`.
//!
//! Slurm's `SLURM_NTASKS` is set for a batch script too, which is one process and no task.

/// A process among those that were started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessRank {
    /// How many there are: at least 2.
    pub processes: usize,
    /// Which of them this is, from 0.
    pub here: usize,
}

/// Processes that a launcher has started could not be connected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A launcher's variables contradict each other.
    #[error(
        "the environment says that this is process {here} of {processes} ({rank}, {size}): start the program by \
         `mpirun` or `srun`, or unset both variables to run one process"
    )]
    Variables {
        /// The variable with the number of processes.
        size: &'static str,
        /// The variable with the number of this one.
        rank: &'static str,
        /// What the first says.
        processes: String,
        /// What the second says.
        here: String,
    },

    /// The program cannot connect them.
    #[error(
        "the environment says that this is process {here} of {processes}, but the program is built without MPI: build it \
         with the feature `mpi`, or start it by itself"
    )]
    NoMpi {
        /// Number of processes by the launcher's variables.
        processes: usize,
        /// This process by the launcher's variables.
        here: usize,
    },

    /// There are not as many ranks for each process.
    #[error(
        "{ranks} ranks are no whole number for each of {processes} processes: start as many processes as divide the \
         number of ranks"
    )]
    Uneven {
        /// Number of ranks.
        ranks: usize,
        /// Number of processes.
        processes: usize,
        /// This process.
        here: usize,
    },

    /// MPI sees other processes than the launcher has started.
    #[error(
        "the launcher has started process {here} of {processes}, which to MPI is process {mpi_here} of \
         {mpi_processes}: the program is built with another MPI library than its launcher belongs to; run it with the \
         `mpirun` beside the `mpicc` it was built with, or with `srun --mpi=` what that library supports (`pmix`, `pmi2`)"
    )]
    OtherLauncher {
        /// Number of processes by the launcher's variables.
        processes: usize,
        /// This process by the launcher's variables.
        here: usize,
        /// Number of processes in `MPI_COMM_WORLD`.
        mpi_processes: usize,
        /// This process in `MPI_COMM_WORLD`.
        mpi_here: usize,
    },

    /// The program has initialized MPI itself.
    #[error(
        "MPI is initialized already, and by a thread that is not the one that communicates for the ranks: connect the \
         ranks before, or leave MPI to them"
    )]
    Initialized,

    /// The MPI library knows nothing of threads.
    #[error(
        "the MPI library gives `MPI_THREAD_SINGLE` where `MPI_THREAD_FUNNELED` is needed: take one built with threads"
    )]
    SingleThreaded,

    /// The file of a rank's [flight recorder](crate::comm::flight) could not be made.
    #[error(
        "rank {rank} cannot make the file of its flight recorder, {}: {problem}; name a folder that the program may write \
         (`Launch::with_flight_recorder`, BURN_DTENSOR_FLIGHT), or none",
        .path.display()
    )]
    Flight {
        /// Global rank.
        rank: usize,
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        problem: String,
    },

    /// The thread that communicates could not be started.
    #[error("the thread that communicates with other processes could not be started: {problem}")]
    NoThread {
        /// Why.
        problem: String,
    },

    /// A call of MPI failed.
    #[error("{call} failed: {text}")]
    Mpi {
        /// The function.
        call: &'static str,
        /// MPI's text of the error.
        text: String,
    },
}

const LAUNCHERS: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

/// This process's place. `None`: it is alone.
pub(crate) fn place() -> Result<Option<ProcessRank>, StartError> {
    place_by(|name| std::env::var(name).ok())
}

/// By what `variable` says of the environment.
fn place_by(variable: impl Fn(&str) -> Option<String>) -> Result<Option<ProcessRank>, StartError> {
    let set = |&(size, rank): &(&'static str, &'static str)| Some((size, rank, variable(size)?, variable(rank)?));
    let Some((size, rank, processes, here)) = LAUNCHERS.iter().find_map(set) else { return Ok(None) };
    match (processes.parse(), here.parse()) {
        (Ok(1), Ok(0)) => Ok(None),
        (Ok(processes), Ok(here)) if here < processes => Ok(Some(ProcessRank { processes, here })),
        _ => Err(StartError::Variables { size, rank, processes, here }),
    }
}

const NEIGHBOURS: [&str; 4] =
    ["OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"];

/// How many processes the launcher has started on this host, this one among them; 1 if it does not say.
pub(crate) fn neighbours() -> usize {
    neighbours_by(|name| std::env::var(name).ok())
}

fn neighbours_by(variable: impl Fn(&str) -> Option<String>) -> usize {
    let said = NEIGHBOURS.iter().find_map(|name| variable(name)).unwrap_or_default();
    // Slurm lists hosts, such as `2(x3),1`: the most that one of them has.
    let of_host = said.split(',').map(|of_host| of_host.split('(').next().unwrap_or_default());
    of_host.filter_map(|count| count.trim().parse().ok()).max().filter(|count| *count > 0).unwrap_or(1)
}

/// Whether the launcher has given this process cores of its own: others than it has itself. Where nothing says so, not.
pub(crate) fn is_bound() -> bool {
    let allowed = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(String::from)
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
        place_by(|name| set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn every_launcher_says_which_process_this_is() {
        for (size, rank) in LAUNCHERS {
            assert_eq!(among(&[(size, "4"), (rank, "3")]), Ok(Some(ProcessRank { processes: 4, here: 3 })), "{size}");
        }
        // Open MPI's `mpirun` within an allocation of Slurm's, whose shell is one task.
        let nested = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
        let nested = [&nested[..], &[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")]].concat();
        assert_eq!(among(&nested), Ok(Some(ProcessRank { processes: 2, here: 1 })));
    }

    #[test]
    fn the_processes_of_a_host_are_counted() {
        let among = |set: &[(&str, &str)]| {
            neighbours_by(|name| set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.to_string()))
        };
        assert_eq!(among(&[]), 1);
        for name in NEIGHBOURS {
            assert_eq!([among(&[(name, "4")]), among(&[(name, "0")]), among(&[(name, "many")])], [4, 1, 1], "{name}");
        }
        assert_eq!(among(&[("SLURM_STEP_TASKS_PER_NODE", "2(x3),3")]), 3);
    }

    #[test]
    fn a_process_alone_has_no_place() {
        assert_eq!(among(&[]), Ok(None));
        assert_eq!(among(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]), Ok(None));
        // A batch script of Slurm's.
        assert_eq!(among(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), Ok(None));
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
