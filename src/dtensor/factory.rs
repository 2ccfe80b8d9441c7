//! Factories: DTensors of constants, random values and indices. Each rank fills only its own local
//! tensor.

use burn::tensor::{
    Distribution, ElementConversion, Int, Shape, Tensor, TensorCreationOptions, TensorData, kind,
};
use itertools::Itertools;
use std::cmp::Ordering;
use std::ops::Range;

use super::distribute::check_no_partial;
use super::ops::operand_error;
use super::{DTensor, DTensorError, DTensorSpec, Kind, random};
use crate::Result;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

/// # Factories
/// `options` are burn's: a device (with or without autodiff), or a device and a dtype.
///
/// Local: nothing is sent.
///
/// All factories return [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember),
/// [`DTensorError::Partial`], [`DTensorError::Operands`] for a shape that does not have `D`
/// dimensions, or [`PlacementError`](crate::placement::PlacementError) for a wrong number of
/// placements or a dimension out of range.
impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Creates a tensor of zeros (false).
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn zeros(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        make("zeros", shape, mesh, placements, |part| {
            Tensor::zeros(part.shape(), options)
        })
    }

    /// Creates a tensor of ones (true).
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn ones(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        make("ones", shape, mesh, placements, |part| {
            Tensor::ones(part.shape(), options)
        })
    }

    /// Creates a tensor of unspecified values, to be overwritten.
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn empty(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        make("empty", shape, mesh, placements, |part| {
            Tensor::empty(part.shape(), options)
        })
    }

    /// Creates a tensor with `value` in every element.
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn full<E: ElementConversion>(
        shape: impl Into<Shape>,
        value: E,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        make("full", shape, mesh, placements, |part| {
            Tensor::full(part.shape(), value, options)
        })
    }
}

impl<K: Kind + kind::Numeric> DTensor<2, K> {
    /// Creates the identity matrix, `[size, size]`. Local.
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn eye(
        size: usize,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        make("eye", [size, size], mesh, placements, |part| {
            let places = part.slices.iter().cloned().multi_cartesian_product();
            let values: Vec<u8> = places
                .map(|place| u8::from(place.iter().all_equal()))
                .collect();
            Tensor::from_data(TensorData::new(values, part.shape()), options)
        })
    }
}

impl<const D: usize> DTensor<D> {
    /// Creates a tensor of random values, identical on every mesh and under every placement:
    /// element `i` (row-major) depends on `seed` and `i` only (Philox4x32-10), not on burn's random
    /// state.
    ///
    /// Equal seeds give equal values, so use a different seed for every tensor. Local; every rank
    /// passes the same seed.
    ///
    /// # Errors
    /// As [all factories](#factories), and [`DTensorError::Distribution`].
    pub fn random(
        shape: impl Into<Shape>,
        distribution: Distribution,
        seed: u64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        check_distribution(distribution)?;
        make("random", shape, mesh, placements, |part| {
            let values = random::fill(seed, part.global, &part.slices, |words, lane| {
                random::float(distribution, words, lane)
            });
            Tensor::from_data(TensorData::new(values, part.shape()), options)
        })
    }
}

impl<const D: usize> DTensor<D, Int> {
    /// Creates a tensor of random integers from `range`, drawn as [`random`](DTensor::random) draws
    /// floats. Each integer is computed from 32 random bits: if the range has `n > 2^32` integers,
    /// only 2^32 of them occur, about `n / 2^32` apart. Local, as `random`.
    ///
    /// # Errors
    /// As [all factories](#factories), and [`DTensorError::Distribution`] for an empty range.
    pub fn random_range(
        shape: impl Into<Shape>,
        range: Range<i64>,
        seed: u64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        if range.is_empty() {
            let distribution = format!("uniform over {range:?}");
            return Err(DTensorError::Distribution {
                distribution,
                why: "the range is empty",
            }
            .into());
        }
        make("random_range", shape, mesh, placements, |part| {
            let values = random::fill(seed, part.global, &part.slices, |words, lane| {
                random::int(&range, words, lane)
            });
            Tensor::from_data(TensorData::new(values, part.shape()), options)
        })
    }
}

impl DTensor<1, Int> {
    /// Creates a vector of the integers of `range`. Local.
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn arange(
        range: Range<i64>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        steps("arange", range, 1, mesh, placements, options)
    }

