//! [`RedistributeOptions`]: a redistribution with options, and [`RedistributeWork`], one under way.

use std::sync::{Arc, Weak};

use burn::tensor::{DType, Float, FloatDType};

use super::redistribute_plan::{Casts, RedistributePlan, Redistribution};
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::placement::{Layout, Placement, Placements};
use crate::watch::CallSite;

/// A redistribution with options: element types to send in, or to go on with something else meanwhile.
///
/// Without options, [`redistribute`](DTensor::redistribute) is the same.
///
/// ```
/// use burn::tensor::{DType, FloatDType, Tensor};
/// use burn_dtensor::dtensor::RedistributeOptions;
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
///     let x = Tensor::<2>::ones([4, 3], &world.device().clone().autodiff()).require_grad();
///     let x = DTensor::distribute_replicated(x, &mesh, &[Shard(0)])?;
///     // Half the bytes both ways; gradients are f32 again at their end.
///     let whole = RedistributeOptions::to(&[Replicate])
///         .with_forward_dtype(FloatDType::BF16)
///         .with_backward_dtype(FloatDType::BF16)
///         .start(x.clone())?;
///     // .. what needs it not yet ..
///     let whole = whole.wait()?;
///     assert_eq!(whole.dtype(), DType::BF16);
///     let grads = whole.to_local().sum().backward();
///     assert_eq!(x.grad(&grads).expect("it is in the loss").dtype(), DType::F32);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RedistributeOptions {
    to: RequestedTarget,
    casts: Casts,
}

#[derive(Debug, Clone)]
enum RequestedTarget {
    Placements(Placements),
    Layout(Layout),
}

impl RedistributeOptions {
    /// To these placements, cut into chunks in the order of the mesh dimensions.
    pub fn to(placements: &[Placement]) -> Self {
        Self { to: RequestedTarget::Placements(placements.into()), casts: Casts::default() }
    }

    /// To a layout with an order of cuts or lengths of its own.
    pub fn to_layout(layout: Layout) -> Self {
        Self { to: RequestedTarget::Layout(layout), casts: Casts::default() }
    }

    /// The tensor is cast to `dtype` before it is sent, and stays so. Default: not cast.
    #[must_use]
    pub fn with_forward_dtype(mut self, dtype: FloatDType) -> Self {
        self.casts.forward = Some(dtype.into());
        self
    }

    /// The gradient is sent in `dtype`, and cast to that of the tensor before when it has arrived. Default: it is
    /// cast to that before it is sent.
    #[must_use]
    pub fn with_backward_dtype(mut self, dtype: FloatDType) -> Self {
        self.casts.backward = Some(dtype.into());
        self
    }

    /// Redistributes `x`, and waits for it.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`start`](Self::start); [`CommError`](crate::comm::CommError) if a collective fails.
    #[track_caller]
    pub fn run<const D: usize, K: Kind>(&self, x: DTensor<D, K>) -> Result<DTensor<D, K>> {
        self.start(x)?.wait()
    }

    /// Starts to redistribute `x`, which [`RedistributeWork::wait`] returns.
    ///
    /// All collectives are issued before this returns, so ranks stay in step whenever each of them waits, and
    /// if one never does. The last is not waited for; most redistributions have but one.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`redistribute_to`](DTensor::redistribute_to), and [`DTensorError::NotFloat`] for the dtype of a tensor
    /// that has no floats.
    #[track_caller]
    pub fn start<const D: usize, K: Kind>(&self, x: DTensor<D, K>) -> Result<RedistributeWork<D, K>> {
        let layout = match &self.to {
            RequestedTarget::Placements(placements) => Layout::new(x.mesh().shape(), placements)?,
            RequestedTarget::Layout(layout) => layout.clone(),
        };
        let Casts { forward, backward } = self.casts;
        if !x.dtype().is_float() && self.casts != Casts::default() {
            return Err(DTensorError::NotFloat { operation: "RedistributeOptions", dtype: x.dtype() }.into());
        }
        let own = |dtype: Option<DType>| dtype.is_none_or(|dtype| dtype == x.dtype());
        if *x.layout() == layout && own(forward) && own(backward) {
            return Ok(RedistributeWork(RedistributeState::There(Box::new(x))));
        }
        let spec = x.spec.with_layout(layout)?.with_dtype(forward.unwrap_or(x.dtype()));
        let route = RedistributePlan::between(x.layout(), spec.layout())?;
        let casts = Some(self.casts).filter(|casts| *casts != Casts::default());
        let walk = route.start(x.local, &x.spec, &[], casts, CallSite::new("RedistributeOptions"))?;
        Ok(RedistributeWork(RedistributeState::UnderWay(Box::new(walk), spec.shared())))
    }
}

/// A tensor being [redistributed](RedistributeOptions::start).
///
/// Dropped without [`wait`](Self::wait), the tensor is lost and nothing else: the rank has taken part, and the
/// others get theirs. In backward no gradient comes from it, so ranks must all use it or none.
#[derive(Debug)]
#[must_use = "the tensor is what `wait` returns"]
pub struct RedistributeWork<const D: usize, K: Kind = Float>(RedistributeState<D, K>);

#[derive(Debug)]
enum RedistributeState<const D: usize, K: Kind> {
    There(Box<DTensor<D, K>>),
    UnderWay(Box<Redistribution<D, K>>, Arc<DTensorSpec>),
}

impl<const D: usize, K: Kind> RedistributeWork<D, K> {
    /// Whether [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        match &self.0 {
            RedistributeState::There(_) => true,
            RedistributeState::UnderWay(walk, _) => walk.is_complete(),
        }
    }

    /// The tensor in its new layout, in the graph of the one that it was.
    ///
    /// # Errors
    /// [`CommError`](crate::comm::CommError) if a collective fails.
    pub fn wait(self) -> Result<DTensor<D, K>> {
        match self.0 {
            RedistributeState::There(x) => Ok(*x),
            RedistributeState::UnderWay(walk, spec) => Ok(DTensor::from_parts(walk.finish(Weak::new())?, spec)),
        }
    }
}
