//! [`ForwardScope`]: a unit while it is open, with the tensors that tie it to the autodiff graph.

use std::cell::OnceCell;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::ParamError;
use super::backward_nodes::{
    PostBackward, RootPostBackward, TrackedInput, UnitInput, UnshardedParamNode, one_graph,
    own_leaf,
};
use super::begin_pass::{Enclosing, UnitAccess, begin_pass};
use super::copied_leaves;
use super::events::{EventKind, TrainingState};
use super::options::{Kept, cast};
use super::recompute::context::{self, Next};
use super::shards::LocalShards;
use super::thread::scheduler;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use super::varying::Varying;
use crate::Result;
use crate::autodiff::{self, Retain};
use crate::burn_compat::LAYER_DEPTH;
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
    pub(super) is_recomputed: bool,
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
        check_captured(unit, &shards)?;
        let recorded = recorded_pass(unit, &shards)?;
        let (input, inputs) = read_inputs(unit, input);
        let plan = OpenPlan::new(
            unit,
            &shards,
            &access,
            &around,
            recorded.is_some(),
            !inputs.is_empty(),
        );
        let pass = match recorded {
            Some(pass) => pass,
            None => begin_pass(
                unit,
                &shards,
                &access,
                &around,
                plan.backward,
                !inputs.is_empty(),
            )?,
        };
        match plan.block_run {
            BlockRun::Recomputed => pass.unsharded.start_backward_gather(),
            BlockRun::First => {
                pass.unsharded.will_be_recomputed();
                context::record(&pass);
            }
            BlockRun::Untracked => pass.unsharded.will_be_recomputed(),
            BlockRun::None => {}
        }
        let own_leaf = match &plan.parent {
            Some(parent) if plan.has_own_leaf => Some(own_leaf(parent)),
            _ => None,
        };
        let token = plan.parent.map(|parent| {
            let links = TokenLinks {
                inputs: &inputs,
                earlier: plan.earlier,
                depth: plan.earlier_depth,
            };
            build_token(&pass, parent, own_leaf.clone(), links)
        });
        if let Some(token) = &token {
            pass.set_token(token);
        }
        let input = tie_inputs(&pass, token.as_ref(), inputs, input);
        let scope = Self {
            pass,
            token,
            stands_for_shards: plan.stands_for_shards,
            own_leaf,
            backward: plan.backward,
            is_tracked: plan.is_tracked,
            is_recomputed: matches!(plan.block_run, BlockRun::Recomputed),
            read: unread(&shards),
            shards,
        };
        Ok((scope, input))
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
            pass: pass.clone(),
            token: anchor.clone(),
            stands_for_shards: anchor,
            own_leaf: None,
            backward: true,
            is_tracked: true,
            is_recomputed: true,
            read: unread(&copies),
            shards: copies,
        }
    }

    /// Returns true if this scope is of `unit`.
    pub(super) fn is_of(&self, unit: &Arc<Unit>) -> bool {
        Arc::ptr_eq(self.pass.unsharded.unit(), unit)
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
        let frozen = !pass.trains(position)
            && (self.is_recomputed || pass.unsharded.costs_nothing_kept(position));
        let view = pass.unsharded.view(position);
        match self.token.as_ref().filter(|_| self.is_tracked) {
            Some(token) if !frozen => {
                let node = UnshardedParamNode::new(pass, position, self.retain(), view, None);
                autodiff::binary(self.parent(position), token.clone(), node)
            }
            _ if pass.unsharded.is_offloaded() => autodiff::constant(view, base),
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
        match self.pass.unsharded.options.kept {
            _ if self.is_recomputed => Retain::Output,
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
        if self.is_recomputed {
            return;
        }
        let backward = backward && self.backward;
        self.pass.end_forward();
        self.pass.unsharded.reshard_after_forward(backward);
        self.pass
            .unsharded
            .record_event(EventKind::PostForward, TrainingState::Forward);
        if backward {
            self.pass
                .passes
                .forward_ended(&self.pass, self.own_leaf.clone());
        }
    }
}

/// Checks that a checkpointed block enters no module of the program around it, whose shards are
/// tracked: a block computes with copies.
///
/// # Errors
/// [`ParamError::CapturedTrackedTensor`].
fn check_captured(unit: &Unit, shards: &LocalShards) -> Result<(), ParamError> {
    if !context::is_any() {
        return Ok(());
    }
    match shards.bases.iter().position(Dispatch::is_tracked) {
        None => Ok(()),
        Some(at) => Err(ParamError::CapturedTrackedTensor {
            block: unit.spec().params[shards.members[at]].path.to_string(),
        }),
    }
}

/// Returns the pass that a checkpointed block has recorded in its first run, if the block is being
/// recomputed.
///
/// # Errors
/// [`ParamError::NondeterministicRecompute`] if the first run entered another unit here.
fn recorded_pass(
    unit: &Arc<Unit>,
    shards: &LocalShards,
) -> Result<Option<Arc<UnitPass>>, ParamError> {
    match context::next() {
        Next::New => Ok(None),
        Next::Recorded(pass) if pass.unsharded.is_of(unit, &shards.members) => Ok(Some(pass)),
        Next::Recorded(_) | Next::None => Err(ParamError::NondeterministicRecompute {
            block: unit.label().to_string(),
            differs: "enters other units",
        }),
    }
}

/// Run of a checkpointed block in which a unit is entered.
#[derive(Clone, Copy)]
enum BlockRun {
    /// No block is running.
    None,
    /// The first run, which has no graph.
    First,
    /// The recomputation, on a pass of the first run.
    Recomputed,
    /// A block that this rank does not checkpoint, because nothing is tracked on it.
    Untracked,
}

/// How a unit is opened and tied to the graph.
struct OpenPlan {
    block_run: BlockRun,
    /// True if this rank's weights depend on the token: see [`ForwardScope::is_tracked`].
    is_tracked: bool,
    /// True if a backward may need the pass, on this rank or another.
    backward: bool,
    /// Leaf that replaces the shards in the graph.
    stands_for_shards: Option<DispatchTensor>,
    /// Parent of the unit's token; `None` if it has none.
    parent: Option<DispatchTensor>,
    /// True if the pass gets its own leaf in the graph. The graph of a block that is being
    /// recomputed is dropped when the recomputation ends, and needs no such leaf.
    has_own_leaf: bool,
    /// The token of the unit that was entered before, on which this one depends, and the number of
    /// links between.
    earlier: Option<DispatchTensor>,
    earlier_depth: usize,
}

impl OpenPlan {
    fn new(
        unit: &Unit,
        shards: &LocalShards,
        access: &UnitAccess,
        around: &Enclosing,
        is_recorded: bool,
        has_tracked_input: bool,
    ) -> Self {
        let block_run = if is_recorded {
            BlockRun::Recomputed
        } else if context::is_first() {
            BlockRun::First
        } else if context::is_untracked_block() {
            BlockRun::Untracked
        } else {
            BlockRun::None
        };
        let trained = match access {
            UnitAccess::Stored => None,
            _ => shards
                .bases
                .iter()
                .find(|base| copied_leaves::trained(base).is_some()),
        };
        let is_tracked = trained.is_some() || has_tracked_input;
        // In forward, a checkpointed block computes without a graph.
        let without_graph = context::is_first();
        // Inside a unit whose weights a rank need not use, ranks may differ in having a tracked
        // input. There neither the order nor the issued collectives may depend on it (rules 5 and
        // 9). A pass that a checkpointed block has recorded ends where the block is computed a
        // second time (rule 13).
        let last_token = around.last.as_ref().filter(|_| !access.is_stored());
        let backward = is_tracked || without_graph || is_recorded || last_token.is_some();
        // Other ranks may have a tracked input where this one has none. The pass must then end here
        // too, at the same point of backward (rule 7).
        let mut shard = None;
        if backward && !without_graph {
            shard = trained.or(shards.bases.first());
        }
        let anchor = context::anchor();
        // Shards are not leaves of the graph of a block that is being recomputed, nor of a graph on
        // another device.
        let mut stands_for_shards = None;
        if let Some(shard) = shard {
            let offloaded = unit.spec().offloaded().filter(|_| !access.is_stored());
            if anchor.is_some() {
                stands_for_shards = anchor.clone();
            } else if let Some(offloaded) = offloaded {
                let leaf = autodiff::leaf(offloaded.device(), shard, trained.is_some());
                stands_for_shards = Some(leaf);
            }
        }
        let parent = stands_for_shards.as_ref().or(shard).cloned();
        let earlier = match (&parent, last_token) {
            (Some(parent), Some(last)) if one_graph(last, parent) => Some(last.clone()),
            _ => None,
        };
        Self {
            block_run,
            is_tracked,
            backward,
            has_own_leaf: anchor.is_none(),
            stands_for_shards,
            parent,
            earlier,
            earlier_depth: match access {
                UnitAccess::Read => LAYER_DEPTH,
                _ => 0,
            },
        }
    }
}

/// Returns true if the last pass through `unit` is gathered in advance of its backward, and the
/// gather is complete.
pub(crate) fn is_backward_gathered(unit: &Arc<Unit>) -> bool {
    scheduler().is_backward_gathered(unit)
}

/// Drops the reductions in flight of a backward of this thread that was abandoned.
pub(crate) fn give_up_backward() {
    scheduler().reducer.abandon();
}

/// Returns an empty entry for each of these shards.
fn unread(shards: &LocalShards) -> Vec<ReadValue> {
    shards.bases.iter().map(|_| ReadValue::default()).collect()
}

/// Checks the devices of the unit's inputs, and returns those that are tracked.
///
/// # Panics
/// Unwinds with [`ParamError::InputDevice`].
fn read_inputs<I: TensorTree>(unit: &Unit, input: I) -> (I, Vec<(DispatchTensor, TrackedInput)>) {
    let mut tracked = Vec::new();
    let input = input.map_floats(&mut |tensor| {
        unit.comm.check_input(&tensor);
        if Dispatch::is_tracked(&tensor) {
            tracked.push((tensor.clone(), TrackedInput::default()));
        }
        tensor
    });
    (input, tracked)
}

/// Makes the `tracked` inputs depend on the token, and casts the others. Without a token all are
/// cast.
fn tie_inputs<I: TensorTree>(
    pass: &Arc<UnitPass>,
    token: Option<&DispatchTensor>,
    tracked: Vec<(DispatchTensor, TrackedInput)>,
    input: I,
) -> I {
    let dtype = pass.unsharded.unit().spec().precision().inputs;
    let mut tracked = tracked.into_iter();
    input.map_floats(&mut |tensor| match token {
        Some(token) if Dispatch::is_tracked(&tensor) => {
            let (_, input) = tracked
                .next()
                .expect("`read_inputs` has visited the same tensors");
            let op = UnitInput {
                pass: pass.clone(),
                input,
                dtype: tensor.dtype(),
            };
            autodiff::binary(tensor, token.clone(), Arc::new(op))
        }
        _ => cast(tensor, dtype),
    })
}

/// What a unit's token depends on in addition to its parent.
struct TokenLinks<'a> {
    /// The unit's tracked inputs.
    inputs: &'a [(DispatchTensor, TrackedInput)],
    /// The token of the unit that was entered before.
    earlier: Option<DispatchTensor>,
    /// Number of nodes between the earlier token and this one.
    depth: usize,
}

