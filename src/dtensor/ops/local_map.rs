//! [`LocalMap`]: runs a function of local tensors on DTensors.

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::apply::{Boundary, Inputs, Outputs};
use crate::Result;
use crate::dtensor::create::summed_dims;
use crate::dtensor::{DTensor, DTensorError, Kind, MeshDims};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, Placements};

/// Placements of the inputs and outputs of a function of local tensors, as in PyTorch's
/// `local_map`.
///
/// It is for a custom computation that every rank does locally and that has no
/// [rule](super::ShardingRule): the caller states how the inputs must be placed, and how the
/// outputs are. Placements are one per mesh dimension.
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
/// // Each rank has some columns of `x`, and computes a partial sum of the product.
/// let product = LocalMap::new().with_input([Shard(1)]).with_input([Shard(0)]).with_output([Partial(PartialOp::Sum)]);
/// let y = product.with_redistributed_inputs().run((x, w), |(x, w): (Tensor<2>, Tensor<2>)| x.matmul(w));
/// assert_eq!(y.full_tensor()?.into_data(), Tensor::<2>::full([4, 3], 6.0, world.device()).into_data());
/// # Ok::<_, burn_dtensor::Error>(())
/// # })?;
/// # Ok::<_, burn_dtensor::comm::LaunchError>(())
/// ```
///
/// # Gradients
/// The gradient of an input is placed as the input, or replicated if the input is partial. For a
/// replicated input this is correct only if all ranks use it in the same computation. If each rank
/// computes a partial gradient, for example because it multiplies a weight by its own rows, declare
/// the gradient as `P(sum)` with [`with_input_and_grad`](Self::with_input_and_grad); backward then
/// sums it over the ranks.
#[derive(Debug, Clone, Default)]
pub struct LocalMap {
    inputs: Vec<LocalMapInput>,
    outputs: Vec<LocalMapOutput>,
    mesh: Option<DeviceMesh>,
    redistributes: bool,
}

#[derive(Debug, Clone, Default)]
struct LocalMapInput {
    /// Required placements; `None` permits any.
    placements: Option<Placements>,
    /// Placements of the gradient.
    grads: Option<Placements>,
}

#[derive(Debug, Clone)]
struct LocalMapOutput {
    placements: Placements,
    /// Global shape, if shards may be uneven.
    shape: Option<Shape>,
}

impl LocalMap {
    /// Makes a map that accepts any inputs as they are and has no outputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares the placements of the next input. If any input is declared, all must be, in their
    /// order.
    #[must_use]
    pub fn with_input(mut self, placements: impl AsRef<[Placement]>) -> Self {
        self.inputs.push(LocalMapInput {
            placements: Some(placements.as_ref().into()),
            grads: None,
        });
        self
    }

    /// Declares the placements of the next input, and of its gradient. `grads` has the same
    /// placements, except `R` for partial values, or `P(sum)` where the input is replicated and
    /// each rank computes a partial gradient.
    #[must_use]
    pub fn with_input_and_grad(
        mut self,
        placements: impl AsRef<[Placement]>,
        grads: impl AsRef<[Placement]>,
    ) -> Self {
        let placements = Some(placements.as_ref().into());
        self.inputs.push(LocalMapInput {
            placements,
            grads: Some(grads.as_ref().into()),
        });
        self
    }

    /// Declares that the next input may be placed in any way.
    #[must_use]
    pub fn with_any_input(mut self) -> Self {
        self.inputs.push(LocalMapInput::default());
        self
    }

    /// Declares the placements of the next output. All shards have equal shapes: a dimension
    /// sharded over `k` ranks is `k` times as long in the global tensor.
    #[must_use]
    pub fn with_output(mut self, placements: impl AsRef<[Placement]>) -> Self {
        self.outputs.push(LocalMapOutput {
            placements: placements.as_ref().into(),
            shape: None,
        });
        self
    }

    /// Declares the placements and the global shape of the next output, whose shards may be uneven
    /// or empty.
    #[must_use]
    pub fn with_output_of_shape(
        mut self,
        placements: impl AsRef<[Placement]>,
        shape: impl Into<Shape>,
    ) -> Self {
        self.outputs.push(LocalMapOutput {
            placements: placements.as_ref().into(),
            shape: Some(shape.into()),
        });
        self
    }

