//! [`apply_io_layouts`]: runs a module's forward with the input and output layouts that the plan declares.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::Result;
use crate::dtensor::{DTensor, DTensorError, Kind};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::parallel::{IoLayout, ParallelError, Prepared, prepared_of};
use crate::placement::Placement;

/// Runs a module's forward with its inputs and outputs redistributed to the layouts that the plan's
/// [`PrepareModuleInputOutput`](crate::parallel::PrepareModuleInputOutput) requires. Returns the
/// outputs as DTensors.
///
/// Inputs and outputs are plain tensors or [`DTensor`]s, or tuples, `Option`s and `Vec`s of them. A
/// plain tensor is taken as this rank's local tensor of a DTensor on the module's mesh, with the
/// declared placement or, by default, `Replicate`. An ordinary model can therefore contain a block
/// that computes on DTensors. All ranks' local tensors must have equal shapes, as for
/// [`from_local`](DTensor::from_local). If the plan does not prepare the module, inputs and outputs
/// keep their placements. The closure captures anything else that the forward reads.
///
/// An input that arrives sharded and is required replicated is all-gathered once. Its gradient is
/// reduce-scattered if the layers inside compute different things with it on every rank.
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
/// If the module is a [`unit`](fn@crate::fsdp::unit), call this function inside the unit.
///
/// # Collective
/// Every rank of the module's mesh must call it, in forward and in backward, if an input or output
/// is redistributed. Plain tensors become DTensors as in [`from_local`](DTensor::from_local), which
/// is collective if the launch checks replicas.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error), on every rank: [`ParallelError::Layout`] for a
/// tensor that is not placed as declared, [`ParallelError::Count`] if the number of tensors differs
/// from the plan's, [`ParallelError::NoMesh`] for plain tensors if the module has no parallelized
/// parameters, and [`DTensorError::MeshMismatch`].
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
    let side = |what, edges| IoSide {
        module: module_path,
        mesh: mesh.as_ref(),
        what,
        edges,
    };
    let inputs = side("input", ins).bring(inputs).or_unwind();
    side("output", outs)
        .bring(forward(module, inputs))
        .or_unwind()
}

/// Runs [`apply_io_layouts`] and returns this rank's local tensors of the outputs, for a block
/// inside an ordinary model.
///
/// All ranks must perform the same computation with a replicated output, as an ordinary model does.
/// If ranks compute different things with it, use the DTensor that [`apply_io_layouts`] returns and
/// [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
///
/// If the features are sharded, the local tensor has fewer heads than the model: see
/// [`local_heads`](super::local_heads).
///
/// # Collective
/// Like [`apply_io_layouts`].
///
/// # Panics
/// Like [`apply_io_layouts`].
#[track_caller]
pub fn apply_io_layouts_local<M: Module, I: ModuleTensors, O: ModuleTensors>(
    module: &M,
    inputs: I,
    forward: impl FnOnce(&M, I::Global) -> O,
) -> O::Local {
    O::local(apply_io_layouts(module, inputs, forward))
}

/// Inputs or outputs of a prepared module.
pub trait ModuleTensors: Sized {
    /// The container with every tensor as a DTensor.
    type Global;
    /// The container with every tensor as a plain local tensor.
    type Local;

    /// Returns the number of tensors in this input or output.
    #[doc(hidden)]
    fn count(&self) -> usize;

    /// Redistributes each tensor to its required layout. `at` is the index of the first tensor and
    /// is advanced by their number.
    #[doc(hidden)]
    fn bring(self, side: &IoSide<'_>, at: &mut usize) -> Result<Self::Global>;

    /// Returns this rank's local tensors.
    #[doc(hidden)]
    fn local(global: Self::Global) -> Self::Local;
}

/// Declared layouts of the inputs or of the outputs of a module.
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
        let given = tensors.count();
        let prepared = self.edges.len();
        if prepared > 0 && given != prepared {
            let module = self.module.into();
            let what = self.what;
            return Err(ParallelError::Count {
                module,
                what,
                given,
                prepared,
            }
            .into());
        }
        tensors.bring(&self, &mut 0)
    }

    /// Converts a plain local tensor to a DTensor on the module's mesh, with the declared
    /// placements.
    fn enter<const D: usize, K: Kind>(
        &self,
        at: usize,
        local: Tensor<D, K>,
    ) -> Result<DTensor<D, K>> {
        let mesh = self.mesh.ok_or(ParallelError::NoMesh {
            what: self.what,
            at,
        })?;
        let declared =
            |mesh_dim: usize| self.edges.get(at).and_then(|edge| edge.declared[mesh_dim]);
        let placements: Vec<_> = (0..mesh.ndim())
            .map(|mesh_dim| declared(mesh_dim).unwrap_or(Placement::Replicate))
            .collect();
        DTensor::from_local(local, mesh, &placements)
    }

    fn bring_one<const D: usize, K: Kind>(
        &self,
        at: usize,
        tensor: DTensor<D, K>,
    ) -> Result<DTensor<D, K>> {
        let (Some(edge), Some(mesh)) = (self.edges.get(at), self.mesh) else {
            return Ok(tensor);
        };
        if !mesh.congruent(tensor.mesh()) {
            let left = mesh.to_string();
            let right = tensor.mesh().to_string();
            return Err(DTensorError::MeshMismatch { left, right }.into());
        }
        let other = edge
            .declared
            .iter()
            .zip(tensor.placements())
            .position(|(declared, own)| declared.is_some_and(|declared| declared != *own));
        if let Some((mesh_dim, declared)) =
            other.and_then(|mesh_dim| Some((mesh_dim, edge.declared[mesh_dim]?)))
        {
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
        self.into_iter()
            .map(|tensor| tensor.bring(side, at))
            .collect()
    }

    fn local(global: Self::Global) -> Self::Local {
        global.into_iter().map(T::local).collect()
    }
}

macro_rules! tuples {
    ($($($name:ident)+),+) => {$(
        #[allow(non_snake_case)] // variables named like the types
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
