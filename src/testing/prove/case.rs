//! [`Case`]: an operator to prove, with the inputs on which to prove it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, BoolStore, DType, Device, Float, Gradients, Int, Tensor, TensorData};

use super::output::{CaseOutputs, FullOutput};
use super::values::ValueKind;
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

type RunCase<L> = Box<dyn Fn(&[L]) -> Result<Vec<FullOutput>> + Send + Sync>;

/// One operator with inputs of given shapes, written with [`case!`](crate::case).
///
/// Cases with the same name belong to the same operator: write one for each shape worth proving.
pub struct Case {
    pub(super) name: &'static str,
    pub(super) inputs: Vec<CaseInput>,
    pub(super) plain: RunCase<PlainInput>,
    pub(super) sharded: RunCase<ShardedInput>,
}

impl Case {
    /// Creates a case of the operator `name` with `inputs`. `plain` computes the expected results
    /// on ordinary tensors, and `sharded` computes on DTensors.
    pub fn new<A: CaseOutputs, B: CaseOutputs>(
        name: &'static str,
        inputs: impl Into<Vec<CaseInput>>,
        plain: impl Fn(&[PlainInput]) -> A + Send + Sync + 'static,
        sharded: impl Fn(&[ShardedInput]) -> B + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            inputs: inputs.into(),
            plain: Box::new(move |inputs| plain(inputs).full_outputs()),
            sharded: Box::new(move |inputs| sharded(inputs).full_outputs()),
        }
    }

    /// Returns the name of the operator.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the tolerance of the least precise input.
    pub(super) fn tolerance(&self) -> f64 {
        self.inputs
            .iter()
            .map(CaseInput::tolerance)
            .fold(0.0, f64::max)
    }

    /// Returns the inputs.
    pub fn inputs(&self) -> &[CaseInput] {
        &self.inputs
    }
}

/// Formats as `matmul(a: [4, 6], b: [6, 4])`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.name)?;
        for (at, input) in self.inputs.iter().enumerate() {
            write!(
                f,
                "{}{}: {:?}",
                if at == 0 { "" } else { ", " },
                input.name,
                input.shape
            )?;
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
pub struct CaseInput {
    pub(super) name: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) values: ValueKind,
    dtype: DType,
    leaf: fn(TensorData, &Device) -> DispatchTensor,
    gradient: fn(DispatchTensor, &Gradients) -> Option<TensorData>,
}

