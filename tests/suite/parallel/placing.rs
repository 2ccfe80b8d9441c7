//! Which rank holds what.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Initializer, LinearConfig, LinearLayout};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Net, devices, distribute, meshes, plan};
use crate::fsdp::support::{on_device, values};

use Placement::{Replicate as R, Shard as S};

/// The dimension that the plan splits, and that `fully_shard` cuts.
fn sharded_dims(path: &str) -> (Option<usize>, Option<usize>) {
    let layer = |names: &[&str]| names.iter().any(|name| path.contains(name));
    let tp = match (path.rsplit('.').next(), path) {
        (_, "embedding.weight") => Some(0),
        (Some("weight"), _) if layer(&["query", "key", "value", "up", "head"]) => Some(1),
        (Some("bias"), _) if layer(&["query", "key", "value", "up", "head"]) => Some(0),
        (Some("weight"), _) if layer(&["output", "down"]) => Some(0),
        _ => None,
    };
    let rms_norm = path.starts_with("blocks") && path.ends_with("gamma");
    (tp, (!rms_norm).then_some(0))
}

/// The `index`-th of `parts` pieces of `range`, all `ceil` long but the last.
fn chunk(range: Range<usize>, parts: usize, index: usize) -> Range<usize> {
    let size = range.len().div_ceil(parts);
    let at = |index: usize| (range.start + index * size).min(range.end);
    at(index)..at(index + 1)
}

