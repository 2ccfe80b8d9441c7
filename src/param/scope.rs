//! [`ForwardScope`]: a unit while it is open, with the tensors that tie it to the autodiff graph.

use std::cell::OnceCell;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Device;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::ParamError;
use super::backward_nodes::{
    PostBackward, RootPostBackward, TrackedInput, UnitInput, UnshardedParamNode, one_graph,
    own_leaf,
};
use super::copied_leaves;
use super::events::{EventKind, TrainingState};
use super::options::{Kept, cast};
use super::recompute::context::{self, Next};
use super::shards::LocalShards;
use super::storage::ShardGatherer;
use super::thread::scheduler;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use super::unsharded::{UnshardOptions, UnshardedParams};
use super::varying::Varying;
use crate::Result;
use crate::autodiff::{self, Retain};
use crate::burn_compat::LAYER_DEPTH;
use crate::comm::Call;
use crate::memory::is_host;
use crate::tensor_tree::TensorTree;

/// An open unit on this rank. Unlike [`UnitPass`] it holds tensors of the graph, so it is dropped
/// when the unit is left.
pub(super) struct ForwardScope {
    pub(super) pass: Arc<UnitPass>,
    pub(super) shards: LocalShards,
    /// Output of the pass's [`PostBackward`] nodes, on which the unit's weights and inputs depend
    /// in the graph.
    pub(super) token: Option<DispatchTensor>,
    /// Leaf that replaces the shards in the graph, if they are not leaves of it: shards on another
    /// device, or a checkpointed block that is being recomputed.
    stands_for_shards: Option<DispatchTensor>,
    /// The pass's [own leaf](super::backward_nodes::own_leaf) in the graph.
    own_leaf: Option<DispatchTensor>,
    /// True if a backward may need the pass, on this rank or another.
    backward: bool,
    /// True if this rank's weights depend on the token: the rank trains one of them, or an input is
    /// tracked.
    is_tracked: bool,
    /// True if forward entered the pass before, and a checkpointed block reads it now.
    pub(super) again: bool,
    /// Values of the parameters read so far: a weight that is read twice has one node in the graph.
    pub(super) read: Vec<ReadValue>,
}

