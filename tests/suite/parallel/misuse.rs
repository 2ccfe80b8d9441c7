//! What `parallelize` refuses, and how it says so.

use burn::module::{Lora, Module};
use burn::nn::attention::CrossAttentionConfig;
use burn::nn::{LayerNormConfig, LinearConfig};
use burn::tensor::Device;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{FsdpError, ParamInfo, ParamPlacement};
use burn_dtensor::mesh::MeshError;
use burn_dtensor::nn::CrossAttention;
use burn_dtensor::parallel::ParallelError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Net, plan};

fn refused<M: std::fmt::Debug>(result: Result<M>) -> Error {
    result.expect_err("must be refused")
}

/// Each names the parameter, the mesh dimension and what to do.
fn assert_says(error: &impl std::fmt::Display, parts: &[&str]) {
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn plans_that_do_not_fit_the_model() {
    let model = Net::new(&Device::flex());
    MeshTest::new([3], ["tp"]).run(|mesh| {
        let refused = |plan: Plan| refused(parallelize(model.clone(), mesh, plan));

        let error = refused(Plan::new().with_style("layers.*", Style::colwise()));
        assert!(matches!(&error, Error::Param(ParamError::NoMatch { pattern, .. }) if pattern == "layers.*"));
        assert_says(&error, &["`layers.*`", "`blocks.0.up`", "`head.weight`"]);
        let error = refused(Plan::new().with_style("blocks.*.atention.query", Style::colwise()));
        assert_says(&error, &["did you mean `blocks.0.attention.query`?"]);
        let error = refused(Plan::new().with_units(["head.weight"]));
        assert!(matches!(&error, Error::Param(ParamError::NoMatch { what: "module", .. })), "{error}");
        let error = refused(Plan::new().with_style("a.[b", Style::colwise()));
        assert!(matches!(&error, Error::Param(ParamError::Pattern { pattern, .. }) if pattern == "a.[b"), "{error}");

        let error = refused(Plan::new().with_style("norm", Style::colwise()));
        assert!(matches!(&error, Error::Parallel(ParallelError::UnknownLayer { layer, .. }) if layer == "LayerNorm"), "{error}");
        assert_says(&error, &["colwise", "`norm.gamma`", "`tp`", "Linear and Embedding", "Shard(dim)"]);
        let error = refused(Plan::new().with_style("blocks.*.attention", Style::rowwise()));
        assert!(
            matches!(&error, Error::Parallel(ParallelError::UnknownLayer { layer, .. }) if layer == "MultiHeadAttention"),
            "{error}"
        );
        let error = refused(Plan::new().with_style("blocks", Style::colwise()));
        assert!(
            matches!(&error, Error::Parallel(ParallelError::UnknownLayer { param, .. }) if param == "blocks.0.norm.gamma"),
            "{error}"
        );

        for placement in [Placement::Shard(2), Placement::Partial(PartialOp::Sum)] {
            let error = refused(Plan::new().with_style("head.weight", placement));
            assert_says(&error, &["`head.weight`", "[8, 11]", &placement.to_string(), "`tp`"]);
            assert!(matches!(error, Error::Parallel(ParallelError::Placement { .. })));
        }
        Ok(())
    });
}

#[test]
fn heads_are_not_split() {
    let model = Net::new(&Device::flex());
    MeshTest::new([3], ["tp"]).run(|mesh| {
        let refused = |style: Style| {
            let plan = Plan::new().with_style("blocks.0.attention.query", style);
            refused(parallelize(model.clone(), mesh, plan))
        };
        let error = refused(Style::colwise().with_heads(4));
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::Heads {
                heads: 4,
                size: 3,
                ..
            })
        ));
        assert_says(
            &error,
            &[
                "`blocks.0.attention.query.weight`",
                "4 heads",
                "3 ranks",
                "`tp`",
                "Replicate",
            ],
        );
        // 8 features are no 3 heads.
        assert!(matches!(
            refused(Style::colwise().with_heads(3)),
            Error::Parallel(ParallelError::Heads {
                heads: 3,
                len: 8,
                ..
            })
        ));
        assert!(matches!(
            refused(Style::colwise().with_heads(0)),
            Error::Parallel(ParallelError::Heads { heads: 0, .. })
        ));
        // Without a number of heads, attention needs an even split at the least.
        let error = refused(Style::colwise());
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::Uneven {
                len: 8,
                size: 3,
                ..
            })
        ));
        assert_says(
            &error,
            &[
                "`blocks.0.attention.query.weight`",
                "length 8",
                "`tp`",
                "MultiHeadAttention",
            ],
        );
        // A plain layer takes uneven parts.
        let plan = Plan::new().with_style("blocks.*.up", Style::colwise());
        assert_eq!(
            parallelize(model.clone(), mesh, plan)?.blocks[0]
                .up
                .weight
                .base()
                .dims()[0],
            8
        );
        Ok(())
    });
}