/// Invariants 1 and 2: tensor parallelism cuts first, whatever the order of the mesh dimensions.
#[test]
fn shards_are_chunks_of_chunks() {
    let model = Net::new(&Device::flex());
    let full = values(&model, None);
    for mesh in meshes() {
        mesh.run(|mesh| {
            let [device, _] = devices(mesh);
            let model = distribute(
                on_device(&model, &device),
                mesh,
                plan(),
                ReshardAfterForward::Auto,
            )?;
            let stored = values(&model, None);
            let position = |name: &str| {
                let dim = mesh.dim(name).ok()?;
                Some((mesh.size_of(dim), mesh.coordinate().expect("a member")[dim]))
            };
            let named = named_parameters(&model)?;
            assert_eq!(
                named
                    .iter()
                    .map(|param| &param.path)
                    .collect::<Vec<_>>()
                    .len(),
                full.len()
            );
            for param in named {
                let mut ranges: Vec<_> = param.spec.shape().iter().map(|&len| 0..len).collect();
                let (tp, shard) = sharded_dims(&param.path);
                for (name, dim) in [("tp", tp), ("shard", shard)] {
                    if let (Some(dim), Some((size, index))) = (dim, position(name)) {
                        ranges[dim] = chunk(ranges[dim].clone(), size, index);
                    }
                }
                assert_eq!(
                    param
                        .spec
                        .layout()
                        .local_slices(param.spec.shape(), param.spec.coordinate()),
                    ranges
                );
                let columns = param.spec.shape().get(1).copied().unwrap_or(1);
                let columns_held = ranges.get(1).cloned().unwrap_or(0..1);
                let rows = ranges[0]
                    .clone()
                    .flat_map(|row| columns_held.clone().map(move |col| row * columns + col));
                let expected: Vec<f32> = rows.map(|at| full[&param.path][at]).collect();
                assert_eq!(stored[&param.path], expected, "{param} on {mesh}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_parameter_has_three_views() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let plain = on_device(&model, &device);
        let model = distribute(plain.clone(), mesh, plan(), ReshardAfterForward::Auto)?;
        let (down, full) = (&model.blocks[1].down, &plain.blocks[1].down);

        let shard = down.weight.shard().expect("distributed");
        assert_eq!(shard.mesh(), mesh);
        assert_eq!(
            shard.layout().to_string(),
            "[R, S(0), S(0); dim 0 sharded by mesh dims 2, 1]"
        );
        assert_eq!(shard.dims(), [13, 8]);
        assert_eq!(
            shard.full_tensor()?.into_data(),
            full.weight.val().into_data()
        );

        let view = down.weight.dtensor()?;
        assert_eq!(view.mesh(), &mesh.slice("tp")?);
        assert_eq!((view.placements(), view.dims()), (&[S(0)][..], [13, 8]));
        assert_eq!(
            view.full_tensor()?.into_data(),
            full.weight.val().into_data()
        );
        assert_eq!(down.weight.val().into_data(), full.weight.val().into_data());

        let bias = down.bias.as_ref().expect("a bias");
        assert_eq!(bias.dtensor()?.placements(), [R]);
        assert_eq!(
            bias.val().into_data(),
            full.bias.as_ref().expect("a bias").val().into_data()
        );
        let [style] = model.blocks[1].up.weight.styles() else {
            panic!("parallelized on one dimension")
        };
        assert_eq!((style.input(), style.output()), (Some(R), None));
        let [style] = bias.styles() else {
            panic!("parallelized on one dimension")
        };
        assert_eq!((style.input(), style.output()), (None, Some(R)));
        let text = named_parameters(&model)?
            .iter()
            .find(|p| p.path == "head.weight")
            .map(ToString::to_string);
        let local = [4, [6, 5][mesh.coordinate().expect("a member")[2]]];
        assert_eq!(
            text,
            Some(format!(
                "head.weight: [8, 11] as [R, S(0), S(1)], local {local:?}, unit root"
            ))
        );
        Ok(())
    });
}

#[test]
fn later_entries_count_and_the_rest_is_replicated() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let plan = Plan::new()
            .with_style("**", Style::sequence_parallel())
            .with_style(
                "blocks.[0-9].up",
                Style::colwise().with_input(S(0)).with_output(R),
            )
            .with_style("blocks.1.up", R)
            .with_style("blocks.0.up.bias", R)
            .with_style("head.weight", S(0));
        let model = parallelize(model.clone(), mesh, plan)?;
        let up = |block: usize| &model.blocks[block].up;
        assert_eq!(up(0).weight.dtensor()?.placements(), [S(1)]);
        assert_eq!(
            up(0).bias.as_ref().expect("a bias").dtensor()?.placements(),
            [R]
        );
        assert_eq!(up(1).weight.dtensor()?.placements(), [R]);
        assert_eq!(model.head.weight.dtensor()?.placements(), [S(0)]);
        let [style] = up(0).weight.styles() else {
            panic!("parallelized on one dimension")
        };
        assert_eq!((style.input(), style.output()), (Some(S(0)), Some(R)));
        assert_eq!(model.norm.gamma.styles()[0].input(), Some(S(1)));

        let linear = LinearConfig::new(4, 6).init(mesh.device());
        let model = parallelize(linear, mesh, Plan::new().with_style("", Style::colwise()))?;
        assert_eq!(model.weight.base().dims(), [4, 3]);
        let linear = LinearConfig::new(4, 6).init(mesh.device());
        let linear = parallelize(linear, mesh, Plan::new())?;
        let [style] = linear.weight.styles() else {
            panic!("parallelized on one dimension")
        };
        assert_eq!((style.input(), style.output()), (None, None));
        Ok(())
    });
}

#[test]
fn values_are_the_first_ranks() {
    let mesh = MeshTest::new([2, 2], ["shard", "tp"]);
    let weights = mesh.run(|mesh| {
        let value = 10.0 + mesh.rank() as f64;
        let device = mesh.device().clone().autodiff();
        let lazy = LinearConfig::new(5, 7)
            .with_initializer(Initializer::Constant { value })
            .init(&device);
        let plan = Plan::new().with_style("", Style::colwise());
        let model = parallelize(lazy.clone(), &mesh.slice("tp")?, plan)?;
        let first = mesh.coordinate().expect("a member")[1] == 0;
        assert_eq!(
            lazy.weight.is_initialized(),
            first,
            "only the first rank makes values"
        );
        let parallel: Vec<f32> = model.weight.val().into_data().try_to_vec().expect("f32");
        assert_eq!(parallel, [10.0 + (mesh.rank() / 2 * 2) as f32; 35]);
        let model = fully_shard(model, &mesh.slice("shard")?, FullyShard::new())?;
        assert!(model.weight.base().is_require_grad());
        let data = full_model(&model)?.weight.val().into_data();
        Ok(data.try_to_vec::<f32>().expect("f32"))
    });
    assert!(weights.iter().all(|weight| *weight == [10.0; 35]));
}

