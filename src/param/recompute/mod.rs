//! [`checkpoint_activations`]: activation checkpointing. A block keeps only its input, and backward recomputes the
//! rest.
//!
//! ```text
//!   forward    input ─> the block without a graph ─────────────────────────────> outputs
//!   backward   input ─> the block on a private graph ─> backward of that graph <─ gradients of outputs
//! ```
//!
//! The backward of the private graph runs inside a step of the program's backward. Its leaves are
//! copies of the inputs, of parameters that no unit gathers, and of gathered weights. The gradients
//! of gathered weights are passed to their units as usual. Units inside the block are entered once:
//! the recomputation uses the passes that forward recorded.

use std::any::type_name;
use std::rc::Rc;
use std::sync::Arc;

use burn::backend::{
    AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchTensor, TensorMetadata,
};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Distribution, Tensor};

use super::ParamError;
use super::backward_nodes::nothing;
use super::copied_leaves;
use super::forward::{ModuleUnits, in_unit};
use super::panicked::noting_panics;
use super::scope::ForwardScope;
use super::shards::LocalShards;
use super::storage::persistent_copy;
use super::thread;
use super::unit_pass::{BackwardScheduler, UnitPass};
use super::unit_stack::{self, InBlock, UnitGuard};
use super::visit::walk;
use crate::Error;
use crate::autodiff::{self, BackwardId};
use crate::dtensor::ops::random::{self, ThreadRng};
use crate::error::OrUnwind;
use crate::memory::{digests, is_host};
use crate::tensor_tree::TensorTree;
use context::{RecomputeGuard, UntrackedBlock};
use detached::{DetachedModule, leaf, untracked};
use region::{Recompute, RecomputeRegion, Recomputed, backward_from};

pub(crate) mod context;
mod detached;
mod region;

/// [`unit`](fn@super::unit) with activation checkpointing: keeps only the input of `forward`, and
/// recomputes everything else in backward.
///
/// Use it instead of [`unit`](fn@super::unit) around each block whose activations need too much
/// memory:
///
/// ```
/// # use burn::{nn::Linear, module::Module, tensor::Tensor};
/// # use burn_dtensor::fsdp::{checkpoint_activations, unit};
/// # #[derive(Module, Debug)]
/// # struct Stack { blocks: Vec<Linear>, head: Linear }
/// impl Stack {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         unit(self, x, |stack, mut x| {
///             for block in &stack.blocks {
///                 x = checkpoint_activations(block, x, |block, x| block.forward(x));
///             }
///             stack.head.forward(x)
///         })
///     }
/// }
/// ```
///
/// It also checkpoints a module that is not sharded. For units,
/// [`FsdpModule::set_activation_checkpointing`](crate::fsdp::FsdpModule::set_activation_checkpointing)
/// turns checkpointing off and on, optionally by path patterns. If nothing is tracked, it is
/// equivalent to [`unit`](fn@super::unit).
///
/// Backward gathers each unit once, for both the recomputation and the gradients, and reduces it in
/// the same order as without checkpointing. This holds for units inside the block, however they are
/// entered, and for enclosing units whose weights the block reads. Backward gathers the units that
/// a block reads even if
/// [`FsdpModule::set_unshard_in_backward`](crate::fsdp::FsdpModule::set_unshard_in_backward) is
/// off. Blocks may be nested, and one block may run several times.
///
/// Every tracked tensor that the block uses must be in `input` or a parameter of `module`: other
/// captured tensors would get no gradient. An output that depends on a captured tracked tensor is
/// an error. A dependency that `detach` hides is not detected. Compute such values outside the
/// block, because otherwise backward could not finish.
///
/// # Random numbers
/// Both runs of the block use the same random numbers:
///
/// | source | identical |
/// |---|---|
/// | this crate's [streams](crate::dtensor::ops::random): DTensors, [`nn::dropout`](crate::nn::dropout), `random::tensor` | always |
/// | burn's state of the device (`Dropout`, `Tensor::random`) | if no other thread draws from it while the block computes |
///
/// If anything is tracked, a call reseeds burn's state with a number drawn from it (on a GPU, from
/// this crate's stream of the rank). It does so whether or not checkpointing is on, so
/// checkpointing changes no random number. Ranks that are threads share burn's state. If the
/// recomputed outputs are not bitwise identical to those of forward, backward fails with
/// [`ParamError::NondeterministicRecompute`] instead of computing wrong gradients. This check runs
/// on the CPU only: on a GPU, outputs are not compared.
///
/// Statistics that a layer updates in forward (batch normalization) are updated once.
///
/// # Collective
/// Like [`unit`](fn@super::unit). Collectives that `forward` itself calls, as DTensors do, are
/// called a second time in backward, if an output of the block is in the loss. So the ranks of such
/// a collective must agree on that.
///
/// # Panics
/// Like [`unit`](fn@super::unit); with [`ParamError::CapturedTrackedTensor`] in forward, and
/// [`ParamError::NondeterministicRecompute`] in backward.
#[track_caller]
pub fn checkpoint_activations<M, I, O>(
    module: &M,
    input: I,
    forward: impl Fn(&M, I) -> O + Send + 'static,
) -> O
where
    M: Module + 'static,
    I: TensorTree + Clone + Send + 'static,
    O: TensorTree,
{
    in_unit(module, input, |module, input, units| {
        let (input, given) = RegionInputs::of(module, input);
        let is_trained = given.trains || !given.tracked.is_empty();
        let random = given
            .device
            .clone()
            .filter(|_| is_trained || context::is_any())
            .map(SavedRngState::start);
        let is_on = units.iter().all(|unit| unit.comm.options.lock().checkpoint);
        // A block that runs for the first time has no graph that could keep activations, so a
        // nested one need not be checkpointed.
        if !is_on || context::is_first() {
            return forward(module, input);
        }
        if !is_trained {
            // Whether the units are gathered for backward must not depend on what this rank tracks.
            let units: Vec<_> = walk(module)
                .distributed
                .into_iter()
                .map(|visited| visited.param.unit)
                .collect();
            unit_stack::passes_of(&units)
                .iter()
                .for_each(|(pass, _)| pass.unsharded.will_be_recomputed());
            let _block = UntrackedBlock::enter();
            return forward(module, input);
        }
        first(
            module,
            input,
            forward,
            given,
            random,
            units.first().map(|unit| unit.label()),
        )
    })
}

