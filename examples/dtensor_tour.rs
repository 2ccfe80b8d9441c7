//! A walk through DTensor: a mesh, placements, redistribution, an operator, a gradient.
//!
//! ```text
//! cargo run --example dtensor_tour
//! ```

use burn::tensor::{Int, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::visualize_sharding;
use burn_dtensor::prelude::*;

use Placement::{Replicate, Shard};

fn main() -> Result<()> {
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let guide = Guide { talks: world.rank() == 0, world };
        placements(&guide, &mesh)?;
        redistribution(&guide, &mesh)?;
        operators(&guide, &mesh)?;
        gradients(&guide, &mesh)?;
        denial(&guide, &mesh)
    })?;
    Ok(())
}

/// A tensor on every rank is one tensor; a placement per mesh dimension says which part is whose.
fn placements(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("1. Placements");
    guide.say(format!("Four ranks make a mesh, {mesh}. Rank 0 is at {:?}.", mesh.coordinate().unwrap_or_default()));
    for placements in [[Shard(0), Shard(1)], [Shard(0), Replicate], [Shard(0), Shard(0)]] {
        let x = DTensor::distribute_replicated(numbers(mesh), mesh, &placements)?;
        guide.say(visualize_sharding(x.spec()));
    }
    guide.say("Shards may be uneven: each holds ceil(n / ranks), the last what is left.");
    let uneven = DTensor::<1, Int>::arange(0..5, mesh, &[Shard(0), Shard(0)], mesh.device())?;
    guide.say(visualize_sharding(uneven.spec()));
    Ok(())
}

/// From one layout to another, as cheaply as the placements allow.
fn redistribution(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("2. Redistribution");
    let x = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Shard(1)])?;
    for target in [[Shard(0), Replicate], [Shard(1), Shard(0)], [Replicate, Replicate]] {
        let from = x.layout().to_string();
        let (y, sent) = guide.count(|| x.clone().redistribute(&target))?;
        guide.say(format!("{from} -> {}: {sent}", y.layout()));
    }
    guide.say(format!("The whole, on every rank:\n{}", x.full_tensor()?.into_data()));
    Ok(())
}

/// Operators have burn's names, and follow the placements of their inputs.
fn operators(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("3. Operators");
    let x = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Replicate])?;
    let columns = DTensor::<2>::ones([4, 4], mesh, &[Replicate, Shard(1)], mesh.device())?;
    let rows = DTensor::<2>::ones([4, 4], mesh, &[Replicate, Shard(0)], mesh.device())?;
    let (h, sent) = guide.count(|| Ok(x.matmul(columns).tanh()))?;
    guide.say(format!("x {{S(0), R}} @ columns {{R, S(1)}}, tanh -> {}: {sent}", h.layout()));
    let (y, sent) = guide.count(|| Ok(h.matmul(rows)))?;
    guide.say(format!("        .. @ rows {{R, S(0)}}          -> {}: {sent}", y.layout()));
    guide.say("P(sum) is a partial sum: every rank has a term, and nobody has added them up.");
    let (y, sent) = guide.count(|| y.redistribute(&[Shard(0), Replicate]))?;
    guide.say(format!("        .. to where x was           -> {}: {sent}", y.layout()));
    Ok(())
}

/// Gradients are laid out like values, and are those of the one tensor.
fn gradients(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("4. Gradients");
    let device = mesh.device().clone().autodiff();
    let x = Tensor::from_inner(numbers(mesh));
    let x = DTensor::distribute_replicated(x, mesh, &[Replicate, Replicate])?.require_grad();
    let weight = |scale: f32| {
        let w = Tensor::<2>::ones([4, 4], &device).mul_scalar(scale).detach();
        DTensor::distribute_replicated(w, mesh, &[Replicate, Shard(1)])
    };
    let (q, k, v) = (x.clone().matmul(weight(1.0)?), x.clone().matmul(weight(2.0)?), x.clone().matmul(weight(3.0)?));
    let loss = (q + k + v).full_tensor()?.sum();
    let (grads, sent) = guide.count(|| Ok(loss.backward()))?;
    guide.say(format!("Three products of one replicated x with column shards. Backward: {sent}"));
    if let Some(grad) = x.local().grad(&grads) {
        guide.say(format!("Its gradient, in full on every rank:\n{}", grad.into_data()));
    }
    Ok(())
}

/// Nothing moves behind your back if you ask for that.
fn denial(guide: &Guide<'_>, mesh: &DeviceMesh) -> Result<()> {
    guide.chapter("5. What would move, said aloud");
    let rows = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(0), Replicate])?;
    let columns = DTensor::distribute_replicated(numbers(mesh), mesh, &[Shard(1), Replicate])?;
    let (sum, sent) = guide.count(|| Ok(rows.clone() + columns.clone()))?;
    guide.say(format!("rows + columns -> {}: {sent}", sum.layout()));
    let denied = std::panic::AssertUnwindSafe(|| RedistributePolicy::Deny.run(|| rows + columns));
    if let Err(panic) = std::panic::catch_unwind(denied)
        && let Some(error) = panic.downcast_ref::<Error>()
    {
        guide.say(format!("The same under RedistributePolicy::Deny:\n  {error}"));
    }
    Ok(())
}

/// Rows of four numbers, the same on every rank.
fn numbers(mesh: &DeviceMesh) -> Tensor<2> {
    Tensor::<1, Int>::arange(0..16, mesh.device()).float().reshape([4, 4])
}

/// One rank talks; all take part.
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

    /// What `f` sends from this rank, in words.
    fn count<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
        self.world.ledger().reset();
        let value = f()?;
        let totals = self.world.ledger().by_phase();
        let collectives = totals.iter().map(|((op, phase), total): (&(Op, Phase), _)| {
            format!("{} {op} ({} bytes, {phase})", total.calls, total.bytes)
        });
        let collectives: Vec<_> = collectives.collect();
        let sent = if collectives.is_empty() { "nothing is sent".into() } else { collectives.join(", ") };
        Ok((value, sent))
    }
}
