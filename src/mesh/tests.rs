use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::{DeviceMesh, MeshError};
use crate::comm::{Launch, World, launch};
use crate::{Error, Result};

/// Runs `program` on `ranks` ranks, as threads.
fn on<T: Send>(ranks: usize, program: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
    let launched = launch(
        Launch::threads(ranks).with_deadline(Duration::from_secs(20)),
        program,
    );
    let launched = launched.unwrap_or_else(|error| panic!("{error}"));
    launched.into_iter().map(|(_, returned)| returned).collect()
}

/// Returns the error of `build` in a world of `ranks`, and its message.
fn refused(
    ranks: usize,
    build: impl Fn(&World) -> Result<DeviceMesh> + Sync,
) -> (MeshError, String) {
    let mut errors = on(ranks, |world| Ok(build(world).unwrap_err()));
    let Error::Mesh(error) = errors.swap_remove(0) else {
        panic!("no error of a mesh")
    };
    let message = error.to_string();
    (error, message)
}

/// Returns the ranks of the caller's group along each dimension, and its rank in each.
fn groups(mesh: &DeviceMesh) -> Vec<(Vec<usize>, usize)> {
    let groups = (0..mesh.ndim()).map(|dim| mesh.communicator(dim).unwrap().group().clone());
    groups
        .map(|group| (group.ranks().to_vec(), group.rank()))
        .collect()
}

#[test]
fn ranks_are_row_major_and_groups_follow_coordinates() {
    let seen = on(8, |world| {
        let mesh = DeviceMesh::new(world, [2, 4], ["dp", "tp"])?;
        assert_eq!(
            (mesh.shape(), mesh.ndim(), mesh.size(), mesh.size_of(1)),
            (&[2, 4][..], 2, 8, 4)
        );
        assert_eq!((mesh.dim("tp")?, mesh.rank()), (1, world.rank()));
        Ok((mesh.coordinate().unwrap().to_vec(), groups(&mesh)))
    });
    // The picture in the module doc, written out.
    let expected = [
        (vec![0, 0], [(vec![0, 4], 0), (vec![0, 1, 2, 3], 0)]),
        (vec![0, 3], [(vec![3, 7], 0), (vec![0, 1, 2, 3], 3)]),
        (vec![1, 2], [(vec![2, 6], 1), (vec![4, 5, 6, 7], 2)]),
    ];
    for (rank, (coordinate, groups)) in [0, 3, 6].into_iter().zip(expected) {
        assert_eq!(seen[rank], (coordinate, groups.to_vec()), "rank {rank}");
    }
}

#[test]
fn three_dims_give_each_rank_three_groups() {
    let seen = on(8, |world| {
        Ok(groups(&DeviceMesh::new(world, [2, 2, 2], ["a", "b", "c"])?))
    });
    assert_eq!(seen[5], [(vec![1, 5], 1), (vec![5, 7], 0), (vec![4, 5], 1)]);
}

#[test]
fn explicit_ranks_may_lie_anywhere() {
    let seen = on(4, |world| {
        let mesh = DeviceMesh::from_ranks(world, [3, 1, 2, 0], [2, 2], ["x", "y"])?;
        Ok((
            mesh.coordinate().unwrap().to_vec(),
            groups(&mesh),
            mesh.to_string(),
        ))
    });
    let text = "DeviceMesh(x=2, y=2; ranks [3, 1, 2, 0])".to_string();
    assert_eq!(
        seen[3],
        (
            vec![0, 0],
            vec![(vec![3, 2], 0), (vec![3, 1], 0)],
            text.clone()
        )
    );
    assert_eq!(
        seen[0],
        (vec![1, 1], vec![(vec![1, 0], 1), (vec![2, 0], 1)], text)
    );
}

#[test]
fn a_rank_outside_has_no_coordinate_and_no_communicator() {
    on(3, |world| {
        let mesh = DeviceMesh::new(world, [2], ["dp"])?;
        if world.rank() < 2 {
            assert_eq!(mesh.coordinate(), Some(&[world.rank()][..]));
            return Ok(());
        }
        assert_eq!((mesh.coordinate(), mesh.rank()), (None, 2));
        let error = mesh.communicator(0).unwrap_err();
        assert!(
            matches!(error, Error::Mesh(MeshError::NotAMember { rank: 2, .. })),
            "{error:?}"
        );
        assert!(
            error
                .to_string()
                .contains("rank 2 is not in DeviceMesh(dp=2; ranks 0..2)"),
            "{error}"
        );
        let two = DeviceMesh::new(world, [1, 2], ["dp", "tp"])?;
        assert!(matches!(
            two.slice("tp"),
            Err(Error::Mesh(MeshError::NotAMember { .. }))
        ));
        Ok(())
    });
}

