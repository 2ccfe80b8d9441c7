//! Text from a trained model.

use burn::prelude::*;
use burn::tensor::activation::softmax;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cli::Settings;
use crate::model::Gpt;

/// Number of characters of the text with which the sample starts.
const PROMPT: usize = 16;
/// Softmax temperature. Below 1, likely characters are drawn more often.
const TEMPERATURE: f64 = 0.8;

/// Returns the prompt followed by `settings.sample` generated characters.
pub fn sample(model: &Gpt, settings: &Settings) -> String {
    let model = model.valid();
    let device = model.devices().remove(0);
    let mut rng = StdRng::seed_from_u64(settings.seed);
    let mut tokens = settings.text.head(PROMPT);
    for _ in 0..settings.sample {
        let window: Vec<i32> =
            tokens[tokens.len().saturating_sub(settings.model.seq)..].iter().map(|&t| t as i32).collect();
        let seq = window.len();
        let logits = model.forward(Tensor::from_data(TensorData::new(window, [1, seq]), &device));
        let last = logits.slice([0..1, seq - 1..seq]) / TEMPERATURE;
        let odds: Vec<f32> = softmax(last, 2).into_data().try_to_vec().expect("the model is f32");
        tokens.push(draw(&odds, rng.random()));
    }
    settings.text.decode(&tokens)
}

/// Returns the token at `point`, from 0 to 1, of the cumulative distribution of `odds`.
fn draw(odds: &[f32], point: f32) -> u32 {
    let mut sum = 0.0;
    let within = odds.iter().position(|&p| {
        sum += p;
        point < sum
    });
    // Rounding can leave the sum a little below 1.
    within.unwrap_or(odds.len() - 1) as u32
}