/// Builds the token of a unit, with one link for each of `links`. Rules 3, 4, 6 and 7 of
/// [`backward_nodes`](super::backward_nodes).
fn build_token(
    pass: &Arc<UnitPass>,
    parent: DispatchTensor,
    own_leaf: Option<DispatchTensor>,
    links: TokenLinks<'_>,
) -> DispatchTensor {
    // A checkpointed block has one `RootPostBackward` for all passes inside, in the graph around
    // it.
    let mut token = match own_leaf {
        Some(own) if pass.is_reduced() => autodiff::binary(
            parent,
            own,
            Arc::new(RootPostBackward(SmallVec::from([pass.clone()]))),
        ),
        Some(own) => own,
        None => parent,
    };
    if links.inputs.is_empty() && links.earlier.is_none() {
        return autodiff::unary(token, PostBackward::new(pass, None, true));
    }
    for (at, (tensor, input)) in links.inputs.iter().enumerate() {
        let is_last = links.earlier.is_none() && at + 1 == links.inputs.len();
        let link = PostBackward::new(pass, Some((tensor, input)), is_last);
        token = autodiff::binary(token, tensor.clone(), link);
    }
    if let Some(mut earlier) = links.earlier {
        for _ in 0..links.depth {
            earlier = autodiff::unary(earlier, PostBackward::new(pass, None, false));
        }
        token = autodiff::binary(token, earlier, PostBackward::new(pass, None, true));
    }
    token
}