/// Devices and tracking of a block's input and parameters.
struct RegionInputs {
    /// The device without autodiff on which the block computes, or `None` if it has no float
    /// tensor.
    device: Option<Device>,
    /// True if the block trains a parameter.
    trains: bool,
    /// The tracked inputs.
    tracked: Vec<DispatchTensor>,
    /// For each input, true if it is tracked.
    is_tracked: Vec<bool>,
}

impl RegionInputs {
    fn of<M: Module, I: TensorTree>(module: &M, input: I) -> (I, Self) {
        let mut given = Self {
            device: None,
            trains: false,
            tracked: Vec::new(),
            is_tracked: Vec::new(),
        };
        let input = input.map_floats(&mut |tensor| {
            given.see(&tensor);
            let is_tracked = Dispatch::is_tracked(&tensor);
            given.is_tracked.push(is_tracked);
            given.tracked.extend(is_tracked.then(|| tensor.clone()));
            tensor
        });
        if given.device.is_none() {
            // Offloaded shards are in host memory, and the block computes on another device.
            let found = walk(module).distributed;
            let offloaded = found
                .iter()
                .find_map(|visited| visited.param.unit.spec().offloaded());
            given.device = offloaded.map(|offloaded| offloaded.device().clone());
        }
        module.visit(&mut given);
        (input, given)
    }

    fn see(&mut self, tensor: &DispatchTensor) {
        self.device
            .get_or_insert_with(|| Device::new(tensor.device()).inner());
    }
}

impl ModuleVisitor for RegionInputs {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() {
            // Asking for the device does not initialize a lazy parameter.
            self.device
                .get_or_insert_with(|| param.lazy_device().inner());
            self.trains |= param.is_require_grad() && param.lazy_device().is_autodiff();
            return;
        }
        let base = param.base().into_dispatch();
        self.see(&base);
        self.trains |= copied_leaves::trained(&base).is_some();
    }
}

