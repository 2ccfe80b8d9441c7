//! [`ParamError`]: why a model's parameters could not be distributed, or read as such.

use crate::pattern::PatternError;

/// Why a model's parameters could not be distributed, or read as such.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// A pattern of paths cannot be parsed.
    #[error("`{pattern}` is no path pattern: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern of paths matches nothing in the model.
    #[error("the pattern `{pattern}` matches no {what} of the model{}; it has {present}", near(near_path.as_deref()))]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What was looked for: modules or parameters.
        what: &'static str,
        /// What is written almost like it.
        near_path: Option<String>,
        /// What there is.
        present: String,
    },
    /// The parameter has a reparameterization already, and burn allows one.
    #[error(
        "parameter `{param}` has the reparameterization `{name}`, and burn allows one a parameter (fully_shard takes \
         `lora` of weights that are not quantized); merge it with \
         `model.materialize()`, or have fully_shard leave the stored value as it is, `.with_ignored([\"{param}\"])`, and \
         distribute what `{name}` trains"
    )]
    Reparameterized {
        /// Path of the parameter.
        param: String,
        /// Name of its reparameterization.
        name: String,
    },
    /// Adapters (LoRA) are taken off a whole model at once, and would take something else with them.
    #[error(
        "parameter `{param}` has an adapter, which cannot be distributed with it while `{other}` has the \
         reparameterization `{name}`: shard a model with adapters in one call, all of it, and merge what is no adapter \
         with `materialize()`; or have fully_shard leave the stored value as it is, `.with_ignored([\"{param}\"])`, and \
         shard what the adapter trains"
    )]
    AdapterConflict {
        /// Path of the parameter.
        param: String,
        /// Path of the other one.
        other: String,
        /// Name of its reparameterization.
        name: String,
    },
    /// No graph of this crate's operations can be recorded on the ranks' device.
    #[error(
        "the ranks compute on {device}, where this crate cannot record gradients: it was built for the backends of its \
         features, of `flex` (CPU), `cuda` and `wgpu`; enable the one of the device, or launch on another: \
         `Launch::threads(4).device(..)`"
    )]
    Backend {
        /// The device.
        device: String,
    },
    /// The parameter is on another device than its rank computes on.
    #[error(
        "parameter `{param}` is on {device}, and this rank computes on {own}; make the model on `world.device()`, or \
         move it there: `model.to_device(world.device())`; of units whose shards are in host memory, \
         `FullyShard::with_offload(OffloadPolicy::Cpu)`, it may be on the CPU, too"
    )]
    Device {
        /// Path of the parameter.
        param: String,
        /// Its device.
        device: String,
        /// The rank's.
        own: String,
    },
    /// An input of a unit is on another device than the unit computes on.
    #[error(
        "an input of unit `{unit}` is on {device}, and this rank computes on {own}; make batches on `world.device()`, or \
         move them there: `x.to_device(world.device())`"
    )]
    InputDevice {
        /// The unit.
        unit: String,
        /// The input's device.
        device: String,
        /// The rank's.
        own: String,
    },
    /// A parameter has been put into a model that was distributed before.
    #[error(
        "parameter `{param}` is not distributed as those around it: it was replaced after fully_shard or parallelize, \
         by an assignment or by a method of the parameter (`map`, `set_require_grad`), and would be trained by each \
         rank alone; gather the model with full_model, replace the parameter in that, and distribute it again"
    )]
    Replaced {
        /// Path of the parameter.
        param: String,
    },
    /// Two fields hold clones of one parameter.
    #[error(
        "`{param}` and `{other}` are clones of one parameter, of which burn's optimizers step one; \
         keep it in one field and read that in both places: `embedding.weight.val()`, or `.dtensor()`"
    )]
    Tied {
        /// Path of the first.
        param: String,
        /// Path of the second.
        other: String,
    },
    /// The model was walked twice and showed different parameters.
    #[error("parameter `{param}` was planned but not met again; does the module's `map` visit what its `visit` does?")]
    ParamNotVisited {
        /// Path of the parameter.
        param: String,
    },
    /// Parameters of one unit are parallelized on different meshes.
    #[error(
        "one unit would hold `{param}`, parallelized on {mesh}, and `{other_param}`, parallelized on \
         {other_mesh}; parallelize both on one mesh, or make them separate units"
    )]
    TensorMeshes {
        /// Path of a parameter.
        param: String,
        /// Its mesh.
        mesh: String,
        /// Path of the first parameter on another mesh.
        other_param: String,
        /// That mesh.
        other_mesh: String,
    },
    /// The data-parallel and the tensor-parallel mesh do not make one mesh.
    #[error(
        "the parameters are parallelized on {tensor}, which is no other part of one mesh than {data}; \
         slice both out of one mesh: `mesh.slice([\"replicate\", \"shard\"])` for fully_shard and \
         `mesh.slice([\"tp\"])` for parallelize"
    )]
    Meshes {
        /// The mesh given to `fully_shard`.
        data: String,
        /// The mesh given to `parallelize`.
        tensor: String,
    },
    /// A parameter of a [strict](crate::fsdp::FullyShard::with_implicit_unshard) model was read outside its unit.
    #[error(
        "parameter `{param}` is read outside its unit `{unit}`, which would gather and reduce it by itself; write \
         `unit(module, input, ..)` around the forward of the unit's module, or of one around it"
    )]
    ReadOutsideUnit {
        /// Path of the parameter.
        param: String,
        /// The unit.
        unit: String,
    },
    /// Units were told to keep parts over so many ranks, of which no groups were made.
    #[error(
        "unit `{unit}` cannot keep its parameters over {ranks} ranks after forward: `fully_shard` was not given \
         ReshardAfterForward::Ranks({ranks}), and makes the groups; give it that, and set another one at run time"
    )]
    ReshardRanks {
        /// The unit.
        unit: String,
        /// Number of ranks asked for.
        ranks: usize,
    },
    /// A divide factor of gradients by which nothing can be divided.
    #[error(
        "gradients cannot be divided by {factor}: the factor must be positive, and neither it nor its reciprocal may be out of \
         the range of f32"
    )]
    DivideFactor {
        /// The factor.
        factor: f64,
    },
    /// A checkpointed block computes with what it would have no gradient for.
    #[error(
        "the checkpointed block `{block}` computes with a tracked tensor that is no input of it and no parameter of its \
         module, and would get no gradient: pass it in `input`, give a module that has the parameter, or detach it \
         before"
    )]
    CapturedTrackedTensor {
        /// The unit, or the type of the module.
        block: String,
    },
    /// A checkpointed block did other things when it computed again.
    #[error(
        "the checkpointed block `{block}` {differs} in backward than in forward, and its gradients would be wrong: it \
         must compute the same again; random numbers of burn's own state (`Dropout`, `Tensor::random`) are the same \
         unless other threads of the process draw meanwhile, as ranks that are threads do: draw with \
         `burn_dtensor::nn::dropout` and `random::tensor`, or run a rank a process"
    )]
    NondeterministicRecompute {
        /// The unit, or the type of the module.
        block: String,
        /// What differs.
        differs: &'static str,
    },
    /// A hook on a unit's averaged gradients has not returned one for each, as it was.
    #[error("the all-reduce hook of unit `{unit}` must return the tensors that it was given, in order: {reason}")]
    HookResult {
        /// The unit.
        unit: String,
        /// What it has returned.
        reason: String,
    },
    /// Gradients of backwards that did not reduce them wait, and the optimizer has stepped without them.
    #[error(
        "gradients of unit `{unit}` wait to be reduced, and the optimizer has stepped without them. They were computed by a \
         backward without gradient synchronization. Call FsdpModule::of(&model)?.set_requires_gradient_sync(true) before the last \
         backward of a step, which must enter a unit of the same model, sharded by one call of `fully_shard` or inside it; \
         or drop them with FsdpModule::of(&model)?.reset_iter_state()"
    )]
    PendingGradients {
        /// The unit.
        unit: String,
    },
    /// A backward has come to what one before has consumed.
    #[error(
        "a second backward comes to unit `{unit}`, or to one that ran before it, whose graph the first has consumed: what \
         it returned is in two losses that were differentiated apart; add the losses up and call backward once, or run the \
         unit once for each of them, `unit(&module, ..)` twice"
    )]
    SecondBackward {
        /// The unit: the last that may be meant.
        unit: String,
    },
    /// One module was to be gathered of a unit of several.
    #[error(
        "unit `{unit}` is of several modules, and `unshard` was given one: they are gathered together as the model's forward \
         comes to the first; have another unit gather it ahead, \
         FsdpModule::of(&model)?.matching([..])?.set_forward_prefetch([FsdpModule::of(&module)?])"
    )]
    UnshardOnGroupUnit {
        /// The unit.
        unit: String,
    },
    /// The module is not sharded.
    #[error("the module is no unit; pass a module that fully_shard made one")]
    NotSharded,
    /// The model was to be gathered on a rank that has no part of it.
    #[error("rank {rank} is not of {mesh}, on which the model is distributed: name one of its ranks")]
    NotOfMesh {
        /// The rank asked for.
        rank: usize,
        /// The mesh of the first parameter.
        mesh: String,
    },
    /// A parameter without tensor-parallel placements was read as a DTensor on the tensor-parallel mesh.
    #[error(
        "parameter `{param}` was not parallelized, so it has no tensor-parallel mesh; call parallelize on the model \
         (an empty plan replicates everything), or read it with `val()`"
    )]
    NotParallelized {
        /// Path of the parameter, or its id.
        param: String,
    },
}

fn near(path: Option<&str>) -> String {
    path.map_or_else(String::new, |path| format!(": did you mean `{path}`?"))
}

impl From<PatternError> for crate::Error {
    fn from(PatternError { pattern, reason }: PatternError) -> Self {
        ParamError::Pattern { pattern, reason }.into()
    }
}
