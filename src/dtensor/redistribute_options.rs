//! [`RedistributeOptions`]: a redistribution with options. [`RedistributeWork`]: a redistribution in flight.

use std::sync::{Arc, Weak};

use burn::tensor::{DType, Float, FloatDType};

use super::redistribute_plan::{Casts, RedistributePlan, Redistribution};
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::placement::{Layout, Placement, Placements};
use crate::watch::CallSite;

/// A redistribution with options: dtypes in which the tensor and its gradient are sent, or
/// computation that overlaps the communication.
///
/// Without options, [`redistribute`](DTensor::redistribute) does the same.
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
///     // Half the bytes in both directions; the gradient is cast back to f32 on arrival.
///     let work = RedistributeOptions::to(&[Replicate])
///         .with_forward_dtype(FloatDType::BF16)
///         .with_backward_dtype(FloatDType::BF16)
///         .start(x.clone())?;
///     // .. compute something else here ..
///     let full = work.wait()?;
///     assert_eq!(full.dtype(), DType::BF16);
///     let grads = full.to_local().sum().backward();
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
    /// Creates options for a redistribution to these placements. Shards have the sizes of
    /// `torch.chunk`, and mesh dimensions shard in ascending order.
    pub fn to(placements: &[Placement]) -> Self {
        Self {
            to: RequestedTarget::Placements(placements.into()),
            casts: Casts::default(),
        }
    }

    /// Creates options for a redistribution to a [`Layout`], which may have its own shard order or
    /// uneven shard sizes.
    pub fn to_layout(layout: Layout) -> Self {
        Self {
            to: RequestedTarget::Layout(layout),
            casts: Casts::default(),
        }
    }

    /// Casts the tensor to `dtype` before it is sent; the result keeps that dtype. Default: no
    /// cast.
    #[must_use]
    pub fn with_forward_dtype(mut self, dtype: FloatDType) -> Self {
        self.casts.forward = Some(dtype.into());
        self
    }

    /// Casts the gradient to `dtype` before it is sent, and to the dtype of the original tensor
    /// after it arrives. Default: the gradient is cast to the dtype of the original tensor before
    /// it is sent.
    #[must_use]
    pub fn with_backward_dtype(mut self, dtype: FloatDType) -> Self {
        self.casts.backward = Some(dtype.into());
        self
    }

    /// Redistributes `x` and waits for the result.
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

    /// Starts the redistribution of `x`; [`RedistributeWork::wait`] returns the result.
    ///
    /// All collectives are issued before this function returns, so ranks remain in step whenever
    /// they call `wait`, and even if they never do. Only the last collective is left in flight;
    /// most redistributions have just one.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`redistribute_to`](DTensor::redistribute_to), and [`DTensorError::NotFloat`] if a dtype
    /// is set but the tensor does not have float elements.
    #[track_caller]
    pub fn start<const D: usize, K: Kind>(
        &self,
        x: DTensor<D, K>,
    ) -> Result<RedistributeWork<D, K>> {
        let layout = match &self.to {
            RequestedTarget::Placements(placements) => Layout::new(x.mesh().shape(), placements)?,
            RequestedTarget::Layout(layout) => layout.clone(),
        };
        let Casts { forward, backward } = self.casts;
        if !x.dtype().is_float() && self.casts != Casts::default() {
            return Err(DTensorError::NotFloat {
                operation: "RedistributeOptions",
                dtype: x.dtype(),
            }
            .into());
        }
        let own = |dtype: Option<DType>| dtype.is_none_or(|dtype| dtype == x.dtype());
        if *x.layout() == layout && own(forward) && own(backward) {
            return Ok(RedistributeWork(RedistributeState::There(Box::new(x))));
        }
        let spec = x
            .spec
            .with_layout(layout)?
            .with_dtype(forward.unwrap_or(x.dtype()));
        let plan = RedistributePlan::between(x.layout(), spec.layout())?;
        let casts = Some(self.casts).filter(|casts| *casts != Casts::default());
        let walk = plan.start(
            x.local,
            &x.spec,
            &[],
            casts,
            CallSite::new("RedistributeOptions"),
        )?;
        Ok(RedistributeWork(RedistributeState::InFlight(
            Box::new(walk),
            spec.shared(),
        )))
    }
}

/// A redistribution in flight, which [`RedistributeOptions::start`] returns.
///
/// If it is dropped without [`wait`](Self::wait), only this rank's result is lost: the rank has
/// participated, so the other ranks receive theirs. No gradient flows back through an unused
/// result, so either all ranks use it or none does.
#[derive(Debug)]
#[must_use = "the tensor is what `wait` returns"]
pub struct RedistributeWork<const D: usize, K: Kind = Float>(RedistributeState<D, K>);

#[derive(Debug)]
enum RedistributeState<const D: usize, K: Kind> {
    There(Box<DTensor<D, K>>),
    InFlight(Box<Redistribution<D, K>>, Arc<DTensorSpec>),
}

impl<const D: usize, K: Kind> RedistributeWork<D, K> {
    /// Returns true if [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        match &self.0 {
            RedistributeState::There(_) => true,
            RedistributeState::InFlight(walk, _) => walk.is_complete(),
        }
    }

    /// Waits for the last collective, and returns the tensor in its new layout, connected to the
    /// graph of the original. Local: [`start`](RedistributeOptions::start) has posted all
    /// collectives.
    pub fn wait(self) -> Result<DTensor<D, K>> {
        match self.0 {
            RedistributeState::There(x) => Ok(*x),
            RedistributeState::InFlight(walk, spec) => {
                Ok(DTensor::from_parts(walk.finish(Weak::new())?, spec))
            }
        }
    }
}
