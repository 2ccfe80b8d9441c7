//! [`FailureArbiter`]: which failure is the first. Pure state.

use crate::comm::backend::Failure;

/// The first failure of a world, as far as this process knows it. Among processes, one decides
/// which failure is the first, and the others wait for its decision.
#[derive(Default)]
pub(crate) struct FailureArbiter {
    /// The first failure. It never changes.
    decided: Option<Failure>,
    /// First failure found in this process, while another process decides.
    found: Option<Failure>,
    /// True if another process decides.
    defers: bool,
    /// True if the other processes have not been notified of the failure yet.
    is_unsent: bool,
}

impl FailureArbiter {
    /// Returns the first failure, once it is decided.
    pub fn decided(&self) -> Option<&Failure> {
        self.decided.as_ref()
    }

    /// Returns the first failure as far as this process knows it.
    pub fn known(&self) -> Option<&Failure> {
        self.decided.as_ref().or(self.found.as_ref())
    }

    /// Records a failure that was found in this process; later ones are ignored. Returns it if it
    /// is decided to be the first.
    pub fn find(&mut self, failure: Failure) -> Option<Failure> {
        if self.known().is_some() {
            return None;
        }
        self.is_unsent = true;
        self.found = Some(failure.clone());
        (!self.defers).then_some(failure)
    }

    /// Makes `failure` the first, unless the first was decided before.
    pub fn decide(&mut self, failure: Failure) {
        self.decided.get_or_insert(failure);
    }

    /// Leaves the decision to another process.
    pub fn defer(&mut self) {
        self.defers = true;
    }

    /// Returns true if this process has found a failure and does not know yet which failure is the
    /// first.
    pub fn is_undecided(&self) -> bool {
        self.decided.is_none() && self.found.is_some()
    }

    /// Makes this process decide, because the one that decided is lost or silent. Returns the
    /// failure that is the first then. The other processes may not have received what was sent to
    /// that one, so they are notified in any case.
    pub fn decide_here(&mut self) -> Option<Failure> {
        self.defers = false;
        self.is_unsent = self.known().is_some();
        self.found.clone()
    }

    /// Takes the failure of which the other processes must be notified, and whether this process
    /// decides that it is the first. Otherwise it is for the process that decides.
    pub fn take_unsent(&mut self) -> Option<(Failure, bool)> {
        let failure = self
            .known()
            .cloned()
            .filter(|_| std::mem::replace(&mut self.is_unsent, false))?;
        Some((failure, !self.defers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_defers_leaves_the_decision_to_another_until_that_one_is_silent() {
        let failure = || Failure::Panicked {
            rank: 2,
            message: "boom".into(),
        };
        let unsent = |arbiter: &mut FailureArbiter| {
            let (failure, decided) = arbiter.take_unsent()?;
            matches!(failure, Failure::Panicked { rank: 2, .. }).then_some(decided)
        };
        let mut arbiter = FailureArbiter::default();
        arbiter.defer();
        assert!(arbiter.find(failure()).is_none());
        assert_eq!(unsent(&mut arbiter), Some(false));
        assert_eq!((unsent(&mut arbiter), arbiter.is_undecided()), (None, true));
        let found = arbiter.decide_here().expect("a failure was found");
        arbiter.decide(found);
        // Also for the processes to which nothing was sent before.
        assert_eq!(unsent(&mut arbiter), Some(true));
        assert_eq!(
            (unsent(&mut arbiter), arbiter.is_undecided()),
            (None, false)
        );
    }
}
