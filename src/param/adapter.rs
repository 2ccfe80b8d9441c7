//! LoRA adapters of distributed parameters.
//!
//! A burn parameter can have only one reparameterization, and that is
//! [`DistributedParameter`](super::DistributedParameter). It therefore contains the adapter, and presents the
//! adapter's factors to visitors and mappers at the paths where burn does, `weight.lora.a` and `weight.lora.b`. The
//! factors are ordinary parameters of the unit.
//!
//! ```text
//! burn's model       weight ── LoraAdapter { a, b, scale }
//! in between         weight                                  LoraAdapter { a, b, scale }       separate
//! distributed        weight ── DistributedParameter { adapter: LoraAdapter { a ── .., b ── .., scale } }
//! ```

use std::cell::RefCell;

use burn::module::{LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::states::copying;
use crate::burn_compat::{ADAPTER, Adapters, ModulePath, REPARAMETERIZATION, TensorMapper, map_tensors};

/// Removes the adapters from the distributed parameters of `model`, and returns them.
pub(super) fn take<M: Module>(model: M) -> (M, Adapters) {
    TAKEN.set(Some(Vec::new()));
    let mut paths = Paths { last: String::new(), adapted: Vec::new() };
    let model = copying(|| map_tensors(model, &mut paths));
    let taken = TAKEN.take().unwrap_or_default();
    (model, paths.adapted.into_iter().zip(taken).collect())
}

thread_local! {
    /// Destination of the adapters of mapped parameters while [`take`] runs; `None` otherwise.
    static TAKEN: RefCell<Option<Vec<LoraAdapter>>> = const { RefCell::new(None) };
}

/// Returns the adapter of a parameter that is being mapped, or moves it to `TAKEN` and returns `None` while
/// [`take`] runs.
fn left(adapter: LoraAdapter) -> Option<LoraAdapter> {
    TAKEN.with_borrow_mut(|taken| match taken {
        Some(taken) => {
            taken.push(adapter);
            None
        }
        None => Some(adapter),
    })
}

/// Presents the adapter's factors to `visitor` as burn does: next to the parameter, instead of inside the
/// reparameterization named `around` that contains them.
pub(super) fn visit<V: ModuleVisitor>(adapter: &LoraAdapter, around: &str, visitor: &mut V) {
    visitor.exit_module(around, REPARAMETERIZATION);
    visitor.enter_module(ADAPTER, REPARAMETERIZATION);
    adapter.visit(visitor);
    visitor.exit_module(ADAPTER, REPARAMETERIZATION);
    visitor.enter_module(around, REPARAMETERIZATION);
}

/// Does the same as [`visit`] for a mapper. Returns the mapped adapter, or `None` if [`take`] removed it.
pub(super) fn map<M: ModuleMapper>(adapter: LoraAdapter, around: &str, mapper: &mut M) -> Option<LoraAdapter> {
    mapper.exit_module(around, REPARAMETERIZATION);
    mapper.enter_module(ADAPTER, REPARAMETERIZATION);
    let adapter = left(adapter).map(|adapter| adapter.map(mapper));
    mapper.exit_module(ADAPTER, REPARAMETERIZATION);
    mapper.enter_module(around, REPARAMETERIZATION);
    adapter
}

/// A mapper that collects the paths of the distributed parameters whose adapters are removed. burn's own adapters
/// stay.
struct Paths {
    /// Path of the parameter that was mapped last.
    last: String,
    adapted: Vec<String>,
}

impl TensorMapper for Paths {
    fn exit(&mut self, _: &ModulePath) {
        let taken = TAKEN.with_borrow(|taken| taken.as_ref().map_or(0, Vec::len));
        if taken > self.adapted.len() {
            self.adapted.push(self.last.clone());
        }
    }

    fn float<const D: usize>(&mut self, path: &ModulePath, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.last = path.join();
        param
    }
}
