//! [`SavedRngState`]: random state from which a checkpointed block starts.

use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::dtensor::ops::random::{self, RngState};
use crate::memory::is_host;

/// State of random numbers at the start of a block: that of the thread's [stream](random), and the seed of burn's
/// own state.
///
/// burn's state can be seeded, but not read. So each block reseeds it with a number that is drawn from it. On
/// devices other than the CPU, reading that number would wait for the device, so it is drawn from the thread's
/// stream instead.
pub(super) struct SavedRngState {
    stream: Option<RngState>,
    device: Device,
    seed: u64,
}

impl SavedRngState {
    /// Saves the state and reseeds burn's, when a block starts on a device without autodiff.
    pub(super) fn start(device: Device) -> Self {
        let stream = random::started();
        let seed = next_seed(&device);
        device.seed(seed);
        Self { stream, device, seed }
    }

    /// Restores the saved state for the recomputation of the block. Dropping the returned guard ends the replay.
    pub(super) fn replay(self) -> Replayed {
        let Self { stream, device, seed } = self;
        let after = if is_host(&device) { next_seed(&device) } else { random::fold_in(seed, 1) };
        let replayed = Replayed { stream: random::started(), device, seed: after };
        random::restart(stream);
        if !is_host(&replayed.device) {
            // The first run drew the block's seed from the stream, so the replay does too.
            next_seed(&replayed.device);
        }
        replayed.device.seed(seed);
        replayed
    }
}

/// Draws a seed for burn's state.
fn next_seed(device: &Device) -> u64 {
    match is_host(device) {
        true => {
            let drawn = Tensor::<1>::random([1], Distribution::Default, (device, DType::F64));
            drawn.into_scalar::<f64>().to_bits()
        }
        false => random::next_device_seed(),
    }
}

/// Guard of a replay. When it is dropped, the random state continues as if there had been no replay.
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
