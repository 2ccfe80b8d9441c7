//! [`Case`]: an operator to prove, and the inputs to prove it on.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Device, Gradients, Int, Tensor, TensorData};

use super::output::{Outputs, Whole};
use super::values::Values;
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

type Run<L> = Box<dyn Fn(&[L]) -> Result<Vec<Whole>> + Send + Sync>;

/// One operator on inputs of certain shapes; written with [`case!`](crate::case).
///
/// Cases of one name are one operator: give it as many as it has shapes worth proving.
pub struct Case {
    pub(super) name: &'static str,
    pub(super) inputs: Vec<Input>,
    pub(super) plain: Run<Plain>,
    pub(super) sharded: Run<Sharded>,
}

impl Case {
    /// The operator `name` on `inputs`: `plain` on ordinary tensors is the truth that `sharded`
    /// on DTensors is held to.
    pub fn new<A: Outputs, B: Outputs>(
        name: &'static str,
        inputs: impl Into<Vec<Input>>,
        plain: impl Fn(&[Plain]) -> A + Send + Sync + 'static,
        sharded: impl Fn(&[Sharded]) -> B + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            inputs: inputs.into(),
            plain: Box::new(move |inputs| plain(inputs).wholes()),
            sharded: Box::new(move |inputs| sharded(inputs).wholes()),
        }
    }

    /// The operator's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its inputs.
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }
}

/// `matmul(a: [4, 6], b: [6, 4])`
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.name)?;
        for (at, input) in self.inputs.iter().enumerate() {
            write!(f, "{}{}: {:?}", if at == 0 { "" } else { ", " }, input.name, input.shape)?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Case({self})")
    }
}

/// One input of a [`Case`].
#[derive(Debug, Clone)]
pub struct Input {
    pub(super) name: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) values: Values,
    leaf: fn(TensorData, &Device) -> DispatchTensor,
    gradient: fn(DispatchTensor, &Gradients) -> Option<TensorData>,
}

impl Input {
    /// Floats without ties in `-2.0..2.0`.
    pub fn float<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        let leaf = |data, device: &Device| Tensor::<D>::from_data(data, device).require_grad().into_dispatch();
        let gradient = |leaf, grads: &Gradients| Some(Tensor::<D>::from_dispatch(leaf).grad(grads)?.into_data());
        Self { name, shape: shape.to_vec(), values: Values::Float(-2.0..2.0), leaf, gradient }
    }

    /// Integers from 0 to below `bound`.
    pub fn int<const D: usize>(name: &'static str, shape: [usize; D], bound: i64) -> Self {
        Self::constant::<D, Int>(name, shape, Values::Int(bound))
    }

    /// Booleans.
    pub fn bool<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        Self::constant::<D, Bool>(name, shape, Values::Bool)
    }

    /// Its global shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Floats in `range`.
    ///
    /// # Panics
    /// If the input is not one of floats.
    #[must_use]
    pub fn within(mut self, range: Range<f64>) -> Self {
        assert!(matches!(self.values, Values::Float(_)), "`{}` has no floats to keep in a range", self.name);
        self.values = Values::Float(range);
        self
    }

    fn constant<const D: usize, K: Kind>(name: &'static str, shape: [usize; D], values: Values) -> Self {
        let leaf = |data, device: &Device| Tensor::<D, K>::from_data(data, device).into_dispatch();
        Self { name, shape: shape.to_vec(), values, leaf, gradient: |_, _| None }
    }

    /// A leaf of these values.
    pub(super) fn leaf(&self, values: &[f64], shape: &[usize], device: &Device) -> DispatchTensor {
        let data = match self.values {
            Values::Float(_) => TensorData::new(values.iter().map(|&value| value as f32).collect(), shape.to_vec()),
            Values::Int(_) => TensorData::new(values.iter().map(|&value| value as i64).collect(), shape.to_vec()),
            Values::Bool => TensorData::new(values.iter().map(|&value| value != 0.0).collect(), shape.to_vec()),
        };
        (self.leaf)(data, device)
    }

    /// The gradient of a leaf, if it has one: shape and values.
    pub(super) fn gradient(&self, leaf: &DispatchTensor, grads: &Gradients) -> Option<(Vec<usize>, Vec<f64>)> {
        let data = (self.gradient)(leaf.clone(), grads)?;
        Some((data.shape().to_vec(), data.iter::<f64>().collect()))
    }
}

/// An input as the plain operator takes it.
#[derive(Debug)]
pub struct Plain(pub(super) DispatchTensor);

impl Plain {
    /// The tensor.
    pub fn tensor<const D: usize, K: Kind>(&self) -> Tensor<D, K> {
        Tensor::from_dispatch(self.0.clone())
    }
}

/// An input as the operator on DTensors takes it.
#[derive(Debug)]
pub struct Sharded {
    pub(super) leaf: DispatchTensor,
    pub(super) spec: Arc<DTensorSpec>,
}

impl Sharded {
    /// The tensor.
    pub fn tensor<const D: usize, K: Kind>(&self) -> DTensor<D, K> {
        DTensor::from_parts(Tensor::from_dispatch(self.leaf.clone()), self.spec.clone())
    }
}