#[test]
fn slices_share_communicators() {
    on(8, |world| {
        let mesh = DeviceMesh::new(world, [2, 2, 2], ["pp", "dp", "tp"])?;
        let coordinate = mesh.coordinate().unwrap().to_vec();
        let slice = mesh.slice(["pp", "tp"])?;
        assert_eq!(
            (slice.names(), slice.shape()),
            (&["pp".to_string(), "tp".to_string()][..], &[2, 2][..])
        );
        assert_eq!(slice.coordinate().unwrap(), [coordinate[0], coordinate[2]]);
        let base = 2 * coordinate[1];
        assert_eq!(slice.ranks(), [base, base + 1, base + 4, base + 5]);
        for (dim, parent) in [(0, 0), (1, 2)] {
            assert!(slice.communicator(dim)?.is_same(mesh.communicator(parent)?));
        }
        // A slice of a slice, and the concatenation of slices.
        let tp = slice.slice("tp")?;
        assert_eq!(tp, mesh.slice("tp")?);
        assert_eq!(
            (tp.root(), mesh.root(), mesh.slice(["pp", "dp", "tp"])?),
            (&mesh, &mesh, mesh.clone())
        );
        assert_eq!(
            mesh.slice("dp")?.concatenate(&[&tp])?,
            mesh.slice(["dp", "tp"])?
        );
        Ok(())
    });
}

#[test]
fn flattening_makes_one_dim_of_several() {
    on(8, |world| {
        let mesh = DeviceMesh::new(world, [2, 2, 2], ["dp", "cp", "tp"])?;
        let coordinate = mesh.coordinate().unwrap().to_vec();
        // The dimensions are not adjacent: the ranks share the coordinate of cp.
        let flat = mesh.flatten(["dp", "tp"])?;
        let base = 2 * coordinate[1];
        assert_eq!(
            (flat.names(), flat.ranks()),
            (
                &["dp_tp".to_string()][..],
                &[base, base + 1, base + 4, base + 5][..]
            )
        );
        assert_eq!(
            groups(&flat),
            [(flat.ranks().to_vec(), 2 * coordinate[0] + coordinate[2])]
        );
        assert_eq!((flat.root(), flat.slice_index()), (&mesh, coordinate[1]));
        // Next to the dimension between them, in the order of the first dimension of each.
        let both = mesh.slice(["dp_tp", "cp"])?;
        assert_eq!(
            both.to_string(),
            "DeviceMesh(dp_tp=4, cp=2; ranks [0, 2, 1, 3, 4, 6, 5, 7])"
        );
        assert_eq!(
            both.coordinate().unwrap(),
            [2 * coordinate[0] + coordinate[2], coordinate[1]]
        );
        for (dim, (ranks, place)) in groups(&both).into_iter().enumerate() {
            assert_eq!(ranks[place], mesh.rank());
            assert_eq!(place, both.coordinate().unwrap()[dim]);
        }
        // All flattened, then unflattened.
        mesh.flatten(["dp", "cp"])?;
        let joined = mesh.slice(["dp_cp", "tp"])?;
        assert_eq!(joined.to_string(), "DeviceMesh(dp_cp=4, tp=2; ranks 0..8)");
        assert_eq!(
            joined.coordinate().unwrap(),
            [2 * coordinate[0] + coordinate[1], coordinate[2]]
        );
        assert_eq!(joined.unflatten("dp_cp", [2, 2], ["dp", "cp"])?, mesh);
        Ok(())
    });
}

#[test]
fn unflattening_keeps_the_communicators_of_other_dimensions() {
    on(4, |world| {
        let plain = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let groups = [
            plain.communicator(0)?.clone(),
            plain.communicator(1)?.duplicate("separate"),
        ];
        let mesh = DeviceMesh::from_groups(world, groups, [0, 1, 2, 3], [2, 2], ["dp", "tp"])?;
        for (mesh, joins_dims) in [(plain, true), (mesh, false)] {
            let split = mesh.unflatten("dp", [2, 1], ["outer", "inner"])?;
            assert!(split.communicator(0)?.is_same(mesh.communicator(0)?));
            assert!(
                split
                    .communicator(1)?
                    .is_same(&world.group(&[world.rank()])?)
            );
            assert!(split.communicator(2)?.is_same(mesh.communicator(1)?));
            assert_eq!(split.joins_dims(), joins_dims);
        }
        Ok(())
    });
}

