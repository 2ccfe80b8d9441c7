//! [`StrategyCost`]: the cost of redistributing an operator's operands to the placements of its strategies.

use std::ops::Add;

use burn::tensor::Shape;
use hashbrown::HashMap;
use itertools::Itertools;

use super::cost_model::Times;
use super::rule::Strategy;
use super::sharding_context::{Dims, ShardingContext};
use crate::dtensor::DTensorSpec;
use crate::dtensor::redistribute_plan::RedistributePlan;
use crate::placement::{CommVolume, Layout, Placement, Placements, sent_backward, sent_forward};

/// An input as it arrives.
#[derive(Debug, Clone, Copy)]
pub(super) struct OperandInfo<'a> {
    pub(super) layout: &'a Layout,
    pub(super) shape: &'a Shape,
    /// Size of the global tensor.
    pub(super) bytes: u64,
    /// True if the input can have a gradient.
    pub(super) differentiable: bool,
    /// Placement that the caller requires on each mesh dimension; empty without a constraint.
    pub(super) wanted: &'a [Option<Placement>],
    /// True if steps of one kind over several mesh dimensions are one collective.
    pub(super) joins: bool,
}

impl<'a> OperandInfo<'a> {
    pub(super) fn new(spec: &'a DTensorSpec, wanted: &'a [Option<Placement>]) -> Self {
        let shape = spec.shape();
        let dtype = spec.dtype();
        let bytes = (shape.num_elements() * dtype.size()) as u64;
        let joins = spec.mesh().joins_dims();
        Self {
            layout: spec.layout(),
            shape,
            bytes,
            differentiable: dtype.is_float(),
            wanted,
            joins,
        }
    }

    /// Returns true if the caller's constraint permits `placement` on `mesh_dim`.
    pub(super) fn takes(&self, mesh_dim: usize, placement: Placement) -> bool {
        self.wanted
            .get(mesh_dim)
            .copied()
            .flatten()
            .is_none_or(|wanted| wanted == placement)
    }
}

/// Cost of a combination of strategies. The fields are compared in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StrategyCost {
    /// Picoseconds of forward and backward; 0 without a [model](super::CostModel).
    pub(super) time: u128,
    /// Collectives in forward, including a later gather that the combination makes necessary.
    pub(super) forward: usize,
    /// Volume that a rank sends in forward, for tensors of nominal size.
    pub(super) sent: u128,
    /// Collectives in backward.
    pub(super) backward: usize,
    /// Volume that a rank sends in backward.
    pub(super) sent_back: u128,
    pub(super) steps: usize,
    /// Number of placements that change.
    pub(super) changed: usize,
}

impl Add for StrategyCost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            time: self.time + other.time,
            forward: self.forward + other.forward,
            sent: self.sent + other.sent,
            backward: self.backward + other.backward,
            sent_back: self.sent_back + other.sent_back,
            steps: self.steps + other.steps,
            changed: self.changed + other.changed,
        }
    }
}

/// Weight of a tensor's traffic, and the times of collectives.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferScale<'a> {
    /// Size relative to the other operands, independent of lengths: every dimension multiplies it
    /// by 256, except those along which the tensor is only broadcast.
    nominal: u128,
    bytes: u64,
    times: Option<&'a Times>,
}

impl<'a> TransferScale<'a> {
    pub(super) fn new(
        operand: &OperandInfo<'_>,
        operands: &[OperandInfo<'_>],
        times: Option<&'a Times>,
    ) -> Self {
        let dims = operand.shape.num_dims();
        let longer = |dim: usize| {
            operands
                .iter()
                .any(|other| other.shape.num_dims() == dims && other.shape[dim] > 1)
        };
        let own = (0..dims)
            .filter(|&dim| operand.shape[dim] > 1 || !longer(dim))
            .count();
        Self {
            nominal: 1 << (8 * own.min(10)),
            bytes: operand.bytes,
            times,
        }
    }

    /// Returns the scale for summaries, a few elements of each shard with `bytes` in total.
    fn of_slots(self, bytes: u64) -> Self {
        Self {
            nominal: (self.nominal >> 8).max(1),
            bytes,
            ..self
        }
    }

    fn forward(self, sent: &CommVolume) -> StrategyCost {
        let time = self.times.map_or(0, |times| times.of(sent, self.bytes));
        StrategyCost {
            time,
            forward: 1,
            sent: u128::from(sent.share) * self.nominal,
            ..StrategyCost::default()
        }
    }

    fn backward(self, sent: &CommVolume) -> StrategyCost {
        let time = self
            .times
            .map_or(0, |times| times.of_backward(sent, self.bytes));
        StrategyCost {
            time,
            backward: 1,
            sent_back: u128::from(sent.share) * self.nominal,
            ..StrategyCost::default()
        }
    }
}

/// Layouts to which an operand may be redistributed in one sharding context, with their costs.
pub(super) struct TargetCosts<'a> {
    operand: OperandInfo<'a>,
    scale: TransferScale<'a>,
    cutting: ShardingContext<'a>,
    /// Dimensions along which shards may be empty. It has some only if the operand arrives with
    /// empty shards: none are created for one that arrives without.
    may_be_empty: Dims,
    known: HashMap<CandidateTarget, Result<(Layout, StrategyCost), Infeasible>>,
}

