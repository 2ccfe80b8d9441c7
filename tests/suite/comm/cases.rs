//! What every collective is tried on: groups, shapes, dtypes, and the cuts of a length.

use std::ops::Range;
use std::time::Duration;

use burn::tensor::{DType, Device};
use burn_dtensor::Error;
use burn_dtensor::comm::{Communicator, Launch, Sharded, World, launch};
use burn_dtensor::placement::Cut;

use super::plain::Plain;

pub const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::Bool(burn::tensor::BoolStore::Native),
];

/// Ceil-sized chunks, the tail ones possibly empty: `torch.chunk`.
fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let size = len.div_ceil(parts);
    (index * size).min(len)..((index + 1) * size).min(len)
}

/// The cuts of a length that are tried: into chunks, and ragged, with nothing on the first of several
/// ranks and most on the last.
pub fn cuts(len: usize, ranks: usize) -> [Cut; 2] {
    let mut lengths: Vec<usize> = (0..ranks).map(|rank| usize::from(rank > 0 && rank <= len)).collect();
    lengths[ranks - 1] += len - lengths.iter().sum::<usize>();
    [Cut::Chunks(len), Cut::Lengths(lengths.into())]
}

/// What a rank holds, by the definition.
pub fn held(cut: &Cut, parts: usize, index: usize) -> Range<usize> {
    match cut {
        Cut::Chunks(len) => chunk(*len, parts, index),
        Cut::Lengths(lengths) => {
            let before = lengths.iter().take(index).sum::<usize>();
            before..before + lengths[index]
        }
    }
}

/// Shapes with even, uneven and empty chunks for groups of up to 8.
pub fn shapes() -> Vec<Vec<usize>> {
    vec![vec![17], vec![1], vec![8, 6], vec![5, 3], vec![2, 70], vec![3, 4, 5], vec![4, 2, 9]]
}

/// Every case: shape, cut dimension and dtype.
pub fn cases() -> impl Iterator<Item = (Vec<usize>, usize, DType)> {
    shapes().into_iter().flat_map(|shape| {
        (0..shape.len()).flat_map(move |dim| {
            let shape = shape.clone();
            DTYPES.into_iter().map(move |dtype| (shape.clone(), dim, dtype))
        })
    })
}

pub fn run(ranks: usize, program: impl Fn(&World) -> Result<(), Error> + Sync) {
    launch(Launch::threads(ranks).deadline(Duration::from_secs(60)), program).unwrap_or_else(|error| panic!("{error}"));
}

/// Runs `program` on the group of all ranks, for every group size to be tested.
pub fn on_groups(program: impl Fn(&World, &Communicator) -> Result<(), Error> + Sync) {
    for ranks in [1, 2, 3, 4, 5, 8] {
        run(ranks, |world| program(world, &world.all()));
    }
}

pub fn piece(whole: &Plain, dim: usize, cut: Cut, dtype: DType, comm: &Communicator, device: &Device) -> Sharded {
    let range = held(&cut, comm.group().size(), comm.group().rank());
    Sharded { tensor: whole.narrow(dim, range).tensor(dtype, device), dim, cut }
}