#[test]
fn a_flattened_name_is_found_again_with_its_one_communicator() {
    on(8, |world| {
        let mesh = DeviceMesh::new(world, [2, 2, 2], ["pp", "dp", "cp"])?;
        let stage = mesh.slice(["dp", "cp"])?;
        let unknown = |found: Result<DeviceMesh>| {
            let error = found.unwrap_err();
            assert!(
                matches!(error, Error::Mesh(MeshError::UnknownName { .. })),
                "{error:?}"
            );
            error.to_string()
        };
        unknown(mesh.slice("dp_cp"));
        let flat = stage.flatten(["dp", "cp"])?;
        // On the root, on the slice, on a clone, and flattened a second time.
        for again in [
            mesh.slice("dp_cp"),
            stage.slice("dp_cp"),
            mesh.clone().slice("dp_cp"),
            mesh.flatten(["dp", "cp"]),
        ] {
            let again = again?;
            assert_eq!(again, flat);
            assert!(again.communicator(0)?.is_same(flat.communicator(0)?));
        }
        assert_eq!(flat.slice("dp_cp")?, flat);
        assert_eq!(
            mesh.slice(["pp", "dp_cp"])?.to_string(),
            "DeviceMesh(pp=2, dp_cp=4; ranks 0..8)"
        );
        assert_eq!(
            mesh.slice("pp")?.concatenate(&[&flat])?,
            mesh.slice(["pp", "dp_cp"])?
        );
        assert_eq!(
            flat.concatenate(&[&mesh.slice("pp")?])?,
            mesh.slice(["pp", "dp_cp"])?
        );
        // A slice without cp cannot have it, and lists the names that it has.
        assert!(
            unknown(mesh.slice(["pp", "dp"])?.slice("dp_cp"))
                .contains(r#"Use one of ["pp", "dp"]"#)
        );
        assert!(unknown(mesh.slice("tp")).contains(r#"Use one of ["pp", "dp", "cp", "dp_cp"]"#));
        // Flattening one dimension returns its slice. Another name is another slice of the same
        // group.
        assert_eq!(mesh.flatten("dp")?, mesh.slice("dp")?);
        let batch = mesh.flatten_as(["dp", "cp"], "batch")?;
        assert!(batch != flat && batch.communicator(0)?.is_same(flat.communicator(0)?));
        Ok(())
    });
}

/// The index counts the root's slices along the same dimensions, however the slice was obtained.
#[test]
fn a_slice_of_a_slice_has_the_index_of_the_slice() {
    on(12, |world| {
        let mesh = DeviceMesh::new(world, [2, 3, 2], ["a", "b", "c"])?;
        let coordinate = mesh.coordinate().unwrap();
        for names in [["a", "c"], ["b", "c"]] {
            assert_eq!(
                mesh.slice(names)?.slice("c")?.slice_index(),
                3 * coordinate[0] + coordinate[1]
            );
        }
        Ok(())
    });
}

#[test]
fn a_mesh_is_drawn_as_a_grid() {
    let drawn = on(13, |world| {
        let mesh = |ranks: Vec<usize>, shape: &[usize], names: &[&str]| {
            Ok::<_, Error>(format!(
                "{:#}",
                DeviceMesh::from_ranks(world, ranks, shape, names)?
            ))
        };
        Ok([
            mesh((0..3).collect(), &[3], &["tp"])?,
            mesh((5..13).collect(), &[2, 4], &["dp", "tp"])?,
            mesh((0..12).rev().collect(), &[2, 3, 2], &["pp", "dp", "tp"])?,
        ])
    });
    let expected = [
        "\
DeviceMesh(tp=3; ranks 0..3)

tp  0  1  2
    0  1  2",
        "\
DeviceMesh(dp=2, tp=4; ranks 5..13)

     tp   0   1   2   3
dp 0      5   6   7   8
dp 1      9  10  11  12",
        "\
DeviceMesh(pp=2, dp=3, tp=2; ranks [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])

pp 0
     tp   0   1
dp 0     11  10
dp 1      9   8
dp 2      7   6

pp 1
     tp   0   1
dp 0      5   4
dp 1      3   2
dp 2      1   0",
    ];
    assert_eq!(drawn[4], expected);
}

#[test]
fn equality_and_hash_cover_ranks_shape_names_and_root() {
    on(4, |world| {
        let hash = |mesh: &DeviceMesh| {
            let mut hasher = DefaultHasher::new();
            mesh.hash(&mut hasher);
            hasher.finish()
        };
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        assert_eq!(
            mesh.to_string(),
            "DeviceMesh(replicate=2, shard=2; ranks 0..4)"
        );
        let same = DeviceMesh::from_ranks(world, [0, 1, 2, 3], [2, 2], ["replicate", "shard"])?;
        assert_eq!((&mesh, hash(&mesh)), (&same, hash(&same)));
        assert_ne!(
            mesh,
            DeviceMesh::new(world, [4, 1], ["replicate", "shard"])?
        );
        assert_ne!(mesh, DeviceMesh::new(world, [2, 2], ["replicate", "tp"])?);
        assert_ne!(
            mesh,
            DeviceMesh::from_ranks(world, [1, 0, 2, 3], [2, 2], ["replicate", "shard"])?
        );
        let slice = mesh.slice("shard")?;
        let alone = DeviceMesh::from_ranks(world, slice.ranks(), [2], "shard")?;
        assert_eq!(
            (&slice, hash(&slice)),
            (&same.slice("shard")?, hash(&same.slice("shard")?))
        );
        assert_ne!((&slice, hash(&slice)), (&alone, hash(&alone)));
        assert!(slice.congruent(&alone));
        // One mesh was created from a slice, the other from ranks. Random numbers drawn on them
        // differ on all slices except the first.
        let made = slice.unflatten("shard", [2], "shard")?;
        let first = slice.slice_index() == 0;
        assert_eq!(made == alone, first);
        Ok(())
    });
}

#[test]
fn meshes_of_other_ranks_and_other_launches_differ() {
    let meshes = || on(2, |world| DeviceMesh::new(world, [2], "x"));
    let [first, second] = [meshes(), meshes()];
    assert!(first[0] != first[1] && first[0] != second[0]);
    assert!(!first[0].congruent(&first[1]) && !first[0].congruent(&second[0]));
    assert_eq!(first[0], first[0].clone());
}

/// Size of which two are more than a `usize` holds.
const HALF: usize = 1 << (usize::BITS - 1);

/// One test case per variant: the rejected call, the variant, and the remedy in its message.
macro_rules! refusals {
    ($($test:ident: $world:expr, $build:expr => $variant:pat, $message:literal;)*) => {$(
        #[test]
        fn $test() {
            let (error, message) = refused($world, $build);
            assert!(matches!(error, $variant), "{error:?}");
            assert!(message.contains($message), "{message}");
        }
    )*};
}

refusals! {
    a_mesh_larger_than_the_world: 2, |w| DeviceMesh::new(w, [2, 2], ["a", "b"])
        => MeshError::WorldTooSmall { needed: 4, world_size: 2, .. }, "Launch 4 ranks";
    a_mesh_whose_size_overflows: 2, |w| DeviceMesh::new(w, [HALF, 2], ["a", "b"])
        => MeshError::WorldTooSmall { needed: usize::MAX, world_size: 2, .. }, "make the mesh smaller";
    ranks_for_a_size_that_overflows: 2, |w| DeviceMesh::from_ranks(w, [0, 1], [HALF, 2], ["a", "b"])
        => MeshError::RankCount { given: 2, needed: usize::MAX, .. }, "List exactly";
    sizes_that_overflow: 2, |w| DeviceMesh::new(w, [2], "dp")?.unflatten("dp", [HALF, 2], ["a", "b"])
        => MeshError::Unflatten { size: 2, .. }, "Make their product 2";
    a_mesh_without_dims: 1, |w| DeviceMesh::new(w, [], [""; 0])
        => MeshError::EmptyShape { .. }, "at least one dimension";
    a_dim_of_size_0: 1, |w| DeviceMesh::new(w, [1, 0], ["a", "b"])
        => MeshError::EmptyShape { .. }, "each of size 1 or more";
    too_few_names: 2, |w| DeviceMesh::new(w, [2, 1], ["a"])
        => MeshError::NameCount { .. }, "one name per mesh dimension";
    an_empty_name: 1, |w| DeviceMesh::new(w, [1, 1], ["a", ""])
        => MeshError::EmptyName { mesh_dim: 1 }, "Name every mesh dimension";
    a_name_twice: 1, |w| DeviceMesh::new(w, [1, 1], ["a", "a"])
        => MeshError::DuplicateName { .. }, "`a` is given twice";
    too_few_ranks: 2, |w| DeviceMesh::from_ranks(w, [0], [2], "a")
        => MeshError::RankCount { given: 1, needed: 2, .. }, "List exactly 2 ranks";
    a_rank_outside_the_world: 2, |w| DeviceMesh::from_ranks(w, [0, 2], [2], "a")
        => MeshError::RankOutOfRange { rank: 2, world_size: 2 }, "Use ranks below 2";
    a_rank_twice: 2, |w| DeviceMesh::from_ranks(w, [1, 1], [2], "a")
        => MeshError::DuplicateRank { rank: 1 }, "rank 1 appears twice";
    an_unknown_name: 2, |w| DeviceMesh::new(w, [2, 1], ["dp", "tp"])?.slice("pp")
        => MeshError::UnknownName { .. }, r#"Use one of ["dp", "tp"]"#;
    a_slice_without_names: 1, |w| DeviceMesh::new(w, [1], "dp")?.slice([""; 0])
        => MeshError::NoNames { .. }, "Give at least one name";
    a_slice_with_a_name_twice: 1, |w| DeviceMesh::new(w, [1], "dp")?.slice(["dp", "dp"])
        => MeshError::DuplicateName { .. }, "`dp` is given twice";
    a_reordered_slice: 1, |w| DeviceMesh::new(w, [1, 1], ["dp", "tp"])?.slice(["tp", "dp"])
        => MeshError::NameOrder { .. }, r#"List them as ["dp", "tp"]"#;
    a_dim_twice_by_a_flattened_name: 1, |w| {
        let mesh = DeviceMesh::new(w, [1, 1, 1], ["a", "b", "c"])?;
        mesh.flatten(["a", "b"])?;
        mesh.slice(["a_b", "b"])
    } => MeshError::Overlap { .. }, "`b` is in two of them";
    a_reordered_slice_with_a_flattened_name: 1, |w| {
        let mesh = DeviceMesh::new(w, [1, 1, 1], ["a", "b", "c"])?;
        mesh.flatten(["a", "b"])?;
        mesh.slice(["c", "a_b"])
    } => MeshError::NameOrder { .. }, r#"List them as ["a_b", "c"]"#;
    flattening_to_a_name_of_a_dim: 1, |w| DeviceMesh::new(w, [1, 1, 1], ["a", "b", "a_b"])?.flatten(["a", "b"])
        => MeshError::NameTaken { .. }, r#"`a_b` names the dims ["a_b"]"#;
    flattening_to_a_name_of_other_flattened_dims: 1, |w| {
        let mesh = DeviceMesh::new(w, [1, 1, 1], ["a", "b", "c"])?;
        mesh.flatten_as(["a", "b"], "batch")?;
        mesh.slice(["b", "c"])?.flatten_as(["b", "c"], "batch")
    } => MeshError::NameTaken { .. }, r#"`batch` names the dims ["a", "b"]"#;
    flattening_to_an_empty_name: 1, |w| DeviceMesh::new(w, [1, 1], ["a", "b"])?.flatten_as(["a", "b"], "")
        => MeshError::EmptyName { .. }, "Name every mesh dimension";
    slices_that_share_a_dim: 1, |w| {
        let mesh = DeviceMesh::new(w, [1, 1, 1], ["a", "b", "c"])?;
        mesh.slice(["a", "b"])?.concatenate(&[&mesh.flatten(["b", "c"])?])
    } => MeshError::Overlap { .. }, "`b` is in two of them";
    sizes_that_do_not_split: 2, |w| DeviceMesh::new(w, [2], "dp")?.unflatten("dp", [2, 2], ["a", "b"])
        => MeshError::Unflatten { size: 2, .. }, "Make their product 2";
    unflattening_with_too_few_names: 2, |w| DeviceMesh::new(w, [2], "dp")?.unflatten("dp", [2, 1], ["a"])
        => MeshError::NameCount { .. }, "one name per mesh dimension";
    slices_of_two_meshes: 1, |w| {
        let slice = |names| DeviceMesh::new(w, [1, 1], names)?.slice("tp");
        slice(["dp", "tp"])?.concatenate(&[&slice(["pp", "tp"])?])
    } => MeshError::DifferentRoots { .. }, "Slice both from the mesh that has all";
    a_dim_index_past_the_end: 1, |w| {
        let mesh = DeviceMesh::new(w, [1], "dp")?;
        mesh.communicator(1).map(|_| mesh.clone())
    } => MeshError::DimOutOfRange { mesh_dim: 1, ndim: 1, .. }, "Use an index below 1";
}