/// Runs a block in forward, without a graph, and records its nodes.
fn first<M, I, O, F>(
    module: &M,
    input: I,
    forward: F,
    given: RegionInputs,
    random: Option<SavedRngState>,
    unit: Option<Arc<str>>,
) -> O
where
    M: Module + 'static,
    I: TensorTree + Clone + Send + 'static,
    O: TensorTree,
    F: Fn(&M, I) -> O + Send + 'static,
{
    let block = unit.unwrap_or_else(|| type_name::<M>().into());
    let (module, copies) = DetachedModule::of(module);
    let kept = input.map_floats(&mut |tensor| match tensor.autodiff {
        DispatchAutodiffContext::Disabled => persistent_copy(tensor),
        DispatchAutodiffContext::Enabled(_) => persistent_copy(untracked(tensor)),
    });
    let units: Vec<_> = walk(&module)
        .distributed
        .into_iter()
        .map(|visited| visited.param.unit)
        .collect();
    let around = unit_stack::passes_of(&units)
        .into_iter()
        .map(|(pass, shards)| {
            pass.unsharded.will_be_recomputed();
            let bases = shards
                .bases
                .iter()
                .map(|base| copies.copy_of(base))
                .collect();
            (pass, LocalShards { bases, ..shards })
        });
    let around: Vec<_> = around.collect();
    let is_inside = context::is_any();
    let computing = RecomputeGuard::first(copies.leaves.clone());
    let in_block = InBlock::first(scopes(&around, None));
    let output = run(&module, kept.clone(), &forward).0;
    drop(in_block);
    let passes = computing.passes();
    drop(computing);

    let mut values = Vec::new();
    let output = output.map_floats(&mut |tensor| {
        if Dispatch::is_tracked(&tensor) {
            Error::from(ParamError::CapturedTrackedTensor {
                block: block.to_string(),
            })
            .unwind();
        }
        values.push(persistent_copy(autodiff::plain(tensor.clone())));
        tensor
    });
    let RegionInputs {
        tracked,
        is_tracked,
        device,
        ..
    } = given;
    let device = device.expect("at least one input or parameter is tracked");
    // Shards in host memory cannot be leaves of a graph on the device.
    let leaf =
        copies
            .first
            .clone()
            .map(|leaf| match Device::new(leaf.device()).inner() == device {
                true => leaf,
                false => autodiff::leaf(&device, &leaf, true),
            });
    let leaf = leaf.or_else(context::anchor);
    let like = tracked
        .first()
        .or(leaf.as_ref())
        .expect("at least one input or parameter is tracked")
        .clone();
    let trains = passes.iter().any(|pass| pass.is_reduced());
    let inputs = RecomputeInputs {
        block,
        module,
        copies: copies.forget_leaves(),
        input: kept,
        forward,
        random: random.map(SavedRngState::with_begun),
        is_tracked,
        like: untracked(nothing(&like)),
        around,
        passes: passes.clone(),
        digests: digests(values.iter()),
    };
    let scheduler = thread::scheduler();
    let block = RecomputeRegion::new(Box::new(inputs), &tracked, values.len(), passes, scheduler);
    let gate = block.gate(leaf, tracked, unit_stack::enclosing().last, !is_inside);
    if trains {
        unit_stack::set_last_token(gate.clone());
    }
    let mut values = values.into_iter().enumerate();
    output.map_floats(&mut |tensor| {
        let (index, value) = values
            .next()
            .expect("the first traversal visited the same tensors");
        match tensor.autodiff {
            DispatchAutodiffContext::Disabled => value,
            DispatchAutodiffContext::Enabled(_) => block.output(&gate, index, value),
        }
    })
}

/// Runs `forward` with access to the units of modules inside. Also returns the last post-backward
/// node that was created inside.
fn run<M: Module, I, O>(
    module: &M,
    input: I,
    forward: impl Fn(&M, I) -> O,
) -> (O, Option<DispatchTensor>) {
    let Some(ModuleUnits { inside, .. }) = ModuleUnits::of(module).or_unwind() else {
        return (forward(module, input), None);
    };
    let _open = UnitGuard::new(None, inside);
    let output = noting_panics(|| forward(module, input));
    (output, unit_stack::enclosing().last)
}

/// Returns scopes in which a block reads enclosing units: without a graph, or on the graph of
/// `anchor`.
fn scopes(
    around: &[(Arc<UnitPass>, LocalShards)],
    anchor: Option<&DispatchTensor>,
) -> Vec<Rc<ForwardScope>> {
    around
        .iter()
        .map(|(pass, shards)| ForwardScope::around_block(pass, shards.clone(), anchor.cloned()))
        .map(Rc::new)
        .collect()
}

/// Everything that the recomputation of a block needs.
struct RecomputeInputs<M, I, F> {
    /// Name of the unit, or the type of the module.
    block: Arc<str>,
    module: M,
    copies: DetachedModule,
    input: I,
    forward: F,
    random: Option<SavedRngState>,
    /// For each input, true if it is tracked.
    is_tracked: Vec<bool>,
    /// Empty tensor with the autodiff context of the program's graph, from which the anchor is
    /// made.
    like: DispatchTensor,
    /// Enclosing units whose weights the block reads, with copies of their shards.
    around: Vec<(Arc<UnitPass>, LocalShards)>,
    passes: Vec<Arc<UnitPass>>,
    /// Digests of the outputs that forward computed.
    digests: Vec<Option<u64>>,
}

