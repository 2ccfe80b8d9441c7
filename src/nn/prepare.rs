//! [`apply_io_layouts`]: a module's forward between the inputs and outputs that the plan prepares.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::Result;
use crate::dtensor::{DTensor, DTensorError, Kind};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::parallel::ParallelError;
use crate::param::{IoLayout, Prepared, prepared_of};
use crate::placement::Placement;

/// Runs a module's forward with inputs and outputs brought to where the plan's
/// [`PrepareModuleInputOutput`](crate::parallel::PrepareModuleInputOutput) says, and outputs as DTensors.
///
/// Inputs and outputs are tensors, plain ones or [`DTensor`]s, or tuples, `Option`s and `Vec`s of such. A plain tensor
/// is this rank's part of one on the module's mesh, placed as declared, or `Replicate`: so a block over DTensors
/// stands inside an ordinary model. Parts are of equal shape, as [`from_local`](DTensor::from_local) takes them. A
/// module that the plan does not prepare takes and returns what it is given. What else the forward reads the closure
/// captures.
///
/// An input that comes as a shard and is desired whole is gathered once, and where layers inside compute different
/// things with it on every rank, its gradient is reduce-scattered.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_dtensor::nn::apply_io_layouts;
/// use burn_dtensor::parallel::PrepareModuleInputOutput;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
/// use burn_dtensor::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl Mlp {
///     fn forward(&self, x: DTensor<3>) -> DTensor<3> {
///         apply_io_layouts(self, x, |mlp, x| mlp.down.forward_dtensor(mlp.up.forward_dtensor(x).tanh()))
///     }
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
///     let mlp = Mlp {
///         up: LinearConfig::new(8, 32).init(world.device()),
///         down: LinearConfig::new(32, 8).init(world.device()),
///     };
///     let plan = Plan::new()
///         .with_style("up", Style::colwise())
///         .with_style("down.weight", Shard(0))
///         .with_io("", PrepareModuleInputOutput::new().with_input(Shard(1), Replicate).with_output(None, Shard(1)));
///     let mlp = parallelize(mlp, &mesh, plan)?;
///     let x = DTensor::ones([4, 6, 8], &mesh, &[Shard(1)], world.device())?;
///     assert_eq!(mlp.forward(x).placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Where the module is a [`unit`](fn@crate::fsdp::unit), write this inside it.
///
/// # Collective
/// If an input or output is brought elsewhere: every rank of the module's mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error), on every rank alike: [`ParallelError::Layout`] for a tensor that is
/// not placed as declared, [`ParallelError::Count`] for another number of them than the plan prepares,
/// [`ParallelError::NoMesh`] for plain tensors and a module without parallelized parameters, and
/// [`DTensorError::MeshMismatch`].
#[track_caller]
pub fn apply_io_layouts<M: Module, I: ModuleTensors, O: ModuleTensors>(
    module: &M,
    inputs: I,
    forward: impl FnOnce(&M, I::Global) -> O,
) -> O::Global {
    let Prepared { mesh, layouts } = prepared_of(module);
    let (module_path, ins, outs) = match &layouts {
        Some(layouts) => (&*layouts.path, &layouts.inputs[..], &layouts.outputs[..]),
        None => ("", &[][..], &[][..]),
    };
    let side = |what, edges| IoSide { module: module_path, mesh: mesh.as_ref(), what, edges };
    let inputs = side("input", ins).bring(inputs).or_unwind();
    side("output", outs).bring(forward(module, inputs)).or_unwind()
}

/// [`apply_io_layouts`], with this rank's parts of the outputs: for a block inside an ordinary model.
///
/// What follows must compute with a replicated output the same on all ranks, as an ordinary model does; where ranks go
/// on to compute different things with it, take the DTensor of [`apply_io_layouts`] and
/// [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
///
/// Of features that are split over ranks a rank's part has fewer heads: see [`local_heads`](super::local_heads).
///
/// # Collective
/// As [`apply_io_layouts`].
///
/// # Panics
/// As [`apply_io_layouts`].
#[track_caller]
pub fn apply_io_layouts_local<M: Module, I: ModuleTensors, O: ModuleTensors>(
    module: &M,
    inputs: I,
    forward: impl FnOnce(&M, I::Global) -> O,
) -> O::Local {
    O::local(apply_io_layouts(module, inputs, forward))
}

/// What a prepared module takes and returns.
pub trait ModuleTensors: Sized {
    /// All of it as DTensors.
    type Global;
    /// All of it as plain tensors.
    type Local;

    /// How many tensors there are.
    #[doc(hidden)]
    fn count(&self) -> usize;

    /// Brings each to where it is desired; they are those from `at` on.
    #[doc(hidden)]
    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self::Global>;

