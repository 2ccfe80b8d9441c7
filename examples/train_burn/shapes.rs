//! A data set that is drawn when it is read: four shapes on 12 by 12 pixels, shifted, in noise.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Names of the classes.
pub const CLASSES: [&str; 4] = ["bar", "cross", "ring", "corner"];

/// Height and width of an image.
const SIDE: usize = 12;

/// Height and width of a shape.
const SHAPE: usize = 7;

/// An image, and its class.
#[derive(Clone, Debug)]
pub struct ShapeItem {
    pub image: [[f32; SIDE]; SIDE],
    pub label: usize,
}

/// Images `[batch, height, width]`, and their classes `[batch]`.
#[derive(Clone, Debug)]
pub struct ShapeBatch {
    pub images: Tensor<3>,
    pub targets: Tensor<1, Int>,
}

/// Images with the given numbers, of which each is always the same.
#[derive(Clone, Debug)]
pub struct ShapeDataset {
    first: u64,
    len: usize,
}

impl ShapeDataset {
    /// Returns the images to train on.
    pub fn train() -> Self {
        Self {
            first: 0,
            len: 1000,
        }
    }

    /// Returns other images, of which 48 are no multiple.
    pub fn test() -> Self {
        Self {
            first: 1_000_000,
            len: 205,
        }
    }
}

impl Dataset<ShapeItem> for ShapeDataset {
    fn get(&self, index: usize) -> Result<ShapeItem, DatasetError> {
        let mut rng = StdRng::seed_from_u64(self.first + index as u64);
        let label = rng.random_range(0..CLASSES.len());
        let [top, left] = std::array::from_fn(|_| rng.random_range(0..=SIDE - SHAPE));
        let mut image = [[0.0; SIDE]; SIDE];
        for pixel in image.as_flattened_mut() {
            *pixel = rng.random_range(0.0..0.8);
        }
        for (row, column) in (0..SHAPE).flat_map(|row| (0..SHAPE).map(move |column| (row, column)))
        {
            if is_drawn(label, row, column) {
                image[top + row][left + column] += 0.6;
            }
        }
        Ok(ShapeItem { image, label })
    }

    fn len(&self) -> usize {
        self.len
    }
}

fn is_drawn(label: usize, row: usize, column: usize) -> bool {
    let middle = SHAPE / 2;
    let last = SHAPE - 1;
    match CLASSES[label] {
        "bar" => row == middle,
        "cross" => row == middle || column == middle,
        "ring" => [0, last].contains(&row) || [0, last].contains(&column),
        _ => row == last || column == 0,
    }
}

#[derive(Clone, Default)]
pub struct ShapeBatcher;

impl Batcher<ShapeItem, ShapeBatch> for ShapeBatcher {
    fn batch(&self, items: Vec<ShapeItem>, device: &Device) -> ShapeBatch {
        ShapeBatch {
            images: Tensor::cat(
                items
                    .iter()
                    .map(|item| Tensor::<2>::from_data(item.image, device).unsqueeze::<3>())
                    .collect(),
                0,
            ),
            targets: Tensor::cat(
                items
                    .iter()
                    .map(|item| Tensor::<1, Int>::from_data([item.label as i64], device))
                    .collect(),
                0,
            ),
        }
    }
}
