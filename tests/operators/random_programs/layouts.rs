//! Layouts of inputs and results, and what a rank holds of an input. No tensors.

use burn::tensor::DType;
use burn_dtensor::placement::{Layout, PartialOp, Placement};
use rand::Rng;
use rand::rngs::StdRng;

use super::profile::Profile;
use super::value::{Data, ElementKind};
use crate::layouts::draw;

const OPS: [PartialOp; 5] = [
    PartialOp::Sum,
    PartialOp::Avg,
    PartialOp::Min,
    PartialOp::Max,
    PartialOp::Product,
];

/// Any layout that an input of this kind may come in.
pub fn any(
    rng: &mut StdRng,
    mesh: &[usize],
    ndim: usize,
    kind: ElementKind,
    profile: &Profile,
) -> Layout {
    let partial = |rng: &mut StdRng| {
        let ops: Vec<_> = OPS
            .into_iter()
            .filter(|&op| takes(kind, op, profile))
            .collect();
        if ops.is_empty() {
            Placement::Replicate
        } else {
            Placement::Partial(ops[rng.random_range(0..ops.len())])
        }
    };
    // Few operators take integers, and yet each must meet every reduction.
    let share = if kind == ElementKind::Int { 0.5 } else { 0.2 };
    draw(rng, mesh, ndim, share, partial)
}

/// Any layout that a result may be redistributed to; see [`reachable`].
pub fn target(rng: &mut StdRng, mesh: &[usize], ndim: usize, kind: ElementKind) -> Layout {
    let summed = if kind == ElementKind::Bool {
        Placement::Replicate
    } else {
        Placement::Partial(PartialOp::Sum)
    };
    draw(rng, mesh, ndim, 0.2, |rng| {
        if rng.random_bool(0.3) {
            summed
        } else {
            Placement::Replicate
        }
    })
}

/// `target`, with Replicate for the partial sums that cannot be made of a tensor laid out as
/// `from`.
pub fn reachable(from: &Layout, target: &Layout) -> Layout {
    let sum = Placement::Partial(PartialOp::Sum);
    let placement = |(&from, &to): (&Placement, &Placement)| {
        if to == sum && from != sum && from.partial_op().is_some() {
            Placement::Replicate
        } else {
            to
        }
    };
    let placements: Vec<_> = from
        .placements()
        .iter()
        .zip(target.placements())
        .map(placement)
        .collect();
    let orders: Vec<_> = target.orders().collect();
    let layout = Layout::with_shard_order(target.mesh_shape(), &placements, &orders)
        .expect("the cuts are those of the target");
    let mut lengths = target.uneven_mesh_dims();
    let layout = lengths.try_fold(layout, |layout, (mesh_dim, lengths)| {
        layout.with_uneven_sizes(mesh_dim, lengths.clone())
    });
    layout.expect("the cuts are those of the target")
}

fn takes(kind: ElementKind, op: PartialOp, profile: &Profile) -> bool {
    match kind {
        ElementKind::Float => op != PartialOp::Avg || !profile.is_exact(),
        ElementKind::Int => op != PartialOp::Avg,
        ElementKind::Bool => false,
    }
}

/// What a rank holds of an input, and the derivative of the loss by it.
pub struct Held {
    pub values: Data,
    pub gradient: Option<Data>,
}

/// What the rank at `coordinate` holds of `whole`, where `gradient` is the loss's by the whole.
pub fn held(
    full: &Data,
    gradient: Option<&Data>,
    layout: &Layout,
    coordinate: &[usize],
    profile: &Profile,
) -> Held {
    let ranges = layout.local_slices(&full.shape, coordinate);
    let positions = ranges
        .iter()
        .zip(&full.shape)
        .fold(vec![0], |outer, (range, len)| {
            outer
                .iter()
                .flat_map(|&outer| range.clone().map(move |at| outer * len + at))
                .collect()
        });
    let shape = layout.local_shape(&full.shape, coordinate);
    let mut values = Data {
        shape: shape.clone(),
        values: Vec::new(),
        ..full.clone()
    };
    let mut held = gradient.map(|gradient| Data {
        shape,
        values: Vec::new(),
        ..gradient.clone()
    });
    for at in positions {
        let (mut value, mut factor) = (full.values[at], 1.0);
        for (mesh_dim, placement) in layout.placements().iter().enumerate() {
            if let Placement::Partial(op) = *placement {
                let place = Place {
                    at,
                    mesh_dim,
                    size: layout.mesh_shape()[mesh_dim],
                };
                let (part, derivative) =
                    place.part(op, value, coordinate[mesh_dim], full.kind, profile);
                (value, factor) = (part, factor * derivative);
            }
        }
        values.values.push(value);
        if let (Some(held), Some(gradient)) = (&mut held, gradient) {
            held.values.push(gradient.values[at] * factor);
        }
    }
    Held {
        values,
        gradient: held,
    }
}