impl CaseInput {
    /// Creates an input of floats in `-2.0..2.0` without ties.
    pub fn float<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        let leaf = |data, device: &Device| {
            leaf::<D, Float>(data, device)
                .require_grad()
                .into_dispatch()
        };
        let gradient = |leaf, grads: &Gradients| {
            Some(Tensor::<D>::from_dispatch(leaf).grad(grads)?.into_data())
        };
        let values = ValueKind::Float(-2.0..2.0);
        Self {
            name,
            shape: shape.to_vec(),
            values,
            dtype: DType::F32,
            leaf,
            gradient,
        }
    }

    /// Creates an input of floats of which most are equal to another: `count` different integers
    /// around 0. It has no gradients, because operators are free to assign them to any of the equal
    /// elements.
    pub fn tied<const D: usize>(name: &'static str, shape: [usize; D], count: usize) -> Self {
        Self::constant::<D, Float>(name, shape, ValueKind::Tied(count), DType::F32)
    }

    /// Creates an input of integral floats that never equal those of another such input (up to
    /// three inputs). But under `P(max)` or `P(min)`, local values that are not the extremum may be
    /// equal.
    pub fn meeting<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        Self {
            values: ValueKind::Meeting,
            ..Self::float(name, shape)
        }
    }

    /// Creates an input of floats in `-2.0..2.0`, with every third NaN. It has no gradients.
    pub fn nan<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        Self::constant::<D, Float>(name, shape, ValueKind::Nan(-2.0..2.0), DType::F32)
    }

    /// Creates an input of 64-bit integers in `range`.
    pub fn int<const D: usize>(
        name: &'static str,
        shape: [usize; D],
        range: impl IntRange,
    ) -> Self {
        Self::constant::<D, Int>(name, shape, ValueKind::Int(range.range()), DType::I64)
    }

    /// Creates an input of booleans.
    pub fn bool<const D: usize>(name: &'static str, shape: [usize; D]) -> Self {
        Self::constant::<D, Bool>(name, shape, ValueKind::Bool, DType::Bool(BoolStore::Native))
    }

    /// Returns the global shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sets the range of the floats.
    ///
    /// # Panics
    /// If the input was not created by [`float`](Self::float).
    #[must_use]
    pub fn with_range(mut self, range: Range<f64>) -> Self {
        assert!(
            matches!(self.values, ValueKind::Float(_)),
            "`{}` is not a `CaseInput::float`",
            self.name
        );
        self.values = ValueKind::Float(range);
        self
    }

    /// Sets the dtype of the elements.
    ///
    /// # Panics
    /// If `dtype` is of another kind (float, integer or boolean).
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        let kind = |dtype: DType| (dtype.is_float(), dtype.is_bool());
        assert_eq!(
            kind(self.dtype),
            kind(dtype),
            "`{}` cannot have elements of {dtype:?}",
            self.name
        );
        self.dtype = dtype;
        self
    }

    fn constant<const D: usize, K: Kind>(
        name: &'static str,
        shape: [usize; D],
        values: ValueKind,
        dtype: DType,
    ) -> Self {
        let leaf = |data, device: &Device| leaf::<D, K>(data, device).into_dispatch();
        Self {
            name,
            shape: shape.to_vec(),
            values,
            dtype,
            leaf,
            gradient: |_, _| None,
        }
    }

    /// Creates a leaf with these values. Integers wrap around, because partial values of a sum may
    /// exceed the range of the dtype.
    pub(super) fn leaf(&self, values: &[f64], shape: &[usize], device: &Device) -> DispatchTensor {
        macro_rules! wrapped {
            ($int:ty) => {
                TensorData::new(
                    values.iter().map(|&value| value as i64 as $int).collect(),
                    shape.to_vec(),
                )
            };
        }
        let data = match self.dtype {
            DType::I64 => wrapped!(i64),
            DType::I32 => wrapped!(i32),
            DType::I16 => wrapped!(i16),
            DType::I8 => wrapped!(i8),
            DType::U64 => wrapped!(u64),
            DType::U32 => wrapped!(u32),
            DType::U16 => wrapped!(u16),
            DType::U8 => wrapped!(u8),
            DType::Bool(_) => TensorData::new(
                values.iter().map(|&value| value != 0.0).collect(),
                shape.to_vec(),
            ),
            float => TensorData::new(values.to_vec(), shape.to_vec()).convert_dtype(float),
        };
        (self.leaf)(data, device)
    }

    /// Returns the tolerance for results with another order of summation, relative to their size.
    pub(super) fn tolerance(&self) -> f64 {
        match self.dtype {
            // Sums of products of up to five factors, each rounded to 1/256.
            DType::BF16 => 0.1,
            DType::F16 => 0.01,
            // Single precision, in which everything else is computed. A wrong rule is off by about 1.
            _ => 1e-4,
        }
    }

    /// Returns shape and values of the gradient of a leaf, if it has one.
    pub(super) fn gradient(
        &self,
        leaf: &DispatchTensor,
        grads: &Gradients,
    ) -> Option<(Vec<usize>, Vec<f64>)> {
        let data = (self.gradient)(leaf.clone(), grads)?;
        Some((data.shape().to_vec(), data.iter::<f64>().collect()))
    }
}

/// Creates a tensor with the dtype of the data.
fn leaf<const D: usize, K: Kind>(data: TensorData, device: &Device) -> Tensor<D, K> {
    let dtype = data.dtype();
    Tensor::from_data(data, (device, dtype))
}

/// Range of the integers of a [`CaseInput`]: either a range, or an upper bound with 0 as the lower
/// one.
pub trait IntRange {
    /// Returns the range.
    fn range(self) -> Range<i64>;
}

impl IntRange for i64 {
    fn range(self) -> Range<i64> {
        0..self
    }
}

impl IntRange for Range<i64> {
    fn range(self) -> Range<i64> {
        self
    }
}

/// Input of the operator on plain tensors.
#[derive(Debug)]
pub struct PlainInput(pub(super) DispatchTensor);

impl PlainInput {
    /// Returns the tensor.
    pub fn tensor<const D: usize, K: Kind>(&self) -> Tensor<D, K> {
        Tensor::from_dispatch(self.0.clone())
    }
}

/// Input of the operator on DTensors.
#[derive(Debug)]
pub struct ShardedInput {
    pub(super) leaf: DispatchTensor,
    pub(super) spec: Arc<DTensorSpec>,
}

impl ShardedInput {
    /// Returns the tensor.
    pub fn tensor<const D: usize, K: Kind>(&self) -> DTensor<D, K> {
        DTensor::from_parts(Tensor::from_dispatch(self.leaf.clone()), self.spec.clone())
    }
}
