//! [`CostModel`]: times of collectives, by which layouts are chosen.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::mesh::DeviceMesh;
use crate::placement::CommVolume;

/// Latency and bandwidth of collectives, by which an operator's layouts are chosen.
///
/// Without a model, counts decide, so that a program's layouts do not depend on the lengths of its
/// tensors: first the fewest collectives in forward, then the least volume in forward, then
/// backward ([operators](super#how-layouts-are-chosen)). With a model, the total time of forward
/// and backward decides, computed from actual lengths. A collective takes its
/// [latency](Self::with_latency) plus the bytes that a rank sends, divided by the
/// [bandwidth](Self::with_bandwidth) of the mesh dimension. If it runs along several mesh
/// dimensions, the slowest one counts.
///
/// ```
/// use burn_dtensor::dtensor::ops::CostModel;
///
/// // Ranks of one host are connected by a fast network, hosts by a slower one.
/// let model = CostModel::default().with_bandwidth(80e9).with_bandwidth_of("hosts", 20e9);
/// let layouts = model.run(|| "operators, whose layouts are chosen by time");
/// # let _ = layouts;
/// ```
///
/// A collective over several mesh dimensions counts as one. The halo of a convolution or pool does
/// not count.
///
/// All ranks of a mesh must use an equal model. Otherwise they choose different layouts, and their
/// collectives end with [`CommError::Mismatch`](crate::comm::CommError::Mismatch).
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    call: f64,
    bandwidth: f64,
    /// Bandwidths along mesh dimensions of these names.
    bandwidths: BTreeMap<String, f64>,
    backward: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            call: 6.6e-6,
            bandwidth: 87.7e9,
            bandwidths: BTreeMap::new(),
            backward: 1.0,
        }
    }
}

impl CostModel {
    /// Sets the latency of a collective, in seconds. Default: 6.6e-6, as in PyTorch's cost model.
    ///
    /// # Panics
    /// If the latency is negative or not a finite number.
    #[must_use]
    pub fn with_latency(self, seconds: f64) -> Self {
        assert!(
            seconds >= 0.0 && seconds.is_finite(),
            "a latency must be finite and 0 seconds or more, not {seconds}"
        );
        Self {
            call: seconds,
            ..self
        }
    }

    /// Sets the bandwidth at which a rank sends, in bytes per second. Default: 87.7e9, PyTorch's
    /// value between devices of a host.
    ///
    /// # Panics
    /// If the bandwidth is not positive.
    #[must_use]
    pub fn with_bandwidth(self, bytes_per_second: f64) -> Self {
        Self {
            bandwidth: checked(bytes_per_second),
            ..self
        }
    }

    /// Sets the [bandwidth](Self::with_bandwidth) along mesh dimensions of this name.
    ///
    /// # Panics
    /// If the bandwidth is not positive.
    #[must_use]
    pub fn with_bandwidth_of(mut self, mesh_dim: impl Into<String>, bytes_per_second: f64) -> Self {
        self.bandwidths
            .insert(mesh_dim.into(), checked(bytes_per_second));
        self
    }

    /// Sets the weight of a second in backward relative to one in forward. Default: 1. Use 0 if no
    /// gradients are computed. The weight applies to all operands that can have a gradient, whether
    /// or not one is computed, so that layouts are the same with and without gradients.
    ///
    /// # Panics
    /// If the weight is negative or not a finite number.
    #[must_use]
    pub fn with_backward(self, factor: f64) -> Self {
        assert!(
            factor >= 0.0 && factor.is_finite(),
            "the backward weight must be finite and 0 or more, not {factor}"
        );
        Self {
            backward: factor,
            ..self
        }
    }

    /// Runs `f`. Operators of the calling rank in it choose their layouts by this model. Local; all
    /// ranks of a mesh must do the same.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        DecisionScope {
            model: self.number(),
            ..DecisionScope::current()
        }
        .run(f)
    }

    /// Returns the number of this model among all that this thread has run, counted from 1.
    fn number(&self) -> u32 {
        MODELS.with_borrow_mut(|models| {
            let known = models
                .iter()
                .position(|known| **known == *self)
                .unwrap_or_else(|| {
                    models.push(Arc::new(self.clone()));
                    models.len() - 1
                });
            known as u32 + 1
        })
    }

    /// Returns the times of collectives on `mesh`.
    fn times(&self, mesh: &DeviceMesh) -> Times {
        let bandwidth =
            |name: Option<&String>| name.and_then(|name| self.bandwidths.get(name)).copied();
        let bandwidths =
            (0..mesh.ndim()).map(|dim| bandwidth(mesh.names().get(dim)).unwrap_or(self.bandwidth));
        Times {
            call: self.call,
            bandwidths: bandwidths.collect(),
            backward: self.backward,
        }
    }
}

fn checked(bytes_per_second: f64) -> f64 {
    assert!(
        bytes_per_second > 0.0,
        "a bandwidth must be positive, not {bytes_per_second}"
    );
    bytes_per_second
}

/// State of the calling thread on which decisions depend, in addition to rule and inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecisionScope {
    /// Number of the [`CostModel`], counted from 1; 0 without one.
    pub(super) model: u32,
    /// True if decisions are to be [explained](super::explain).
    pub(super) explained: bool,
}

thread_local! {
    static SCOPE: Cell<DecisionScope> = const { Cell::new(DecisionScope { model: 0, explained: false }) };
    /// Models of this thread, by number. They are never removed: the number identifies a model as
    /// long as the thread lives.
    static MODELS: RefCell<Vec<Arc<CostModel>>> = const { RefCell::new(Vec::new()) };
}

impl DecisionScope {
    #[inline(always)]
    pub(super) fn current() -> Self {
        SCOPE.get()
    }

    pub(super) fn run<T>(self, f: impl FnOnce() -> T) -> T {
        struct RestoreScope(DecisionScope);
        impl Drop for RestoreScope {
            fn drop(&mut self) {
                SCOPE.set(self.0);
            }
        }
        let _restore = RestoreScope(SCOPE.replace(self));
        f()
    }

    /// Returns the times of collectives on `mesh`, if a model is in force.
    pub(super) fn times(self, mesh: &DeviceMesh) -> Option<Times> {
        let model = (self.model as usize).checked_sub(1)?;
        MODELS.with_borrow(|models| Some(models[model].times(mesh)))
    }
}

/// Times of collectives on one mesh.
#[derive(Debug)]
pub(super) struct Times {
    pub(super) call: f64,
    /// Bandwidth of each mesh dimension.
    pub(super) bandwidths: Vec<f64>,
    pub(super) backward: f64,
}

impl Times {
    /// Returns the time of a collective on a tensor of `bytes` bytes, in picoseconds.
    pub(super) fn of(&self, sent: &CommVolume, bytes: u64) -> u128 {
        // Along several mesh dimensions, the slowest one counts.
        let bandwidth = sent
            .mesh_dims
            .iter()
            .map(|&dim| self.bandwidths[dim])
            .fold(f64::INFINITY, f64::min);
        let seconds = self.call + sent.bytes(bytes) as f64 / bandwidth;
        (seconds * 1e12).round() as u128
    }

    /// Returns the time of a collective in backward, in weighted picoseconds.
    pub(super) fn of_backward(&self, sent: &CommVolume, bytes: u64) -> u128 {
        (self.of(sent, bytes) as f64 * self.backward).round() as u128
    }
}
