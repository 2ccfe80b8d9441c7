//! Progress of a run on stderr: on a terminal one line that is redrawn, otherwise a line at
//! intervals.

use std::fmt::Display;
use std::io::IsTerminal;
use std::ops::Range;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

/// Number of lines printed in a run if stderr is not a terminal.
const LINES: usize = 10;

/// Progress of the steps of a run, shown by one rank.
pub struct Progress {
    reports: bool,
    /// The redrawn line, on a terminal.
    bar: Option<ProgressBar>,
    start: Instant,
    /// Steps that were made before.
    first: usize,
    steps: usize,
    done: usize,
    /// Amount of data in one step, with its unit.
    a_step: (usize, &'static str),
    /// Description of the last step.
    last: String,
}

impl Progress {
    /// Starts the clock of a run of these steps, which begin with 0 unless it resumes. `a_step` is
    /// the amount of data in one step. Shows progress only if `reports` is true.
    pub fn new(reports: bool, steps: Range<usize>, a_step: (usize, &'static str)) -> Self {
        // The message alone, because indicatif draws once for each change of message, position or
        // length.
        let style = ProgressStyle::with_template("{msg}").expect("the template is well formed");
        let bar = (reports && std::io::stderr().is_terminal())
            .then(|| ProgressBar::no_length().with_style(style));
        let Range {
            start: first,
            end: steps,
        } = steps;
        Self {
            reports,
            bar,
            start: Instant::now(),
            first,
            steps,
            done: first,
            a_step,
            last: String::new(),
        }
    }

    /// Counts a step with these results, such as `loss 0.4321`.
    pub fn step(&mut self, results: impl Display) {
        self.done += 1;
        let Self {
            first,
            done,
            steps,
            a_step: (_, unit),
            ..
        } = *self;
        self.last = format!(
            "step {done:>3}/{steps}  {results}  {:.0} {unit}/s",
            self.per_s()
        );
        match &self.bar {
            Some(bar) => {
                let left = self.start.elapsed().as_secs_f64() / (done - first) as f64
                    * (steps - done) as f64;
                bar.set_message(format!("{}  {left:.0} s left", self.last));
            }
            None if self.reports
                && (done.is_multiple_of(steps.div_ceil(LINES))
                    || [first + 1, steps].contains(&done)) =>
            {
                eprintln!("{}", self.last);
            }
            None => {}
        }
    }

    /// Prints a line between two steps.
    pub fn note(&self, text: impl Display) {
        match &self.bar {
            Some(bar) => bar.println(text.to_string()),
            None if self.reports => eprintln!("{text}"),
            None => {}
        }
    }

    /// Ends the line. Returns the amount of data per second over the run.
    pub fn finish(self) -> f64 {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            eprintln!("{}", self.last);
        }
        self.per_s()
    }

    fn per_s(&self) -> f64 {
        ((self.done - self.first) * self.a_step.0) as f64 / self.start.elapsed().as_secs_f64()
    }
}
