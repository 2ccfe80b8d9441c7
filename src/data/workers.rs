//! [`Workers`]: threads that prefetch batches.

use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Threads that run jobs, each in the order in which it got them.
///
/// They live as long as their loader. On a GPU a thread has a stream and a memory pool of its own,
/// so new threads for each epoch would leave their pools behind.
pub(super) struct Workers {
    jobs: Vec<Sender<LoadJob>>,
    threads: Vec<JoinHandle<()>>,
}

/// Work for one thread. It must not panic.
pub(super) type LoadJob = Box<dyn FnOnce() + Send>;

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Panics
    /// If the operating system cannot start a thread, as [`std::thread::spawn`].
    pub(super) fn start(count: usize) -> Self {
        let start = |index| {
            let (jobs, received) = channel::<LoadJob>();
            (
                jobs,
                Builder::new()
                    .name(format!("data loader {index}"))
                    .spawn(move || received.into_iter().for_each(|job| job()))
                    .expect("a new thread"),
            )
        };
        let (jobs, threads) = (0..count).map(start).unzip();
        Self { jobs, threads }
    }

    /// Returns the number of threads.
    pub(super) fn count(&self) -> usize {
        self.jobs.len()
    }

    /// Gives thread `index` its next job.
    pub(super) fn run(&self, index: usize, job: LoadJob) {
        self.jobs[index]
            .send(job)
            .expect("a thread ends after its last job");
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.jobs.clear();
        // A thread that panicked has nothing more to say.
        self.threads
            .drain(..)
            .for_each(|thread| drop(thread.join()));
    }
}