/// One element, and the ranks along one mesh dimension that hold terms of it.
struct Place {
    at: usize,
    mesh_dim: usize,
    size: usize,
}

impl Place {
    /// What rank `index` holds of `value`, and the derivative of the reduced value by it. The same
    /// on every rank that asks: a function of the place.
    fn part(
        &self,
        op: PartialOp,
        value: f64,
        index: usize,
        kind: ElementKind,
        profile: &Profile,
    ) -> (f64, f64) {
        let integers = kind == ElementKind::Int || profile.is_exact();
        let last = index + 1 == self.size;
        let far = |salt: usize| {
            if integers {
                1.0 + self.below(salt, 3)
            } else {
                0.2 + self.unit(salt)
            }
        };
        match op {
            PartialOp::Sum if kind == ElementKind::Int => (self.share(value, index), 1.0),
            PartialOp::Sum => {
                let term = |index| {
                    if integers {
                        self.below(index, 5) - 2.0
                    } else {
                        self.unit(index) - 0.4
                    }
                };
                let others: f64 = (0..self.size - 1).map(term).sum();
                (if last { value - others } else { term(index) }, 1.0)
            }
            PartialOp::Avg => {
                let term = |index| value + self.unit(index) - 0.4;
                let others: f64 = (0..self.size - 1).map(term).sum();
                let size = self.size as f64;
                (
                    if last {
                        value * size - others
                    } else {
                        term(index)
                    },
                    1.0 / size,
                )
            }
            PartialOp::Min | PartialOp::Max if self.below(50, self.size) == index as f64 => {
                (value, 1.0)
            }
            // A byte holds no more.
            PartialOp::Min if kind == ElementKind::Int && profile.int == DType::U8 => {
                ((value + far(index)).min(255.0), 0.0)
            }
            PartialOp::Min => (value + far(index), 0.0),
            // Of unsigned elements nothing is below zero.
            PartialOp::Max if kind == ElementKind::Int => ((value - far(index)).max(0.0), 0.0),
            PartialOp::Max => (value - far(index), 0.0),
            PartialOp::Product => {
                let factor = |index: usize| match kind {
                    ElementKind::Int => 1.0,
                    _ if integers => {
                        if self.below(index, 2) == 0.0 {
                            1.0
                        } else {
                            -1.0
                        }
                    }
                    _ => 0.6 + 0.8 * self.unit(index),
                };
                let product: f64 = (0..self.size - 1).map(factor).product();
                if last {
                    (value / product, product)
                } else {
                    (factor(index), value / factor(index))
                }
            }
        }
    }

    /// Of `value`, cut into as many terms as there are ranks, none of them negative if it is not.
    fn share(&self, value: f64, index: usize) -> f64 {
        let mut rest = value;
        for rank in 0..self.size - 1 {
            let term = value.signum() * self.below(rank, rest.abs() as usize + 1);
            if rank == index {
                return term;
            }
            rest -= term;
        }
        rest
    }

    fn below(&self, salt: usize, bound: usize) -> f64 {
        (self.unit(salt) * bound as f64).floor()
    }

    /// In `0.0..1.0`: the finalizer of SplitMix64 over the place.
    fn unit(&self, salt: usize) -> f64 {
        let bits = [self.at, self.mesh_dim, salt]
            .into_iter()
            .fold(0, |state: u64, number| {
                let mut z = (state ^ number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^ (z >> 31)
            });
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}
