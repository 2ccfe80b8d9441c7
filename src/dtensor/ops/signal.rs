//! Fourier transforms, with the names of [`burn::signal`]. Signals are independent; the dimension
//! that is transformed is not sharded. All transforms are linear.
//!
//! Lengths must be powers of two, as in burn.

use burn::signal as local;
use burn::signal::StftOptions;
use burn::tensor::{AsIndex, Tensor, TensorCreationOptions};

use super::args::{dim_of, operand_error};
use super::partial_rules::LINEAR;
use super::{EinsumRule, apply};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::factory::make;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;

const RFFT: EinsumRule =
    EinsumRule::new("rfft", ".._.. -> ..F.., ..F..").with_partial_rules(LINEAR);
const IRFFT: EinsumRule =
    EinsumRule::new("irfft", ".._.., .._.. -> ..T..").with_partial_rules(LINEAR);
const CFFT: EinsumRule =
    EinsumRule::new("cfft", "..T.., ..T.. -> ..F.., ..F..").with_partial_rules(LINEAR);
const STFT: EinsumRule = EinsumRule::new("stft", "b_, W* -> bFKC").linear(&[0]);
const ISTFT: EinsumRule = EinsumRule::new("istft", "bFKC, W* -> bT").linear(&[0]);

/// Returns the real and imaginary parts of the spectrum of real signals along `dim`, as burn's
/// [`rfft`](local::rfft). The transform has `n` elements, by default the length of `dim`. The
/// result has the `n / 2 + 1` frequencies from 0 up.
#[must_use]
#[track_caller]
pub fn rfft<const D: usize>(
    signal: DTensor<D>,
    dim: impl AsIndex,
    n: Option<usize>,
) -> (DTensor<D>, DTensor<D>) {
    let dim = dim_of("rfft", dim, D);
    let len = length("rfft", &signal, n.unwrap_or(signal.dims()[dim]));
    apply(&RFFT.at([dim]).lens([len / 2 + 1]), signal, |x, _| {
        local::rfft(x, dim, n)
    })
}

/// Returns the real signals with the given spectrum along `dim`, as burn's [`irfft`](local::irfft).
/// The signals have `n` elements, by default the number that the frequencies correspond to.
#[must_use]
#[track_caller]
pub fn irfft<const D: usize>(
    spectrum_re: DTensor<D>,
    spectrum_im: DTensor<D>,
    dim: impl AsIndex,
    n: Option<usize>,
) -> DTensor<D> {
    let dim = dim_of("irfft", dim, D);
    check_same_layout("irfft", &spectrum_re, &spectrum_im);
    let len = n.unwrap_or(2 * spectrum_re.dims()[dim].saturating_sub(1));
    let len = length("irfft", &spectrum_re, len);
    apply(
        &IRFFT.at([dim]).lens([len]),
        (spectrum_re, spectrum_im),
        |(re, im), _| local::irfft(re, im, dim, n),
    )
}

/// Returns the real and imaginary parts of the spectrum of complex signals along `dim`, as burn's
/// [`cfft`](local::cfft). The transform has `n` elements, by default the length of `dim`, and
/// equally many frequencies.
#[must_use]
#[track_caller]
pub fn cfft<const D: usize>(
    signal_re: DTensor<D>,
    signal_im: DTensor<D>,
    dim: impl AsIndex,
    n: Option<usize>,
) -> (DTensor<D>, DTensor<D>) {
    let dim = dim_of("cfft", dim, D);
    check_same_layout("cfft", &signal_re, &signal_im);
    let len = length("cfft", &signal_re, n.unwrap_or(signal_re.dims()[dim]));
    apply(
        &CFFT.at([dim]).lens([len]),
        (signal_re, signal_im),
        |(re, im), _| local::cfft(re, im, dim, n),
    )
}

/// Returns the spectra of overlapping frames of signals `[batch, time]`, as burn's
/// [`stft`](local::stft): `[batch, frames, frequencies, 2]`, where the last dimension contains real
/// and imaginary parts.
#[must_use]
#[track_caller]
pub fn stft(signal: DTensor<2>, window: Option<DTensor<1>>, options: StftOptions) -> DTensor<4> {
    let StftOptions {
        n_fft,
        hop_length,
        center,
        ..
    } = options;
    check("stft", &signal, window.as_ref(), options);
    let [_, len] = signal.dims();
    if len < n_fft && (!center || len <= n_fft / 2) {
        let why = format!("the signal is too short for frames of {n_fft}");
        operand_error("stft", &[signal.shape()], why).unwind();
    }
    let padded = if center { len + 2 * (n_fft / 2) } else { len };
    let frames = 1 + (padded - n_fft) / hop_length;
    apply(
        &STFT.lens([frames, frequencies(options), 2]),
        (signal, window),
        |(signal, window), _| local::stft(signal, window, options),
    )
}

