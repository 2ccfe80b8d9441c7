//! [`distribute_module`], with the [`Styles`] that its function returns, and the [`InputOutputFns`]
//! between plain tensors and a distributed module.

use burn::module::Module;

use super::{ParallelError, Plan, Style, parallelize};
use crate::Result;
use crate::mesh::DeviceMesh;
use crate::param::ModelScan;
use crate::placement::Placement;

/// Like [`parallelize`], but with a function in place of patterns. `partition` is called with the
/// path and global shape of each parameter, and returns its placement or style. On a mesh of
/// several dimensions it returns an array with one for each, such as `[Replicate, Shard(0)]`.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_dtensor::parallel::{InputOutputFns, distribute_module};
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl Mlp {
///     fn forward(&self, x: DTensor<2>) -> DTensor<2> {
///         self.down.forward_dtensor(self.up.forward_dtensor(x).tanh())
///     }
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
///     let device = world.device().clone().autodiff();
///     let mlp = Mlp { up: LinearConfig::new(8, 30).init(&device), down: LinearConfig::new(30, 8).init(&device) };
///     // Shards every parameter along its dimension of 30 features.
///     let mlp = distribute_module(mlp, &mesh, |_, shape| match shape.iter().position(|&len| len == 30) {
///         Some(dim) => Shard(dim),
///         None => Replicate,
///     })?;
///     assert_eq!(mlp.down.weight.base().dims(), [15, 8]);
///     // Plain tensors in, plain tensors out.
///     let boundary = InputOutputFns::new(
///         &mesh,
///         |x: Tensor<2>, mesh| DTensor::from_local(x, mesh, &[Replicate]),
///         |y: DTensor<2>, _| y.full_tensor(),
///     );
///     let y = boundary.forward(&mlp, Tensor::ones([4, 8], &device), Mlp::forward)?;
///     assert_eq!(y.dims(), [4, 8]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// As [`parallelize`]; `partition` must return the same on every rank.
///
/// # Errors
/// [`ParallelError::Styles`] if the number of styles is not the number of mesh dimensions, and as
/// [`parallelize`]. If the model has already been parallelized,
/// [`ParallelError::AlreadyParallelized`].
pub fn distribute_module<M: Module, S: Into<Styles>>(
    module: M,
    mesh: &DeviceMesh,
    mut partition: impl FnMut(&str, &[usize]) -> S,
) -> Result<M> {
    let mut plan = Plan::new();
    for found in &ModelScan::of(&module).params {
        let param = found.path();
        let Styles(styles) = partition(&param, &found.global_shape()).into();
        if styles.len() != mesh.ndim() {
            return Err(ParallelError::Styles {
                param,
                given: styles.len(),
                mesh: mesh.to_string(),
            }
            .into());
        }
        let named = mesh.names().iter().zip(styles);
        plan = named.fold(plan, |plan, (name, style)| {
            plan.with_mesh_dim_plan(name, Plan::new().with_style(&param, style))
        });
    }
    parallelize(module, mesh, plan)
}

/// Styles of a parameter on the dimensions of a mesh: a [`Style`] or [`Placement`], or an array or
/// `Vec` of them.
#[derive(Debug, Clone)]
pub struct Styles(Vec<Style>);

impl From<Style> for Styles {
    fn from(style: Style) -> Self {
        Self(vec![style])
    }
}

impl From<Placement> for Styles {
    fn from(placement: Placement) -> Self {
        Self(vec![placement.into()])
    }
}

impl<S: Into<Style>, const N: usize> From<[S; N]> for Styles {
    fn from(styles: [S; N]) -> Self {
        Self(styles.map(Into::into).into())
    }
}

impl<S: Into<Style>> From<Vec<S>> for Styles {
    fn from(styles: Vec<S>) -> Self {
        Self(styles.into_iter().map(Into::into).collect())
    }
}

/// Functions that convert the inputs of a module before its forward, and the outputs after it. Use
/// them if the program has plain tensors but the module computes with
/// [`DTensor`](crate::dtensor::DTensor)s. The input function can use
/// [`from_local`](crate::dtensor::DTensor::from_local) for each rank's local tensor, or
/// [`distribute_tensor`](crate::dtensor::DTensor::distribute_tensor) for one rank's full tensor.
/// The output function can use [`to_local`](crate::dtensor::DTensor::to_local) or
/// [`full_tensor`](crate::dtensor::DTensor::full_tensor).
///
/// burn modules have no forward hooks, so these functions are applied where the forward is called;
/// see [`distribute_module`] for an example. They do not depend on a module's parameters: one value
/// serves all modules of the mesh with such inputs and outputs.
#[derive(Clone)]
pub struct InputOutputFns<I, O> {
    mesh: DeviceMesh,
    input: I,
    output: O,
}

impl<I, O> InputOutputFns<I, O> {
    /// Creates the functions. Each is called with the tensors to convert, `input` before and
    /// `output` after the forward, and with the mesh.
    pub fn new<X, A, B, Y>(mesh: &DeviceMesh, input: I, output: O) -> Self
    where
        I: Fn(X, &DeviceMesh) -> Result<A>,
        O: Fn(B, &DeviceMesh) -> Result<Y>,
    {
        Self {
            mesh: mesh.clone(),
            input,
            output,
        }
    }

    /// Converts the inputs, runs `forward` of `module`, and converts its outputs.
    ///
    /// # Collective
    /// As the functions and the forward.
    ///
    /// # Errors
    /// Those of the functions.
    pub fn forward<M, X, A, B, Y>(
        &self,
        module: &M,
        x: X,
        forward: impl FnOnce(&M, A) -> B,
    ) -> Result<Y>
    where
        I: Fn(X, &DeviceMesh) -> Result<A>,
        O: Fn(B, &DeviceMesh) -> Result<Y>,
    {
        let y = forward(module, (self.input)(x, &self.mesh)?);
        (self.output)(y, &self.mesh)
    }
}
