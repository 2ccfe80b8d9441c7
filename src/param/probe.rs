//! [`probe`]: records what units return, and the unit in which a program panics.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

use super::io::TensorTree;
use super::shards::plain;
use crate::comm::forget_panic;

/// Record of a program that ran with a [`probe`].
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// The float tensors that each call of [`unit`](super::unit()) returned, with the unit's label. A unit inside
    /// another one returns first.
    pub(crate) outputs: Vec<(Arc<str>, Vec<HostTensor>)>,
    /// Label of the innermost unit in which the program panicked.
    pub(crate) panicked_in: Option<Arc<str>>,
}

/// The values of a float tensor, in host memory.
#[derive(Debug, Clone)]
pub(crate) struct HostTensor {
    pub(crate) shape: Vec<usize>,
    data: TensorData,
}

thread_local! {
    static PROBE: RefCell<Option<Probe>> = const { RefCell::new(None) };
}

/// Runs `program` on this thread and returns its result, or the payload of its panic, with a record of the units that
/// it entered by [`unit`](super::unit()).
pub(crate) fn probe<T>(program: impl FnOnce() -> T) -> (thread::Result<T>, Probe) {
    let around = PROBE.replace(Some(Probe::default()));
    let result = catch_unwind(AssertUnwindSafe(program));
    forget_panic();
    (result, PROBE.replace(around).unwrap_or_default())
}

impl HostTensor {
    /// Copies a float tensor.
    pub(crate) fn of(tensor: DispatchTensor) -> Self {
        let shape = tensor.shape();
        let flat = Dispatch::float_reshape(plain(tensor), [shape.num_elements()].into());
        Self { shape: shape.to_vec(), data: Tensor::<1>::from_dispatch(flat).into_data() }
    }

    /// Returns the values in row-major order.
    pub(crate) fn values(&self) -> Vec<f64> {
        self.data.iter::<f64>().collect()
    }
}

/// Guard of a unit whose forward runs with a probe.
pub(super) struct ProbedUnit(Arc<str>);

impl ProbedUnit {
    /// Records that the unit is entered. Returns `None` without a probe.
    pub(super) fn enter(label: &Arc<str>) -> Option<Self> {
        PROBE.with_borrow(Option::is_some).then(|| Self(label.clone()))
    }

    /// Records what the unit returns.
    pub(super) fn leave<O: TensorTree>(self, output: O) -> O {
        let mut tensors = Vec::new();
        let output = output.map_floats(&mut |tensor| {
            // The elements of quantized tensors cannot be read as floats.
            tensors.extend(tensor.dtype().is_float().then(|| HostTensor::of(tensor.clone())));
            tensor
        });
        self.note(|probe, label| probe.outputs.push((label.clone(), tensors)));
        output
    }

    fn note(&self, note: impl FnOnce(&mut Probe, &Arc<str>)) {
        PROBE.with_borrow_mut(|probe| probe.as_mut().map(|probe| note(probe, &self.0)));
    }
}

impl Drop for ProbedUnit {
    fn drop(&mut self) {
        if thread::panicking() {
            self.note(|probe, label| _ = probe.panicked_in.get_or_insert_with(|| label.clone()));
        }
    }
}
