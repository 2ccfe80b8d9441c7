//! Parameters created by burn's [`Initializer`], each rank computing only its own shard.

use burn::linalg;
use burn::module::Initializer;
use burn::tensor::{Distribution, Shape, Tensor, TensorCreationOptions};

use super::{DTensor, DTensorError};
use crate::Result;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;

impl<const D: usize> DTensor<D> {
    /// Creates a parameter of this `shape` with the values of `initializer`. The tensor is
    /// identical on every mesh and under every placement, because it is a function of `seed`, as in
    /// [`random`](Self::random).
    ///
    /// Each rank draws only its own shard, so no rank ever holds the full tensor. The exception is
    /// [`Orthogonal`](Initializer::Orthogonal): every rank draws the full tensor and then slices
    /// it. `fans` are the numbers of input and output features by which the Kaiming and Xavier
    /// initializers scale; for a [`Linear`](burn::nn::Linear) they are `[d_input, d_output]`. Other
    /// initializers ignore `fans`.
    ///
    /// ```
    /// use burn::module::Initializer;
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
    ///     let device = world.device().clone().autodiff();
    ///     let init = Initializer::KaimingUniform { gain: 1.0, fan_out_only: false };
    ///     let shard = &[Placement::Shard(1)];
    ///     let weight = DTensor::<2>::from_initializer(&init, [8, 6], [8, 6], 1, &mesh, shard, &device)?;
    ///     assert_eq!(weight.require_grad().local().dims(), [8, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Local, except for [`Orthogonal`](Initializer::Orthogonal) if the launch [checks
    /// replicas](crate::comm::Launch::with_replica_checks): then every rank of the mesh, because
    /// the full tensors are compared.
    ///
    /// # Errors
    /// As [all factories](#factories), and [`DTensorError::Distribution`] for an initializer whose
    /// parameters are invalid, such as Kaiming with 0 features, and for an orthogonal parameter of
    /// one dimension.
    pub fn from_initializer(
        initializer: &Initializer,
        shape: impl Into<Shape>,
        fans: [usize; 2],
        seed: u64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        let draw = match *initializer {
            Initializer::Constant { value } => {
                return Self::full(shape, value, mesh, placements, options);
            }
            Initializer::Ones => return Self::ones(shape, mesh, placements, options),
            Initializer::Zeros => return Self::zeros(shape, mesh, placements, options),
            Initializer::Orthogonal { gain } => {
                return Self::orthogonal(
                    shape.into(),
                    gain,
                    seed,
                    mesh,
                    placements,
                    options.into(),
                );
            }
            Initializer::Uniform { min, max } => Distribution::Uniform(min, max),
            Initializer::Normal { mean, std } => Distribution::Normal(mean, std),
            Initializer::KaimingUniform { gain, fan_out_only } => {
                uniform(gain * kaiming(fans, fan_out_only))
            }
            Initializer::KaimingNormal { gain, fan_out_only } => {
                normal(gain * kaiming(fans, fan_out_only))
            }
            Initializer::XavierUniform { gain } => uniform(gain * xavier(fans)),
            Initializer::XavierNormal { gain } => normal(gain * xavier(fans)),
        };
        Self::random(shape, draw, seed, mesh, placements, options)
    }

    /// Creates an orthogonal matrix: the rows or the columns, whichever are fewer, are orthonormal,
    /// times `gain`. It is `Q` of the QR decomposition of a matrix of normal values, with the signs
    /// that make the decomposition unique.
    fn orthogonal(
        shape: Shape,
        gain: f64,
        seed: u64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: TensorCreationOptions,
    ) -> Result<Self> {
        if D < 2 {
            let distribution = format!("orthogonal over {shape:?}");
            let why = "the shape must have at least two dimensions";
            return Err(DTensorError::Distribution { distribution, why }.into());
        }
        let rows = shape[0];
        let all = shape.num_elements();
        let replicated = vec![Placement::Replicate; mesh.ndim()];
        let matrix = [rows, all / rows.max(1)];
        let drawn = DTensor::<2>::random(
            matrix,
            Distribution::Normal(0.0, 1.0),
            seed,
            mesh,
            &replicated,
            options,
        )?;
        let drawn = drawn.to_local();
        let wide = matrix[0] < matrix[1];
        let (q, r) = linalg::qr::<2>(if wide { drawn.transpose() } else { drawn }, true);
        let signs = linalg::diag::<2, 1, _>(r).sign().unsqueeze();
        let q: Tensor<2> = q * signs;
        let full = if wide { q.transpose() } else { q };
        Self::distribute_replicated(full.reshape(shape).mul_scalar(gain), mesh, placements)
    }
}

/// Returns the standard deviation that preserves the variance of the activations, or of the
/// gradients with `fan_out_only`.
fn kaiming([fan_in, fan_out]: [usize; 2], fan_out_only: bool) -> f64 {
    let fan = if fan_out_only { fan_out } else { fan_in };
    1.0 / (fan as f64).sqrt()
}

/// Returns the standard deviation that approximately preserves the variance of both activations and
/// gradients.
fn xavier(fans: [usize; 2]) -> f64 {
    (2.0 / fans.iter().sum::<usize>() as f64).sqrt()
}

/// Returns the uniform distribution around 0 with this standard deviation.
fn uniform(std: f64) -> Distribution {
    let bound = 3.0_f64.sqrt() * std;
    Distribution::Uniform(-bound, bound)
}

fn normal(std: f64) -> Distribution {
    Distribution::Normal(0.0, std)
}
