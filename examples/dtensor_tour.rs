//! A tour of DTensor: a mesh, placements, redistribution, operators, gradients.
//!
//! ```text
//! cargo run --example dtensor_tour
//! ```

use burn::tensor::{Int, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::visualize_sharding;
use burn_dtensor::prelude::*;
use clap::Parser;

use Placement::{Replicate, Shard};

/// Prints a tour of DTensor on four ranks: placements, redistribution, operators,
/// gradients, and implicit redistribution as an error. Shows the layout of each
/// result, and the collectives that it took.
#[derive(Parser)]
#[command(verbatim_doc_comment)]
struct Args {}

fn main() -> Result<()> {
    Args::parse();
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let guide = Guide {
            talks: world.rank() == 0,
            world,
        };
        placements(&guide, &mesh)?;
        redistribution(&guide, &mesh)?;
        operators(&guide, &mesh)?;
        gradients(&guide, &mesh)?;
        denial(&guide, &mesh)
    })?;
    Ok(())
}

/// Shows that a DTensor is one global tensor, and that each placement determines the ranks' local
/// tensors along one mesh dimension.
fn placements(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("1. Placements");
    guide.say(format!(
        "Four ranks make a mesh, {mesh}. Rank 0 is at {:?}.",
        mesh.coordinate().unwrap_or_default()
    ));
    for placements in [
        [Shard(0), Shard(1)],
        [Shard(0), Replicate],
        [Shard(0), Shard(0)],
    ] {
        let x = DTensor::distribute_replicated(numbers(mesh), mesh, &placements)?;
        guide.say(visualize_sharding(x.spec()));
    }
    guide.say(
        "Shards may be uneven: each holds ceil(n / ranks) elements, and the last holds the rest.",
    );
    let uneven = DTensor::<1, Int>::arange(0..5, mesh, &[Shard(0), Shard(0)], mesh.device())?;
    guide.say(visualize_sharding(uneven.spec()));
    Ok(())
}

/// Redistributes a tensor from one layout to others, each time with the cheapest collectives.
fn redistribution(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("2. Redistribution");
    let x = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Shard(1)])?;
    for target in [
        [Shard(0), Replicate],
        [Shard(1), Shard(0)],
        [Replicate, Replicate],
    ] {
        let from = x.layout().to_string();
        let (y, sent) = guide.count(|| x.clone().redistribute(&target))?;
        guide.say(format!("{from} -> {}: {sent}", y.layout()));
    }
    guide.say(format!(
        "The full tensor, on every rank:\n{}",
        x.full_tensor()?.into_data()
    ));
    Ok(())
}

/// Applies operators. They have burn's names, and their results are placed according to the inputs.
fn operators(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("3. Operators");
    let x = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Replicate])?;
    let columns = DTensor::<2>::ones([4, 4], mesh, &[Replicate, Shard(1)], mesh.device())?;
    let rows = DTensor::<2>::ones([4, 4], mesh, &[Replicate, Shard(0)], mesh.device())?;
    let (h, sent) = guide.count(|| Ok(x.matmul(columns).tanh()))?;
    guide.say(format!(
        "x {{S(0), R}} @ columns {{R, S(1)}}, tanh -> {}: {sent}",
        h.layout()
    ));
    let (y, sent) = guide.count(|| Ok(h.matmul(rows)))?;
    guide.say(format!(
        "        .. @ rows {{R, S(0)}}          -> {}: {sent}",
        y.layout()
    ));
    guide.say(
        "P(sum) is a partial sum: every rank holds a partial value, and no rank has added them up.",
    );
    let (y, sent) = guide.count(|| y.redistribute(&[Shard(0), Replicate]))?;
    guide.say(format!(
        "        .. redistributed like x      -> {}: {sent}",
        y.layout()
    ));
    Ok(())
}

/// Computes gradients. They are laid out like the values, and equal those of the full tensor.
fn gradients(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("4. Gradients");
    let device = mesh.device().clone().autodiff();
    let x = Tensor::from_inner(numbers(mesh));
    let x = DTensor::distribute_replicated(x, mesh, &[Replicate, Replicate])?.require_grad();
    let weight = |scale: f32| {
        let w = Tensor::<2>::ones([4, 4], &device)
            .mul_scalar(scale)
            .detach();
        DTensor::distribute_replicated(w, mesh, &[Replicate, Shard(1)])
    };
    let (q, k, v) = (
        x.clone().matmul(weight(1.0)?),
        x.clone().matmul(weight(2.0)?),
        x.clone().matmul(weight(3.0)?),
    );
    let loss = (q + k + v).full_tensor()?.sum();
    let (grads, sent) = guide.count(|| Ok(loss.backward()))?;
    guide.say(format!(
        "Three products of a replicated x with column-sharded weights. Backward: {sent}"
    ));
    if let Some(grad) = x.local().grad(&grads) {
        guide.say(format!(
            "The gradient of x, replicated on every rank:\n{}",
            grad.into_data()
        ));
    }
    Ok(())
}

/// Denies implicit redistribution, so that an operator fails instead of communicating.
fn denial(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("5. Implicit redistribution as an error");
    let rows = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Replicate])?;
    let columns = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(1), Replicate])?;
    let (sum, sent) = guide.count(|| Ok(rows.clone() + columns.clone()))?;
    guide.say(format!("rows + columns -> {}: {sent}", sum.layout()));
    let denied = std::panic::AssertUnwindSafe(|| RedistributePolicy::Deny.run(|| rows + columns));
    if let Err(panic) = std::panic::catch_unwind(denied)
        && let Some(error) = panic.downcast_ref::<Error>()
    {
        guide.say(format!(
            "The same under RedistributePolicy::Deny:\n  {error}"
        ));
    }
    Ok(())
}

/// Returns rows of four numbers, the same on every rank.
fn numbers(mesh: &DeviceMesh) -> Tensor<2> {
    Tensor::<1, Int>::arange(0..16, mesh.device())
        .float()
        .reshape([4, 4])
}

/// Prints explanations on one rank while all ranks compute.
struct Guide<'a> {
    talks: bool,
    world: &'a World,
}

impl Guide<'_> {
    fn chapter(&self, title: &str) {
        self.say(format!("{title}\n{}", "=".repeat(title.len())));
    }

    fn say(&self, text: impl std::fmt::Display) {
        if self.talks {
            println!("{}\n", text.to_string().trim_end());
        }
    }

    /// Runs `f` and describes the collectives of this rank in it.
    fn count<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
        self.world.ledger().reset();
        let value = f()?;
        let totals = self.world.ledger().by_phase();
        let collectives = totals
            .iter()
            .map(|((op, phase), total): (&(Op, Phase), _)| {
                format!("{} {op} ({} bytes, {phase})", total.calls, total.bytes)
            });
        let collectives: Vec<_> = collectives.collect();
        let sent = if collectives.is_empty() {
            "no communication".into()
        } else {
            collectives.join(", ")
        };
        Ok((value, sent))
    }
}