    /// This rank's parts.
    #[doc(hidden)]
    fn local(global: Self::Global) -> Self::Local;
}

/// The inputs or the outputs of a module.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct IoSide<'a> {
    module: &'a str,
    mesh: Option<&'a DeviceMesh>,
    what: &'static str,
    edges: &'a [IoLayout<Vec<Option<Placement>>>],
}

impl IoSide<'_> {
    fn bring<T: ModuleTensors>(self, tensors: T) -> Result<T::Global> {
        let (given, prepared) = (tensors.count(), self.edges.len());
        if prepared > 0 && given != prepared {
            let (module, what) = (self.module.into(), self.what);
            return Err(ParallelError::Count { module, what, given, prepared }.into());
        }
        tensors.bring(&self, &mut 0)
    }

    /// A plain tensor as one of the mesh.
    fn enter<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> Result<DTensor<D, K>> {
        let mesh = self.mesh.ok_or(ParallelError::NoMesh { what: self.what, at })?;
        let declared = |mesh_dim: usize| self.edges.get(at).and_then(|edge| edge.declared[mesh_dim]);
        let placements: Vec<_> =
            (0..mesh.ndim()).map(|mesh_dim| declared(mesh_dim).unwrap_or(Placement::Replicate)).collect();
        DTensor::from_local(local, mesh, &placements)
    }

    fn bring_one<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Result<DTensor<D, K>> {
        let (Some(edge), Some(mesh)) = (self.edges.get(at), self.mesh) else { return Ok(tensor) };
        if !mesh.congruent(tensor.mesh()) {
            let (left, right) = (mesh.to_string(), tensor.mesh().to_string());
            return Err(DTensorError::MeshMismatch { left, right }.into());
        }
        let other = edge
            .declared
            .iter()
            .zip(tensor.placements())
            .position(|(declared, own)| declared.is_some_and(|declared| declared != *own));
        if let Some((mesh_dim, declared)) = other.and_then(|mesh_dim| Some((mesh_dim, edge.declared[mesh_dim]?))) {
            return Err(ParallelError::Layout {
                module: self.module.into(),
                what: self.what,
                at,
                declared,
                found: tensor.placements()[mesh_dim],
                mesh_dim: mesh.names()[mesh_dim].clone(),
            }
            .into());
        }
        tensor.redistribute_each(&edge.desired)
    }
}

impl<const D: usize, K: Kind> ModuleTensors for DTensor<D, K> {
    type Global = Self;
    type Local = Tensor<D, K>;

    fn count(&self) -> usize {
        1
    }

    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self> {
        *at += 1;
        side.bring_one(*at - 1, self)
    }

    fn local(global: Self) -> Tensor<D, K> {
        global.to_local()
    }
}

impl<const D: usize, K: Kind> ModuleTensors for Tensor<D, K> {
    type Global = DTensor<D, K>;
    type Local = Self;

    fn count(&self) -> usize {
        1
    }

    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<DTensor<D, K>> {
        side.enter(*at, self)?.bring(side, at)
    }

    fn local(global: DTensor<D, K>) -> Self {
        global.to_local()
    }
}

impl<T: ModuleTensors> ModuleTensors for Option<T> {
    type Global = Option<T::Global>;
    type Local = Option<T::Local>;

    fn count(&self) -> usize {
        self.as_ref().map_or(0, T::count)
    }

    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self::Global> {
        self.map(|tensor| tensor.bring(side, at)).transpose()
    }

    fn local(global: Self::Global) -> Self::Local {
        global.map(T::local)
    }
}

impl<T: ModuleTensors> ModuleTensors for Vec<T> {
    type Global = Vec<T::Global>;
    type Local = Vec<T::Local>;

    fn count(&self) -> usize {
        self.iter().map(T::count).sum()
    }

    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self::Global> {
        self.into_iter().map(|tensor| tensor.bring(side, at)).collect()
    }

    fn local(global: Self::Global) -> Self::Local {
        global.into_iter().map(T::local).collect()
    }
}

macro_rules! tuples {
    ($($($name:ident)+),+) => {$(
        #[allow(non_snake_case)] // the types' names
        impl<$($name: ModuleTensors),+> ModuleTensors for ($($name,)+) {
            type Global = ($($name::Global,)+);
            type Local = ($($name::Local,)+);

            fn count(&self) -> usize {
                let ($($name,)+) = self;
                0 $(+ $name.count())+
            }

            fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self::Global> {
                let ($($name,)+) = self;
                Ok(($($name.bring(side, at)?,)+))
            }

            fn local(global: Self::Global) -> Self::Local {
                let ($($name,)+) = global;
                ($($name::local($name),)+)
            }
        }
    )+};
}

tuples! { A B, A B C, A B C D, A B C D E }
