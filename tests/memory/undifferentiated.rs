//! Forwards in training mode without a backward, such as an evaluation without `valid()`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::checkpoint_activations;
use burn_dtensor::prelude::*;

use crate::is_long;
use crate::live::{allocates_for, alone, apart, live, own};

const WIDTH: usize = 512;
const UNIT: usize = WIDTH * WIDTH * size_of::<f32>();

#[derive(Module, Debug)]
struct Net {
    own: Linear,
    inner: Linear,
    frozen: Linear,
}

/// The way in which a forward enters the units.
#[derive(Debug, Clone, Copy)]
enum Entered {
    /// One inside the other, and one that is frozen.
    Nested,
    /// One after the other, of which none encloses another.
    Apart,
    /// The inner one computes again in backward.
    Checkpointed,
    /// None: weights are read outside.
    Never,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = || {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device)
        };
        Self {
            own: layer(),
            inner: layer(),
            frozen: layer().no_grad(),
        }
    }

    fn forward(&self, x: Tensor<2>, entered: Entered) -> Tensor<2> {
        let layer = |layer: &Linear, x: Tensor<2>| layer.forward(x);
        match entered {
            Entered::Nested => unit(self, x, |net, x| {
                unit(
                    &net.frozen,
                    unit(&net.inner, net.own.forward(x), layer),
                    layer,
                )
            }),
            Entered::Apart => unit(&self.frozen, unit(&self.inner, x, layer), layer),
            Entered::Checkpointed => unit(self, x, |net, x| {
                checkpoint_activations(&net.inner, net.own.forward(x), layer)
            }),
            Entered::Never => self.frozen.forward(self.inner.forward(self.own.forward(x))),
        }
    }
}

/// Returns how many bytes more are live after many forwards than after two, on each rank. The
/// program may hold the last output.
fn growth(ranks: usize, reshard: ReshardAfterForward, entered: Entered, holds: bool) -> Vec<i64> {
    let _alone = alone();
    let grown = launch(apart(ranks), |world| {
        allocates_for(world.rank());
        let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
        let device = world.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["inner", "frozen"])
            .with_reshard_after_forward(reshard);
        let net = fully_shard(Net::new(&device), &mesh, config)?;
        let mut held = None;
        let mut forward = || {
            let output = net.forward(Tensor::ones([1, WIDTH], &device), entered);
            held = holds.then_some(output);
        };
        (0..2).for_each(|_| forward());
        world.barrier("few")?;
        let few = own();
        (2..if is_long() { 200 } else { 50 }).for_each(|_| forward());
        world.barrier("many")?;
        let many = own();
        // The model trains on.
        net.forward(Tensor::ones([1, WIDTH], &device), entered)
            .sum()
            .backward();
        Ok(many as i64 - few as i64)
    });
    grown.unwrap().into_iter().map(|(_, grown)| grown).collect()
}

#[test]
fn many_forwards_without_a_backward_keep_no_more_than_two() {
    use ReshardAfterForward::{Always, Auto, Never, Ranks};
    for (ranks, reshard) in [(2, Always), (2, Auto), (2, Never), (4, Ranks(2))] {
        for entered in [
            Entered::Nested,
            Entered::Apart,
            Entered::Checkpointed,
            Entered::Never,
        ] {
            for holds in [false, true] {
                for grown in growth(ranks, reshard, entered, holds) {
                    println!(
                        "{reshard:?}, {entered:?}, an output is held: {holds}: {grown} bytes more"
                    );
                    assert!(
                        grown < UNIT as i64 / 4,
                        "{reshard:?}, {entered:?}, an output is held: {holds}: {grown} bytes more"
                    );
                }
            }
        }
    }
}

/// A server that evaluates in training mode, each time in a new launch.
#[test]
fn forwards_without_a_backward_are_freed_after_their_threads_have_ended() {
    let _alone = alone();
    let evaluated = || {
        launch(apart(2), |world| {
            let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
            let device = world.device().clone().autodiff();
            let config = FullyShard::new().with_units(["inner", "frozen"]);
            let net = fully_shard(Net::new(&device), &mesh, config)?;
            net.forward(Tensor::ones([1, WIDTH], &device), Entered::Nested);
            Ok(())
        })
        .expect("every rank evaluates");
        // burn frees graphs that nothing needs in the next backward, of any graph.
        let x = Tensor::<1>::ones([1], &Device::flex().autodiff()).require_grad();
        x.sum().backward();
    };
    let live_after = |launches: usize| {
        (0..launches).for_each(|_| evaluated());
        live()
    };
    let (few, many) = (live_after(2), live_after(10));
    println!("{few} bytes are live after 2 launches, {many} after 12");
    // The last threads may not have dropped their thread-locals yet. Ten launches that keep
    // everything hold over 30 units.
    assert!(
        many < few + 10 * UNIT,
        "{few} bytes are live after 2 launches, {many} after 12"
    );
}
