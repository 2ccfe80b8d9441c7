//! Models that draw while they are built, on every rank. A process of its own: burn's random state
//! is the process's, and other tests draw from it.

use std::sync::{Mutex, PoisonError};

use burn::nn::{
    DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    LinearLayout,
};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_dtensor::comm::CommError;
use burn_dtensor::dtensor::ops::random;
use burn_dtensor::prelude::*;

#[derive(Module, Debug)]
struct Net {
    /// Read while it is built, as burn's examples do to set a bias.
    eager: Vec<Linear>,
    lazy: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(16, 16).with_bias(false).init(device);
        let eager: Vec<Linear> = (0..6).map(|_| linear()).collect();
        for linear in &eager {
            let _ = linear.weight.val();
        }
        Self {
            eager,
            lazy: linear(),
        }
    }

    fn eager(&self) -> Vec<TensorData> {
        self.eager
            .iter()
            .map(|linear| linear.weight.val().into_data())
            .collect()
    }
}

/// The eager weights as they were built and as they are trained, and the lazy one.
type Weights = (Vec<TensorData>, Vec<TensorData>, TensorData);

/// What each rank builds, and what it then trains.
fn run(ranks: usize) -> Vec<(usize, Weights)> {
    let outcome = launch(Launch::threads(ranks), |world| {
        let device = world.device().clone().autodiff();
        let net = world.run_seeded(3, || Net::new(&device))?;
        let built = net.eager();
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let net = full_model(&fully_shard(net, &mesh, FullyShard::new())?)?;
        Ok::<_, Error>((built, net.eager(), net.lazy.weight.val().into_data()))
    });
    outcome.unwrap_or_else(|error| panic!("{error}"))
}

/// burn's random state is one for all tests.
static STATE: Mutex<()> = Mutex::new(());

/// And they take nothing from it: what they draw is theirs alone.
#[test]
fn what_dtensors_draw_leaves_burns_random_state_alone() {
    let _alone = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let drawn = |dtensors: bool| {
        let outcome = launch(Launch::threads(1), |world| {
            let (mesh, device) = (
                DeviceMesh::new(world, [1], ["tp"])?,
                world.device().clone().autodiff(),
            );
            device.seed(5);
            let mut masks = Vec::new();
            if dtensors {
                let x = DTensor::<2>::ones([4, 6], &mesh, &[Placement::Shard(0)], &device)?;
                masks.push(
                    x.random_like(Distribution::Default)
                        .full_tensor()?
                        .into_data(),
                );
                masks.push(
                    DropoutConfig::new(0.5)
                        .init()
                        .forward_dtensor(x)
                        .full_tensor()?
                        .into_data(),
                );
                masks.push(random::tensor::<2>([2, 2], Distribution::Default, &device).into_data());
            }
            let burns = Tensor::<1>::random([8], Distribution::Default, &device).into_data();
            Ok((masks, burns))
        });
        outcome
            .unwrap_or_else(|error| panic!("{error}"))
            .remove(0)
            .1
    };
    let (masks, after) = drawn(true);
    assert_eq!(drawn(false).1, after);
    assert_eq!(
        drawn(true).0,
        masks,
        "nor does it matter where burn's stands"
    );
}

