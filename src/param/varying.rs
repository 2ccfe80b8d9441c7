//! [`Varying`]: a parameter as computations read it that differ between tensor-parallel ranks.

use std::sync::{Arc, OnceLock};

use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

use super::graph::Term;
use super::pass::Pass;
use super::shards::plain;
use crate::autodiff::{self, Retain};

/// The value of a parameter that the tensor-parallel ranks hold whole, with a node of its own in the
/// graph, made when it is first asked for: the gradients that arrive there are terms of a sum, and
/// the unit adds up all its terms at once.
///
/// Ranks of a tensor-parallel mesh run one program, so all of them ask, or none does.
#[derive(Debug)]
pub(super) struct Varying {
    pub(super) pass: Arc<Pass>,
    pub(super) position: usize,
    pub(super) base: DispatchTensor,
    pub(super) token: DispatchTensor,
    /// The value for computations that are the same on all tensor-parallel ranks.
    pub(super) value: DispatchTensor,
    pub(super) retain: Retain,
    pub(super) handle: OnceLock<DispatchTensor>,
}

impl Varying {
    /// The handle for computations that differ.
    pub(super) fn get(&self) -> DispatchTensor {
        self.handle.get_or_init(|| self.make()).clone()
    }

    fn make(&self) -> DispatchTensor {
        // Nobody wants the gradient of a frozen parameter, so its terms need not be added up.
        if !Dispatch::is_tracked(&self.base) {
            return self.value.clone();
        }
        self.pass.buffer.expect_term(self.position);
        let op = Term {
            pass: self.pass.clone(),
            position: self.position,
            retain: self.retain,
            value: Mutex::new(Some(plain(self.value.clone()))),
        };
        autodiff::binary(self.base.clone(), self.token.clone(), Arc::new(op))
    }
}