/// Four heads of two features, on three ranks.
#[test]
fn heads_of_cross_attention_are_not_split() {
    MeshTest::new([3], ["tp"]).run(|mesh| {
        let config = CrossAttentionConfig::new(8, 6, 4, 4, 2);
        let layer = CrossAttention::new(&config, mesh.device());
        let plan = Plan::new().with_style("query", Style::colwise());
        let error = refused(parallelize(layer, mesh, plan));
        assert!(
            matches!(
                error,
                Error::Parallel(ParallelError::Uneven {
                    len: 8,
                    size: 3,
                    ..
                })
            ),
            "{error}"
        );
        assert_says(
            &error,
            &["`query.weight`", "length 8", "`tp`", "CrossAttention"],
        );
        Ok(())
    });
}

#[test]
fn models_distributed_before() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let (shard, tp) = (mesh.slice("shard")?, mesh.slice("tp")?);
        let error = refused(parallelize(model.clone(), mesh, plan()));
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::MeshDims { .. })
        ));
        assert_says(
            &error,
            &[
                "`embedding`",
                "shard=2, tp=2",
                "slice",
                ".with_mesh_dim_plan(",
            ],
        );
        let error = refused(parallelize(
            model.clone(),
            mesh,
            Plan::new().with_mesh_dim_plan("pp", plan()),
        ));
        assert!(
            matches!(&error, Error::Mesh(MeshError::UnknownName { name, .. }) if name == "pp"),
            "{error}"
        );

        let parallel = parallelize(model.clone(), &tp, plan())?;
        let error = refused(parallelize(parallel.clone(), &tp, plan()));
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::AlreadyParallelized { .. })
        ));
        assert_says(&error, &["`embedding.weight`", "one plan"]);

        let sharded = fully_shard(model.clone(), &shard, FullyShard::new())?;
        let view = sharded.head.weight.dtensor()?;
        assert_eq!(view.mesh(), &DeviceMesh::single_device(mesh.device()));
        assert!(sharded.head.weight.styles().is_empty());
        // A part of a unit is none, to either.
        let error = refused(parallelize(sharded.head.clone(), &tp, Plan::new()));
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::PartOfUnit { .. })
        ));
        assert_says(&error, &["`weight`", "`root`", "parallelize first"]);
        let error = refused(fully_shard(sharded.head.clone(), &shard, FullyShard::new()));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::AlreadySharded { .. })),
            "{error}"
        );
        let both = parallelize(sharded, &tp, plan())?;
        let error = refused(parallelize(both.clone(), &tp, plan()));
        assert!(matches!(
            error,
            Error::Parallel(ParallelError::AlreadyParallelized { .. })
        ));
        let error = refused(fully_shard(both, &shard, FullyShard::new()));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::AlreadySharded { .. })),
            "{error}"
        );

        // Of 13 rows, of which this rank's part has 7 or 6.
        let lengths = FullyShard::new().with_shard_placement_fn(|param: ParamInfo| {
            (param.path == "blocks.1.down.weight").then(|| ParamPlacement::uneven(0, [9, 4]))
        });
        let error = refused(parallelize(
            fully_shard(model.clone(), &shard, lengths)?,
            &tp,
            plan(),
        ));
        assert!(
            matches!(
                error,
                Error::Parallel(ParallelError::Lengths { dim: 0, .. })
            ),
            "{error}"
        );
        assert_says(
            &error,
            &["`blocks.1.down.weight`", "`tp`", "parallelize first"],
        );

        let lora = LinearConfig::new(4, 4)
            .init(mesh.device())
            .apply_lora(Lora::new(2, 4.0));
        let error = refused(parallelize(lora, &tp, Plan::new()));
        assert!(matches!(
            error,
            Error::Param(ParamError::Reparameterized { .. })
        ));

        let twice = fully_shard(parallel.clone(), &shard, FullyShard::new())?;
        let error = fully_shard(twice, &shard, FullyShard::new());
        assert!(matches!(
            error,
            Err(Error::Fsdp(FsdpError::AlreadySharded { .. }))
        ));
        Ok(())
    });
}

