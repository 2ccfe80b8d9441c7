//! Meshes and placements of data-parallel dimensions that are refused, on every rank and before
//! anything moves.

use burn::nn::LinearConfig;
use burn_dtensor::fsdp::{FsdpError, ParamInfo, ParamPlacement, remesh};
use burn_dtensor::mesh::MeshError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{Net, place_experts};

fn refused<T>(result: Result<T>) -> Error {
    result.map(drop).expect_err("it is wrong")
}

fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    assert!(
        parts.iter().all(|part| text.contains(part)),
        "{parts:?} in: {text}"
    );
}

#[test]
fn names_of_dimensions_that_cannot_be() {
    MeshTest::new([2, 1, 2], ["dp", "cp", "tp"]).run(|mesh| {
        let shard = |config: FullyShard| {
            refused(fully_shard(
                LinearConfig::new(4, 4).init(mesh.device()),
                mesh,
                config,
            ))
        };
        let error = shard(FullyShard::new());
        assert!(
            matches!(error, Error::Fsdp(FsdpError::MeshDims { .. })),
            "{error}"
        );
        says(&error, &["`FullyShard::with_shard_dims`"]);
        let error = shard(FullyShard::new().with_replicate_dims("dp"));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::NoShardDims { .. })),
            "{error}"
        );
        says(
            &error,
            &["`with_replicate_dims`", "Name the dimensions that shard"],
        );
        let error = shard(FullyShard::new().with_shard_dims(["dp", "ep"]));
        assert!(
            matches!(error, Error::Mesh(MeshError::UnknownName { .. })),
            "{error}"
        );
        let error = shard(
            FullyShard::new()
                .with_shard_dims("dp")
                .with_replicate_dims("ep"),
        );
        assert!(
            matches!(error, Error::Mesh(MeshError::UnknownName { .. })),
            "{error}"
        );
        let error = shard(FullyShard::new().with_shard_dims(["dp", "dp"]));
        assert!(
            matches!(error, Error::Mesh(MeshError::DuplicateName { .. })),
            "{error}"
        );
        let error = shard(
            FullyShard::new()
                .with_shard_dims(["dp", "cp"])
                .with_replicate_dims("cp"),
        );
        assert!(
            matches!(error, Error::Mesh(MeshError::DuplicateName { .. })),
            "{error}"
        );
        let error = shard(FullyShard::new().with_shard_dims(["cp", "dp"]));
        assert!(
            matches!(error, Error::Mesh(MeshError::NameOrder { .. })),
            "{error}"
        );
        assert_eq!(mesh.world().ledger().total(|_| true).calls, 0);
        Ok(())
    });
}

#[test]
fn placements_over_dimensions_that_are_taken_or_have_no_part() {
    MeshTest::new([2, 2, 1], ["efsdp", "ep", "tp"]).run(|mesh| {
        let net = || place_experts(Net::new(), mesh);
        let over = |names: &'static [&'static str]| {
            FullyShard::new()
                .with_shard_dims(["efsdp", "ep"])
                .with_shard_placement_fn(move |param: ParamInfo<'_>| {
                    param
                        .path
                        .ends_with("up")
                        .then(|| ParamPlacement::from(Placement::Shard(0)).with_mesh_dims(names))
                })
        };
        let calls = || mesh.world().ledger().total(|_| true).calls;
        let placed = net()?;
        let before = calls();
        for name in ["ep", "tp", "pp"] {
            let names = match name {
                "ep" => &["ep"][..],
                "tp" => &["efsdp", "tp"],
                _ => &["pp"],
            };
            match refused(fully_shard(placed.clone(), mesh, over(names))) {
                Error::Fsdp(error @ FsdpError::MeshDimInUse { .. }) => {
                    let text = error.to_string();
                    let FsdpError::MeshDimInUse {
                        param,
                        mesh_dim,
                        free,
                        ..
                    } = error
                    else {
                        unreachable!()
                    };
                    assert_eq!(
                        (&*param, &*mesh_dim, free),
                        ("blocks.0.experts.up", name, vec!["efsdp".to_string()])
                    );
                    assert!(
                        text.contains("Pass some of these to `ParamPlacement::with_mesh_dims`"),
                        "{text}"
                    );
                }
                other => panic!("{other}"),
            }
        }
        let error = refused(fully_shard(placed.clone(), mesh, over(&["efsdp", "efsdp"])));
        assert!(
            matches!(error, Error::Mesh(MeshError::DuplicateName { .. })),
            "{error}"
        );
        let error = refused(fully_shard(placed.clone(), mesh, over(&[])));
        assert!(
            matches!(error, Error::Mesh(MeshError::NoNames { .. })),
            "{error}"
        );
        // Experts are placed over `ep`, and nothing else shards.
        let error = refused(fully_shard(
            placed,
            mesh,
            FullyShard::new()
                .with_shard_dims("ep")
                .with_replicate_dims("efsdp"),
        ));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::NoShardDimLeft { .. })),
            "{error}"
        );
        says(
            &error,
            &["`blocks.0.experts.up`", "Add a dimension of size 1"],
        );
        assert_eq!(calls(), before);
        // All of the model over `ep`, where most of it is whole.
        let plan = Plan::new().with_style("blocks.*.experts.*", Style::placed(Placement::Shard(0)));
        let full = parallelize(Net::new(), &mesh.slice("ep")?, plan)?;
        let before = calls();
        let error = refused(fully_shard(
            full,
            mesh,
            FullyShard::new().with_shard_dims(["efsdp", "ep"]),
        ));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::ReplicatedOverDataDim { .. })),
            "{error}"
        );
        says(
            &error,
            &[
                "`first.weight`",
                "`ep`",
                "Parallelize over it only the modules",
            ],
        );
        assert_eq!(calls(), before);
        Ok(())
    });
}

/// What cannot be kept over so many ranks, or moved to another mesh, is told of experts too.
#[test]
fn experts_where_their_mesh_has_too_few_ranks_or_is_another() {
    MeshTest::new([2, 2], ["efsdp", "ep"]).run(|mesh| {
        let over_both = || FullyShard::new().with_shard_dims(["efsdp", "ep"]);
        let parts = over_both().with_reshard_after_forward(ReshardAfterForward::Ranks(4));
        match refused(fully_shard(place_experts(Net::new(), mesh)?, mesh, parts)) {
            Error::Fsdp(FsdpError::ReshardRanks {
                ranks: 4,
                size: 2,
                dim,
            }) => assert_eq!(dim, "efsdp"),
            other => panic!("{other}"),
        }
        let net = fully_shard(place_experts(Net::new(), mesh)?, mesh, over_both())?;
        match refused(remesh(net, &mesh.flatten(["efsdp", "ep"])?)) {
            Error::Fsdp(FsdpError::IncompatibleMesh { unit, is, .. }) => {
                assert_eq!(
                    (&*unit, is),
                    ("root", format!("{} of 4", mesh.rank())),
                    "that of the experts"
                );
            }
            other => panic!("{other}"),
        }
        Ok(())
    });
}
