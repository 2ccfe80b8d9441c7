//! [`SavedRngState`]: the random state that a checkpointed block starts from.

use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::dtensor::ops::random::{self, RngState};
use crate::memory::is_host;

/// Where random numbers of a block begin: the thread's [stream](random), and burn's own state.
///
/// burn's state can be started, and not be read. So each block starts it anew, from a number that is drawn from it; on
/// other devices than the CPU, where reading it would wait for the device, from one of the thread's stream.
pub(super) struct SavedRngState {
    stream: Option<RngState>,
    device: Device,
    seed: u64,
}

impl SavedRngState {
    /// A block begins, on a plain device.
    pub(super) fn start(device: Device) -> Self {
        let stream = random::started();
        let seed = next_seed(&device);
        device.seed(seed);
        Self { stream, device, seed }
    }

    /// The same block begins again: until what is returned is dropped.
    pub(super) fn replay(self) -> Replayed {
        let Self { stream, device, seed } = self;
        let after = if is_host(&device) { next_seed(&device) } else { random::fold_in(seed, 1) };
        let replayed = Replayed { stream: random::started(), device, seed: after };
        random::restart(stream);
        if !is_host(&replayed.device) {
            // As for the first time: the block's seed was drawn from it.
            next_seed(&replayed.device);
        }
        replayed.device.seed(seed);
        replayed
    }
}

/// A number that burn's state is started with.
fn next_seed(device: &Device) -> u64 {
    match is_host(device) {
        true => {
            let drawn = Tensor::<1>::random([1], Distribution::Default, (device, DType::F64));
            drawn.into_scalar::<f64>().to_bits()
        }
        false => random::next_device_seed(),
    }
}

/// Goes on, once dropped, as if there had been no replay.
pub(super) struct Replayed {
    stream: Option<RngState>,
    device: Device,
    seed: u64,
}

impl Drop for Replayed {
    fn drop(&mut self) {
        random::restart(self.stream);
        self.device.seed(self.seed);
    }
}
