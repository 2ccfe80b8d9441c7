//! Progress of a run on stderr: a bar on a terminal, otherwise a line at intervals.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

/// Number of lines printed in a run if stderr is not a terminal.
const LINES: usize = 10;

/// Progress of the steps of a run, shown by one rank.
pub struct Progress {
    bar: Option<ProgressBar>,
    start: Instant,
    steps: usize,
    done: usize,
    /// Amount of data in one step, with its unit.
    a_step: (usize, &'static str),
}

impl Progress {
    /// Starts the clock of a run of `steps` steps. `a_step` is the amount of data in one step. Shows progress only
    /// if `reports` is true.
    pub fn new(reports: bool, steps: usize, a_step: (usize, &'static str)) -> Self {
        let style = "{bar:30} {pos}/{len} steps  {msg}  {eta} left";
        let style = ProgressStyle::with_template(style).expect("the template is well formed");
        Self {
            bar: reports.then(|| ProgressBar::new(steps as u64).with_style(style)),
            start: Instant::now(),
            steps,
            done: 0,
            a_step,
        }
    }

    /// Counts a step with this loss.
    pub fn step(&mut self, loss: f32) {
        self.done += 1;
        let Some(bar) = &self.bar else { return };
        let message = format!("loss {loss:.4}  {:.0} {}/s", self.per_s(), self.a_step.1);
        if !std::io::stderr().is_terminal() && (self.done == 1 || self.done.is_multiple_of(self.steps.div_ceil(LINES)))
        {
            eprintln!("step {:>6}  {message}", self.done);
        }
        bar.set_message(message);
        bar.inc(1);
    }

    /// Ends the bar. Returns the amount of data per second over the run.
    pub fn finish(self) -> f64 {
        let per_s = self.per_s();
        if let Some(bar) = self.bar {
            bar.abandon();
        }
        per_s
    }

    fn per_s(&self) -> f64 {
        (self.done * self.a_step.0) as f64 / self.start.elapsed().as_secs_f64()
    }
}