#[test]
fn a_model_built_on_every_rank_is_the_same_on_all_and_at_every_run() {
    let _alone = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    device.seed(3);
    let alone = Net::new(&device);
    let (eager, lazy) = (alone.eager(), alone.lazy.weight.val().into_data());
    for ranks in [1, 2, 3] {
        for _ in 0..3 {
            for (_, (built, trained, drawn_later)) in run(ranks) {
                assert_eq!(built, eager);
                assert_eq!(trained, eager);
                assert_eq!(drawn_later, lazy, "only the first rank draws what is lazy");
            }
        }
    }

    let error = launch(Launch::threads(2), |world| {
        world.run_seeded(0, || assert_eq!(world.rank(), 0, "rank 1 cannot build"))?;
        Ok::<_, Error>(())
    });
    let error = error.expect_err("a rank panics");
    assert!(error.to_string().contains("rank 1 cannot build"), "{error}");
    let error = launch(Launch::threads(2), |world| {
        world.run_seeded(0, || world.barrier("inside"))?
    });
    let error = error.expect_err("the others are waiting elsewhere");
    assert!(
        matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
    assert!(error.to_string().contains("seeded"), "{error}");
}

/// Nothing reads it before it is distributed. No length is a multiple of the ranks.
#[derive(Module, Debug)]
struct Lazy {
    table: Embedding,
    blocks: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Lazy {
    fn new(device: &Device) -> Self {
        let linear = |layout| LinearConfig::new(7, 5).with_layout(layout).init(device);
        Self {
            table: EmbeddingConfig::new(11, 7).init(device),
            blocks: vec![linear(LinearLayout::Row), linear(LinearLayout::Col)],
            norm: LayerNormConfig::new(5).init(device),
            head: LinearConfig::new(5, 3).init(device),
        }
    }

    /// All values, drawn in the model's order where they are not yet.
    fn values(&self) -> Vec<TensorData> {
        struct Values(Vec<TensorData>);
        impl burn::module::ModuleVisitor for Values {
            fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
                self.0.push(param.val().into_data());
            }
        }
        let mut values = Values(Vec::new());
        self.visit(&mut values);
        values.0
    }
}

/// In which order a model is distributed over data-parallel and tensor-parallel ranks.
#[derive(Debug, Clone, Copy)]
enum Order {
    ShardedFirst,
    ParallelizedFirst,
    /// Over one dimension of a mesh, of which the other ranks hold copies.
    ShardedByName,
}

fn distributed(mesh: &DeviceMesh, order: Option<Order>) -> Result<Lazy> {
    let device = mesh.device().clone().autodiff();
    // One state for all ranks, from which nobody else draws.
    mesh.world().run_on(0, || device.seed(17));
    mesh.world().barrier("seeded")?;
    let model = Lazy::new(&device);
    let config = || FullyShard::new().with_units(["table", "blocks.*"]);
    let plan = || {
        Plan::new()
            .with_style("blocks.0", Style::colwise())
            .with_style("head", Style::rowwise())
    };
    match order {
        None => fully_shard(model, mesh, config()),
        Some(Order::ShardedByName) => fully_shard(model, mesh, config().with_shard_dims(["dp"])),
        Some(Order::ShardedFirst) => parallelize(
            fully_shard(model, &mesh.slice("dp")?, config())?,
            &mesh.slice("tp")?,
            plan(),
        ),
        Some(Order::ParallelizedFirst) => fully_shard(
            parallelize(model, &mesh.slice("tp")?, plan())?,
            &mesh.slice("dp")?,
            config(),
        ),
    }
}

#[test]
fn lazy_parameters_are_those_of_one_device_whatever_the_mesh() {
    let _alone = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    device.seed(17);
    let expected = Lazy::new(&device).values();
    let run = |shape: &[usize], names: &[&str], order: Option<Order>| {
        for _ in 0..3 {
            let outcome = launch(Launch::threads(shape.iter().product()), |world| {
                let mesh = DeviceMesh::new(world, shape, names)?;
                Ok(full_model(&distributed(&mesh, order)?)?.values())
            });
            for (rank, values) in outcome.unwrap_or_else(|error| panic!("{error}")) {
                assert_eq!(values, expected, "rank {rank} of {shape:?}, {order:?}");
            }
        }
    };
    for ranks in [1, 2, 3, 4] {
        run(&[ranks], &["shard"], None);
    }
    for shape in [[2, 2], [3, 2], [1, 3]] {
        run(&shape, &["replicate", "shard"], None);
        for order in [
            Order::ShardedFirst,
            Order::ParallelizedFirst,
            Order::ShardedByName,
        ] {
            run(&shape, &["dp", "tp"], Some(order));
        }
    }
}

/// Of one rank alone: those of the others are drawn all the same, by the first.
#[test]
fn ranks_may_differ_in_what_is_drawn_already() {
    let _alone = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let outcome = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let device = world.device().clone().autodiff();
        let model = Lazy::new(&device);
        let drawn = (world.rank() == 0).then(|| model.values());
        let model = full_model(&fully_shard(model, &mesh, FullyShard::new())?)?;
        Ok((drawn, model.values()))
    });
    let ranks = outcome.unwrap_or_else(|error| panic!("{error}"));
    let expected = ranks[0].1.0.clone().expect("the first has drawn them");
    assert!(ranks.iter().all(|(_, (_, values))| *values == expected));
}
