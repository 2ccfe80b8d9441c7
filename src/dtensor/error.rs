//! [`DTensorError`].

use burn::tensor::DType;

use crate::placement::{Layout, Placement};

/// Error of creating, converting or redistributing a DTensor on this rank.
///
/// Meshes and layouts are stored as text, so that an error can outlive them.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DTensorError {
    /// Two tensors of one operation are on different meshes.
    #[error(
        "tensors of one operation must be on the same mesh, got {left} and {right}. Create both on one mesh (for \
         layers, the mesh given to `parallelize`), or move one of them with `full_tensor` and `distribute_replicated`"
    )]
    MeshMismatch {
        /// Mesh of the first tensor.
        left: String,
        /// Mesh of the other tensor.
        right: String,
    },
    /// Two tensors of one operation belong to different ranks, or to different launches.
    #[error(
        "tensors of one operation must belong to the same rank, got tensors of {left} and of {right}. To move a \
         tensor between ranks, pass plain data (`full_tensor`, then `into_data`) and create a DTensor from it on the \
         other rank (`distribute_replicated`)"
    )]
    RankMismatch {
        /// Rank and launch of the first tensor, such as `rank 0 of launch 3`.
        left: String,
        /// Rank and launch of the other tensor.
        right: String,
    },
    /// A tensor of a rank meets one on the mesh of a device alone.
    #[error(
        "tensors of one operation must be on the same mesh, got one of {rank} and one of a device outside a launch: made \
         by `DTensor::from`, or a parameter of a model that was not parallelized. On ranks, use \
         `DTensor::replicated_like(tensor, &x)` in place of `DTensor::from(tensor)`, and call `parallelize` on the model \
         (an empty plan replicates all parameters)"
    )]
    OneDevice {
        /// Rank and launch of the one tensor, such as `rank 0 of launch 3`.
        rank: String,
    },
    /// An operator of a DTensor was given a plain tensor of several elements.
    #[error(
        "`{operator}` combines a DTensor on {mesh} with a plain tensor of shape {shape:?}. A plain tensor of one \
         element is taken as replicated; make any other a DTensor: `DTensor::replicated_like(tensor, &x)` if every rank \
         holds all of it, `DTensor::from_local` if each rank holds its shard"
    )]
    PlainTensor {
        /// The operator.
        operator: &'static str,
        /// Shape of the plain tensor.
        shape: Vec<usize>,
        /// Mesh of the DTensor.
        mesh: String,
    },
    /// A layout was created for a mesh of another shape.
    #[error(
        "the layout is for a mesh of shape {layout:?}, but the tensor is on {mesh}. Build the layout with this mesh's \
         `shape()`"
    )]
    LayoutMesh {
        /// Mesh shape of the layout.
        layout: Vec<usize>,
        /// The tensor's mesh.
        mesh: String,
    },
    /// A seed was requested on a thread that has no stream of seeds.
    #[error(
        "this thread does not belong to a rank and has no stream of seeds. Call `random::seed` on it, with a seed \
         that all ranks of the tensor use and no other thread has, or draw with `random::next_seed_on`"
    )]
    Unseeded,
    /// A local tensor does not have the shape that the global shape and the layout require on this
    /// rank.
    #[error(
        "the local tensor of rank {rank} has shape {local:?}, but a tensor of global shape {global:?} laid out as \
         {layout} has local shape {expected:?} there. Pass the true global shape, or shard the tensor with \
         `distribute_replicated`"
    )]
    LocalShape {
        /// The calling rank.
        rank: usize,
        /// Shape of the local tensor that was passed.
        local: Vec<usize>,
        /// Local shape that the global shape and the layout require.
        expected: Vec<usize>,
        /// The global shape.
        global: Vec<usize>,
        /// The layout.
        layout: String,
    },
    /// The tensor to distribute is the result of a tracked operation. Only a leaf can be
    /// distributed, because its shards become leaves.
    #[error(
        "`{operation}` creates new leaves, so it accepts only a leaf or a tensor without gradients, not the result of \
         a tracked operation. `detach` it, or keep the graph with `from_local` (Replicate placements) followed by \
         `redistribute`"
    )]
    NotALeaf {
        /// The operation.
        operation: &'static str,
    },
    /// The requested placement is Partial, which this operation cannot create.
    #[error(
        "`{operation}` cannot create a tensor placed {placement} on mesh dimension {mesh_dim}, because no rank has a \
         partial value yet. Create it as Replicate and `redistribute` it, or pass each rank's partial value to \
         `from_local`"
    )]
    Partial {
        /// The operation.
        operation: &'static str,
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// The placement.
        placement: Placement,
    },
    /// The requested placement of a local gradient is not possible for this value.
    #[error(
        "a local tensor placed {forward} on mesh dimension {mesh_dim} cannot receive a gradient placed {grad}. \
         Declare the gradient as {natural}, or as P(sum) on a dimension where the value is not sharded; backward then \
         all-reduces it"
    )]
    GradPlacement {
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// Placement of the value.
        forward: Placement,
        /// Placement requested for the gradient.
        grad: Placement,
        /// Placement that the gradient has by default.
        natural: Placement,
    },
    /// `vary` was called for a mesh dimension on which the tensor is not replicated.
    #[error(
        "`vary` on mesh dimension {mesh_dim} needs a Replicate value, but it is {placement}. Use `all_gather_varying` \
         to gather it first"
    )]
    NotReplicated {
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// The placement found.
        placement: Placement,
    },
    /// The ranks' local tensors are not what the placements claim.
    #[error(
        "ranks {rank} and {other} disagree on {what} of one tensor: {found} and {other_found}. {remedy}"
    )]
    RanksDisagree {
        /// Property that differs.
        what: &'static str,
        /// Rank that serves as the reference.
        rank: usize,
        /// The first rank that differs from it.
        other: usize,
        /// Value on `rank`.
        found: String,
        /// Value on `other`.
        other_found: String,
        /// Remedy, as a sentence in the imperative.
        remedy: &'static str,
    },
    /// The inputs of an operator do not fit each other or the operator's arguments.
    #[error("`{operator}` of tensors of global shapes {shapes:?}: {why}")]
    Operands {
        /// The operator.
        operator: &'static str,
        /// Global shapes of the inputs.
        shapes: Vec<Vec<usize>>,
        /// Description of the mismatch, with the remedy.
        why: String,
    },
    /// An operator would have to redistribute an input, but the policy forbids it.
    #[error(
        "`{operator}` needs its input {input} as {to}, but it is {from}, and RedistributePolicy::Deny forbids an \
         implicit redistribution. Call `{write}` on it first"
    )]
    ImplicitRedistribution {
        /// The operator.
        operator: &'static str,
        /// Index of the input, from 0.
        input: usize,
        /// Layout of the input.
        from: String,
        /// Layout that the operator needs.
        to: String,
        /// Method call that redistributes the input to it, as source text.
        write: String,
    },
    /// No strategy of an operator's rule can be reached from the layouts of its inputs.
    #[error(
        "`{operator}` has no strategy for inputs laid out as {inputs:?}. Redistribute them to Replicate, and do not \
         require (by a style or a placement constraint) a placement that the operator does not support or that leaves \
         a rank without elements"
    )]
    NoStrategy {
        /// The operator.
        operator: &'static str,
        /// Layouts of the inputs.
        inputs: Vec<String>,
    },
    /// The local operator made a result of another shape than its rule determines.
    #[error(
        "output {output} of the local operator of `{operator}` has shape {found:?} on this rank, but its rule has \
         {expected:?}. Correct `ShardingRule::outputs`. If the shape depends on an argument, make the argument a field \
         of the rule, included in its `Eq` and `Hash`: what rules that compare as equal determine is computed once"
    )]
    OutputShape {
        /// The operator.
        operator: &'static str,
        /// Index of the output.
        output: usize,
        /// Shape of this rank's local result.
        found: Vec<usize>,
        /// Shape that the rule determines for this rank.
        expected: Vec<usize>,
    },
    /// A `CrossMeshRedistribute` was run with a tensor that it was not created for.
    #[error(
        "rank {rank} passed {found} to a `CrossMeshRedistribute` created for {expected}. Pass this rank's DTensor of \
         exactly that description on ranks of the source mesh, and `None` on all others"
    )]
    TransferOf {
        /// The calling rank.
        rank: usize,
        /// Description of the tensor that the redistribution was created for.
        expected: String,
        /// Description of the value that was passed.
        found: String,
    },
    /// A tracked tensor cannot be redistributed to a mesh of other ranks, because the gradient
    /// could not be sent back.
    #[error(
        "a tracked tensor cannot be redistributed from {from} to {to}: some ranks are in only one of the meshes, and \
         such a rank has no graph to run backward through. `detach` the tensor, or choose meshes of the same ranks"
    )]
    TransferTracked {
        /// Source mesh.
        from: String,
        /// Target mesh.
        to: String,
    },
    /// A float dtype was requested for the redistribution of a tensor that does not have float
    /// elements.
    #[error(
        "`{operation}` was given a dtype to send in, which only float tensors support, but the tensor is {}. Omit the \
         dtype, or convert the tensor to floats",
        dtype.name()
    )]
    NotFloat {
        /// The operation.
        operation: &'static str,
        /// The tensor's element type.
        dtype: DType,
    },
    /// A [`LocalMap`](crate::dtensor::ops::LocalMap) was run with more or fewer inputs or outputs
    /// than it lists.
    #[error(
        "the local map lists {listed} {what}, but there are {given}. List each of them in order; `.with_any_input()` \
         lists an input of any placement"
    )]
    MapCount {
        /// Either `inputs` or `outputs`.
        what: &'static str,
        /// Number of inputs or outputs at run time.
        given: usize,
        /// Number of inputs or outputs that the map lists.
        listed: usize,
    },
    /// An input of a [`LocalMap`](crate::dtensor::ops::LocalMap) does not have the placements that
    /// the map requires.
    #[error(
        "input {input} of the local map is {from}, but must be {to}. `redistribute` it first, or let the map \
         redistribute it: `.with_redistributed_inputs()`"
    )]
    MapInput {
        /// Index of the input, from 0.
        input: usize,
        /// Layout of the input.
        from: String,
        /// Layout that the map requires.
        to: String,
    },
    /// The mesh of the outputs of a [`LocalMap`](crate::dtensor::ops::LocalMap) is unknown, because
    /// it has no input.
    #[error(
        "the local map has no input, so the mesh of its outputs is unknown. Name the mesh: `.with_mesh(&mesh)`"
    )]
    MapMesh,
    /// The parameters of a distribution are invalid.
    #[error("{distribution} is not a valid distribution: {why}")]
    Distribution {
        /// The distribution.
        distribution: String,
        /// Requirement that the parameters violate.
        why: &'static str,
    },
}

impl DTensorError {
    /// Returns [`ImplicitRedistribution`](Self::ImplicitRedistribution) for an input that would
    /// have to be redistributed from one layout to another.
    pub(super) fn implicit(
        operator: &'static str,
        input: usize,
        from: &Layout,
        to: &Layout,
    ) -> Self {
        let placements = to.placements();
        let write = if to.has_default_shard_sizes() {
            format!(".redistribute(&{placements:?})?")
        } else {
            let order: Vec<_> = to.orders().collect();
            let layout =
                format!("Layout::with_shard_order(mesh.shape(), &{placements:?}, &{order:?})?")
                    .replace(", [", ", &[");
            let lengths = to
                .uneven_mesh_dims()
                .map(|(mesh_dim, lengths)| format!(".with_uneven_sizes({mesh_dim}, {lengths:?})?"));
            format!(
                ".redistribute_to(&{layout}{})?",
                lengths.collect::<String>()
            )
        };
        Self::ImplicitRedistribution {
            operator,
            input,
            from: from.to_string(),
            to: to.to_string(),
            write,
        }
    }
}
