//! [`DTensorError`].

use burn::tensor::DType;

use crate::placement::{Layout, Placement};

/// Why a distributed tensor could not be built, viewed or re-laid-out on this rank.
///
/// Meshes and layouts are given as text, so that an error outlives them.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DTensorError {
    /// Two tensors of one operation live on different meshes.
    #[error(
        "tensors of one operation must share a mesh, got {left} and {right}; make both on one, which for \
         layers is that given to `parallelize`, or bring one over with `full_tensor` and `distribute_replicated`"
    )]
    MeshMismatch {
        /// Mesh of the first tensor.
        left: String,
        /// Mesh of the other.
        right: String,
    },
    /// Two tensors of one operation are the parts of different ranks, or of different launches.
    #[error(
        "tensors of one operation must be one rank's own parts, got parts of {left} and of {right}; pass \
         plain data from rank to rank (`full_tensor`, then `into_data`), and make a part of it there \
         (`distribute_replicated`)"
    )]
    RankMismatch {
        /// Whose part the first tensor is, such as `rank 0 of launch 3`.
        left: String,
        /// Whose part the other is.
        right: String,
    },
    /// A layout was made for a mesh of another shape.
    #[error(
        "the layout is for a mesh of shape {layout:?}, but the tensor is on {mesh}; \
         build it with this mesh's `shape()`"
    )]
    LayoutMesh {
        /// Mesh shape of the layout.
        layout: Vec<usize>,
        /// The tensor's mesh.
        mesh: String,
    },
    /// A seed was asked for on a thread that has no stream of seeds.
    #[error(
        "this thread is no rank's own and has no stream of seeds; call `random::seed` on it, with a seed that all \
         ranks of a tensor give and no other thread has, or draw with `random::next_seed_on`"
    )]
    Unseeded,
    /// A local tensor does not have the shape that the global shape and layout give this rank.
    #[error(
        "the local tensor of rank {rank} has shape {local:?}, but a tensor of global shape \
         {global:?} laid out as {layout} puts {expected:?} there; \
         pass the true global shape, or shard it with `distribute_replicated`"
    )]
    LocalShape {
        /// The calling rank.
        rank: usize,
        /// Shape of the tensor given.
        local: Vec<usize>,
        /// Shape it must have.
        expected: Vec<usize>,
        /// The global shape.
        global: Vec<usize>,
        /// The layout.
        layout: String,
    },
    /// Only a leaf can be distributed: its shards become leaves of their own.
    #[error(
        "`{operation}` makes new leaves, so it takes a leaf or a tensor without gradients, not the \
         result of a tracked operation; `detach` it, or use `from_local` with Replicate placements \
         followed by `redistribute` to keep the graph"
    )]
    NotALeaf {
        /// The operation.
        operation: &'static str,
    },
    /// A tensor cannot be made partial.
    #[error(
        "`{operation}` cannot make a tensor placed {placement} on mesh dimension {mesh_dim}: no \
         rank holds a part of it yet; make it Replicate and `redistribute`, or give each rank's \
         term to `from_local`"
    )]
    Partial {
        /// The operation.
        operation: &'static str,
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// The placement.
        placement: Placement,
    },
    /// A local gradient cannot be laid out as asked.
    #[error(
        "a local tensor placed {forward} on mesh dimension {mesh_dim} cannot receive a gradient \
         placed {grad}; there it is {natural}, or P(sum) to be all-reduced in backward"
    )]
    GradPlacement {
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// Placement of the value.
        forward: Placement,
        /// Placement asked for the gradient.
        grad: Placement,
        /// Placement the gradient has by itself.
        natural: Placement,
    },
    /// `vary` was asked for a mesh dimension on which the tensor is not replicated.
    #[error(
        "`vary` on mesh dimension {mesh_dim} needs a Replicate value, it is {placement}; \
         use `all_gather_varying` to gather it first"
    )]
    NotReplicated {
        /// The mesh dimension, `index (name)`.
        mesh_dim: String,
        /// The placement found.
        placement: Placement,
    },
    /// Ranks do not hold what the placements say they hold.
    #[error(
        "ranks {rank} and {other} disagree on {what} of one tensor: {found} and {other_found}; \
         {remedy}"
    )]
    RanksDisagree {
        /// What differs.
        what: &'static str,
        /// A rank.
        rank: usize,
        /// The first rank that differs from it.
        other: usize,
        /// Its value.
        found: String,
        /// The other's value.
        other_found: String,
        /// How to repair it.
        remedy: &'static str,
    },
    /// An operator's inputs do not fit each other, or its arguments.
    #[error("`{operator}` of tensors of global shapes {shapes:?}: {why}")]
    Operands {
        /// The operator.
        operator: &'static str,
        /// Global shapes of the inputs.
        shapes: Vec<Vec<usize>>,
        /// What does not fit, and what would.
        why: String,
    },
    /// An operator would have to redistribute an input, and the policy forbids it.
    #[error(
        "`{operator}` needs its input {input} as {to}, it is {from}, and RedistributePolicy::Deny \
         forbids moving it silently; write `{write}` on it first"
    )]
    ImplicitRedistribution {
        /// The operator.
        operator: &'static str,
        /// Which input, from 0.
        input: usize,
        /// Its layout.
        from: String,
        /// The layout the operator needs.
        to: String,
        /// What brings it there.
        write: String,
    },
    /// No row of an operator's rule can be reached from its inputs' layouts.
    #[error(
        "`{operator}` has no strategy for inputs laid out as {inputs:?}; redistribute them to Replicate, and let \
         no style or pin ask for a placement that the operator cannot take, or that leaves a rank without elements"
    )]
    NoStrategy {
        /// The operator.
        operator: &'static str,
        /// Layouts of the inputs.
        inputs: Vec<String>,
    },
    /// A transfer was given another tensor than it is of.
    #[error(
        "rank {rank} brings {found} to a transfer of {expected}; make a `CrossMeshRedistribute` of what there is, and give it the \
         part of every rank of the mesh that it comes from, and `None` on the others"
    )]
    TransferOf {
        /// The calling rank.
        rank: usize,
        /// The tensor that the transfer is of.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// Gradients cannot come back from a mesh of other ranks.
    #[error(
        "a tracked tensor cannot go from {from} to {to}: not every rank is in both, and one that is not has no graph \
         to run backward through; `detach` it, or choose meshes of the same ranks"
    )]
    TransferTracked {
        /// The mesh that it comes from.
        from: String,
        /// The mesh that it goes to.
        to: String,
    },
    /// An element type for floats was given for a tensor of something else.
    #[error(
        "`{operation}` was given an element type to send in, which is for floats: the tensor is {}; leave it out, or \
         make floats of it",
        dtype.name()
    )]
    NotFloat {
        /// The operation.
        operation: &'static str,
        /// The tensor's element type.
        dtype: DType,
    },
    /// A [`LocalMap`](crate::dtensor::ops::LocalMap) was run with other inputs, or made other outputs, than it lists.
    #[error(
        "the local map lists {listed} {what}, and there are {given}; list each, in its order, with `.with_any_input()` for \
         an input of any placement"
    )]
    MapCount {
        /// Inputs or outputs.
        what: &'static str,
        /// How many there are.
        given: usize,
        /// How many it lists.
        listed: usize,
    },
    /// An input of a [`LocalMap`](crate::dtensor::ops::LocalMap) is placed otherwise than it must be.
    #[error(
        "input {input} of the local map is {from}, and must be {to}; `redistribute` it first, or let the map do that: \
         `.with_redistributed_inputs()`"
    )]
    MapInput {
        /// Which input, from 0.
        input: usize,
        /// Its layout.
        from: String,
        /// The one that it must have.
        to: String,
    },
    /// Nothing says which mesh the outputs of a [`LocalMap`](crate::dtensor::ops::LocalMap) are on.
    #[error("the local map has no input to take the mesh of its outputs from; name it: `.with_mesh(&mesh)`")]
    MapMesh,
    /// A distribution's parameters make no sense.
    #[error("{distribution} is not a distribution: {why}")]
    Distribution {
        /// The distribution.
        distribution: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl DTensorError {
    /// [`ImplicitRedistribution`](Self::ImplicitRedistribution) of an input between two layouts.
    pub(super) fn implicit(operator: &'static str, input: usize, from: &Layout, to: &Layout) -> Self {
        let placements = to.placements();
        let write = if to.has_default_shard_sizes() {
            format!(".redistribute(&{placements:?})?")
        } else {
            let order: Vec<_> = to.orders().collect();
            let layout =
                format!("Layout::with_shard_order(mesh.shape(), &{placements:?}, &{order:?})?").replace(", [", ", &[");
            let lengths = to
                .uneven_mesh_dims()
                .map(|(mesh_dim, lengths)| format!(".with_uneven_sizes({mesh_dim}, {lengths:?})?"));
            format!(".redistribute_to(&{layout}{})?", lengths.collect::<String>())
        };
        Self::ImplicitRedistribution { operator, input, from: from.to_string(), to: to.to_string(), write }
    }
}
