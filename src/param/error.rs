//! [`ParamError`]: errors of distributing a model's parameters, and of using distributed parameters.

use itertools::Itertools;

use crate::pattern::PatternError;

/// An error of distributing a model's parameters, or of using distributed parameters.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// A path pattern cannot be parsed.
    #[error(
        "`{pattern}` is not a valid path pattern: {reason}. Write `*`, `?` or `[0-3]` within a component of the path, or `**` for \
         any number of components"
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Reason why the pattern cannot be parsed.
        reason: String,
    },
    /// A path pattern matches nothing in the model.
    #[error(
        "pattern `{pattern}` matches no {what} of the model{}. The model has {present}",
        near(near_path.as_deref())
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Kind of item that was searched, for example modules or parameters.
        what: &'static str,
        /// Path that differs only slightly from the pattern, if there is one.
        near_path: Option<String>,
        /// List of the paths that exist.
        present: String,
    },
    /// Some ranks did not use parameters in a backward, which the program refuses.
    #[error(
        "{} Use each on every rank, freeze or ignore it, or allow it by `with_unused_parameters_refused(false)`: it then \
         counts as zeros there",
        by_rank(unused)
    )]
    Unused {
        /// Each of these global ranks, with the paths of the parameters that it did not use.
        unused: Vec<(usize, Vec<String>)>,
    },
    /// The parameter already has a reparameterization. burn allows one per parameter.
    #[error(
        "parameter `{param}` has the reparameterization `{name}`, and burn allows one per parameter (`fully_shard` \
         accepts `lora` on weights that are not quantized). Merge it with `model.materialize()`, or let `fully_shard` \
         ignore the stored value, `.with_ignored([\"{param}\"])`, and distribute the parameters that `{name}` trains"
    )]
    Reparameterized {
        /// Path of the parameter.
        param: String,
        /// Name of its reparameterization.
        name: String,
    },
    /// A parameter with an adapter (LoRA) must be distributed, while another parameter has a
    /// different reparameterization. Adapters are removed from all parameters of a model at once,
    /// which would also remove the other reparameterization.
    #[error(
        "parameter `{param}` has an adapter, which cannot be distributed while `{other}` has the reparameterization \
         `{name}`. Shard all parameters of a model with adapters in one call, and merge other reparameterizations with \
         `materialize()`; or let `fully_shard` ignore the stored value, `.with_ignored([\"{param}\"])`, and shard the \
         parameters that the adapter trains"
    )]
    AdapterConflict {
        /// Path of the parameter.
        param: String,
        /// Path of the other parameter.
        other: String,
        /// Name of the other parameter's reparameterization.
        name: String,
    },
    /// This crate cannot record gradients on the ranks' device.
    #[error(
        "the ranks compute on {device}, where this crate cannot record gradients: it supports only the backends that \
         its features `flex` (CPU), `cuda` and `wgpu` enable. Enable the feature for this device, or launch on another \
         one: `Launch::threads(4).with_device(..)`"
    )]
    Backend {
        /// The device.
        device: String,
    },
    /// A parameter is not on the device on which its rank computes.
    #[error(
        "parameter `{param}` is on {device}, but this rank computes on {own}. Create the model on `world.device()`, or \
         move it there: `model.to_device(world.device())`. Parameters may also be on the CPU if their unit's shards \
         are in host memory: `FullyShard::with_offload(OffloadPolicy::Cpu)`"
    )]
    Device {
        /// Path of the parameter.
        param: String,
        /// Device of the parameter.
        device: String,
        /// Device of the rank.
        own: String,
    },
    /// An input of a unit is not on the device on which the unit computes.
    #[error(
        "an input of unit `{unit}` is on {device}, but this rank computes on {own}. Create batches on \
         `world.device()`, or move them there: `x.to_device(world.device())`"
    )]
    InputDevice {
        /// The unit.
        unit: String,
        /// Device of the input.
        device: String,
        /// Device of the rank.
        own: String,
    },
    /// A parameter of a distributed model was replaced after the model was distributed.
    #[error(
        "parameter `{param}` is not distributed, but the parameters around it are: it was replaced after fully_shard \
         or parallelize, by an assignment or by a method of the parameter (`map`, `set_require_grad`), and each rank \
         would train it separately. Gather the model with full_model, replace the parameter there, and distribute the \
         result"
    )]
    Replaced {
        /// Path of the parameter.
        param: String,
    },
    /// Two fields hold clones of the same parameter.
    #[error(
        "`{param}` and `{other}` are clones of the same parameter, and burn's optimizers would update only one of \
         them. Keep the parameter in one field, and read that field in both uses: `embedding.weight.val()` or \
         `.dtensor()`"
    )]
    Tied {
        /// Path of the first clone.
        param: String,
        /// Path of the second clone.
        other: String,
    },
    /// A method of the model that maps its parameters did not visit a parameter that its `visit`
    /// did.
    #[error(
        "the model's `visit` visited parameter `{param}`, but its `map` did not. Make both methods visit the same \
         parameters"
    )]
    ParamNotVisited {
        /// Path of the parameter.
        param: String,
    },
    /// Parameters of one unit are parallelized on different meshes.
    #[error(
        "one unit would contain `{param}`, parallelized on {mesh}, and `{other_param}`, parallelized on {other_mesh}. \
         Parallelize both on the same mesh, or put them into separate units"
    )]
    TensorMeshes {
        /// Path of a parameter.
        param: String,
        /// Mesh of that parameter.
        mesh: String,
        /// Path of the first parameter on another mesh.
        other_param: String,
        /// Mesh of the other parameter.
        other_mesh: String,
    },
    /// The data-parallel mesh and the tensor-parallel mesh are not disjoint slices of one mesh.
    #[error(
        "the parameters are parallelized on {tensor}, but {data} is not a slice of the same mesh along other \
         dimensions. Slice both out of one mesh: `mesh.slice([\"replicate\", \"shard\"])` for fully_shard and \
         `mesh.slice([\"tp\"])` for parallelize"
    )]
    Meshes {
        /// Mesh passed to `fully_shard`.
        data: String,
        /// Mesh passed to `parallelize`.
        tensor: String,
    },
    /// A parameter was read outside its unit, in a model with
    /// [implicit unshard](crate::fsdp::FullyShard::with_implicit_unshard) disabled.
    #[error(
        "parameter `{param}` is read outside its unit `{unit}`, so it would be gathered and reduced separately. Write \
         `unit(module, input, ..)` around the forward of the unit's module, or of a module that contains it"
    )]
    ReadOutsideUnit {
        /// Path of the parameter.
        param: String,
        /// The unit.
        unit: String,
    },
    /// The requested [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks) has a number
    /// of ranks for which `fully_shard` created no groups.
    #[error(
        "unit `{unit}` cannot keep its parameters sharded over {ranks} ranks after forward: `fully_shard` creates the \
         groups, and was not given ReshardAfterForward::Ranks({ranks}). Pass that to `fully_shard`; other policies can \
         be set at run time"
    )]
    ReshardRanks {
        /// The unit.
        unit: String,
        /// Requested number of ranks.
        ranks: usize,
    },
    /// The gradient divide factor is not a valid divisor.
    #[error(
        "gradients cannot be divided by {factor}. Pass a positive factor such that both the factor and its reciprocal \
         are in the range of f32"
    )]
    DivideFactor {
        /// The requested factor.
        factor: f64,
    },
    /// The weight of a rank's gradients is not a valid factor.
    #[error("gradients cannot have the weight {weight}. Pass a finite number that is not negative")]
    GradientWeight {
        /// The requested weight.
        weight: f64,
    },
    /// A checkpointed block computes with a tracked tensor that is not one of its inputs or
    /// parameters. That tensor would get no gradient.
    #[error(
        "checkpointed block `{block}` computes with a tracked tensor that is neither an input of the block nor a \
         parameter of its module, and would get no gradient. Pass it in `input`, pass a module that contains the \
         parameter, or detach the tensor first"
    )]
    CapturedTrackedTensor {
        /// The unit, or the type of the module.
        block: String,
    },
    /// The recomputation of a checkpointed block in backward differed from its forward.
    #[error(
        "checkpointed block `{block}` {differs} in backward than in forward, so its gradients would be wrong. Make the \
         block deterministic. Random numbers of burn's own state (`Dropout`, `Tensor::random`) repeat only if no other \
         thread of the process draws at the same time, as ranks that are threads do: draw with \
         `burn_dtensor::nn::dropout` and `random::tensor`, or run one rank per process"
    )]
    NondeterministicRecompute {
        /// The unit, or the type of the module.
        block: String,
        /// Description of the difference, a verb phrase such as "enters fewer units".
        differs: &'static str,
    },
    /// An all-reduce hook did not return one tensor per gradient, of the same length and dtype.
    #[error(
        "the all-reduce hook of unit `{unit}` must return one tensor for each that it received, of the same length and \
         dtype, in the same order: {reason}"
    )]
    HookResult {
        /// The unit.
        unit: String,
        /// Description of the wrong result.
        reason: String,
    },
    /// A shard codec did not decode a shard to its length and dtype.
    #[error(
        "the shard codec of unit `{unit}` must decode to at least as many elements as the shard has, in the dtype that \
         `decode` gets: {reason}"
    )]
    CodecResult {
        /// The unit.
        unit: String,
        /// Description of the wrong result.
        reason: String,
    },
    /// The optimizer stepped other parameters before accumulated gradients were reduced.
    #[error(
        "gradients of unit `{unit}` have not been reduced, and the optimizer has stepped without them. They were \
         computed by a backward without gradient synchronization. Call \
         FsdpModule::of(&model)?.set_requires_gradient_sync(true) before the last backward of a step, and let that \
         backward enter a unit of the same model (the outermost module passed to `fully_shard`); or drop the gradients \
         with FsdpModule::of(&model)?.reset_iter_state()"
    )]
    PendingGradients {
        /// The unit.
        unit: String,
    },
    /// A step has no gradients, because those of its backwards have not been reduced.
    #[error(
        "this step has no gradients: those of unit `{unit}` have not been reduced. They were computed by backwards \
         without gradient synchronization, and none with it followed. Call \
         FsdpModule::of(&model)?.set_requires_gradient_sync(true) before the last backward of a step (with HSDP also \
         set_requires_all_reduce(true)), or drop the gradients with FsdpModule::of(&model)?.reset_iter_state()"
    )]
    StepWithoutGradients {
        /// The unit. The first one, if gradients of several have not been reduced.
        unit: String,
    },
    /// A backward reached a graph that an earlier backward had consumed.
    #[error(
        "a second backward reached unit `{unit}`, or a unit that ran before it, whose graph the first backward \
         consumed: its output is part of two losses that were differentiated separately. Either add the losses up and \
         call backward once, or run the unit once for each loss, `unit(&module, ..)` twice"
    )]
    SecondBackward {
        /// The unit. The last one in forward order, if several are possible.
        unit: String,
    },
    /// Backward reads a parameter of a unit that it does not gather.
    #[error(
        "backward reads a parameter of unit `{unit}`, which `set_unshard_in_backward(false)` keeps it from gathering. \
         Call FsdpModule::of(&module)?.set_unshard_in_backward(true) before the forward; only a unit whose parameters \
         no gradient needs, such as an embedding's, can do without"
    )]
    NotUnsharded {
        /// The unit.
        unit: String,
    },
    /// `unshard` was called on one module of a unit that consists of several.
    #[error(
        "unit `{unit}` consists of several modules, but `unshard` was called on one of them. The unit is gathered when \
         the model's forward reaches the first of its modules. To prefetch it, call \
         FsdpModule::of(&model)?.matching([..])?.set_forward_prefetch([FsdpModule::of(&module)?]) on another unit"
    )]
    UnshardOnGroupUnit {
        /// The unit.
        unit: String,
    },
    /// Ranks of a parameter's mesh would lay it out differently.
    #[error(
        "the layout of a parameter differs between ranks of its mesh: rank {rank} has `{param}` {layout}, rank \
         {other_rank} has `{other_param}` {other_layout}. Pass an equal model and configuration on all of these ranks, \
         and let placement functions depend only on what is equal there"
    )]
    LayoutsDiffer {
        /// Path of the first parameter that differs.
        param: String,
        /// First rank of the mesh.
        rank: usize,
        /// Global shape, dtype and layout of the parameter on that rank.
        layout: String,
        /// Path of that parameter on another rank.
        other_param: String,
        /// The other rank.
        other_rank: usize,
        /// Global shape, dtype and layout of the parameter on the other rank.
        other_layout: String,
    },
    /// An input of a unit has no elements.
    #[error(
        "the input of unit `{unit}` has shape {shape:?}, a batch without elements, {problem}. Give every rank at least one \
         row, such as a copy of another row whose loss is multiplied by 0; `data::DistributedLoader` fills up the last \
         batch. Or pass rows of features, `[0, d_model]`, with which layers compute"
    )]
    EmptyInput {
        /// The unit, or the type of the module if it only encloses units.
        unit: String,
        /// Shape of the input.
        shape: Vec<usize>,
        /// Consequence of such an input.
        problem: &'static str,
    },
    /// The module is not an FSDP unit, or the model contains none.
    #[error(
        "this module is not an FSDP unit. Pass the model that `fully_shard` returned, or a module in it that a pattern \
         of `FullyShard::with_units` matches. On one device, call `fully_shard` with a mesh of one rank"
    )]
    NotSharded,
    /// The full model was requested on a rank that is not in the model's mesh.
    #[error(
        "rank {rank} is not in {mesh}, over which the model is distributed. Pass a rank of that mesh"
    )]
    NotOfMesh {
        /// The requested rank.
        rank: usize,
        /// Mesh of the first parameter.
        mesh: String,
    },
    /// In a backward with steps, a gradient of a parameter came after its step.
    #[error(
        "`{param}` was stepped in backward, but the loss reads its shard outside its unit, or its unit has more gradients \
         than passes that wait for a backward. Call `loss.backward()` and then `step`"
    )]
    LateGradient {
        /// Path of the parameter.
        param: String,
    },
    /// A parameter without tensor-parallel placements was read as a DTensor on the tensor-parallel
    /// mesh.
    #[error(
        "the parameter {param} was not parallelized, so it has no tensor-parallel mesh. Call parallelize on the model \
         (an empty plan replicates all parameters), compute on one device (`DeviceMesh::single_device`) with \
         `apply_style`, or read it with `val()`"
    )]
    NotParallelized {
        /// Path of the parameter, or its shape if it is not distributed.
        param: String,
    },
}

fn by_rank(unused: &[(usize, Vec<String>)]) -> String {
    let of_rank = |(rank, params): &(usize, Vec<String>)| {
        let params = params.iter().map(|param| format!("`{param}`")).join(", ");
        format!("Rank {rank} did not use {params} in this backward.")
    };
    unused.iter().map(of_rank).join(" ")
}

fn near(path: Option<&str>) -> String {
    path.map_or_else(String::new, |path| format!(" (did you mean `{path}`?)"))
}

impl From<PatternError> for crate::Error {
    fn from(PatternError { pattern, reason }: PatternError) -> Self {
        ParamError::Pattern { pattern, reason }.into()
    }
}
