//! [`begin_pass`]: begins a pass through a unit, as its [`PassPlan`] says.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::ParamError;
use super::copied_leaves;
use super::options::Kept;
use super::shards::LocalShards;
use super::storage::ShardGatherer;
use super::thread::scheduler;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use super::unsharded::{UnshardOptions, UnshardedParams};
use crate::Result;
use crate::comm::Call;
use crate::memory::is_host;

/// Purpose for which a unit is opened.
pub(super) enum UnitAccess {
    /// The forward of a module of the unit.
    Forward,
    /// The read of a parameter inside an open module. Then no `PreBackward` node runs before the
    /// operations that saved the unit's weights.
    Read,
    /// The read of one parameter outside its unit; the field is the label of its collectives. The
    /// end of its use is unknown, so its value cannot be in evictable storage.
    LoneRead(Arc<str>),
    /// Reads in the element types in which weights are stored, not in those of the computation. No
    /// backward follows.
    Stored,
}

impl UnitAccess {
    pub(super) fn is_lone(&self) -> bool {
        matches!(self, Self::LoneRead(_))
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self, Self::Stored)
    }
}

/// The units and modules that are open.
pub(super) struct Enclosing {
    /// True if there are any.
    pub(super) is_any: bool,
    /// The token made last, by these units or by those opened inside them.
    pub(super) last: Option<DispatchTensor>,
    /// The pass through the innermost of the units.
    pub(super) innermost: Option<Arc<UnitPass>>,
}

/// What a pass trains, and what becomes of its weights. It follows from the options of the unit and
/// from what the program does, so all ranks plan the same, except for what this rank trains.
struct PassPlan {
    /// Label of the pass's collectives.
    label: Arc<str>,
    /// Leaves of the shards, by position; `None` for a shard that the pass does not train.
    leaves: Vec<Option<NodeId>>,
    options: UnshardOptions,
}

impl PassPlan {
    /// Plans a pass over `shards`. `backward` is true if a backward may follow.
    fn new(unit: &Unit, shards: &LocalShards, access: &UnitAccess, backward: bool) -> Self {
        let spec = unit.spec();
        let kept_by_unit = match (access, unit.comm.kept()) {
            (UnitAccess::Forward | UnitAccess::Read, kept) => kept,
            (UnitAccess::LoneRead(_), Kept::Full) => Kept::Full,
            (UnitAccess::LoneRead(_), Kept::Part | Kept::Shard) => Kept::Shard,
            (UnitAccess::Stored, _) => Kept::Shard,
        };
        let leaves = match access {
            UnitAccess::Stored => vec![None; shards.bases.len()],
            _ => shards.bases.iter().map(copied_leaves::trained).collect(),
        };
        // A unit may be opened by a read, or be one of several modules that the program does not
        // run itself. Then backward may need a saved view of a weight before any node of the unit
        // runs.
        let may_be_late = matches!(access, UnitAccess::Read) || unit.comm.is_group();
        let is_filled_in_time =
            !may_be_late || shards.bases.iter().all(|base| fills_when_read(unit, base));
        let stays = if backward {
            !unit.comm.options.lock().reshard_after_backward
        } else {
            // Parameters that would be kept for a backward are kept for the next forward.
            kept_by_unit == Kept::Full && !access.is_lone() && spec.is_gathered()
        };
        Self {
            label: match access {
                UnitAccess::LoneRead(label) => label.clone(),
                _ => unit.label(),
            },
            leaves,
            options: UnshardOptions {
                // Without a backward there is no reason to keep anything.
                kept: if backward { kept_by_unit } else { Kept::Shard },
                in_slots: !access.is_lone() && backward && spec.is_gathered() && is_filled_in_time,
                stays,
                uses_earlier: !access.is_stored() || is_computed_as_stored(unit, shards),
            },
        }
    }

    fn is_trained(&self) -> bool {
        self.leaves.iter().any(Option::is_some)
    }
}

/// Begins a pass through `unit` in forward. `backward` is true if a backward may follow, and
/// `has_tracked_input` if this rank has a tracked input.
///
/// # Errors
/// [`ParamError::PendingGradients`].
pub(super) fn begin_pass(
    unit: &Arc<Unit>,
    shards: &LocalShards,
    access: &UnitAccess,
    around: &Enclosing,
    backward: bool,
    has_tracked_input: bool,
) -> Result<Arc<UnitPass>> {
    let plan = PassPlan::new(unit, shards, access, backward);
    let members = &shards.members;
    // Of a unit of several modules, each may have a pass of its own, in which the others'
    // parameters are not.
    let is_trained = plan.is_trained();
    let mut checked = None;
    if is_trained {
        let is_too_late = unit.accumulated.is_too_late(|member, leaf| {
            let at = members.iter().position(|own| *own == member);
            access.is_lone() || at.is_none_or(|at| plan.leaves[at] == Some(leaf))
        });
        if is_too_late {
            return Err(ParamError::PendingGradients {
                unit: unit.label().to_string(),
            }
            .into());
        }
        checked = unit.next_checked_pass(access.is_lone().then(|| members[0]));
    }
    let forward_index = unit.spec().next_forward_index();
    let call = Call {
        model: unit.comm.model(shards),
        decision: unit.decision(shards),
        ..Call::new(plan.label.clone()).with_forward_index(forward_index)
    };
    let source = ShardGatherer {
        comm: unit.comm.clone(),
        members: members.as_slice().into(),
        shards: shards.plain().into(),
        stored: access.is_stored(),
        codec: unit.comm.codec().filter(|_| !access.is_stored()),
        call,
        checked,
    };
    let passes = scheduler();
    let unsharded = UnshardedParams::new(unit.clone(), source.into(), shards, plan.options);
    let place = is_trained.then(|| passes.register(has_tracked_input || around.is_any));
    let pass = UnitPass::new(
        unsharded,
        plan.leaves,
        passes,
        place,
        around.innermost.clone(),
    );
    #[cfg(feature = "testing")]
    super::trace::entered(&pass);
    Ok(pass)
}

/// Returns true if an empty slot of this shard's weight can be refilled when it is read, which is
/// possible in host memory only.
fn fills_when_read(unit: &Unit, base: &DispatchTensor) -> bool {
    match unit.spec().offloaded() {
        Some(offloaded) => is_host(offloaded.device()),
        None => is_host(&Device::new(base.device()).inner()),
    }
}

/// Returns true if forwards compute with the element types, and on the device, of these shards.
fn is_computed_as_stored(unit: &Unit, shards: &LocalShards) -> bool {
    let spec = unit.spec();
    let mut shards = shards.members.iter().zip(&shards.bases);
    spec.offloaded().is_none()
        && unit.comm.codec().is_none()
        && shards.all(|(&member, base)| spec.computed_dtype(member, base) == base.dtype())
}