/// Returns the signals `[batch, time]` with the spectra `[batch, frames, frequencies, 2]`, as
/// burn's [`istft`](local::istft). They have `length` elements, by default the number that the
/// frames cover.
#[must_use]
#[track_caller]
pub fn istft(
    stft_matrix: DTensor<4>,
    window: Option<DTensor<1>>,
    length: Option<usize>,
    options: StftOptions,
) -> DTensor<2> {
    let StftOptions {
        n_fft,
        hop_length,
        center,
        ..
    } = options;
    check("istft", &stft_matrix, window.as_ref(), options);
    let [_, frames, found, parts] = stft_matrix.dims();
    let wanted = frequencies(options);
    if frames == 0 || found != wanted || parts != 2 {
        let why = format!("spectra must be [batch, frames, {wanted}, 2] with at least 1 frame");
        operand_error("istft", &[stft_matrix.shape()], why).unwind();
    }
    let reach = n_fft + (frames - 1) * hop_length - if center { 2 * (n_fft / 2) } else { 0 };
    apply(
        &ISTFT.lens([length.unwrap_or(reach)]),
        (stft_matrix, window),
        |(spectra, window), _| local::istft(spectra, window, length, options),
    )
}

macro_rules! windows {
    ($($name:ident)*) => {$(
        #[doc = concat!("Makes a window of `size` elements, as burn's [`", stringify!($name), "`](local::", stringify!($name), ").")]
        ///
        /// # Errors
        /// As for [all factories](DTensor#factories).
        pub fn $name(
            size: usize,
            periodic: bool,
            mesh: &DeviceMesh,
            placements: &[Placement],
            options: impl Into<TensorCreationOptions>,
        ) -> Result<DTensor<1>> {
            make(stringify!($name), [size], mesh, placements, |part| {
                let window: Tensor<1> = local::$name(size, periodic, options);
                // Detached, because the computation of the window would be in the graph of some
                // ranks only.
                window.slice([part.slices[0].clone()]).detach()
            })
        }
    )*};
}

windows! { hann_window hamming_window blackman_window }

/// Returns `len`, after checking that a transform can have this length.
#[track_caller]
fn length<const D: usize>(operator: &'static str, signal: &DTensor<D>, len: usize) -> usize {
    if !len.is_power_of_two() {
        let why =
            format!("a transform of {len} elements is not supported. Set `n` to a power of two");
        operand_error(operator, &[signal.shape()], why).unwind();
    }
    len
}

#[track_caller]
fn check_same_layout<const D: usize>(operator: &'static str, re: &DTensor<D>, im: &DTensor<D>) {
    if re.dims() != im.dims() {
        operand_error(
            operator,
            &[re.shape(), im.shape()],
            "real and imaginary parts must have equal shapes",
        )
        .unwind();
    }
}

#[track_caller]
fn check<const D: usize>(
    operator: &'static str,
    x: &DTensor<D>,
    window: Option<&DTensor<1>>,
    options: StftOptions,
) {
    let StftOptions {
        n_fft,
        hop_length,
        win_length,
        ..
    } = options;
    let len = win_length.unwrap_or(n_fft);
    if !n_fft.is_power_of_two() || hop_length == 0 || hop_length > len || len > n_fft {
        let why = format!(
            "{options:?}: `n_fft` must be a power of two, `win_length` at most that, and `hop_length` between 1 and \
             `win_length`"
        );
        operand_error(operator, &[x.shape()], why).unwind();
    }
    if let Some(window) = window.filter(|window| window.dims() != [len]) {
        operand_error(
            operator,
            &[x.shape(), window.shape()],
            format!("the window must have {len} elements"),
        )
        .unwind();
    }
}

/// Returns the number of frequencies of a frame.
fn frequencies(options: StftOptions) -> usize {
    if options.onesided {
        options.n_fft / 2 + 1
    } else {
        options.n_fft
    }
}
