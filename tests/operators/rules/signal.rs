//! Fourier transforms, and windows.

use burn::signal::{self as plain, StftOptions};
use burn::tensor::{Device, Float, Tensor};
use burn_dtensor::Result;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::signal;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::prove::{Case, CaseInput, case};

fn frames() -> StftOptions {
    StftOptions {
        hop_length: 2,
        ..StftOptions::new(4)
    }
}

fn frames_of_three() -> StftOptions {
    StftOptions {
        win_length: Some(3),
        center: false,
        onesided: false,
        ..frames()
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        case!("rfft", (x: 2 = [3, 4]) => signal::rfft(x, 1, None)),
        case!("rfft", (x: 2 = [6, 2]) => signal::rfft(x, -2, Some(4))),
        case!("rfft", (x: 2 = [3, 2]) => signal::rfft(x, 0, Some(8))),
        case!("irfft", (x: 2 = [3, 3], y: 2 = [3, 3]) => signal::irfft(x, y, 1, None)),
        case!("irfft", (x: 2 = [3, 2], y: 2 = [3, 2]) => signal::irfft(x, y, 0, Some(8))),
        case!("cfft", (x: 2 = [3, 4], y: 2 = [3, 4]) => signal::cfft(x, y, 1, None)),
        case!("cfft", (x: 2 = [6, 2], y: 2 = [6, 2]) => signal::cfft(x, y, 0, Some(8))),
        case!("stft", (x: 2 = [3, 6]) => signal::stft(x, None, frames())),
        case!("stft", (x: 2 = [3, 7], w: 1 = [3]) => signal::stft(x, Some(w), frames_of_three())),
        case!("istft", (x: 4 = [3, 3, 3, 2]) => signal::istft(x, None, None, frames())),
        case!("istft", (x: 4 = [3, 2, 4, 2], w: 1 positive = [3]) => {
            signal::istft(x, Some(w), Some(5), frames_of_three())
        }),
    ];
    cases.extend(windows());
    cases
}

/// Windows of even and odd sizes.
macro_rules! windows {
    ($($name:ident)*) => {
        [$(windows!($name 6), windows!($name 3)),*]
    };
    ($name:ident $size:literal) => {
        times(
            stringify!($name),
            $size,
            |device| plain::$name($size, $size == 6, device),
            |mesh, placements, device| signal::$name($size, $size == 6, mesh, placements, device),
        )
    };
}

fn windows() -> [Case; 6] {
    windows! { hann_window hamming_window blackman_window }
}

/// A window times an input, laid out as that.
fn times(
    name: &'static str,
    size: usize,
    plain: fn(&Device) -> Tensor<1>,
    sharded: fn(&DeviceMesh, &[Placement], &Device) -> Result<DTensor<1>>,
) -> Case {
    Case::new(
        name,
        [CaseInput::float("x", [size])],
        move |inputs| {
            let x = inputs[0].tensor::<1, Float>();
            plain(&x.device()) * x
        },
        move |inputs| {
            let x = inputs[0].tensor::<1, Float>();
            let made = |placement: &Placement| {
                placement
                    .shard_dim()
                    .map_or(Placement::Replicate, Placement::Shard)
            };
            let placements: Vec<Placement> = x.placements().iter().map(made).collect();
            sharded(x.mesh(), &placements, &x.device()).unwrap_or_else(|error| error.unwind()) * x
        },
    )
}
