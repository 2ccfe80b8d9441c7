//! [`step_list`]: steps of optimizers for a list of tensors, in as few launches as the device's bindings
//! allow.
//!
//! Each element of a parameter, its gradient and its state is read once, and written once in place.
//! Steps are computed in single precision. The device's compiler may contract a multiplication and
//! an addition, so results are within a few units in the last place of those of the CPU.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::plan::DeviceLimits;
use super::step_kernel::{self, ENTRY, SCALARS, StepFormula, TASK};
use super::tuning::UNITS;

/// Numbers of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepScalars {
    /// Factor of the gradient, applied first.
    pub(crate) factor: f32,
    pub(crate) lr: f32,
    /// Factor of the weight.
    pub(crate) decay: f32,
    /// Factor of the weight in the gradient.
    pub(crate) penalty: f32,
    /// Factors of the first state in the update (Lion), or of the first and second state.
    pub(crate) kept: [f32; 2],
    /// Factors of the gradient that is added to them.
    pub(crate) added: [f32; 2],
    /// Divisors of both moments: corrections of their bias.
    pub(crate) corrections: [f32; 2],
    pub(crate) epsilon: f32,
}

impl StepScalars {
    /// Returns the numbers in the order of the kernel.
    fn numbers(&self) -> [f32; SCALARS] {
        let Self {
            factor,
            lr,
            decay,
            penalty,
            kept,
            added,
            corrections,
            epsilon,
        } = *self;
        [
            factor,
            lr,
            decay,
            penalty,
            kept[0],
            kept[1],
            added[0],
            added[1],
            corrections[0],
            corrections[1],
            epsilon,
        ]
    }
}

/// The tensors of one step: contiguous, of equal lengths, in single precision and on one device.
/// All but the gradient are written.
#[derive(Debug, Clone)]
pub(crate) struct SteppedTensors {
    /// The parameter, its gradient, and its state.
    pub(crate) tensors: Vec<CubeTensor>,
    pub(crate) scalars: StepScalars,
}

/// Buffers of the kernel other than those of tensors: its table, its numbers, and its own arguments.
const OTHERS: usize = 3;

/// Steps the tensors of `list`. Returns the number of launches.
pub(crate) fn step_list(formula: StepFormula, list: &[SteppedTensors]) -> usize {
    let Some(first) = list.first() else { return 0 };
    let client = first.tensors[0].client.clone();
    let limits = DeviceLimits::of(&client);
    let most = (limits.bindings.saturating_sub(OTHERS) / formula.buffers()).max(1);
    let mut launches = 0;
    for list in list.chunks(most) {
        let mut tasks = 0;
        let mut table = Vec::with_capacity(ENTRY * list.len());
        let mut numbers = Vec::with_capacity(SCALARS * list.len());
        for step in list {
            let elements = step.tensors[0].meta.num_elements();
            table.extend([tasks as u32, elements as u32]);
            tasks += elements.div_ceil(TASK);
            numbers.extend(step.scalars.numbers());
        }
        let buffer = |tensor: &CubeTensor| {
            // SAFETY: the tensor is contiguous, and has so many elements.
            unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.meta.num_elements()) }
        };
        let uploaded = |bytes: &[u8], len| {
            // SAFETY: these are the bytes of so many words.
            unsafe { BufferArg::from_raw_parts(client.create_from_slice(bytes), len) }
        };
        let rows = tasks.div_ceil(limits.cubes).max(1);
        let count = CubeCount::Static(tasks.div_ceil(rows) as u32, rows as u32, 1);
        // SAFETY: the kernel accesses elements below the lengths in the table.
        unsafe {
            step_kernel::step::launch_unchecked(
                &client,
                count,
                CubeDim::new_1d(UNITS as u32),
                list.iter()
                    .flat_map(|step| step.tensors.iter().map(buffer))
                    .collect(),
                uploaded(bytemuck::cast_slice(&table), table.len()),
                uploaded(bytemuck::cast_slice(&numbers), numbers.len()),
                list.len(),
                list.len() - 1,
                tasks,
                formula,
            );
        }
        launches += 1;
    }
    launches
}
