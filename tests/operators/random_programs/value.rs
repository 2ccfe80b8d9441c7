//! [`Value`]: a tensor of any kind and number of dimensions, burn's or distributed.

use std::any::Any;

use burn::tensor::{Bool, DType, Device, Gradients, Int, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::dtensor::{DTensor, Kind};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Layout;
use burn_dtensor::testing::{GraphDepth, graph_depth};

/// `$expr` with the constant `D`, of the number of dimensions `$rank`.
macro_rules! by_rank {
    ($rank:expr, $expr:expr) => {
        by_rank!(@ $rank, $expr, 1 2 3 4 5 6)
    };
    (@ $rank:expr, $expr:expr, $($d:literal)+) => {
        match $rank {
            $($d => { const D: usize = $d; $expr })+
            rank => unreachable!("no program has tensors of {rank} dimensions"),
        }
    };
}

/// What the elements of a value are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ElementKind {
    Float,
    Int,
    Bool,
}

impl ElementKind {
    pub fn of(dtype: DType) -> Self {
        match dtype {
            _ if dtype.is_float() => Self::Float,
            _ if dtype.is_bool() => Self::Bool,
            _ => Self::Int,
        }
    }
}

/// Elements in row-major order, outside any tensor. Every element of every dtype here is a `f64`.
#[derive(Debug, Clone, PartialEq)]
pub struct Data {
    pub kind: ElementKind,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Data {
    /// The largest absolute value.
    pub fn extent(&self) -> f64 {
        self.values
            .iter()
            .fold(0.0, |extent, value| value.abs().max(extent))
    }

    /// A tensor of its own: of floats a leaf with a gradient.
    pub fn tensor(&self, device: &Device) -> Value {
        by_rank!(
            self.shape.len(),
            match self.kind {
                ElementKind::Float => Value::new(self.floats::<D>(device)),
                ElementKind::Int => Value::new(self.plain::<D, Int>(device)),
                ElementKind::Bool => Value::new(self.plain::<D, Bool>(device)),
            }
        )
    }

    /// The part of a tensor of the global `shape` that this rank holds.
    pub fn part(
        &self,
        mesh: &DeviceMesh,
        layout: &Layout,
        shape: &[usize],
        device: &Device,
    ) -> Result<Value> {
        fn of<const D: usize, K: Kind>(
            local: Tensor<D, K>,
            (mesh, layout, shape): (&DeviceMesh, &Layout, &[usize]),
        ) -> Result<Value> {
            Ok(Value::new(DTensor::from_local_with_layout(
                local,
                mesh,
                layout.clone(),
                shape.to_vec(),
            )?))
        }
        let place = (mesh, layout, shape);
        by_rank!(
            self.shape.len(),
            match self.kind {
                ElementKind::Float => of(self.floats::<D>(device), place),
                ElementKind::Int => of(self.plain::<D, Int>(device), place),
                ElementKind::Bool => of(self.plain::<D, Bool>(device), place),
            }
        )
    }

    fn floats<const D: usize>(&self, device: &Device) -> Tensor<D> {
        let data = TensorData::new(self.values.clone(), self.shape.clone());
        Tensor::<D>::from_data(data, (device, self.dtype)).require_grad()
    }

    fn plain<const D: usize, K: Kind>(&self, device: &Device) -> Tensor<D, K> {
        if self.kind == ElementKind::Bool {
            let values: Vec<bool> = self.values.iter().map(|&value| value != 0.0).collect();
            return Tensor::from_data(TensorData::new(values, self.shape.clone()), device);
        }
        let values: Vec<i64> = self.values.iter().map(|&value| value as i64).collect();
        Tensor::from_data(
            TensorData::new(values, self.shape.clone()),
            (device, self.dtype),
        )
    }
}

/// A tensor of any kind and number of dimensions.
pub struct Value(Box<dyn Erased>);

impl Value {
    pub fn new(tensor: impl Erased) -> Self {
        Self(Box::new(tensor))
    }

    /// The tensor, which is a `T`.
    pub fn take<T: 'static>(self) -> T {
        let any: Box<dyn Any> = self.0;
        *any.downcast()
            .unwrap_or_else(|_| panic!("an operand is no {}", std::any::type_name::<T>()))
    }
}

impl std::ops::Deref for Value {
    type Target = dyn Erased;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// What a program asks of a tensor whose type it does not know.
pub trait Erased: Any {
    /// Another handle.
    fn share(&self) -> Value;

    /// The whole tensor, outside the graph. Collective, of a distributed one.
    fn full(&self) -> Result<Data>;

    /// The whole tensor in one row, in the graph, if it is part of one. Collective, of a
    /// distributed one.
    fn tracked(&self) -> Result<Option<Tensor<1>>>;

