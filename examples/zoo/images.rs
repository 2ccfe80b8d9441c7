//! Images of synthetic patterns with noise, one pattern per class. An image depends only on (seed,
//! step, row), so every mesh trains on the same images.

use std::ops::Range;

use burn::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Parameters of the images.
#[derive(Debug, Clone)]
pub struct Images {
    pub classes: usize,
    /// Height and width.
    pub side: usize,
}

impl Images {
    /// Returns rows `rows` of the batch of `step`: images `[rows, 3, side, side]` and their classes
    /// `[rows]`.
    pub fn batch(
        &self,
        (seed, step): (u64, usize),
        rows: Range<usize>,
        device: &Device,
    ) -> (Tensor<4>, Tensor<1, Int>) {
        let mut pixels = Vec::new();
        let mut classes = Vec::new();
        for row in rows.clone() {
            // The golden-ratio constant spreads neighbouring steps and rows over the generator's
            // seeds.
            let number = ((step as u64) << 32) + row as u64 + 1;
            let mut rng = StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let class = rng.random_range(0..self.classes);
            classes.push(class as i32);
            // Each class has waves of a different direction and length.
            let along = (class % 7) as f32 * 0.3;
            let across = (class / 7) as f32 * 0.2 + 0.1;
            for channel in 0..3 {
                for (y, x) in (0..self.side).flat_map(|y| (0..self.side).map(move |x| (y, x))) {
                    let wave = (along * x as f32 + across * y as f32 + channel as f32).sin();
                    pixels.push(wave + rng.random_range(-0.5..0.5));
                }
            }
        }
        let shape = [rows.len(), 3, self.side, self.side];
        let images = Tensor::from_data(TensorData::new(pixels, shape), device);
        (images, Tensor::from_data(&classes[..], device))
    }
}
