//! What `fully_shard` makes of a model: its units, and its parameters as DTensors.

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::Device;
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{
    FsdpError, FullyShard, ParamExt, ParamInfo, describe, full_model, fully_shard,
    named_parameters, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};

use super::net::{WIDTH, config, mesh, net, with_units};
use super::support::{on_device, tensor};

#[test]
fn inner_calls_come_first_and_keep_their_units() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let mesh = mesh(world)?;
        let mut sharded = plain.clone();
        sharded.blocks = sharded
            .blocks
            .into_iter()
            .map(|block| fully_shard(block, &mesh, FullyShard::new()))
            .collect::<Result<_>>()?;
        let sharded = fully_shard(sharded, &mesh, FullyShard::new())?;
        world.ledger().reset();
        let x = tensor(1, [4, WIDTH], &device);
        let output = with_units(&sharded, x.clone(), 0);
        assert_eq!(
            output.clone().into_data(),
            with_units(&plain, x, 0).into_data()
        );
        let _ = output.sum().backward();
        // Root keeps, blocks are gathered again: their units are no roots any more.
        assert_eq!(world.ledger().calls_in(Op::AllGather, Phase::Forward), 4);
        assert_eq!(world.ledger().calls_in(Op::AllGather, Phase::Backward), 3);
        let again = fully_shard(sharded, &mesh, FullyShard::new());
        assert!(matches!(
            again,
            Err(Error::Fsdp(FsdpError::AlreadySharded { .. }))
        ));
        Ok(())
    })
    .unwrap();
}

/// A list has no forward of its own, and needs none: it is run by what is given to `unit`.
#[test]
fn a_list_of_modules_is_a_unit() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let config = FullyShard::new().with_units(["blocks"]);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config)?;
        let run = |blocks: &Vec<Linear>| {
            let output = unit(blocks, tensor(1, [4, WIDTH], &device), |blocks, x| {
                blocks.iter().fold(x, |x, block| block.forward(x).tanh())
            });
            output.into_data()
        };
        world.ledger().reset();
        assert_eq!(run(&sharded.blocks), run(&plain.blocks));
        assert_eq!(world.ledger().calls_in(Op::AllGather, Phase::Forward), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_parameter_belongs_to_the_innermost_unit_around_it() {
    let model = vec![net(&Device::flex())];
    launch(Launch::threads(2), |world| {
        let config = FullyShard::new().with_units(["*", "*.blocks.1"]);
        let sharded = fully_shard(model.clone(), &mesh(world)?, config)?;
        for param in named_parameters(&sharded)? {
            let expected = if param.path.starts_with("0.blocks.1.") {
                "0.blocks.1"
            } else {
                "0"
            };
            assert_eq!(&*param.unit, expected, "{}", param.path);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn lazy_parameters_take_the_first_ranks_values() {
    let weights = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let value = 10.0 + world.rank() as f64;
        let lazy = LinearConfig::new(WIDTH, 7)
            .with_initializer(Initializer::Constant { value })
            .init(&device);
        let sharded = fully_shard(lazy.clone(), &mesh(world)?, FullyShard::new())?;
        if world.rank() > 0 {
            assert!(
                !lazy.weight.is_initialized(),
                "only the first rank makes values"
            );
        }
        assert!(sharded.weight.base().is_require_grad());
        Ok(full_model(&sharded)?
            .weight
            .val()
            .into_data()
            .try_to_vec::<f32>()
            .unwrap())
    })
    .unwrap();
    assert!(
        weights
            .iter()
            .all(|(_, weight)| *weight == [10.0; WIDTH * 7])
    );
}

#[test]
fn parameters_are_dtensors() {
    let model = net(&Device::flex());
    launch(Launch::threads(4), |world| {
        let model = on_device(&model, &world.device().clone().autodiff());
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let config = config().with_shard_placement_fn(|param: ParamInfo| {
            param
                .path
                .ends_with("1.weight")
                .then_some(Placement::Shard(1))
        });
        let sharded = fully_shard(model.clone(), &mesh, config)?;
        let weight = sharded.blocks[0].weight.shard().expect("sharded");
        assert_eq!(
            weight.placements(),
            [Placement::Replicate, Placement::Shard(0)]
        );
        assert_eq!(weight.dims(), [WIDTH, WIDTH]);
        assert_eq!(
            weight.to_local().dims(),
            [[3, 2][mesh.coordinate().unwrap()[1]], WIDTH]
        );
        let weight = sharded.blocks[1].weight.shard().expect("sharded");
        assert_eq!(
            weight.placements(),
            [Placement::Replicate, Placement::Shard(1)]
        );
        assert_eq!(
            weight.full_tensor()?.into_data(),
            model.blocks[1].weight.val().into_data()
        );

        let named = named_parameters(&sharded)?;
        let paths: Vec<_> = named.iter().map(|param| param.path.as_str()).collect();
        assert_eq!(paths.len(), 2 + 3 * 2 + 1 + 2);
        assert_eq!(
            &paths[..4],
            [
                "first.weight",
                "first.bias",
                "blocks.0.weight",
                "blocks.0.bias"
            ]
        );
        let second = named
            .iter()
            .find(|param| param.path == "blocks.1.weight")
            .expect("listed");
        assert_eq!(
            (&*second.unit, second.id),
            ("blocks.1", sharded.blocks[1].weight.id)
        );
        assert!(second.shard::<1>().is_none());
        let full = second.shard::<2>().expect("a matrix").full_tensor()?;
        assert_eq!(full.into_data(), model.blocks[1].weight.val().into_data());
        assert_eq!(&*named[0].unit, "root");
        Ok(())
    })
    .unwrap();
}

/// Against shapes and counts by hand.
#[test]
fn a_model_is_described_with_global_and_local_shapes() {
    let start = net(&Device::flex());
    let tables = launch(Launch::threads(2), |world| {
        let config = FullyShard::new()
            .with_units(["blocks.*"])
            .with_ignored(["spare.*"]);
        let model = fully_shard(start.clone(), &mesh(world)?, config)?;
        let description = describe(&model);
        let linear = WIDTH * WIDTH + WIDTH;
        assert_eq!(description.global_count(), 5 * linear + WIDTH);
        // Of each dimension of 5 the first rank has 3.
        let rows = [3, 2][world.rank()];
        assert_eq!(
            description.local_count(),
            4 * (rows * WIDTH + rows) + rows + linear
        );
        assert_eq!(
            model.num_params(),
            description.local_count(),
            "burn sees what is here"
        );
        Ok(description.to_string())
    })
    .unwrap();
    let (_, table) = &tables[1];
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 2 + 11 + 1, "{table}");
    assert_eq!(rows[0], "on DeviceMesh(shard=2; ranks 0..2)");
    let cells = |row: &str| {
        row.split("  ")
            .map(str::trim)
            .filter(|cell| !cell.is_empty())
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let expected = [
        "blocks.1.weight",
        "[5, 5]",
        "[S(0)]",
        "[2, 5]",
        "blocks.1",
        "f32",
        "25",
        "10",
    ];
    let row = rows
        .iter()
        .find(|row| row.starts_with("blocks.1.weight"))
        .unwrap();
    assert_eq!(cells(row), expected);
    let row = rows
        .iter()
        .find(|row| row.starts_with("spare.bias"))
        .unwrap();
    assert_eq!(
        cells(row),
        ["spare.bias", "[5]", "-", "[5]", "-", "f32", "5", "5"]
    );
    assert_eq!(cells(rows[13]), ["total", "155", "80"]);
}
