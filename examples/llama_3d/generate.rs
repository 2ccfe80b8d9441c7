//! Sampling from the trained model: one forward per token, on any mesh.

use burn::prelude::*;
use burn_dtensor::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::model::Llama;

/// A sampled token, and by how much its score exceeded that of the next best.
#[derive(Debug, Clone, Copy)]
pub struct Sampled {
    pub token: u32,
    pub margin: f32,
}

/// Continues `prompt` by `count` tokens. The model sees the last `seq` of them.
///
/// Token `i` is the one with the greatest score, its logit plus Gumbel noise that depends on `seed`
/// and `i` only. This samples from the softmax of the logits. Meshes of different sizes round
/// logits differently, so they sample the same tokens until a margin is as small as the rounding.
///
/// # Collective
/// Every rank of the model's meshes, of which `mesh` is the tensor-parallel one.
pub fn generate(
    model: &Llama,
    mesh: &DeviceMesh,
    prompt: &[u32],
    (seq, count): (usize, usize),
    seed: u64,
) -> Result<Vec<Sampled>> {
    let mut tokens: Vec<i64> = prompt.iter().map(|&token| token.into()).collect();
    let mut sampled = Vec::with_capacity(count);
    for step in 0..count {
        let window = &tokens[tokens.len().saturating_sub(seq)..];
        let input = Tensor::<1, Int>::from_data(window, mesh.device()).unsqueeze::<2>();
        let logits = model
            .forward(DTensor::from_local(input, mesh, &[Placement::Replicate])?)
            .full_tensor()?;
        let logits = logits
            .slice_dim(1, window.len() - 1)
            .into_data()
            .convert::<f32>();
        let next = sample(logits.as_slice().expect("converted to f32"), seed, step);
        tokens.push(next.token.into());
        sampled.push(next);
    }
    Ok(sampled)
}

fn sample(logits: &[f32], seed: u64, step: usize) -> Sampled {
    let mut rng =
        StdRng::seed_from_u64(seed ^ (step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    // An exponential variable is above 0, and minus its logarithm has the Gumbel distribution.
    let mut gumbel = || {
        -(-(1.0 - rng.random::<f32>()).ln())
            .max(f32::MIN_POSITIVE)
            .ln()
    };
    let mut scores: Vec<_> = (0u32..)
        .zip(logits)
        .map(|(token, logit)| (logit + gumbel(), token))
        .collect();
    scores.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let margin = scores
        .get(1)
        .map_or(f32::INFINITY, |(second, _)| scores[0].0 - second);
    Sampled {
        token: scores[0].1,
        margin,
    }
}

/// The tokens that two meshes have sampled from the same weights with the same seed.
pub struct Agreement {
    tokens: usize,
    /// Step at which they part, and the smaller of the two margins there.
    parted: Option<(usize, f32)>,
}

/// Margin below which rounding may decide.
const ROUNDING: f32 = 1e-4;

impl Agreement {
    /// Compares the tokens of the same steps.
    pub fn new(left: &[Sampled], right: &[Sampled]) -> Self {
        assert_eq!(left.len(), right.len(), "both have the same steps");
        let parted = left.iter().zip(right).position(|(a, b)| a.token != b.token);
        let parted = parted.map(|step| (step, left[step].margin.min(right[step].margin)));
        Self {
            tokens: left.len(),
            parted,
        }
    }

    /// Returns true if all tokens are equal, or if rounding may have decided the first that is not.
    pub fn passes(&self) -> bool {
        self.parted.is_none_or(|(_, margin)| margin < ROUNDING)
    }
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.parted {
            None => write!(f, "one device samples the same {} tokens", self.tokens),
            Some((step, margin)) => {
                let verdict = if self.passes() {
                    "a matter of rounding"
                } else {
                    "DIFFERS"
                };
                write!(
                    f,
                    "one device samples the same {step} of {} tokens; the next was decided by {margin:.1e}: {verdict}",
                    self.tokens
                )
            }
        }
    }
}
