//! Activation functions, with burn's names and signatures: [`burn::tensor::activation`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_dtensor::Error;
//! use burn_dtensor::comm::{Launch, launch};
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::activation::softmax;
//! use burn_dtensor::mesh::DeviceMesh;
//! use burn_dtensor::placement::Placement::Shard;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let scores = DTensor::<2>::zeros([4, 8], &mesh, &[Shard(0)], mesh.device())?;
//!     assert_eq!(softmax(scores, -1).placements(), [Shard(0)]);
//!     Ok::<_, Error>(())
//! })?;
//! # Ok::<_, Error>(())
//! ```
//!
//! | | |
//! |---|---|
//! | elementwise | `S(d)` to `S(d)`; increasing ones that do not clamp go through `P(max)` or `P(min)` |
//! | along a dimension: the softmaxes, `glu` | that dimension whole, any other cut |
//! | `prelu` with an `alpha` a channel | channels cut with their `alpha` |

use burn::tensor::{AsIndex, Shape, activation as local};

use super::along::{Along, along};
use super::args::{dim_of, misfit};
use super::placements::{R, S};
use super::pointwise::{INCREASING, INCREASING_TO, NOTHING, Pointwise, Table, map};
use super::{Rule, Strategy, binary, strategy};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;

macro_rules! elementwise {
    ($($name:ident($($arg:ident),*): $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](local::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<const D: usize>(tensor: DTensor<D>, $($arg: f64),*) -> DTensor<D> {
            map(Pointwise::new(stringify!($name), $table), tensor, |x| local::$name(x, $($arg),*))
        }
    )*};
}

/// `table` under a condition on the function's parameters.
const fn only_if(condition: bool, table: Table) -> Table {
    if condition { table } else { NOTHING }
}

elementwise! {
    relu(): INCREASING,
    relu6(): NOTHING, // clamps
    leaky_relu(negative_slope): only_if(negative_slope > 0.0, INCREASING),
    thresholded_relu(alpha): only_if(alpha >= 0.0, INCREASING),
    threshold(threshold, value): only_if(value <= threshold, INCREASING),
    sigmoid(): INCREASING,
    log_sigmoid(): INCREASING,
    hard_sigmoid(alpha, beta): NOTHING, // clamps
    tanh(): INCREASING,
    tanhshrink(): INCREASING,
    hardtanh(min_val, max_val): NOTHING, // clamps
    softsign(): NOTHING,
    softplus(beta): INCREASING,
    // It falls where it becomes linear, by more the lower the threshold.
    softplus_with_threshold(beta, threshold): NOTHING,
    elu(alpha): only_if(alpha >= 0.0, INCREASING_TO),
    celu(alpha): only_if(alpha > 0.0, INCREASING_TO),
    selu(): INCREASING_TO,
    hard_shrink(lambda): only_if(lambda >= 0.0, INCREASING),
    soft_shrink(lambda): only_if(lambda >= 0.0, INCREASING),
    shrink(lambda, bias): only_if(lambda >= bias, INCREASING),
    gelu(): NOTHING,
    gelu_approximate(): NOTHING,
    silu(): NOTHING,
    hard_swish(): NOTHING,
    mish(): NOTHING,
}

macro_rules! along_a_dimension {
    ($($name:ident),* $(,)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](local::", stringify!($name), "): the dimension is made whole.")]
        #[must_use]
        pub fn $name<const D: usize>(tensor: DTensor<D>, dim: impl AsIndex) -> DTensor<D> {
            let dim = dim_of(stringify!($name), dim, D);
            along(&Along::new(stringify!($name), NOTHING, dim), tensor, |x| local::$name(x, dim))
        }
    )*};
}

along_a_dimension! { softmax, log_softmax, softmin, quiet_softmax }

/// The first half of `dim` times the sigmoid of the second, as burn's [`glu`](local::glu): the
/// dimension is made whole.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if its length
/// is odd.
#[must_use]
pub fn glu<const D: usize>(tensor: DTensor<D>, dim: impl AsIndex) -> DTensor<D> {
    let dim = dim_of("glu", dim, D);
    let len = tensor.dims()[dim];
    if len % 2 == 1 {
        misfit("glu", &[tensor.shape()], format!("dimension {dim} must have two halves, its length is {len}")).unwind();
    }
    along(&Along::new("glu", NOTHING, dim).with_len(len / 2), tensor, |x| local::glu(x, dim))
}

/// With an `alpha` for all, or one a channel (dimension 1).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Prelu;

impl Rule for Prelu {
    fn name(&self) -> &'static str {
        "prelu"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let [x, alpha] = inputs else { unreachable!("a tensor and its alpha") };
        if alpha[0] != 1 && x.num_dims() > 1 && alpha[0] != x[1] || x.num_dims() == 1 && alpha[0] != 1 {
            return Err(misfit(self.name(), inputs, "`alpha` needs one element, or one a channel (dimension 1)"));
        }
        Ok(vec![x.clone()])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let alpha = |dim| if dim == 1 && inputs[1][0] > 1 { S(0) } else { R };
        (0..inputs[0].num_dims()).map(|dim| strategy([S(dim), alpha(dim)], [S(dim)])).collect()
    }
}

/// Negative elements times `alpha`, of which there is one, or one a channel (dimension 1), as
/// burn's [`prelu`](local::prelu).
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if there are
/// others.
#[must_use]
pub fn prelu<const D: usize>(tensor: DTensor<D>, alpha: DTensor<1>) -> DTensor<D> {
    binary(&Prelu, tensor, alpha, |x, alpha, _| {
        // Burn's own reads an `alpha` without elements as one for all.
        let mut channels = [1; D];
        channels[D.min(2) - 1] = alpha.dims()[0];
        let scaled = x.clone() * reshape(alpha, Shape::from(channels));
        let negative = x.clone().lower_scalar(0);
        x.mask_where(negative, scaled)
    })
}