    /// Creates a vector of every `step`-th integer of `range`, beginning with the first. Local.
    ///
    /// # Errors
    /// As [all factories](#factories), and [`DTensorError::Operands`] for a step of 0.
    pub fn arange_step(
        range: Range<i64>,
        step: usize,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<Self> {
        if step == 0 {
            return Err(operand_error(
                "arange_step",
                &[],
                "the step is 0. Pass a step of at least 1",
            ));
        }
        steps("arange_step", range, step, mesh, placements, options)
    }
}

fn steps(
    operation: &'static str,
    range: Range<i64>,
    step: usize,
    mesh: &DeviceMesh,
    placements: &[Placement],
    options: impl Into<TensorCreationOptions>,
) -> Result<DTensor<1, Int>> {
    let len = range.end.saturating_sub(range.start).max(0) as usize;
    make(operation, [len.div_ceil(step)], mesh, placements, |part| {
        let own = part.slices[0].clone();
        let values: Vec<_> = own
            .map(|index| range.start + (index * step) as i64)
            .collect();
        Tensor::from_data(TensorData::new(values, part.shape()), options)
    })
}

impl<const D: usize> DTensor<D, Int> {
    /// Creates a tensor of the indices of all elements of a tensor of `shape`; its shape is
    /// `[..shape, D]`. Local.
    ///
    /// # Errors
    /// As [all factories](#factories), and [`DTensorError::Operands`] if `D2` is not `D + 1`, or if
    /// `shape` does not have `D` dimensions.
    pub fn cartesian_grid<S: Into<Shape>, const D2: usize>(
        shape: S,
        mesh: &DeviceMesh,
        placements: &[Placement],
        options: impl Into<TensorCreationOptions>,
    ) -> Result<DTensor<D2, Int>> {
        let shape = shape.into();
        if D2 != D + 1 || shape.num_dims() != D {
            let why = format!(
                "the grid of a shape of {D} dimensions has {} dimensions, not {D2}",
                D + 1
            );
            return Err(operand_error("cartesian_grid", &[shape], why));
        }
        let global = Shape::from([&shape[..], &[D]].concat());
        make("cartesian_grid", global, mesh, placements, |part| {
            let values: Vec<i64> = match part.slices.split_last() {
                Some((which, indices)) => {
                    let places = indices.iter().cloned().multi_cartesian_product();
                    places
                        .flat_map(|place| which.clone().map(move |dim| place[dim] as i64))
                        .collect()
                }
                None => Vec::new(),
            };
            Tensor::from_data(TensorData::new(values, part.shape()), options)
        })
    }
}

/// Region of a global tensor that one rank fills.
pub(super) struct LocalRegion<'a> {
    global: &'a [usize],
    pub(super) slices: Vec<Range<usize>>,
}

impl LocalRegion<'_> {
    pub(super) fn shape(&self) -> Shape {
        Shape::from(self.slices.iter().map(Range::len).collect::<Vec<_>>())
    }
}

pub(super) fn make<const D: usize, K: Kind>(
    operation: &'static str,
    shape: impl Into<Shape>,
    mesh: &DeviceMesh,
    placements: &[Placement],
    local: impl FnOnce(LocalRegion<'_>) -> Tensor<D, K>,
) -> Result<DTensor<D, K>> {
    let layout = Layout::new(mesh.shape(), placements)?;
    check_no_partial(operation, mesh, &layout)?;
    layout.check(D)?;
    let shape = shape.into();
    if shape.num_dims() != D {
        let why = format!(
            "the shape has {} dimensions, but {D} were requested",
            shape.num_dims()
        );
        return Err(operand_error(operation, &[shape], why));
    }
    let coordinate = mesh.member("create a DTensor on it")?;
    let slices = layout.local_slices(&shape, coordinate);
    let local = local(LocalRegion {
        global: &shape,
        slices,
    });
    let spec = DTensorSpec::new(mesh, layout, shape, local.dtype())?;
    Ok(DTensor::from_parts(local, spec.shared()))
}

pub(super) fn check_distribution(distribution: Distribution) -> Result<(), DTensorError> {
    let why = match distribution {
        Distribution::Bernoulli(p) if !(0.0..=1.0).contains(&p) => "a probability must be in 0..=1",
        Distribution::Uniform(low, high) if low.partial_cmp(&high) != Some(Ordering::Less) => {
            "the interval is empty"
        }
        Distribution::Uniform(low, high) if !(high - low).is_finite() => {
            "the interval must be finite"
        }
        Distribution::Normal(_, std) if std.is_nan() || std < 0.0 => {
            "the standard deviation must be at least 0"
        }
        Distribution::Normal(mean, std) if !(mean + std).is_finite() => {
            "mean and standard deviation must be finite"
        }
        _ => return Ok(()),
    };
    Err(DTensorError::Distribution {
        distribution: format!("{distribution:?}"),
        why,
    })
}