/// Values that reads of one parameter have returned so far.
#[derive(Default)]
pub(super) struct ReadValue {
    /// Value gathered over the data-parallel ranks.
    value: OnceCell<DispatchTensor>,
    /// Value gathered over the tensor-parallel ranks as well.
    pub(super) full: OnceCell<DispatchTensor>,
    varying: OnceCell<Arc<Varying>>,
}

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
    fn is_lone(&self) -> bool {
        matches!(self, Self::LoneRead(_))
    }

    fn is_stored(&self) -> bool {
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

impl ForwardScope {
    /// Opens `unit` on the shards of some or all of its parameters, and ties it to its inputs.
    ///
    /// # Errors
    /// [`ParamError`].
    pub(super) fn open<I: TensorTree>(
        unit: &Arc<Unit>,
        shards: LocalShards,
        access: UnitAccess,
        around: Enclosing,
        input: I,
    ) -> Result<(Self, I)> {
        if context::is_any()
            && let Some(at) = shards.bases.iter().position(Dispatch::is_tracked)
        {
            let block = unit.spec().params[shards.members[at]].path.to_string();
            return Err(ParamError::CapturedTrackedTensor { block }.into());
        }
        let pass = match context::next() {
            Next::New => None,
            Next::Recorded(pass) if pass.buffer.is_of(unit, &shards.members) => Some(pass),
            Next::Recorded(_) | Next::None => {
                let (block, differs) = (unit.label().to_string(), "enters other units");
                return Err(ParamError::NondeterministicRecompute { block, differs }.into());
            }
        };
        let mut inputs = Vec::new();
        let input = input.map_floats(&mut |tensor| {
            unit.comm.check_input(&tensor);
            if Dispatch::is_tracked(&tensor) {
                inputs.push((tensor.clone(), TrackedInput::default()));
            }
            tensor
        });
        let bases = &shards.bases;
        let trained =
            |base: &&DispatchTensor| !access.is_stored() && copied_leaves::trained(base).is_some();
        let first = bases.iter().find(trained);
        let tracked = first.is_some() || !inputs.is_empty();
        // In forward, a checkpointed block computes without a graph.
        let without_graph = context::is_first();
        // Inside a unit whose weights a rank need not use, ranks may differ in having a tracked
        // input. There neither the order nor the issued collectives may depend on it (rules 5 and
        // 9). A pass that a checkpointed block has recorded ends where the block is computed a
        // second time (rule 13).
        let again = pass.is_some();
        let backward =
            tracked || without_graph || again || !access.is_stored() && around.last.is_some();
        let pass = match pass {
            Some(pass) => pass,
            None => begin_pass(
                unit,
                &shards,
                &access,
                &around,
                backward,
                !inputs.is_empty(),
            )?,
        };
        if again {
            pass.buffer.start_again();
        } else if without_graph {
            pass.buffer.will_be_recomputed();
            context::record(&pass);
        } else if context::is_untracked_block() {
            pass.buffer.will_be_recomputed();
        }
        // Other ranks may have a tracked input where this one has none. The pass must then end here
        // too, at the same point of backward (rule 7).
        let parent = first
            .or(bases.first())
            .filter(|_| backward && !without_graph);
        // Shards are not leaves of the graph of a block that is being recomputed, nor of a graph on
        // another device.
        let offloaded = unit.spec().offloaded().filter(|_| !access.is_stored());
        let leaf = |parent| Some(autodiff::leaf(offloaded?.device(), parent, first.is_some()));
        let stands_for_shards =
            parent.and_then(|parent| context::anchor().or_else(|| leaf(parent)));
        let parent = stands_for_shards.as_ref().or(parent);
        let last = around.last.filter(|_| !access.is_stored());
        let earlier = parent.and_then(|parent| last.filter(|last| one_graph(last, parent)));
        let deeper = if matches!(access, UnitAccess::Read) {
            LAYER_DEPTH
        } else {
            0
        };
        // The graph of a block that is being recomputed is dropped when the recomputation ends, and
        // needs no such leaf.
        let own_leaf = parent.filter(|_| context::anchor().is_none()).map(own_leaf);
        let token = parent.map(|parent| {
            token(
                &pass,
                parent.clone(),
                own_leaf.clone(),
                &inputs,
                earlier,
                deeper,
            )
        });
        token.iter().for_each(|token| pass.set_token(token));
        let mut inputs = inputs.into_iter();
        let input = input.map_floats(&mut |tensor| match &token {
            Some(token) if Dispatch::is_tracked(&tensor) => {
                let (_, input) = inputs
                    .next()
                    .expect("the first traversal visited the same tensors");
                let op = UnitInput {
                    pass: pass.clone(),
                    input,
                    dtype: tensor.dtype(),
                };
                autodiff::binary(tensor, token.clone(), Arc::new(op))
            }
            _ => cast(tensor, pass.buffer.unit().spec().precision().inputs),
        });
        let scope = Self {
            stands_for_shards,
            own_leaf,
            is_tracked: tracked,
            ..Self::new(pass, shards, token, backward, again)
        };
        Ok((scope, input))
    }

    fn new(
        pass: Arc<UnitPass>,
        shards: LocalShards,
        token: Option<DispatchTensor>,
        backward: bool,
        again: bool,
    ) -> Self {
        let read = shards.bases.iter().map(|_| ReadValue::default()).collect();
        Self {
            pass,
            shards,
            token,
            stands_for_shards: None,
            own_leaf: None,
            backward,
            is_tracked: true,
            again,
            read,
        }
    }

    /// Creates the scope through which a checkpointed block reads the unit of `pass`, which is open
    /// around the block. `copies` are copies of the unit's shards: without a graph, or tied to the
    /// `anchor` of the block's graph.
    pub(super) fn around_block(
        pass: &Arc<UnitPass>,
        copies: LocalShards,
        anchor: Option<DispatchTensor>,
    ) -> Self {
        Self {
            stands_for_shards: anchor.clone(),
            ..Self::new(pass.clone(), copies, anchor, true, true)
        }
    }

    /// Returns true if this scope is of `unit`.
    pub(super) fn is_of(&self, unit: &Arc<Unit>) -> bool {
        Arc::ptr_eq(self.pass.buffer.unit(), unit)
    }

    /// Returns the parameter at `position`, gathered over the data-parallel ranks.
    pub(super) fn value(&self, position: usize) -> DispatchTensor {
        self.read[position]
            .value
            .get_or_init(|| self.make_value(position))
            .clone()
    }

    fn make_value(&self, position: usize) -> DispatchTensor {
        let base = &self.shards.bases[position];
        let pass = self.pass.clone();
        // A frozen weight that the graph can keep at no cost gets no node. Its layer then saves no
        // activation for a gradient that is not needed.
        let frozen =
            !pass.trains(position) && (self.again || pass.buffer.costs_nothing_kept(position));
        let view = pass.buffer.view(position);
        match self.token.as_ref().filter(|_| self.is_tracked) {
            Some(token) if !frozen => {
                let node = UnshardedParamNode::new(pass, position, self.retain(), view, None);
                autodiff::binary(self.parent(position), token.clone(), node)
            }
            _ if pass.buffer.is_offloaded() => autodiff::constant(view, base),
            // Untracked, so the graph cannot recompute the weight.
            _ => autodiff::unary(
                base.clone(),
                UnshardedParamNode::new(pass, position, Retain::Output, view, None),
            ),
        }
    }

    /// Returns the shard at `position`, or the leaf that replaces it in the graph.
    fn parent(&self, position: usize) -> DispatchTensor {
        self.stands_for_shards
            .as_ref()
            .unwrap_or(&self.shards.bases[position])
            .clone()
    }

    /// Returns what the graph keeps of a gathered weight. The graph of a recomputed block is
    /// dropped before the weight is freed, so it may keep the weight.
    fn retain(&self) -> Retain {
        match self.pass.buffer.options.kept {
            _ if self.again => Retain::Output,
            Kept::Full => Retain::Output,
            Kept::Part | Kept::Shard => Retain::Recompute,
        }
    }

    /// Returns the parameter at `position` for computations that differ between tensor-parallel
    /// ranks, or `None` if no backward follows.
    pub(super) fn varying(&self, position: usize) -> Option<Arc<Varying>> {
        let token = self.token.clone().filter(|_| self.is_tracked)?;
        let is_trained = self.pass.trains(position);
        let make = || {
            Arc::new(Varying {
                pass: self.pass.clone(),
                position,
                parent: is_trained.then(|| self.parent(position)),
                token,
                value: self.value(position),
                retain: self.retain(),
                handles: Mutex::default(),
            })
        };
        Some(self.read[position].varying.get_or_init(make).clone())
    }

    /// Ends the unit's forward. Issues the all-gather that backward will need, if there is a
    /// backward.
    pub(super) fn close(&self, backward: bool) {
        if self.again {
            return;
        }
        let backward = backward && self.backward;
        self.pass.end_forward();
        self.pass.buffer.take_back(backward);
        self.pass
            .buffer
            .happened(EventKind::PostForward, TrainingState::Forward);
        if backward {
            self.pass.passes.left(&self.pass, self.own_leaf.clone());
        }
    }
}

/// Creates a pass through `unit` in forward.
fn begin_pass(
    unit: &Arc<Unit>,
    shards: &LocalShards,
    access: &UnitAccess,
    around: &Enclosing,
    backward: bool,
    has_inputs: bool,
) -> Result<Arc<UnitPass>> {
    let LocalShards { members, bases, .. } = shards;
    let trained = |base| copied_leaves::trained(base).filter(|_| !access.is_stored());
    let leaves: Vec<_> = bases.iter().map(trained).collect();
    let tied = has_inputs || around.is_any;
    let (label, keeps) = match (access, unit.comm.kept()) {
        (UnitAccess::Forward | UnitAccess::Read, keeps) => (unit.label(), keeps),
        (UnitAccess::LoneRead(label), Kept::Full) => (label.clone(), Kept::Full),
        (UnitAccess::LoneRead(label), Kept::Part | Kept::Shard) => (label.clone(), Kept::Shard),
        (UnitAccess::Stored, _) => (unit.label(), Kept::Shard),
    };
    // Without a backward there is no reason to keep anything.
    let kept = if backward { keeps } else { Kept::Shard };
    // A unit may be opened by a read, or be one of several modules that the program does not run
    // itself. Then backward may need a saved view of a weight before any node of the unit runs.
    let may_be_late = matches!(access, UnitAccess::Read) || unit.comm.is_group();
    let is_filled = || !may_be_late || bases.iter().all(|base| fills_when_read(unit, base));
    let in_slots = !access.is_lone() && backward && unit.spec().is_gathered() && is_filled();
    // Of a unit of several modules, each may have a pass of its own, in which the others'
    // parameters are not.
    let is_current = |member, leaf| {
        let at = members.iter().position(|own| *own == member);
        access.is_lone() || at.is_none_or(|at| leaves[at] == Some(leaf))
    };
    let is_trained = leaves.iter().any(Option::is_some);
    if is_trained && unit.accumulated.is_too_late(is_current) {
        return Err(ParamError::PendingGradients {
            unit: unit.label().to_string(),
        }
        .into());
    }
    let due = is_trained
        .then(|| unit.count_pass(access.is_lone().then(|| members[0])))
        .flatten();
    let decision = unit.decision(shards);
    let call = Call {
        model: unit.comm.model(shards),
        decision,
        ..Call::new(label).with_forward_index(unit.spec().draw())
    };
    let stays = match backward {
        true => !unit.comm.options.lock().reshard_after_backward,
        // Without a backward, parameters that would be kept for it are kept for the next forward.
        false => keeps == Kept::Full && !access.is_lone() && unit.spec().is_gathered(),
    };
    let is_cast =
        |(&member, base): (&usize, _)| unit.spec().computed_dtype(member, base) != base.dtype();
    let is_as_stored =
        || unit.spec().offloaded().is_none() && !members.iter().zip(bases).any(is_cast);
    let stored = access.is_stored();
    let options = UnshardOptions {
        kept,
        in_slots,
        stays,
        finds: !stored || is_as_stored(),
    };
    let (members, plain) = (members.as_slice().into(), shards.plain().into());
    let source = ShardGatherer {
        comm: unit.comm.clone(),
        members,
        shards: plain,
        stored,
        call,
        due,
    };
    let buffer = UnshardedParams::new(unit.clone(), source.into(), shards, options);
    let passes = scheduler();
    let place = is_trained.then(|| passes.register(tied));
    let pass = UnitPass::new(buffer, leaves, passes, place, around.innermost.clone());
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

/// Returns true if the last pass through `unit` is gathered in advance of its backward, and the
/// gather is complete.
pub(crate) fn is_gathered_again(unit: &Arc<Unit>) -> bool {
    scheduler().is_gathered_again(unit)
}

/// Drops the reductions in flight of a backward of this thread that was abandoned.
pub(crate) fn give_up_backward() {
    scheduler().reducer.abandon();
}

/// Builds the token of a unit from these tracked inputs and the `earlier` token, with one link for
/// each. Rules 3, 4, 6 and 7 of [`backward_nodes`](super::backward_nodes).
fn token(
    pass: &Arc<UnitPass>,
    parent: DispatchTensor,
    own_leaf: Option<DispatchTensor>,
    inputs: &[(DispatchTensor, TrackedInput)],
    earlier: Option<DispatchTensor>,
    deeper: usize,
) -> DispatchTensor {
    let link = |earlier, _| autodiff::unary(earlier, PostBackward::new(pass, None, false));
    let earlier = earlier.map(|earlier| (0..deeper).fold(earlier, link));
    // A checkpointed block has one `RootPostBackward` for all passes inside, in the graph around
    // it.
    let flush = match own_leaf {
        Some(own) if pass.is_reduced() => autodiff::binary(
            parent,
            own,
            Arc::new(RootPostBackward(SmallVec::from([pass.clone()]))),
        ),
        Some(own) => own,
        None => parent,
    };
    let links = inputs
        .iter()
        .map(|(tensor, input)| (tensor, Some((tensor, input))));
    let links = links.chain(earlier.iter().map(|earlier| (earlier, None)));
    let count = inputs.len() + usize::from(earlier.is_some());
    if count == 0 {
        return autodiff::unary(flush, PostBackward::new(pass, None, true));
    }
    links
        .enumerate()
        .fold(flush, |token, (k, (parent, input))| {
            autodiff::binary(
                token,
                parent.clone(),
                PostBackward::new(pass, input, k + 1 == count),
            )
        })
}
