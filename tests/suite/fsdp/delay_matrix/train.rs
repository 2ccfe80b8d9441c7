//! A run of the matrix: some steps, sharded or by hand.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{FsdpModule, ParamInfo, unshard};
use burn_dtensor::prelude::*;

use super::delays::{Delays, Late, Place};
use super::net::Net;
use crate::fsdp::mixed_precision::reference::{average, with_weights_in};
use crate::fsdp::support::{on_device, values};

/// Returns the number of steps of a run. What one leaves for the next is there in 6 several times.
pub fn steps() -> u64 {
    if crate::effort::is_long() { 10 } else { 6 }
}

/// What weights are computed in, and gradients reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    Single,
    /// Reduced in single precision.
    Bf16,
    F16,
}

/// What is gathered before forward comes to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefetchMode {
    /// What units gather of themselves.
    Nothing,
    /// With each unit the two that come next, forward and back.
    NextTwo,
    /// All units, by the program.
    Everything,
}

/// One way to train.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    pub precision: Precision,
    pub reshard: ReshardAfterForward,
    pub prefetch: PrefetchMode,
    pub late: Option<Late>,
}

/// This rank's losses and, by path, all weights in the end.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    pub losses: Vec<f32>,
    pub weights: BTreeMap<String, Vec<f32>>,
}

impl Precision {
    pub const ALL: [Self; 3] = [Self::Single, Self::Bf16, Self::F16];

    fn param(self) -> Option<DType> {
        match self {
            Self::Single => None,
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }

    fn reduce(self) -> DType {
        match self {
            Self::Single | Self::Bf16 => DType::F32,
            Self::F16 => DType::F16,
        }
    }
}

impl PrefetchMode {
    fn set(self, net: &Net) -> Result<()> {
        let Self::NextTwo = self else { return Ok(()) };
        let root = FsdpModule::of(net)?.own();
        let blocks = net
            .blocks
            .iter()
            .map(FsdpModule::of)
            .collect::<Result<Vec<_>>>()?;
        let forward: Vec<_> = std::iter::once(root).chain(blocks).collect();
        for (at, unit) in forward.iter().enumerate() {
            let after = forward[at + 1..].iter().take(2).cloned();
            unit.set_forward_prefetch(after.collect::<Vec<_>>());
            // Backward comes to the root first.
            let end = if at == 0 { forward.len() } else { at };
            let before = forward[1..end].iter().rev().take(2).cloned();
            unit.set_backward_prefetch(before.collect::<Vec<_>>());
        }
        Ok(())
    }

    fn gather(self, net: &Net) -> Result<()> {
        if let Self::Everything = self {
            // Their forwards wait.
            drop(unshard(net)?);
            net.blocks
                .iter()
                .try_for_each(|block| unshard(block).map(drop))?;
        }
        Ok(())
    }
}

impl Cell {
    fn config(&self) -> FullyShard {
        let full = |param: ParamInfo| (param.path == "gain").then_some(Placement::Replicate);
        let config = FullyShard::new()
            .with_units(["blocks.*"])
            .with_reshard_after_forward(self.reshard)
            .with_shard_placement_fn(full);
        let Some(param) = self.precision.param() else {
            return config;
        };
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(param)
            .with_reduce_dtype(self.precision.reduce());
        config
            .with_mixed_precision(policy.clone().with_output_dtype(DType::F32))
            .with_mixed_precision_for(["blocks.*"], policy)
    }

    /// Trains the sharded model.
    ///
    /// # Panics
    /// If the ranks that were to be late were not.
    pub fn train(&self, net: &Net, mesh: &DeviceMesh) -> Result<Trained> {
        let (ranks, ledger) = (mesh.size(), mesh.world().ledger());
        let net = fully_shard(
            on_device(net, &mesh.device().clone().autodiff()),
            mesh,
            self.config(),
        )?;
        self.prefetch.set(&net)?;
        ledger.reset();
        let delays = Arc::new(Delays::new(self.late, mesh.rank(), ranks));
        let (net, losses) =
            tracing::subscriber::with_default(delays.clone(), || self.steps(net, mesh, &delays))?;
        let by_program = if let PrefetchMode::Everything = self.prefetch {
            steps() * (1 + net.blocks.len() as u64)
        } else {
            0
        };
        let is_sharded = u64::from(ranks > 1);
        assert_eq!(
            ledger.calls_in(Op::AllGather, Phase::Other),
            is_sharded * by_program,
            "{self:?}"
        );
        let slept = mesh.all_reduce(delays.slept() as f64, ReduceOp::Sum)?;
        assert_eq!(
            slept,
            self.late.map_or(0, |late| late.count(steps(), ranks)) as f64,
            "{self:?}"
        );
        Ok(Trained {
            losses,
            weights: values(&full_model(&net)?, None),
        })
    }

    fn steps(&self, mut net: Net, mesh: &DeviceMesh, delays: &Delays) -> Result<(Net, Vec<f32>)> {
        let device = mesh.device().clone().autodiff();
        let (mut optim, mut losses) = (optimizer(), Vec::new());
        for step in 0..steps() {
            delays.begin(step);
            self.prefetch.gather(&net)?;
            let loss = net.loss(step, mesh.rank(), &device, || delays.at(Place::InForward));
            losses.push(loss.clone().into_scalar());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            delays.at(Place::BeforeStep);
            net = optim.step(LR, net, grads);
        }
        Ok((net, losses))
    }
}

const LR: f64 = 1e-2;

fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-5).init()
}

/// Data parallelism by hand: every rank has the model whole, casts its weights, and averages
/// gradients.
pub fn by_hand(net: &Net, mesh: &DeviceMesh, precision: Precision) -> Result<Trained> {
    let device = mesh.device().clone().autodiff();
    let mut net = with_weights_in(on_device(net, &device), |_| precision.param());
    let (mut optim, mut losses) = (optimizer(), Vec::new());
    for step in 0..steps() {
        let loss = net.loss(step, mesh.rank(), &device, || ());
        losses.push(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        let grads = average(&net, grads, mesh, |_| precision.reduce());
        net = optim.step(LR, net, grads);
    }
    Ok(Trained {
        losses,
        weights: values(&net, None),
    })
}

/// One device, by the mean of the losses of the batches of all ranks.
pub fn alone(net: &Net, ranks: usize) -> Trained {
    let device = Device::flex().autodiff();
    let mut net = on_device(net, &device);
    let (mut optim, mut losses) = (optimizer(), Vec::new());
    for step in 0..steps() {
        let of_ranks = (0..ranks).map(|rank| net.loss(step, rank, &device, || ()));
        let loss = of_ranks.reduce(|a, b| a + b).expect("a rank") / ranks as f32;
        losses.push(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(LR, net, grads);
    }
    Trained {
        losses,
        weights: values(&net, None),
    }
}