/// A lazy parameter takes its values from one state of the whole process, as burn's initializers
/// do.
#[test]
fn groups_draw_in_turn_from_one_random_state() {
    let run = || {
        let state = Arc::new(AtomicUsize::new(0));
        MeshTest::new([2, 2, 2], ["pp", "dp", "tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let lazy = |_| {
                let state = state.clone();
                let draw = move |device: &Device, _| {
                    let drawn = state.fetch_add(1, Ordering::Relaxed);
                    // Time for the others, if there is anything that they may do.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    Tensor::full([2], drawn as f32, device).require_grad()
                };
                Param::uninitialized(ParamId::new(), draw, device.clone(), true, [2].into())
            };
            let model = Weights {
                weights: (0..4).map(lazy).collect(),
            };
            let stage = mesh.slice(["dp", "tp"])?;
            let model = parallelize(model, &stage.slice("tp")?, Plan::new())?;
            let first = |weight: &Param<Tensor<1>>| {
                weight.val().into_data().iter::<f32>().next().expect("two")
            };
            Ok(model.weights.iter().map(first).collect::<Vec<_>>())
        })
    };
    // Slice by slice, and parameter by parameter.
    let expected: Vec<Vec<f32>> = (0..8)
        .map(|rank| (0..4).map(|at| (rank / 2 * 4 + at) as f32).collect())
        .collect();
    for _ in 0..3 {
        assert_eq!(run(), expected);
    }
}

#[derive(Module, Debug)]
struct Weights {
    weights: Vec<Param<Tensor<1>>>,
}

#[test]
fn ignored_parameters_stay_parallelized() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let model = parallelize(on_device(&model, &device), &mesh.slice("tp")?, plan())?;
        let config = FullyShard::new()
            .with_units(["blocks.*"])
            .with_ignored(["embedding.*"]);
        let model = fully_shard(model, &mesh.slice("shard")?, config)?;
        assert_eq!(
            model
                .embedding
                .weight
                .shard()
                .expect("distributed")
                .placements(),
            [S(0)]
        );
        assert_eq!(
            model.head.weight.shard().expect("distributed").placements(),
            [S(0), S(1)]
        );
        let ledger = mesh.world().ledger();
        ledger.reset();
        let _ = model.loss_on(0, 0, &device).backward();
        assert_eq!(
            ledger.by_label()["root"].calls,
            2,
            "the root's parameters are one unit"
        );
        Ok(())
    });
}

#[test]
fn inference_without_autodiff() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let expected = model.loss_on(0, 0, mesh.device()).into_data();
        let [device, _] = devices(mesh);
        let sharded = distribute(
            on_device(&model, &device),
            mesh,
            plan(),
            ReshardAfterForward::Auto,
        )?;
        assert_eq!(
            sharded.valid().loss_on(0, 0, mesh.device()).into_data(),
            expected
        );
        Ok(())
    });
}

/// burn tells the shape of a lazy parameter as its record has it, which is the transpose.
#[test]
fn a_lazy_linear_in_column_layout_has_its_true_shape() {
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let lazy = || {
            LinearConfig::new(5, 7)
                .with_layout(LinearLayout::Col)
                .init(&device)
        };
        let model = fully_shard(lazy(), &mesh.slice("shard")?, FullyShard::new())?;
        assert_eq!(model.weight.val().dims(), [5, 7]);
        let model = parallelize(
            lazy(),
            &mesh.slice("tp")?,
            Plan::new().with_style("", Style::colwise()),
        )?;
        let rank = mesh.coordinate().expect("a member")[1];
        assert_eq!(model.weight.base().dims(), [5, [4, 3][rank]]);
        assert_eq!(model.weight.val().dims(), [5, 7]);
        Ok(())
    });
}
