//! [`LocalMap`]: a function of local tensors, among DTensors.

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::apply::{Boundary, Inputs, Outputs};
use crate::Result;
use crate::dtensor::create::summed_dims;
use crate::dtensor::{DTensor, DTensorError, Kind, MeshDims};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, Placements};

/// What a function of local tensors takes and makes of a mesh's: PyTorch's `local_map`.
///
/// It is for a computation of one's own that every rank does alone on its part, and that needs no
/// [rule](super::ShardingRule): how its inputs must be placed, and how its outputs are, is said where it is called.
/// Placements are one per mesh dimension.
///
/// ```
/// use burn_dtensor::dtensor::ops::LocalMap;
/// use burn_dtensor::placement::{PartialOp, Placement::{Partial, Replicate, Shard}};
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::prelude::*;
/// # launch(Launch::threads(2), |world| {
/// let mesh = DeviceMesh::new(world, [2], ["tp"])?;
/// let x = DTensor::<2>::ones([4, 6], &mesh, &[Replicate], world.device())?;
/// let w = DTensor::<2>::ones([6, 3], &mesh, &[Shard(0)], world.device())?;
///
/// // Each rank has some columns of `x`, and a term of the product.
/// let product = LocalMap::new().with_input([Shard(1)]).with_input([Shard(0)]).with_output([Partial(PartialOp::Sum)]);
/// let y = product.with_redistributed_inputs().run((x, w), |(x, w): (Tensor<2>, Tensor<2>)| x.matmul(w));
/// assert_eq!(y.full_tensor()?.into_data(), Tensor::<2>::full([4, 3], 6.0, world.device()).into_data());
/// # Ok::<_, burn_dtensor::Error>(())
/// # })?;
/// # Ok::<_, burn_dtensor::comm::LaunchError>(())
/// ```
///
/// # Gradients
/// The gradient of an input is placed as the input is, and of a partial one replicated. That is true of a replicated
/// input only if all ranks compute the same with it; where each makes a term of its gradient, such as of a weight that
/// it multiplies its own rows by, say so by [`with_input_and_grad`](Self::with_input_and_grad) and `P(sum)`: backward
/// then adds the terms up.
#[derive(Debug, Clone, Default)]
pub struct LocalMap {
    inputs: Vec<LocalMapInput>,
    outputs: Vec<LocalMapOutput>,
    mesh: Option<DeviceMesh>,
    redistributes: bool,
}

#[derive(Debug, Clone, Default)]
struct LocalMapInput {
    /// `None` takes any.
    placements: Option<Placements>,
    /// Of its gradient.
    grads: Option<Placements>,
}

#[derive(Debug, Clone)]
struct LocalMapOutput {
    placements: Placements,
    /// Global, if parts may be uneven.
    shape: Option<Shape>,
}

impl LocalMap {
    /// Takes any inputs, as they are, and makes no outputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next input must be placed like this. Of a map that says so of one, all inputs are listed, in their order.
    #[must_use]
    pub fn with_input(mut self, placements: impl AsRef<[Placement]>) -> Self {
        self.inputs.push(LocalMapInput { placements: Some(placements.as_ref().into()), grads: None });
        self
    }

    /// The next input must be placed like this, and its gradient is placed as `grads`: as itself, with `R` for
    /// partial values, or as `P(sum)` where it is replicated and ranks make terms of its gradient.
    #[must_use]
    pub fn with_input_and_grad(mut self, placements: impl AsRef<[Placement]>, grads: impl AsRef<[Placement]>) -> Self {
        let placements = Some(placements.as_ref().into());
        self.inputs.push(LocalMapInput { placements, grads: Some(grads.as_ref().into()) });
        self
    }

    /// The next input may be placed in any way.
    #[must_use]
    pub fn with_any_input(mut self) -> Self {
        self.inputs.push(LocalMapInput::default());
        self
    }

    /// The next output is placed like this, of parts of equal shape: what is cut over `k` ranks is `k` times as long
    /// globally.
    #[must_use]
    pub fn with_output(mut self, placements: impl AsRef<[Placement]>) -> Self {
        self.outputs.push(LocalMapOutput { placements: placements.as_ref().into(), shape: None });
        self
    }

    /// The next output is placed like this and has this global shape, of parts that may be uneven or empty.
    #[must_use]
    pub fn with_output_of_shape(mut self, placements: impl AsRef<[Placement]>, shape: impl Into<Shape>) -> Self {
        self.outputs.push(LocalMapOutput { placements: placements.as_ref().into(), shape: Some(shape.into()) });
        self
    }