#[test]
fn meshes_that_make_no_mesh() {
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let norm = || LayerNormConfig::new(8).init(mesh.device());
        let other =
            DeviceMesh::from_ranks(mesh.world(), mesh.slice("shard")?.ranks(), [2], ["shard"])?;
        let parallel = parallelize(norm(), &mesh.slice("tp")?, Plan::new())?;
        for data in [&other, &mesh.slice("tp")?, mesh] {
            match fully_shard(parallel.clone(), data, FullyShard::new()) {
                Err(Error::Param(error @ ParamError::Meshes { .. })) if data == &other => {
                    assert!(
                        error.to_string().contains("Slice both out of one mesh"),
                        "{error}"
                    );
                }
                Err(Error::Fsdp(FsdpError::ReplicatedOverDataDim { mesh_dim, .. }))
                    if *data == mesh.slice("tp")? =>
                {
                    assert_eq!(mesh_dim, "tp");
                }
                // The commonest slip: the whole mesh.
                Err(Error::Fsdp(error @ FsdpError::TensorParallelDim { .. })) if data == mesh => {
                    assert!(
                        error
                            .to_string()
                            .contains("fully_shard(model, &mesh.slice(\"shard\")?, ..)"),
                        "{error}"
                    );
                }
                other => panic!("must be refused, got {other:?}"),
            }
            // In the other order too.
            let error = refused(parallelize(
                fully_shard(norm(), data, FullyShard::new())?,
                &mesh.slice("tp")?,
                Plan::new(),
            ));
            assert!(
                matches!(error, Error::Param(ParamError::Meshes { .. })),
                "{error}"
            );
            assert_says(
                &error,
                &[
                    &data.to_string(),
                    &mesh.slice("tp")?.to_string(),
                    "Slice both out of one mesh",
                ],
            );
        }
        // Parallelized apart, sharded together.
        let second = parallelize(norm(), &mesh.slice("shard")?, Plan::new())?;
        let error = fully_shard(vec![parallel, second], mesh, FullyShard::new());
        assert!(matches!(
            error,
            Err(Error::Fsdp(FsdpError::TensorParallelDim { .. }))
        ));
        // Where all that shards is taken.
        let plan = Plan::new().with_style("", Style::colwise());
        let layer = parallelize(
            LinearConfig::new(8, 8).init(mesh.device()),
            &mesh.slice("tp")?,
            plan,
        )?;
        let error = refused(fully_shard(layer.clone(), mesh, FullyShard::new()));
        assert!(
            matches!(error, Error::Fsdp(FsdpError::TensorParallelDim { .. })),
            "{error}"
        );
        assert_says(
            &error,
            &[
                "`weight`",
                "over `tp`",
                "`fully_shard(model, &mesh.slice(\"shard\")?, ..)`",
            ],
        );
        fully_shard(layer, &mesh.slice("shard")?, FullyShard::new())?;
        Ok(())
    });
    MeshTest::new([2, 2, 1], ["a", "b", "shard"]).run(|mesh| {
        let norm = || LayerNormConfig::new(8).init(mesh.device());
        let parallel =
            |name: &str| -> Result<_> { parallelize(norm(), &mesh.slice(name)?, Plan::new()) };
        let both = vec![parallel("a")?, parallel("b")?];
        match fully_shard(both.clone(), &mesh.slice("shard")?, FullyShard::new()) {
            Err(Error::Param(error @ ParamError::TensorMeshes { .. })) => {
                assert!(
                    error.to_string().contains("`0.gamma`")
                        && error.to_string().contains("`1.gamma`"),
                    "{error}"
                );
            }
            other => panic!("must be refused, got {other:?}"),
        }
        fully_shard(
            both,
            &mesh.slice("shard")?,
            FullyShard::new().with_units(["0", "1"]),
        )?;
        Ok(())
    });
}
