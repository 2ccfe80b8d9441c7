//! [`step_list`]: steps of optimizers for a list of tensors, in as few launches as the device's bindings
//! allow.
//!
//! Each element of a parameter, its gradient and its state is read once, and written once in place.
//! Steps are computed in single precision. The device's compiler may contract a multiplication and
//! an addition, so results are within a few units in the last place of those of the CPU.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::plan::DeviceLimits;
use super::tuning::{TASK_VECTORS, UNITS};

/// Formula of a step, for which a kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StepFormula {
    /// Two moments, and decay of the weight.
    AdamW,
    /// Two moments; the decayed weight is part of the gradient.
    Adam,
    /// The sign of a momentum.
    Lion,
    /// The gradient itself.
    Sgd,
    /// A velocity; with Nesterov's momentum if true.
    Momentum(bool),
}

impl StepFormula {
    /// Returns the number of buffers of a tensor: parameter, gradient and state.
    pub(crate) fn buffers(self) -> usize {
        match self {
            Self::AdamW | Self::Adam => 4,
            Self::Lion | Self::Momentum(_) => 3,
            Self::Sgd => 2,
        }
    }

    fn is(self, other: Self) -> bool {
        self == other
    }

    fn is_nesterov(self) -> bool {
        self == Self::Momentum(true)
    }

    fn has_moments(self) -> bool {
        matches!(self, Self::AdamW | Self::Adam)
    }

    fn has_velocity(self) -> bool {
        matches!(self, Self::Momentum(_))
    }
}

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

/// Numbers of a tensor in the kernel's argument.
const SCALARS: usize = 11;

impl StepScalars {
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

/// Words of a tensor in the table: its first task, and its elements.
const ENTRY: usize = 2;

/// Elements that one cube steps.
const TASK: usize = TASK_VECTORS;

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
            step::launch_unchecked(
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

/// Steps one task of one of `count` tensors, the last of which is `last`.
#[cube(launch_unchecked)]
fn step(
    buffers: &mut Sequence<Box<[f32]>>,
    table: &[u32],
    numbers: &[f32],
    #[comptime] count: usize,
    last: usize,
    tasks: usize,
    #[comptime] formula: StepFormula,
) {
    if CUBE_POS < tasks {
        let tensor = search(table, CUBE_POS, 0usize, last);
        let first = table[ENTRY * tensor] as usize;
        let elements = table[ENTRY * tensor + 1] as usize;
        let begin = (CUBE_POS - first) * TASK;
        let end = min(begin + TASK, elements);
        let mut at = begin + UNIT_POS as usize;
        while at < end {
            step_element(buffers, numbers, tensor, at, count, formula);
            at += UNITS;
        }
    }
}

/// Returns the last of the tensors `low..=high` whose tasks do not begin after `task`.
#[cube]
fn search(table: &[u32], task: usize, low: usize, high: usize) -> usize {
    let mut low = low;
    let mut high = high;
    while low < high {
        let middle = (low + high + 1) / 2;
        if table[ENTRY * middle] as usize <= task {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cube]
fn step_element(
    buffers: &mut Sequence<Box<[f32]>>,
    numbers: &[f32],
    tensor: usize,
    at: usize,
    #[comptime] count: usize,
    #[comptime] formula: StepFormula,
) {
    let own = SCALARS * tensor;
    let lr = numbers[own + 1];
    let decay = numbers[own + 2];
    let penalty = numbers[own + 3];
    let weight = load(buffers, tensor, at, 0usize, formula, 0usize, count);
    let grad = load(buffers, tensor, at, 1usize, formula, 0usize, count) * numbers[own];
    if comptime!(formula.has_moments()) {
        let mut grad = grad;
        if penalty != 0.0 {
            grad = weight * penalty + grad;
        }
        let moment_1 = load(buffers, tensor, at, 2usize, formula, 0usize, count) * numbers[own + 4]
            + grad * numbers[own + 6];
        let moment_2 = load(buffers, tensor, at, 3usize, formula, 0usize, count) * numbers[own + 5]
            + grad * grad * numbers[own + 7];
        store(
            buffers, tensor, at, moment_1, 2usize, formula, 0usize, count,
        );
        store(
            buffers, tensor, at, moment_2, 3usize, formula, 0usize, count,
        );
        let mut delta = moment_1 / numbers[own + 8];
        if comptime!(formula.is(StepFormula::AdamW)) {
            delta = delta / ((moment_2 / numbers[own + 9]).sqrt() + numbers[own + 10]);
        } else {
            delta = delta / (moment_2.sqrt() + numbers[own + 10]);
        }
        let stepped = weight * decay - delta * lr;
        store(buffers, tensor, at, stepped, 0usize, formula, 0usize, count);
    } else if comptime!(formula.is(StepFormula::Lion)) {
        let momentum = load(buffers, tensor, at, 2usize, formula, 0usize, count);
        let update = momentum * numbers[own + 4] + grad * numbers[own + 6];
        let next = momentum * numbers[own + 5] + grad * numbers[own + 7];
        store(buffers, tensor, at, next, 2usize, formula, 0usize, count);
        let mut sign = 0.0f32;
        if update > 0.0 {
            sign = 1.0f32;
        }
        if update < 0.0 {
            sign = -1.0f32;
        }
        let stepped = weight * decay - sign * lr;
        store(buffers, tensor, at, stepped, 0usize, formula, 0usize, count);
    } else {
        let mut update = grad;
        if penalty != 0.0 {
            update = weight * penalty + grad;
        }
        if comptime!(formula.has_velocity()) {
            let grad = update;
            let velocity = grad * numbers[own + 6]
                + load(buffers, tensor, at, 2usize, formula, 0usize, count) * numbers[own + 4];
            store(
                buffers, tensor, at, velocity, 2usize, formula, 0usize, count,
            );
            update = velocity;
            if comptime!(formula.is_nesterov()) {
                update = velocity * numbers[own + 4] + grad;
            }
        }
        let stepped = weight - update * lr;
        store(buffers, tensor, at, stepped, 0usize, formula, 0usize, count);
    }
}

/// Loads element `at` of the buffer with this number of a tensor, which is one of `count` from
/// `first` on.
#[cube]
fn load(
    buffers: &mut Sequence<Box<[f32]>>,
    tensor: usize,
    at: usize,
    #[comptime] buffer: usize,
    #[comptime] formula: StepFormula,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> f32 {
    if comptime!(count == 1) {
        buffers.index(comptime!(formula.buffers() * first + buffer))[at]
    } else {
        let half = comptime!(count / 2);
        if tensor < comptime!(first + half) {
            load(buffers, tensor, at, buffer, formula, first, half)
        } else {
            load(
                buffers,
                tensor,
                at,
                buffer,
                formula,
                comptime!(first + half),
                comptime!(count - half),
            )
        }
    }
}

/// Stores element `at`, as [`load`] loads it.
#[cube]
fn store(
    buffers: &mut Sequence<Box<[f32]>>,
    tensor: usize,
    at: usize,
    value: f32,
    #[comptime] buffer: usize,
    #[comptime] formula: StepFormula,
    #[comptime] first: usize,
    #[comptime] count: usize,
) {
    if comptime!(count == 1) {
        buffers.index_mut(comptime!(formula.buffers() * first + buffer))[at] = value;
    } else {
        let half = comptime!(count / 2);
        if tensor < comptime!(first + half) {
            store(buffers, tensor, at, value, buffer, formula, first, half);
        } else {
            store(
                buffers,
                tensor,
                at,
                value,
                buffer,
                formula,
                comptime!(first + half),
                comptime!(count - half),
            );
        }
    }
}
