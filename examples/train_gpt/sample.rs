//! Text from a trained model, and how much of it is words.

use std::collections::HashSet;

use burn::prelude::*;
use burn::tensor::activation::softmax;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cli::Settings;
use crate::data::Text;
use crate::model::Gpt;

/// Number of characters of the validation text with which the sample starts.
const PROMPT: usize = 16;
/// Softmax temperature. Below 1, likely characters are drawn more often.
const TEMPERATURE: f64 = 0.5;

/// Returns the prompt followed by `settings.args.sample` generated characters.
pub fn sample(model: &Gpt, settings: &Settings) -> String {
    let model = model.valid();
    let device = model.devices().remove(0);
    let mut rng = StdRng::seed_from_u64(settings.args.seed);
    let mut tokens = settings.validation.head(PROMPT);
    for _ in 0..settings.args.sample {
        let window: Vec<i32> = tokens[tokens.len().saturating_sub(settings.model.seq)..]
            .iter()
            .map(|&t| t as i32)
            .collect();
        let seq = window.len();
        let logits = model.forward(Tensor::from_data(
            TensorData::new(window, [1, seq]),
            &device,
        ));
        let last = logits.slice([0..1, seq - 1..seq]) / TEMPERATURE;
        let odds: Vec<f32> = softmax(last, 2)
            .into_data()
            .try_to_vec()
            .expect("the model is f32");
        tokens.push(draw(&odds, rng.random()));
    }
    settings.text.decode(&tokens)
}

/// Returns the number of generated words in `sample`, and how many of them occur in `text`.
pub fn known_words(sample: &str, text: &Text) -> (usize, usize) {
    let text = text.decode(&text.head(text.len()));
    let known: HashSet<&str> = words(&text).collect();
    let prompt: String = sample.chars().take(PROMPT).collect();
    // Without the last word, which may be incomplete.
    let [prompt, sample] =
        [&prompt, sample].map(|text| text.trim_end_matches(char::is_alphanumeric));
    let generated = words(sample).skip(words(prompt).count());
    generated.fold((0, 0), |(all, found), word| {
        (all + 1, found + usize::from(known.contains(word)))
    })
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
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
