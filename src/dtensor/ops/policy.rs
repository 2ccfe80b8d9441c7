//! [`RedistributePolicy`]: permits or forbids operators to redistribute their inputs implicitly.

use std::cell::Cell;

/// Policy for inputs whose placements fit no strategy of an operator's rule.
///
/// It applies to forward only. In backward, the gradient of a replicated input that enters
/// different computations on different ranks is [summed](crate::dtensor::DTensor::vary) under
/// either policy, because no explicit call could avoid that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RedistributePolicy {
    /// Redistributes the inputs as cheaply as the rule allows.
    #[default]
    Auto,
    /// Fails with
    /// [`DTensorError::ImplicitRedistribution`](crate::dtensor::DTensorError::ImplicitRedistribution),
    /// which names the call to insert. A redistribution that a [`Style`](crate::parallel::Style)
    /// requests is explicit and therefore allowed.
    Deny,
}

thread_local! {
    static POLICY: Cell<RedistributePolicy> = const { Cell::new(RedistributePolicy::Auto) };
}

impl RedistributePolicy {
    /// Runs `f` under this policy on the calling rank. Local.
    ///
    /// ```
    /// use burn_dtensor::dtensor::ops::RedistributePolicy;
    /// assert_eq!(RedistributePolicy::current(), RedistributePolicy::Auto);
    /// RedistributePolicy::Deny.run(|| assert_eq!(RedistributePolicy::current(), RedistributePolicy::Deny));
    /// ```
    pub fn run<T>(self, f: impl FnOnce() -> T) -> T {
        struct RestorePolicy(RedistributePolicy);
        impl Drop for RestorePolicy {
            fn drop(&mut self) {
                POLICY.set(self.0);
            }
        }
        let _restore = RestorePolicy(POLICY.replace(self));
        f()
    }

    /// Returns the policy of the calling rank.
    pub fn current() -> Self {
        POLICY.get()
    }
}