    /// The mesh that inputs must be on. Default: that of the first.
    #[must_use]
    pub fn with_mesh(mut self, mesh: &DeviceMesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// Brings inputs to where they must be. Default: one that is placed otherwise is an error.
    #[must_use]
    pub fn with_redistributed_inputs(mut self) -> Self {
        self.redistributes = true;
        self
    }

    /// Runs `f` on this rank's parts of the inputs, and reads what it makes as parts of the outputs.
    ///
    /// Inputs and outputs are those of [`apply`](super::apply); what else `f` needs it captures.
    ///
    /// # Collective
    /// If an input is redistributed: every rank of the mesh, in forward and in backward; and in backward if a gradient
    /// is `P(sum)`.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error), on every rank alike:
    /// [`MapCount`](DTensorError::MapCount) for other numbers of inputs and outputs than are listed,
    /// [`MapInput`](DTensorError::MapInput) for an input that is placed otherwise,
    /// [`MeshMismatch`](DTensorError::MeshMismatch), [`GradPlacement`](DTensorError::GradPlacement) and what
    /// [`from_local`](DTensor::from_local) says of placements and shapes.
    #[track_caller]
    pub fn run<I: Inputs, O: Outputs>(&self, inputs: I, f: impl FnOnce(I::Local) -> O) -> O::Global {
        let mesh = self.check(&inputs).or_unwind();
        let running = Running { map: self, mesh: &mesh };
        let outputs = f(inputs.localize(&running, &mut 0));
        check_count("outputs", outputs.count(), self.outputs.len()).or_unwind();
        outputs.globalize(&running, &mut 0)
    }

    /// The mesh, which all inputs are on.
    fn check<I: Inputs>(&self, inputs: &I) -> Result<DeviceMesh> {
        let mut args = SmallVec::new();
        inputs.args(&mut args);
        if !self.inputs.is_empty() {
            check_count("inputs", args.len(), self.inputs.len())?;
        }
        if let Some(first) = args.first() {
            args[1..].iter().try_for_each(|other| first.spec.check_same_mesh(other.spec))?;
        }
        match (&self.mesh, args.first()) {
            (Some(mesh), Some(first)) if !mesh.congruent(first.spec.mesh()) => {
                let (left, right) = (mesh.to_string(), first.spec.mesh().to_string());
                Err(DTensorError::MeshMismatch { left, right }.into())
            }
            (Some(mesh), _) => Ok(mesh.clone()),
            (None, Some(first)) => Ok(first.spec.mesh().clone()),
            (None, None) => Err(DTensorError::MapMesh.into()),
        }
    }
}

fn check_count(what: &'static str, given: usize, listed: usize) -> Result<(), DTensorError> {
    if given == listed { Ok(()) } else { Err(DTensorError::MapCount { what, given, listed }) }
}

/// A map that is being run.
struct Running<'a> {
    map: &'a LocalMap,
    mesh: &'a DeviceMesh,
}

impl Running<'_> {
    fn part<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Result<Tensor<D, K>> {
        let Some(LocalMapInput { placements: Some(placements), grads }) = self.map.inputs.get(at) else {
            return Ok(tensor.local);
        };
        let layout = match tensor.placements() == &placements[..] {
            true => tensor.layout().clone(),
            false if self.map.redistributes => Layout::new(self.mesh.shape(), placements)?,
            false => {
                let (from, to) = (tensor.layout().to_string(), Layout::new(self.mesh.shape(), placements)?.to_string());
                return Err(DTensorError::MapInput { input: at, from, to }.into());
            }
        };
        let varying = match grads {
            Some(grads) => summed_dims(self.mesh, placements, grads)?,
            None => MeshDims::new(),
        };
        let varying: MeshDims = varying.into_iter().filter(|&dim| self.mesh.size_of(dim) > 1).collect();
        let to = tensor.destination(&layout, &varying, "local_map")?;
        to.redistribute(tensor.local, &tensor.spec, tensor.handles.get().map(|handles| &**handles))
    }
}

impl Boundary for Running<'_> {
    #[track_caller]
    fn localize<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Tensor<D, K> {
        self.part(at, tensor).or_unwind()
    }

    #[track_caller]
    fn globalize<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        let LocalMapOutput { placements, shape } = &self.map.outputs[at];
        match shape {
            Some(shape) => DTensor::from_local_with_shape(local, self.mesh, placements, shape.clone()),
            None => DTensor::from_local(local, self.mesh, placements),
        }
        .or_unwind()
    }
}
