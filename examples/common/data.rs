//! Text as tokens, and the batch of each step. A batch depends only on (seed, step), so every mesh
//! trains on the same rows.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::Path;

use burn::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The default text: short stories of few words, written for these examples.
const STORIES: &str = include_str!("stories.txt");

/// A text and its alphabet: token `t` is the `t`-th distinct character in code point order.
#[derive(Debug, Clone)]
pub struct Text {
    tokens: Vec<u32>,
    alphabet: Vec<char>,
}

/// The rows of one step: inputs, and targets shifted by one character, each `[rows, seq]`.
pub type Batch = (Tensor<2, Int>, Tensor<2, Int>);

impl Text {
    /// Reads `file`, or by default the stories.
    ///
    /// # Errors
    /// A message with the path that could not be read.
    pub fn load(file: Option<&Path>) -> Result<Self, String> {
        Ok(Self::new(&file.map_or(Ok(STORIES.into()), |file| {
            fs::read_to_string(file)
                .map_err(|e| format!("cannot read the text {}: {e}", file.display()))
        })?))
    }

    fn new(text: &str) -> Self {
        let alphabet: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        Self {
            tokens: text
                .chars()
                .map(|c| {
                    alphabet
                        .binary_search(&c)
                        .expect("the alphabet holds every character") as u32
                })
                .collect(),
            alphabet,
        }
    }

    /// Splits the text in two, with the same alphabet: nine tenths to train on, the rest to
    /// validate with. The rest begins with a paragraph or a line, if one begins near.
    pub fn split(mut self) -> (Self, Self) {
        let rest = &self.tokens[self.len() * 9 / 10..];
        let near = &rest[..rest.len() / 2];
        let newline = self
            .alphabet
            .binary_search(&'\n')
            .ok()
            .map(|token| token as u32);
        let after = |newlines: usize| {
            let at = near
                .windows(newlines)
                .position(|tokens| tokens.iter().all(|&token| Some(token) == newline));
            at.map(|at| at + newlines)
        };
        let start = self.len() - rest.len() + after(2).or_else(|| after(1)).unwrap_or(0);
        let validation = Self {
            tokens: self.tokens.split_off(start),
            alphabet: self.alphabet.clone(),
        };
        (self, validation)
    }

    /// Checks that the text is long enough for a batch of `rows` sequences.
    ///
    /// # Errors
    /// A message with the required and the actual length.
    pub fn check_batch(&self, rows: usize, seq: usize) -> Result<(), String> {
        let has = self.len();
        let needed = rows.saturating_mul(seq.saturating_add(1));
        if has >= needed {
            return Ok(());
        }
        Err(format!(
            "the text has {has} characters, but one batch of {rows} rows takes {needed} (rows x (--seq {seq} + 1)). \
             Pass a longer --text, or a smaller --batch or --seq"
        ))
    }

    /// Returns the number of characters.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of distinct characters.
    pub fn vocab(&self) -> usize {
        self.alphabet.len()
    }

    /// Returns the first `count` tokens.
    pub fn head(&self, count: usize) -> Vec<u32> {
        self.tokens.iter().copied().take(count).collect()
    }

    /// Returns the characters of `tokens`. A token of a model with a larger vocabulary is the
    /// replacement character.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let character = |&token: &u32| self.alphabet.get(token as usize).copied();
        tokens
            .iter()
            .map(|token| character(token).unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect()
    }

    /// Returns rows `rows` of the batch of `step`: windows of `seq + 1` characters at random
    /// positions.
    pub fn batch(
        &self,
        (seed, step): (u64, usize),
        rows: Range<usize>,
        seq: usize,
        device: &Device,
    ) -> Batch {
        // The golden-ratio constant spreads neighbouring steps over the generator's seeds.
        let mut rng =
            StdRng::seed_from_u64(seed ^ (step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let starts: Vec<usize> = (0..rows.end)
            .map(|_| rng.random_range(0..self.len() - seq))
            .collect();
        self.windows(&starts[rows], seq, device)
    }

    /// Returns the number of rows of the text in order.
    pub fn row_count(&self, seq: usize) -> usize {
        self.len().saturating_sub(1) / seq
    }

    /// Returns rows `rows` of the text in order: windows of `seq + 1` characters, of which each
    /// begins with the last character of the one before.
    pub fn rows(&self, rows: Range<usize>, seq: usize, device: &Device) -> Batch {
        self.windows(&rows.map(|row| row * seq).collect::<Vec<_>>(), seq, device)
    }

    fn windows(&self, starts: &[usize], seq: usize, device: &Device) -> Batch {
        let window = |shift: usize| {
            let tokens: Vec<i32> = starts
                .iter()
                .flat_map(|&start| &self.tokens[start + shift..start + shift + seq])
                .map(|&t| t as i32)
                .collect();
            Tensor::from_data(TensorData::new(tokens, [starts.len(), seq]), device)
        };
        (window(0), window(1))
    }
}
