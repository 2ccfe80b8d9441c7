//! The kernel of optimizers' steps: every element of a parameter is stepped by one unit of the device.

use cubecl::prelude::*;

use super::tuning::{TASK_VECTORS, UNITS};

/// Elements that one cube steps.
pub(super) const TASK: usize = TASK_VECTORS;

/// The most elements of a tensor: kernels count in 32 bits, to the end of a task.
pub(crate) const MOST_ELEMENTS: usize = u32::MAX as usize - TASK;

/// Words of a tensor in the table: its first task, and its elements.
pub(super) const ENTRY: usize = 2;

/// Numbers of a tensor: the fields of [`StepScalars`](super::StepScalars), at these places.
pub(super) const SCALARS: usize = 11;
const FACTOR: usize = 0;
const LR: usize = 1;
const DECAY: usize = 2;
const PENALTY: usize = 3;
const KEPT: usize = 4;
const ADDED: usize = 6;
const CORRECTIONS: usize = 8;
const EPSILON: usize = 10;

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

    pub(super) fn is(self, other: Self) -> bool {
        self == other
    }

    pub(super) fn is_nesterov(self) -> bool {
        self == Self::Momentum(true)
    }

    pub(super) fn has_moments(self) -> bool {
        matches!(self, Self::AdamW | Self::Adam)
    }

    pub(super) fn has_velocity(self) -> bool {
        matches!(self, Self::Momentum(_))
    }
}

/// Steps one task of one of `count` tensors, the last of which is `last`.
#[cube(launch_unchecked)]
pub(super) fn step(
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
    let lr = numbers[own + LR];
    let decay = numbers[own + DECAY];
    let penalty = numbers[own + PENALTY];
    let weight = load(buffers, tensor, at, 0usize, formula, 0usize, count);
    let grad = load(buffers, tensor, at, 1usize, formula, 0usize, count) * numbers[own + FACTOR];
    if comptime!(formula.has_moments()) {
        let mut grad = grad;
        if penalty != 0.0 {
            grad += weight * penalty;
        }
        let moment_1 = load(buffers, tensor, at, 2usize, formula, 0usize, count)
            * numbers[own + KEPT]
            + grad * numbers[own + ADDED];
        let moment_2 = load(buffers, tensor, at, 3usize, formula, 0usize, count)
            * numbers[own + KEPT + 1]
            + grad * grad * numbers[own + ADDED + 1];
        store(
            buffers, tensor, at, moment_1, 2usize, formula, 0usize, count,
        );
        store(
            buffers, tensor, at, moment_2, 3usize, formula, 0usize, count,
        );
        let mut delta = moment_1 / numbers[own + CORRECTIONS];
        if comptime!(formula.is(StepFormula::AdamW)) {
            delta /= (moment_2 / numbers[own + CORRECTIONS + 1]).sqrt() + numbers[own + EPSILON];
        } else {
            delta /= moment_2.sqrt() + numbers[own + EPSILON];
        }
        let stepped = weight * decay - delta * lr;
        store(buffers, tensor, at, stepped, 0usize, formula, 0usize, count);
    } else if comptime!(formula.is(StepFormula::Lion)) {
        let momentum = load(buffers, tensor, at, 2usize, formula, 0usize, count);
        let update = momentum * numbers[own + KEPT] + grad * numbers[own + ADDED];
        let next = momentum * numbers[own + KEPT + 1] + grad * numbers[own + ADDED + 1];
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
            let velocity = grad * numbers[own + ADDED]
                + load(buffers, tensor, at, 2usize, formula, 0usize, count) * numbers[own + KEPT];
            store(
                buffers, tensor, at, velocity, 2usize, formula, 0usize, count,
            );
            update = velocity;
            if comptime!(formula.is_nesterov()) {
                update = velocity * numbers[own + KEPT] + grad;
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