impl<M, I, O, F> Recompute for RecomputeInputs<M, I, F>
where
    M: Module + 'static,
    I: TensorTree + Send + 'static,
    O: TensorTree,
    F: Fn(&M, I) -> O + Send + 'static,
{
    fn run(
        self: Box<Self>,
        grads: Vec<Option<DispatchTensor>>,
        backward: BackwardId,
        scheduler: &BackwardScheduler,
    ) -> Recomputed {
        let Self {
            block,
            module,
            copies,
            input,
            forward,
            random,
            is_tracked,
            like,
            around,
            passes,
            digests,
        } = *self;
        let _random = random.map(SavedRngState::replay);
        let anchor = leaf(like);
        let computing = RecomputeGuard::recomputation(
            passes,
            anchor.clone(),
            context::backward(backward),
            copies.leaves.clone(),
        );
        let _in_block = InBlock::recomputation(scopes(&around, Some(&anchor)));
        let (module, grown) = copies.with_leaves(module).or_unwind();
        let mut inputs = Vec::new();
        let mut is_tracked = is_tracked.into_iter();
        let input = input.map_floats(&mut |tensor| match is_tracked.next() {
            Some(true) => {
                inputs.push(leaf(tensor));
                inputs[inputs.len() - 1].clone()
            }
            _ => tensor,
        });
        let (output, last) = run(&module, input, forward);
        let differs = |differs| {
            Error::from(ParamError::NondeterministicRecompute {
                block: block.to_string(),
                differs,
            })
            .unwind()
        };
        if !computing.has_entered_all() {
            differs("enters fewer units");
        }
        let mut values = Vec::new();
        output.map_floats(&mut |tensor| {
            values.push(tensor.clone());
            tensor
        });
        let plain: Vec<_> = values.iter().cloned().map(autodiff::plain).collect();
        if self::digests(plain.iter()) != digests {
            differs("computes other values");
        }
        drop((plain, module));
        let with_grads = values
            .into_iter()
            .zip(grads)
            .filter(|(value, _)| Dispatch::is_tracked(value));
        let outputs = with_grads
            .filter_map(|(value, grad)| Some((value, grad?)))
            .collect();
        let mut grads = backward_from(outputs, last, anchor);
        let is_reached = |leaf: &DispatchTensor| {
            autodiff::node_id(leaf.clone()).is_none_or(|node| scheduler.padding.is_reached(node))
        };
        let mut grad = |leaf: &DispatchTensor| {
            Dispatch::grad_remove(leaf, grads.as_mut()?).filter(|_| is_reached(leaf))
        };
        let inputs = inputs.iter().map(&mut grad).collect();
        let leaves = grown
            .into_iter()
            .filter_map(|(of, grown)| Some((of, grad(&grown)?)))
            .collect();
        Recomputed {
            inputs,
            leaves,
            reduced: computing.take_reduced(),
        }
    }
}

/// State of random numbers at the start of a block: that of the thread's [stream](random), and the
/// seed of burn's own state.
///
/// burn's state can be seeded, but not read. So each block reseeds it with a number that is drawn
/// from it. On devices other than the CPU, reading that number would wait for the device, so it is
/// drawn from the thread's stream instead.
pub(super) struct SavedRngState {
    stream: ThreadRng,
    device: Device,
    seed: u64,
}

impl SavedRngState {
    /// Saves the state and reseeds burn's, when a block starts on a device without autodiff.
    pub(super) fn start(device: Device) -> Self {
        let stream = ThreadRng::of_thread();
        let seed = next_seed(&device);
        device.seed(seed);
        Self {
            stream,
            device,
            seed,
        }
    }

    /// Returns the state after the first run, whose operators may have begun the thread's stream.
    pub(super) fn with_begun(self) -> Self {
        Self {
            stream: self.stream.with_begun(),
            ..self
        }
    }

    /// Restores the saved state for the recomputation of the block. Dropping the returned guard
    /// ends the replay.
    pub(super) fn replay(self) -> Replayed {
        let Self {
            stream,
            device,
            seed,
        } = self;
        let after = if is_host(&device) {
            next_seed(&device)
        } else {
            random::fold_in(seed, 1)
        };
        let replayed = Replayed(Self {
            stream: ThreadRng::of_thread(),
            device: device.clone(),
            seed: after,
        });
        stream.restore();
        if !is_host(&device) {
            // The first run drew the block's seed from the stream, so the replay does too.
            next_seed(&device);
        }
        device.seed(seed);
        replayed
    }
}

/// Draws a seed for burn's state.
fn next_seed(device: &Device) -> u64 {
    match is_host(device) {
        true => {
            let drawn = Tensor::<1>::random([1], Distribution::Default, (device, DType::F64));
            drawn.into_scalar::<f64>().to_bits()
        }
        false => random::next_device_seed(),
    }
}

/// Guard of a replay. When it is dropped, the random state continues as if there had been no
/// replay.
pub(super) struct Replayed(SavedRngState);

impl Drop for Replayed {
    fn drop(&mut self) {
        self.0.stream.restore();
        self.0.device.seed(self.0.seed);
    }
}