    /// The gradient of what this rank holds.
    fn gradient(&self, grads: &Gradients) -> Option<Data>;

    /// Global shape, layout and local shape, if it is distributed.
    fn placed(&self) -> Option<(Vec<usize>, Layout, Vec<usize>)>;

    /// The same laid out as `layout` says, where its own partial values allow it; an
    /// undistributed tensor stays as it is.
    fn moved(self: Box<Self>, layout: &Layout) -> Result<Value>;

    /// The same, and how deep in the graph it lies.
    fn measured(self: Box<Self>) -> (Value, GraphDepth);
}

impl Value {
    /// [`Erased::measured`].
    pub fn probed(self) -> (Self, GraphDepth) {
        self.0.measured()
    }

    /// [`Erased::moved`].
    pub fn redistributed(self, layout: &Layout) -> Result<Self> {
        self.0.moved(layout)
    }
}

fn float<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> Option<&Tensor<D>> {
    (tensor as &dyn Any).downcast_ref()
}

fn data<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Data {
    let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
    Data {
        kind: ElementKind::of(dtype),
        dtype,
        shape,
        values: tensor.into_data().iter().collect(),
    }
}

impl<const D: usize, K: Kind> Erased for Tensor<D, K> {
    fn share(&self) -> Value {
        Value::new(self.clone())
    }

    fn full(&self) -> Result<Data> {
        Ok(data(self.clone()))
    }

    fn tracked(&self) -> Result<Option<Tensor<1>>> {
        let tracked = float(self).filter(|tensor| tensor.is_tracked());
        Ok(tracked.map(|tensor| tensor.clone().reshape([tensor.shape().num_elements()])))
    }

    fn gradient(&self, grads: &Gradients) -> Option<Data> {
        Some(data(float(self)?.grad(grads)?))
    }

    fn placed(&self) -> Option<(Vec<usize>, Layout, Vec<usize>)> {
        None
    }

    fn moved(self: Box<Self>, _: &Layout) -> Result<Value> {
        Ok(Value(self))
    }

    fn measured(self: Box<Self>) -> (Value, GraphDepth) {
        (Value(self), GraphDepth::default())
    }
}

impl<const D: usize, K: Kind> Erased for DTensor<D, K> {
    fn share(&self) -> Value {
        Value::new(self.clone())
    }

    fn full(&self) -> Result<Data> {
        Ok(match (self as &dyn Any).downcast_ref::<DTensor<D>>() {
            Some(tensor) => data(tensor.clone().detach().full_tensor()?),
            None => data(self.clone().full_tensor()?),
        })
    }

    fn tracked(&self) -> Result<Option<Tensor<1>>> {
        if float(self.local()).is_some_and(Tensor::is_tracked) {
            self.clone().full_tensor()?.tracked()
        } else {
            Ok(None)
        }
    }

    fn gradient(&self, grads: &Gradients) -> Option<Data> {
        self.local().gradient(grads)
    }

    fn placed(&self) -> Option<(Vec<usize>, Layout, Vec<usize>)> {
        Some((
            self.dims().to_vec(),
            self.layout().clone(),
            self.local().dims().to_vec(),
        ))
    }

    fn moved(self: Box<Self>, layout: &Layout) -> Result<Value> {
        let layout = super::layouts::reachable(self.layout(), layout);
        Ok(Value::new(self.redistribute_to(&layout)?))
    }

    fn measured(self: Box<Self>) -> (Value, GraphDepth) {
        let (same, depth) = graph_depth(*self);
        (Value::new(same), depth)
    }
}

/// What an operator may return: tensors of any types.
pub trait Outputs {
    fn values(self) -> Vec<Value>;
}

impl<const D: usize, K: Kind> Outputs for Tensor<D, K> {
    fn values(self) -> Vec<Value> {
        vec![Value::new(self)]
    }
}

impl<const D: usize, K: Kind> Outputs for DTensor<D, K> {
    fn values(self) -> Vec<Value> {
        vec![Value::new(self)]
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    fn values(self) -> Vec<Value> {
        self.into_iter().flat_map(Outputs::values).collect()
    }
}

impl<A: Outputs, B: Outputs> Outputs for (A, B) {
    fn values(self) -> Vec<Value> {
        [self.0.values(), self.1.values()]
            .into_iter()
            .flatten()
            .collect()
    }
}

impl<A: Outputs, B: Outputs, C: Outputs> Outputs for (A, B, C) {
    fn values(self) -> Vec<Value> {
        [self.0.values(), self.1.values(), self.2.values()]
            .into_iter()
            .flatten()
            .collect()
    }
}
