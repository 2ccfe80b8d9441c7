//! [`Pass`]: one forward through a unit, and the backward that belongs to it.

use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::buffer::UnitBuffer;
use super::order::{Order, Place};
use super::progress::Progress;
use crate::Error;

/// One forward through a unit: what is gathered of it, whose gradients those are, and when they are reduced.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph inside would
/// keep an abandoned graph alive for ever.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) buffer: UnitBuffer,
    /// The shards' leaves; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    pub(super) passes: Arc<Passes>,
    /// Its place among them; `None` if nothing is reduced.
    place: Option<Place>,
    /// Of each tracked input, whether its gradient has been passed on.
    inputs_seen: Mutex<Vec<bool>>,
    pub(super) progress: Progress,
}

/// The order of a rank's passes.
pub(super) type Passes = Order<Weak<Pass>>;

impl Pass {
    pub(super) fn new(
        buffer: UnitBuffer,
        leaves: Vec<Option<NodeId>>,
        passes: Arc<Passes>,
        place: Option<Place>,
    ) -> Arc<Self> {
        Arc::new(Self { buffer, leaves, passes, place, inputs_seen: Mutex::default(), progress: Progress::default() })
    }

    /// Whether it trains a parameter.
    pub(super) fn is_reduced(&self) -> bool {
        self.place.is_some()
    }

    /// Its number among all passes of the rank.
    #[cfg(feature = "testing")]
    pub(super) fn number(&self) -> Option<u64> {
        self.place.map(Place::number)
    }

    /// Collects the gradient of a whole parameter until the unit's reduction.
    ///
    /// A frozen weight's is dropped.
    pub(super) fn collect(&self, position: usize, grad: DispatchTensor) {
        if self.leaves[position].is_some() {
            self.buffer.reduce_in(position, grad);
        }
    }

    /// All gradients are there: nobody of this backward reads the weights any more. Returns the passes
    /// to reduce now, in order.
    pub(super) fn finish(self: &Arc<Self>) -> Vec<Weak<Self>> {
        self.buffer.end();
        if self.passes.padded() {
            self.buffer.drop_zeros();
        }
        self.place.map_or_else(Vec::new, |place| self.passes.ready(place, Arc::downgrade(self)))
    }

    /// Reduces the collected gradients: the leaf and gradient shard of every trainable parameter that
    /// a rank used. On one that did not use it, it counts as zeros.
    pub(super) fn reduce(&self) -> Vec<(NodeId, DispatchTensor)> {
        let trained = self.leaves.iter().enumerate().filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves): (Vec<_>, Vec<_>) = trained.unzip();
        let shards = self.buffer.reduce(&positions).unwrap_or_else(|error| Error::from(error).unwind());
        leaves.into_iter().zip(shards).filter_map(|(leaf, shard)| Some((leaf, shard?))).collect()
    }

    /// A new tracked input; returns its number.
    pub(super) fn add_input(&self) -> usize {
        let mut seen = self.inputs_seen.lock();
        seen.push(false);
        seen.len() - 1
    }

    /// The input's gradient has been passed on.
    pub(super) fn see_input(&self, input: usize) {
        self.inputs_seen.lock()[input] = true;
    }

    pub(super) fn input_seen(&self, input: usize) -> bool {
        self.inputs_seen.lock()[input]
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.passes.leave(place);
        }
    }
}
