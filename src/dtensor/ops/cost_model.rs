//! [`CostModel`]: what collectives cost, where a program knows.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::mesh::DeviceMesh;
use crate::placement::CommVolume;

/// How long collectives take, to choose an operator's layouts by.
///
/// Without one, counts decide, so that a program's layouts do not depend on how long its tensors are: the
/// fewest collectives in forward, then the least sent in it, then backward
/// ([operators](super#how-layouts-are-chosen)). With one, time decides, of tensors as long as they are, forward
/// and backward together: a collective takes what a [call](Self::with_latency) does, and what a rank sends by the
/// [bandwidth](Self::with_bandwidth) of the mesh dimension that it is sent along, of
/// several the slowest.
///
/// ```
/// use burn_dtensor::dtensor::ops::CostModel;
///
/// // Ranks of one host, and hosts on a slower network.
/// let model = CostModel::default().with_bandwidth(80e9).with_bandwidth_of("hosts", 20e9);
/// let layouts = model.run(|| "operators, whose layouts are chosen by time");
/// # let _ = layouts;
/// ```
///
/// What several mesh dimensions send as one collective counts as one. A halo of a convolution or pool counts
/// nothing.
///
/// Every rank of a mesh must run its operators under an equal one, or they choose differently: their
/// collectives then end with [`CommError::Mismatch`](crate::comm::CommError::Mismatch).
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    call: f64,
    bandwidth: f64,
    /// Along mesh dimensions of these names.
    bandwidths: BTreeMap<String, f64>,
    backward: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { call: 6.6e-6, bandwidth: 87.7e9, bandwidths: BTreeMap::new(), backward: 1.0 }
    }
}

impl CostModel {
    /// With so many seconds that a collective takes whatever it sends. Default: 6.6e-6, what PyTorch counts.
    ///
    /// # Panics
    /// If it is negative, or no number.
    #[must_use]
    pub fn with_latency(self, seconds: f64) -> Self {
        assert!(seconds >= 0.0 && seconds.is_finite(), "a collective takes 0 seconds or more, not {seconds}");
        Self { call: seconds, ..self }
    }

    /// With so many bytes that a rank sends in a second. Default: 87.7e9, what PyTorch counts between devices of a
    /// host.
    ///
    /// # Panics
    /// If it is not positive.
    #[must_use]
    pub fn with_bandwidth(self, bytes_per_second: f64) -> Self {
        Self { bandwidth: checked(bytes_per_second), ..self }
    }

    /// With another [bandwidth](Self::with_bandwidth) along mesh dimensions of this name.
    ///
    /// # Panics
    /// If it is not positive.
    #[must_use]
    pub fn with_bandwidth_of(mut self, mesh_dim: impl Into<String>, bytes_per_second: f64) -> Self {
        self.bandwidths.insert(mesh_dim.into(), checked(bytes_per_second));
        self
    }

    /// With what a second in backward counts beside one in forward. Default: 1; 0 where no gradients are taken. Of
    /// operands that can have one: whether an operand has is not asked, so that layouts are the same with and
    /// without.
    ///
    /// # Panics
    /// If it is negative, or no number.
    #[must_use]
    pub fn with_backward(self, factor: f64) -> Self {
        assert!(factor >= 0.0 && factor.is_finite(), "backward counts 0 times or more, not {factor}");
        Self { backward: factor, ..self }
    }

    /// Runs `f` with operators of the calling rank choosing by this model.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        DecisionScope { model: self.number(), ..DecisionScope::current() }.run(f)
    }

    /// Its number among all that this thread has run, from 1.
    fn number(&self) -> u32 {
        MODELS.with_borrow_mut(|models| {
            let known = models.iter().position(|known| **known == *self).unwrap_or_else(|| {
                models.push(Arc::new(self.clone()));
                models.len() - 1
            });
            known as u32 + 1
        })
    }

    /// The times of collectives on `mesh`.
    fn times(&self, mesh: &DeviceMesh) -> Times {
        let bandwidth = |name: Option<&String>| name.and_then(|name| self.bandwidths.get(name)).copied();
        let bandwidths = (0..mesh.ndim()).map(|dim| bandwidth(mesh.names().get(dim)).unwrap_or(self.bandwidth));
        Times { call: self.call, bandwidths: bandwidths.collect(), backward: self.backward }
    }
}

fn checked(bytes_per_second: f64) -> f64 {
    assert!(bytes_per_second > 0.0, "a bandwidth is positive, not {bytes_per_second}");
    bytes_per_second
}

/// What decisions of the calling thread depend on beside rule and inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecisionScope {
    /// Which [`CostModel`], counted from 1; 0 for none.
    pub(super) model: u32,
    /// Whether decisions are to be [explained](super::explain).
    pub(super) explained: bool,
}

thread_local! {
    static SCOPE: Cell<DecisionScope> = const { Cell::new(DecisionScope { model: 0, explained: false }) };
    /// Few: a number stays one model's as long as the thread lives.
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

    /// The times of collectives on `mesh`, if there is a model.
    pub(super) fn times(self, mesh: &DeviceMesh) -> Option<Times> {
        let model = (self.model as usize).checked_sub(1)?;
        MODELS.with_borrow(|models| Some(models[model].times(mesh)))
    }
}

/// The times of collectives on one mesh.
#[derive(Debug)]
pub(super) struct Times {
    pub(super) call: f64,
    /// By mesh dimension.
    pub(super) bandwidths: Vec<f64>,
    pub(super) backward: f64,
}

impl Times {
    /// Of a collective on a tensor of so many bytes, in picoseconds.
    pub(super) fn of(&self, sent: &CommVolume, bytes: u64) -> u128 {
        // What goes along several mesh dimensions goes as fast as along the slowest.
        let bandwidth = sent.mesh_dims.iter().map(|&dim| self.bandwidths[dim]).fold(f64::INFINITY, f64::min);
        let seconds = self.call + sent.bytes(bytes) as f64 / bandwidth;
        (seconds * 1e12).round() as u128
    }

    /// The same, of one in backward.
    pub(super) fn of_backward(&self, sent: &CommVolume, bytes: u64) -> u128 {
        (self.of(sent, bytes) as f64 * self.backward).round() as u128
    }
}