/// Placements, the mesh dimensions with explicit shard sizes, and those on which the operand
/// varies.
type CandidateTarget = (Placements, Dims, Dims);

/// Reason why a combination of strategies is excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Infeasible {
    /// A rank would have no elements.
    Empty,
    /// An input cannot be redistributed to its layout, or there is no such layout.
    NoWay,
    /// The number of shards of the first output does not divide the length that a strategy
    /// requires.
    Divides,
    /// The cost is not lower than a known one.
    Dearer,
}

impl<'a> TargetCosts<'a> {
    pub(super) fn new(
        operand: OperandInfo<'a>,
        scale: TransferScale<'a>,
        cutting: ShardingContext<'a>,
        takes_empty_parts: impl Fn(usize) -> bool,
    ) -> Self {
        let comes_so = !left_empty(operand.shape, operand.layout).is_empty();
        let may_be_empty = (0..operand.shape.num_dims())
            .filter(|&dim| comes_so && takes_empty_parts(dim))
            .collect();
        Self {
            operand,
            scale,
            cutting,
            may_be_empty,
            known: HashMap::new(),
        }
    }

    /// Returns the layout with these placements and its cost: the redistribution, and the reduction
    /// of the gradient over the mesh dimensions `varying`, on which ranks use the same value in
    /// different computations.
    pub(super) fn get(
        &mut self,
        placements: Placements,
        uneven: &Dims,
        varying: Dims,
    ) -> Result<&(Layout, StrategyCost), Infeasible> {
        let Self {
            operand,
            scale,
            cutting,
            may_be_empty,
            known,
        } = self;
        let make = |(placements, uneven, varying): &CandidateTarget| {
            let layout = cutting
                .layout(placements, uneven)
                .ok_or(Infeasible::NoWay)?;
            if !left_empty(operand.shape, &layout)
                .iter()
                .all(|dim| may_be_empty.contains(dim))
            {
                return Err(Infeasible::Empty);
            }
            let cost = move_cost(operand, *scale, &layout, varying).ok_or(Infeasible::NoWay)?;
            Ok((layout, cost))
        };
        known
            .entry((placements, uneven.clone(), varying))
            .or_insert_with_key(make)
            .as_ref()
            .map_err(|unfit| *unfit)
    }
}

/// Returns the dimensions along which `layout` leaves a rank without elements. A tensor without
/// elements has none.
fn left_empty(shape: &Shape, layout: &Layout) -> Dims {
    if shape.num_elements() == 0 {
        return Dims::new();
    }
    layout
        .min_local_shape(shape)
        .iter()
        .positions(|&len| len == 0)
        .collect()
}

fn move_cost(
    operand: &OperandInfo<'_>,
    scale: TransferScale<'_>,
    target: &Layout,
    varying: &Dims,
) -> Option<StrategyCost> {
    if operand.layout == target && varying.is_empty() {
        return Some(StrategyCost::default());
    }
    let plan = RedistributePlan::of_input(operand.layout, target).ok()?;
    let pairs = operand.layout.placements().iter().zip(target.placements());
    let changed = pairs.filter(|(from, to)| from != to).count();
    let own = StrategyCost {
        steps: plan.steps().len(),
        changed,
        ..StrategyCost::default()
    };
    let moved = Traffic::along(operand.layout, &plan, varying, operand);
    Some(own + moved.cost(scale))
}

/// Returns the cost of exchanging summaries of the shards of `operand`, the first input, in
/// `layout`.
pub(super) fn summary_cost(
    operand: &OperandInfo<'_>,
    scale: TransferScale<'_>,
    layout: &Layout,
    rows: &[&Strategy],
) -> StrategyCost {
    let Some(Slots {
        moved,
        bytes,
        parts,
    }) = slots(operand, layout, rows)
    else {
        return StrategyCost::default();
    };
    let scale = scale.of_slots(bytes);
    // Computed as if no other dimension were sharded: no input is to be sliced only to make the
    // summaries smaller.
    let sent = u128::from(CommVolume::FULL_TENSOR / parts * (parts - 1)) * scale.nominal;
    StrategyCost {
        sent,
        sent_back: if moved.backward.is_empty() { 0 } else { sent },
        ..moved.cost(scale)
    }
}