    /// Sets the mesh that the inputs must be on. Default: the mesh of the first input.
    #[must_use]
    pub fn with_mesh(mut self, mesh: &DeviceMesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// Redistributes inputs to their declared placements. Default: an input with other placements
    /// is an error.
    #[must_use]
    pub fn with_redistributed_inputs(mut self) -> Self {
        self.redistributes = true;
        self
    }

    /// Runs `f` on this rank's local tensors of the inputs, and makes DTensors of the results.
    ///
    /// Inputs and outputs are of the types that [`apply`](super::apply) accepts. `f` captures any
    /// other arguments.
    ///
    /// # Collective
    /// If an input is redistributed: every rank of the mesh, in forward and in backward; also in
    /// backward if a gradient is `P(sum)`. Results become DTensors as in
    /// [`from_local`](DTensor::from_local), which is collective if the launch checks replicas.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) on every rank:
    /// [`MapCount`](DTensorError::MapCount) if the number of inputs or outputs differs from the
    /// declared one, [`MapInput`](DTensorError::MapInput) if an input has other placements,
    /// [`MeshMismatch`](DTensorError::MeshMismatch),
    /// [`GradPlacement`](DTensorError::GradPlacement), and the errors of
    /// [`from_local`](DTensor::from_local) for placements and shapes.
    #[track_caller]
    pub fn run<I: Inputs, O: Outputs>(
        &self,
        inputs: I,
        f: impl FnOnce(I::Local) -> O,
    ) -> O::Global {
        let mesh = self.check(&inputs).or_unwind();
        let running = Running {
            map: self,
            mesh: &mesh,
        };
        let outputs = f(inputs.localize(&running, &mut 0));
        check_count("outputs", outputs.count(), self.outputs.len()).or_unwind();
        outputs.globalize(&running, &mut 0)
    }

    /// Returns the mesh, after checking that all inputs are on it.
    fn check<I: Inputs>(&self, inputs: &I) -> Result<DeviceMesh> {
        let mut args = SmallVec::new();
        inputs.args(&mut args);
        if !self.inputs.is_empty() {
            check_count("inputs", args.len(), self.inputs.len())?;
        }
        if let Some(first) = args.first() {
            args[1..]
                .iter()
                .try_for_each(|other| first.spec.check_same_mesh(other.spec))?;
        }
        match (&self.mesh, args.first()) {
            (Some(mesh), Some(first)) if !mesh.congruent(first.spec.mesh()) => {
                let left = mesh.to_string();
                let right = first.spec.mesh().to_string();
                Err(DTensorError::MeshMismatch { left, right }.into())
            }
            (Some(mesh), _) => Ok(mesh.clone()),
            (None, Some(first)) => Ok(first.spec.mesh().clone()),
            (None, None) => Err(DTensorError::MapMesh.into()),
        }
    }
}

fn check_count(what: &'static str, given: usize, listed: usize) -> Result<(), DTensorError> {
    if given == listed {
        Ok(())
    } else {
        Err(DTensorError::MapCount {
            what,
            given,
            listed,
        })
    }
}

/// A map that is running.
struct Running<'a> {
    map: &'a LocalMap,
    mesh: &'a DeviceMesh,
}

impl Running<'_> {
    fn part<const D: usize, K: Kind>(
        &self,
        at: usize,
        tensor: DTensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let Some(LocalMapInput {
            placements: Some(placements),
            grads,
        }) = self.map.inputs.get(at)
        else {
            return Ok(tensor.local);
        };
        let layout = match tensor.placements() == &placements[..] {
            true => tensor.layout().clone(),
            false if self.map.redistributes => Layout::new(self.mesh.shape(), placements)?,
            false => {
                let from = tensor.layout().to_string();
                let to = Layout::new(self.mesh.shape(), placements)?.to_string();
                return Err(DTensorError::MapInput {
                    input: at,
                    from,
                    to,
                }
                .into());
            }
        };
        let varying = match grads {
            Some(grads) => summed_dims(self.mesh, placements, grads)?,
            None => MeshDims::new(),
        };
        let varying: MeshDims = varying
            .into_iter()
            .filter(|&dim| self.mesh.size_of(dim) > 1)
            .collect();
        let to = tensor.destination(&layout, &varying, "local_map")?;
        to.redistribute(
            tensor.local,
            &tensor.spec,
            tensor.handles.get().map(|handles| &**handles),
        )
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
            Some(shape) => {
                DTensor::from_local_with_shape(local, self.mesh, placements, shape.clone())
            }
            None => DTensor::from_local(local, self.mesh, placements),
        }
        .or_unwind()
    }
}
