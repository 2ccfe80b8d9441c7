//! [`RedistributePolicy`]: whether an operator may change its inputs' layouts by itself.

use std::cell::Cell;

/// What an operator does with inputs that its rule cannot take as they are.
///
/// It is about forward. In backward the gradient of a replicated input that ranks compute different
/// things with is [summed](crate::dtensor::DTensor::vary) under either policy: nothing that could be
/// written instead would spare that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RedistributePolicy {
    /// Redistributes them, as cheaply as the rule allows.
    #[default]
    Auto,
    /// Fails with [`DTensorError::ImplicitRedistribution`](crate::dtensor::DTensorError::ImplicitRedistribution),
    /// which says what to write. What a [`Style`](crate::parallel::Style) asks for is no secret, and
    /// goes through.
    Deny,
}

thread_local! {
    static POLICY: Cell<RedistributePolicy> = const { Cell::new(RedistributePolicy::Auto) };
}

impl RedistributePolicy {
    /// Runs `f` under this policy, on the calling rank.
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

    /// The calling rank's policy.
    pub fn current() -> Self {
        POLICY.get()
    }
}