/// Collectives that redistribute a tensor.
#[derive(Debug)]
struct Traffic {
    forward: Vec<CommVolume>,
    backward: Vec<CommVolume>,
}

impl Traffic {
    /// Returns the collectives along `plan` on the mesh of `operand`, which then varies over
    /// `varying`.
    fn along(
        from: &Layout,
        plan: &RedistributePlan,
        varying: &[usize],
        operand: &OperandInfo<'_>,
    ) -> Self {
        let steps = plan.steps();
        let joins = operand.joins;
        // Only floats have gradients.
        let varying = if operand.differentiable { varying } else { &[] };
        let back = operand
            .differentiable
            .then(|| sent_backward(from, steps, varying, joins));
        Self {
            forward: sent_forward(from, steps, varying, joins).collect(),
            backward: back.into_iter().flatten().collect(),
        }
    }

    fn cost(&self, scale: TransferScale<'_>) -> StrategyCost {
        let forward = self.forward.iter().map(|sent| scale.forward(sent));
        forward
            .chain(self.backward.iter().map(|sent| scale.backward(sent)))
            .fold(StrategyCost::default(), Add::add)
    }
}

/// Traffic of the summaries that ranks exchange of their shards along one dimension.
struct Slots {
    moved: Traffic,
    /// Size of the summaries of all shards.
    bytes: u64,
    parts: u64,
}

fn slots(operand: &OperandInfo<'_>, layout: &Layout, rows: &[&Strategy]) -> Option<Slots> {
    let mut told = rows
        .iter()
        .zip(layout.placements())
        .filter(|(row, _)| row.slots > 0);
    let (row, dim) = told.find_map(|(row, placement)| Some((row, placement.shard_dim()?)))?;
    let sharding_dims = layout.shard_order(dim);
    let parts: usize = sharding_dims
        .iter()
        .map(|&sizes| layout.mesh_shape()[sizes])
        .product();
    if parts == 1 {
        return None;
    }
    let in_chunks = layout.clone().in_chunks(dim);
    let full = in_chunks
        .replaced(|dim, own| {
            if sharding_dims.contains(&dim) {
                Placement::Replicate
            } else {
                own
            }
        })
        .ok()?;
    let plan = RedistributePlan::between(&in_chunks, &full).ok()?;
    // A result that is the same on all ranks is gathered by one collective outside the graph.
    let back = operand.differentiable && row.outputs[0].shard_dim().is_some();
    let joins = operand.joins || row.outputs[0].shard_dim().is_none();
    let moved = Traffic::along(
        &in_chunks,
        &plan,
        sharding_dims,
        &OperandInfo {
            differentiable: back,
            joins,
            ..*operand
        },
    );
    let bytes = operand.bytes / operand.shape[dim].max(1) as u64 * (row.slots * parts) as u64;
    Some(Slots {
        moved,
        bytes,
        parts: parts as u64,
    })
}

/// Collectives for one operand, each with the size of its tensor in bytes.
#[derive(Debug, Default)]
pub(super) struct OperandTraffic {
    pub(super) forward: Vec<(CommVolume, u64)>,
    pub(super) backward: Vec<(CommVolume, u64)>,
}

impl OperandTraffic {
    fn add(&mut self, moved: Traffic, bytes: u64) {
        self.forward
            .extend(moved.forward.into_iter().map(|sent| (sent, bytes)));
        self.backward
            .extend(moved.backward.into_iter().map(|sent| (sent, bytes)));
    }
}

/// Returns all traffic of `operand` on its way to `layout`. For the first operand, this includes
/// the summaries of its shards.
pub(super) fn sends(
    operand: &OperandInfo<'_>,
    layout: &Layout,
    varying: &Dims,
    first: Option<&[&Strategy]>,
) -> OperandTraffic {
    let mut sends = OperandTraffic::default();
    let Ok(plan) = RedistributePlan::of_input(operand.layout, layout) else {
        return sends;
    };
    sends.add(
        Traffic::along(operand.layout, &plan, varying, operand),
        operand.bytes,
    );
    if let Some(Slots { moved, bytes, .. }) = first.and_then(|rows| slots(operand, layout, rows)) {
        sends.add(moved, bytes);
    }
    sends
}
