//! Text as tokens, and the batch of each step. A batch depends only on (seed, step), so every mesh trains on the
//! same rows.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, io};

use burn::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A text and its alphabet: token `t` is the `t`-th distinct character in code point order.
#[derive(Debug, Clone)]
pub struct Text {
    tokens: Vec<u32>,
    alphabet: Vec<char>,
}

/// The rows of one step: inputs, and targets shifted by one character, each `[rows, seq]`.
pub type Batch = (Tensor<2, Int>, Tensor<2, Int>);

impl Text {
    /// Reads `file`, or by default the crate's own source text.
    ///
    /// # Errors
    /// A message with the path that could not be read.
    pub fn load(file: Option<&Path>) -> Result<Self, String> {
        let text = match file {
            Some(file) => read(file)?,
            None => own_source()?,
        };
        Ok(Self::new(&text))
    }

    fn new(text: &str) -> Self {
        let alphabet: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let token = |c| alphabet.binary_search(&c).expect("the alphabet holds every character") as u32;
        Self { tokens: text.chars().map(token).collect(), alphabet }
    }

    /// Checks that the text is long enough for a batch of `rows` sequences.
    ///
    /// # Errors
    /// A message with the required and the actual length.
    pub fn check_batch(&self, rows: usize, seq: usize) -> Result<(), String> {
        let (has, needed) = (self.len(), rows.saturating_mul(seq.saturating_add(1)));
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

    /// Returns the characters of `tokens`.
    pub fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|&t| self.alphabet[t as usize]).collect()
    }

    /// Returns rows `rows` of the batch of `step`: windows of `seq + 1` characters at random positions.
    pub fn batch(&self, (seed, step): (u64, usize), rows: Range<usize>, seq: usize, device: &Device) -> Batch {
        // The golden-ratio constant spreads neighbouring steps over the generator's seeds.
        let mut rng = StdRng::seed_from_u64(seed ^ (step as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let starts: Vec<usize> = (0..rows.end).map(|_| rng.random_range(0..self.len() - seq)).collect();
        let window = |shift: usize| {
            let tokens: Vec<i32> = starts[rows.clone()]
                .iter()
                .flat_map(|&start| &self.tokens[start + shift..start + shift + seq])
                .map(|&t| t as i32)
                .collect();
            Tensor::from_data(TensorData::new(tokens, [rows.len(), seq]), device)
        };
        (window(0), window(1))
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read the text {}: {e}", path.display()))
}

fn own_source() -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    list(&root, &mut files)
        .map_err(|e| format!("cannot list the crate's source {}: {e}. Pass a text with --text FILE", root.display()))?;
    // The text must not depend on the directory order, which differs between file systems.
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
