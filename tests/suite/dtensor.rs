//! DTensor from outside: creation, errors, views, gradients, counts.

use burn::tensor::{Bool, DType, Device, Distribution, Int, Shape, Tensor, TensorData};
use burn_dtensor::comm::{CommError, Launch, Op, Phase, World, launch};
use burn_dtensor::dtensor::{DTensor, DTensorError, DTensorSpec, Kind, picture};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::{Layout, PartialOp, Placement, PlacementError};
use burn_dtensor::{Error, Result};
use itertools::Itertools;

use Placement::{Partial, Replicate as R, Shard as S};

const SUM: Placement = Partial(PartialOp::Sum);
const AVG: Placement = Partial(PartialOp::Avg);
const MAX: Placement = Partial(PartialOp::Max);
const PRODUCT: Placement = Partial(PartialOp::Product);

fn names(ndim: usize) -> &'static [&'static str] {
    &["a", "b", "c"][..ndim]
}

/// Runs `program` on every rank of a mesh that is the whole world.
fn on_mesh<T: Send>(shape: &[usize], program: impl Fn(&World, &DeviceMesh) -> Result<T> + Sync) -> Vec<T> {
    let size = shape.iter().product();
    launch(Launch::threads(size), |world| {
        let mesh = DeviceMesh::new(world, shape, names(shape.len()))?;
        program(world, &mesh)
    })
    .unwrap_or_else(|error| panic!("{error}"))
}

fn devices() -> [Device; 3] {
    let plain = Device::flex();
    [plain.clone(), plain.clone().autodiff(), plain.autodiff().gradient_checkpointing()]
}

fn tracked_devices() -> [Device; 2] {
    let [_, disabled, balanced] = devices();
    [disabled, balanced]
}

/// Distinct values, shifted by `offset`.
fn ramp<const D: usize>(shape: [usize; D], offset: f32, device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| i as f32 + offset).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Every choice of `R`, `S(0)`, .. for a mesh of `ndim` dimensions.
fn placements_of(ndim: usize, dims: usize) -> Vec<Vec<Placement>> {
    let one = || std::iter::once(R).chain((0..dims).map(S));
    (0..ndim).map(|_| one()).multi_cartesian_product().collect()
}

fn error_of<T: std::fmt::Debug>(result: Result<T>) -> Error {
    result.expect_err("must be refused")
}

// ------------------------------------------------------------------------------- distribute

const MESHES: [&[usize]; 6] = [&[1], &[2], &[3], &[2, 2], &[2, 3], &[2, 2, 2]];

/// 5 rows do not divide, one row leaves ranks empty, and so do no rows at all.
const SHAPES: [[usize; 2]; 4] = [[5, 3], [1, 4], [0, 3], [8, 8]];

#[test]
fn distribute_and_full_round_trip_on_every_mesh() {
    for mesh_shape in MESHES {
        on_mesh(mesh_shape, |world, mesh| {
            for (shape, device) in SHAPES.iter().cartesian_product(devices()) {
                for placements in placements_of(mesh.ndim(), 2) {
                    // Only the first rank's values count.
                    let own = ramp(*shape, 100.0 * world.rank() as f32, &device);
                    let sent = DTensor::distribute_tensor(own, mesh, &placements)?;
                    let first = ramp(*shape, 0.0, &device);
                    let cut = DTensor::distribute_local(first.clone(), mesh, &placements)?;
                    let expected = sent.layout().local_shape(shape, mesh.coordinate().unwrap());
                    assert_eq!(sent.local().dims().to_vec(), expected);
                    assert_eq!(sent.local().to_data(), cut.local().to_data());
                    assert_eq!(sent.local().device().is_autodiff(), device.is_autodiff());
                    assert_eq!(sent.full_tensor()?.into_data(), first.clone().into_data(), "{placements:?}");
                    assert_eq!(cut.full_tensor()?.into_data(), first.into_data(), "{placements:?}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn int_and_bool_tensors_move_like_floats() {
    on_mesh(&[2, 2], |_, mesh| {
        for device in devices() {
            let ints: Tensor<1, Int> = Tensor::arange(0..7, &device);
            let bools: Tensor<1, Bool> = ints.clone().greater_elem(2);
            for (from, to) in placements_of(2, 1).iter().cartesian_product(&placements_of(2, 1)) {
                let moved = DTensor::distribute_tensor(ints.clone(), mesh, from)?.redistribute(to)?;
                assert_eq!(moved.dtype(), ints.dtype());
                assert_eq!(moved.local().device().is_autodiff(), device.is_autodiff());
                assert_eq!(moved.full_tensor()?.into_data(), ints.to_data());
                let moved = DTensor::distribute_tensor(bools.clone(), mesh, from)?.redistribute(to)?;
                assert_eq!(moved.full_tensor()?.into_data(), bools.to_data());
            }
            let terms = DTensor::from_local(ints.clone(), mesh, &[SUM, MAX].map(|_| SUM))?;
            assert_eq!(terms.full_tensor()?.into_data(), (ints.clone() * 4).into_data());
        }
        Ok(())
    });
}

#[test]
fn distributed_parts_are_leaves_of_their_own() {
    on_mesh(&[2], |_, mesh| {
        for device in tracked_devices() {
            let full = ramp([4, 2], 0.0, &device).require_grad();
            for part in [
                DTensor::distribute_tensor(full.clone(), mesh, &[S(0)])?,
                DTensor::distribute_local(full.clone(), mesh, &[S(0)])?,
            ] {
                let local = part.to_local();
                assert!(local.is_require_grad());
                let grads = (local.clone() * 3.0).sum().backward();
                assert_eq!(values(local.grad(&grads).unwrap()), [3.0; 4]);
                assert!(full.grad(&grads).is_none());
            }
        }
        Ok(())
    });
}

#[test]
fn a_shard_does_not_keep_the_whole_buffer_alive() {
    use burn::backend::Flex;
    on_mesh(&[2], |_, mesh| {
        let bytes = |part: DTensor<2>| {
            let flex = part.to_local().inner().try_into_primitive::<Flex>().unwrap();
            flex.bytes().len()
        };
        for device in devices() {
            let full = ramp([8, 4], 0.0, &device);
            for dim in [0, 1] {
                let cut = DTensor::distribute_local(full.clone(), mesh, &[S(dim)])?;
                assert_eq!(bytes(cut), 64);
                let replicated = DTensor::from_local(full.clone(), mesh, &[R])?;
                assert_eq!(bytes(replicated.redistribute(&[S(dim)])?), 64);
            }
        }
        Ok(())
    });
}

#[test]
fn distribute_sends_no_more_than_its_plan() {
    on_mesh(&[2, 2], |world, mesh| {
        let full = ramp([4, 4], 0.0, &Device::flex());
        world.ledger().reset();
        DTensor::distribute_tensor(full.clone(), mesh, &[S(0), R])?;
        // Only the ranks that are first in the later mesh dimension take part in the scatter.
        let scatters = u64::from(mesh.coordinate().unwrap()[1] == 0);
        assert_eq!(world.ledger().calls(Op::Scatter), scatters);
        assert_eq!(world.ledger().calls(Op::Broadcast), 1);
        assert_eq!(world.ledger().bytes(Op::Broadcast), 32);
        world.ledger().reset();
        DTensor::distribute_local(full, mesh, &[S(0), S(1)])?;
        assert_eq!(world.ledger().total(|_| true).calls, 0);
        Ok(())
    });
}

#[test]
fn an_order_of_cuts_is_followed() {
    on_mesh(&[2, 2], |_, mesh| {
        let full = ramp([8, 1], 0.0, &Device::flex());
        let layout = Layout::with_order(&[2, 2], &[S(0), S(0)], &[(0, &[1, 0])])?;
        let sent = DTensor::distribute_tensor_to(full.clone(), mesh, layout.clone())?;
        let cut = DTensor::distribute_local_to(full.clone(), mesh, layout)?;
        let expected = [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]][mesh.rank()];
        assert_eq!(values(sent.local().clone()), expected);
        assert_eq!(values(cut.local().clone()), expected);
        assert_eq!(sent.full_tensor()?.into_data(), full.into_data());
        Ok(())
    });
}

// ------------------------------------------------------------------------------------ errors

#[test]
fn every_misuse_is_a_typed_error_with_its_remedy() {
    fn check(error: Error, is: impl Fn(&Error) -> bool, says: &[&str]) {
        assert!(is(&error), "{error:?}");
        let message = error.to_string();
        assert!(says.iter().all(|part| message.contains(part)), "{message}");
    }
    on_mesh(&[2, 2], |_, mesh| {
        let device = Device::flex().autodiff();
        let x = || ramp([4, 4], 0.0, &device);
        check(
            error_of(DTensor::from_local(x(), mesh, &[R])),
            |error| matches!(error, Error::Placement(PlacementError::Count { placements: 1, mesh_dims: 2, .. })),
            &["one placement per mesh dimension"],
        );
        check(
            error_of(DTensor::distribute_local(x(), mesh, &[R, S(2)])),
            |error| matches!(error, Error::Placement(PlacementError::DimOutOfRange { mesh_dim: 1, dim: 2, ndim: 2 })),
            &["S(2)", "mesh dim 1"],
        );
        let whole = DTensor::from_local(x(), mesh, &[R, R])?;
        for target in [AVG, MAX, PRODUCT] {
            check(
                error_of(whole.clone().redistribute(&[R, target])),
                |error| matches!(error, Error::Placement(PlacementError::PartialTarget { mesh_dim: 1, .. })),
                &["only P(sum)"],
            );
        }
        check(
            error_of(DTensor::from_local(x(), mesh, &[SUM, MAX])),
            |error| matches!(error, Error::Placement(PlacementError::MixedPartial { .. })),
            &["P(sum)", "P(max)"],
        );
        let other = Layout::new(&[4, 1], &[R, R])?;
        check(
            error_of(whole.clone().redistribute_to(&other)),
            |error| matches!(error, Error::DTensor(DTensorError::LayoutMesh { .. })),
            &["[4, 1]", "this mesh's `shape()`"],
        );
        check(
            error_of(DTensor::from_local_with_shape(x(), mesh, &[S(0), R], [5, 4])),
            |error| matches!(error, Error::DTensor(DTensorError::LocalShape { .. })),
            &["[4, 4]", "[5, 4]", "S(0)", "`distribute_local`"],
        );
        let derived = x().require_grad() * 2.0;
        for (name, result) in [
            ("`distribute_tensor`", DTensor::distribute_tensor(derived.clone(), mesh, &[R, R])),
            ("`distribute_local`", DTensor::distribute_local(derived.clone(), mesh, &[R, R])),
        ] {
            check(
                error_of(result),
                |error| matches!(error, Error::DTensor(DTensorError::NotALeaf { .. })),
                &[name, "`detach`", "`from_local`"],
            );
        }
        for (name, result) in [
            ("`distribute_tensor`", DTensor::distribute_tensor(x(), mesh, &[R, SUM])),
            ("`distribute_local`", DTensor::distribute_local(x(), mesh, &[R, SUM])),
            ("`zeros`", DTensor::zeros([4, 4], mesh, &[R, SUM], &device)),
        ] {
            check(
                error_of(result),
                |error| matches!(error, Error::DTensor(DTensorError::Partial { placement: SUM, .. })),
                &[name, "1 (b)", "`redistribute`"],
            );
        }
        let rows = DTensor::from_local(x(), mesh, &[S(0), SUM])?;
        for grad in [[R, R], [S(1), R], [SUM, R], [S(0), S(0)], [S(0), AVG]] {
            check(
                error_of(rows.clone().to_local_with_grad_placements(&grad)),
                |error| matches!(error, Error::DTensor(DTensorError::GradPlacement { .. })),
                &["placed"],
            );
        }
        check(
            error_of(rows.vary(&[0])),
            |error| matches!(error, Error::DTensor(DTensorError::NotReplicated { placement: S(0), .. })),
            &["0 (a)", "`gather_vary`"],
        );
        check(
            error_of(rows.vary(&[2])),
            |error| matches!(error, Error::Mesh(MeshError::DimOutOfRange { mesh_dim: 2, ndim: 2, .. })),
            &["below 2"],
        );
        for distribution in [
            Distribution::Bernoulli(1.5),
            Distribution::Uniform(1.0, 1.0),
            Distribution::Normal(0.0, -1.0),
            Distribution::Normal(0.0, f64::NAN),
        ] {
            check(
                error_of(DTensor::<2>::random([4, 4], distribution, 0, mesh, &[R, R], &device)),
                |error| matches!(error, Error::DTensor(DTensorError::Distribution { .. })),
                &["is not a distribution"],
            );
        }
        check(
            error_of(DTensor::<1, Int>::random_range([4], 3..3, 0, mesh, &[R, R], &device)),
            |error| matches!(error, Error::DTensor(DTensorError::Distribution { .. })),
            &["3..3", "empty"],
        );
        let line = DeviceMesh::new(mesh.world(), [4], ["line"])?;
        let on_line = DTensor::from_local(x(), &line, &[R])?;
        let mismatch = whole.spec().check_same_mesh(on_line.spec()).unwrap_err();
        check(
            mismatch.into(),
            |error| matches!(error, Error::DTensor(DTensorError::MeshMismatch { .. })),
            &["line", "`full_tensor`"],
        );
        Ok(())
    });
}

#[test]
fn a_rank_outside_the_mesh_is_told_so() {
    let found = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::from_ranks(world, [0, 2], [2], ["pair"])?;
        let device = Device::flex();
        let full = ramp([4, 2], 0.0, &device);
        let results = [
            DTensor::from_local(full.clone(), &mesh, &[R]),
            DTensor::from_local_checked(full.clone(), &mesh, &[R]),
            DTensor::distribute_local(full.clone(), &mesh, &[S(0)]),
            DTensor::distribute_tensor(full, &mesh, &[S(0)]),
            DTensor::zeros([4, 2], &mesh, &[S(0)], &device),
        ];
        Ok::<_, Error>(results.map(|result| match result {
            Err(Error::Mesh(MeshError::NotAMember { rank, .. })) => Some(rank),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        }))
    });
    let found = found.unwrap();
    assert_eq!(found, [[None; 5], [Some(1); 5], [None; 5]]);
}

#[test]
fn ranks_that_disagree_are_found_by_the_checked_constructor() {
    on_mesh(&[2, 2], |world, mesh| {
        let device = Device::flex();
        let rank = world.rank();
        // Uneven parts: the global shape is found.
        let full = ramp([5, 3], 0.0, &device);
        let part = DTensor::distribute_local(full.clone(), mesh, &[S(0), S(1)])?.to_local();
        let found = DTensor::from_local_checked(part, mesh, &[S(0), S(1)])?;
        assert_eq!(found.dims(), [5, 3]);
        assert_eq!(found.full_tensor()?.into_data(), full.into_data());

        let own = ramp([4, 2], if rank == 2 { 1.0 } else { 0.0 }, &device);
        let error = error_of(DTensor::from_local_checked(own.clone(), mesh, &[R, R]));
        let expected = DTensorError::RanksDisagree {
            what: "the values",
            rank: 0,
            other: 2,
            found: String::new(),
            other_found: String::new(),
            remedy: "",
        };
        assert_disagree(&error, &expected);
        assert!(error.to_string().contains("`distribute_tensor`"), "{error}");
        // Along `b` ranks 0 and 1 are equal, and so are 2 and 3 once shifted alike.
        let own = ramp([4, 2], if rank >= 2 { 1.0 } else { 0.0 }, &device);
        DTensor::from_local_checked(own, mesh, &[S(0), R])?;

        let rows = if rank == 3 { 1 } else { 2 };
        let error = error_of(DTensor::from_local_checked(ramp([rows, 2], 0.0, &device), mesh, &[R, S(1)]));
        assert!(matches!(error, Error::DTensor(DTensorError::LocalShape { rank: 3, .. })), "{error}");

        let dtype = if rank == 1 { DType::F16 } else { DType::F32 };
        let own = ramp([2, 2], 0.0, &device).cast(dtype);
        let error = error_of(DTensor::from_local_checked(own, mesh, &[S(0), R]));
        assert!(
            error.to_string().contains("ranks 0 and 1 disagree on the dtype of one tensor: f32 and f16"),
            "{error}"
        );

        let own = ramp([2, 2], 0.0, &device.clone().autodiff()).set_require_grad(rank != 2);
        let error = error_of(DTensor::from_local_checked(own, mesh, &[S(0), R]));
        assert!(error.to_string().contains("require_grad = true and require_grad = false"), "{error}");
        Ok(())
    });

    fn assert_disagree(error: &Error, expected: &DTensorError) {
        let key = |error: &DTensorError| match error {
            DTensorError::RanksDisagree { what, rank, other, .. } => (*what, *rank, *other),
            other => panic!("{other}"),
        };
        match error {
            Error::DTensor(error) => assert_eq!(key(error), key(expected)),
            other => panic!("{other}"),
        }
    }
}

// -------------------------------------------------------------------------------- factories

fn everywhere<const D: usize, K: Kind>(
    shape: [usize; D],
    make: impl Fn(&DeviceMesh, &[Placement]) -> Result<DTensor<D, K>> + Sync,
) -> TensorData {
    let mut all = Vec::new();
    for mesh_shape in [&[1][..], &[2], &[4], &[2, 2]] {
        all.extend(on_mesh(mesh_shape, |_, mesh| {
            let made = placements_of(mesh.ndim(), D).into_iter().map(|placements| {
                let tensor = make(mesh, &placements)?;
                assert_eq!(tensor.dims(), shape);
                Ok(tensor.full_tensor()?.into_data())
            });
            made.collect::<Result<Vec<_>>>()
        }));
    }
    all.into_iter().flatten().all_equal_value().unwrap()
}

#[test]
fn factories_make_the_same_tensor_on_every_mesh() {
    let device = &Device::flex();
    let shape = [5, 7];
    let zeros = everywhere(shape, |mesh, p| DTensor::<2>::zeros(shape, mesh, p, device));
    assert_eq!(zeros, Tensor::<2>::zeros(shape, device).into_data());
    let ones = everywhere(shape, |mesh, p| DTensor::<2, Int>::ones(shape, mesh, p, device));
    assert_eq!(ones, Tensor::<2, Int>::ones(shape, device).into_data());
    let full = everywhere(shape, |mesh, p| DTensor::<2>::full(shape, 2.5, mesh, p, (device, DType::F16)));
    assert_eq!(full, Tensor::<2>::full(shape, 2.5, (device, DType::F16)).into_data());
    let falses = everywhere(shape, |mesh, p| DTensor::<2, Bool>::zeros(shape, mesh, p, device));
    assert_eq!(falses, Tensor::<2, Bool>::zeros(shape, device).into_data());
    let range = everywhere([9], |mesh, p| DTensor::<1, Int>::arange(-4..5, mesh, p, device));
    assert_eq!(range, Tensor::<1, Int>::arange(-4..5, device).into_data());

    for distribution in [
        Distribution::Default,
        Distribution::Uniform(-1.0, 3.0),
        Distribution::Normal(1.0, 0.5),
        Distribution::Bernoulli(0.4),
    ] {
        let draw =
            |seed| everywhere(shape, move |mesh, p| DTensor::<2>::random(shape, distribution, seed, mesh, p, device));
        assert_ne!(draw(1), draw(2), "{distribution:?}");
    }
    let tokens = everywhere(shape, |mesh, p| DTensor::<2, Int>::random_range(shape, 0..50, 3, mesh, p, device));
    assert!(tokens.iter::<i64>().all(|token| (0..50).contains(&token)));
}

/// Frozen values, computed by a second implementation: a change of generator or of the numbering
/// must not go unnoticed.
#[test]
fn random_values_do_not_move() {
    on_mesh(&[1], |_, mesh| {
        let draw = |distribution| -> Result<Vec<f32>> {
            Ok(values(DTensor::<1>::random([6], distribution, 7, mesh, &[S(0)], &Device::flex())?.to_local()))
        };
        assert_eq!(draw(Distribution::Default)?, FROZEN_UNIFORM);
        assert_eq!(draw(Distribution::Normal(0.0, 1.0))?, FROZEN_NORMAL);
        Ok(())
    });
}

const FROZEN_UNIFORM: [f32; 6] = [0.9545971, 0.7501522, 0.114177346, 0.085657835, 0.40696037, 0.79528403];
const FROZEN_NORMAL: [f32; 6] = [0.0002914693, -0.30484697, 1.7887576, 1.0678722, 0.37640348, -1.2870117];

#[test]
fn factories_follow_the_device_into_autodiff() {
    on_mesh(&[2], |_, mesh| {
        for device in tracked_devices() {
            let x = DTensor::<1>::ones([4], mesh, &[S(0)], &device)?.require_grad();
            let leaf = x.local().clone();
            let grads = x.full_tensor()?.powi_scalar(2).sum().backward();
            assert_eq!(values(leaf.grad(&grads).unwrap()), [2.0; 2]);
        }
        Ok(())
    });
}

// ------------------------------------------------------------------------- no work for nothing

#[test]
fn an_unchanged_layout_costs_nothing() {
    on_mesh(&[2, 1], |world, mesh| {
        for device in tracked_devices() {
            let leaf = ramp([4, 4], 0.0, &device).require_grad();
            let x = DTensor::from_local(leaf, mesh, &[S(0), R])?;
            world.ledger().reset();
            // The mesh dimension of size 1 may say what it likes.
            let y = x.redistribute(&[S(0), R])?.redistribute(&[S(0), S(1)])?.redistribute(&[S(0), SUM])?;
            assert!(y.local().is_require_grad(), "the leaf itself comes back");
            assert_eq!(y.placements(), [S(0), SUM]);
            let z = y.redistribute(&[S(0), R])?;
            assert!(z.vary(&[1])?.is_require_grad());
            assert_eq!(world.ledger().total(|_| true).calls, 0);
        }
        Ok(())
    });
}

#[test]
fn without_gradients_nothing_is_recorded() {
    on_mesh(&[2], |world, mesh| {
        for device in devices() {
            let x = DTensor::from_local(ramp([4, 4], 0.0, &device), mesh, &[S(0)])?;
            let y = x.clone().redistribute(&[S(1)])?.redistribute(&[R])?;
            assert!(!y.local().is_tracked());
            assert_eq!(y.local().device().is_autodiff(), device.is_autodiff());
            assert_eq!(y.local().gradient_checkpointing_strategy(), device.gradient_checkpointing_strategy());
            assert!(!y.vary(&[0])?.is_tracked());
            world.ledger().reset();
            assert!(!x.gather_vary(&[0])?.is_tracked());
            assert!(!x.clone().gather_vary(&[0])?.is_tracked());
            assert_eq!(world.ledger().calls(Op::AllGather), 1, "the second is cached");
        }
        Ok(())
    });
}

// ---------------------------------------------------------------------------------- gradients

/// Rules of the table that need more than PyTorch's values: (from, to, local values by rank,
/// gradient by rank of `sum(g * full)` with `g = [1, 2, 3]`).
#[test]
fn reductions_have_their_true_derivative() {
    // Its square is infinite.
    const BIG: f32 = (1u128 << 100) as f32;
    let nan = f32::NAN;
    let cases = [
        (AVG, [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]], [[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]]),
        // Ties share evenly.
        (MAX, [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]], [[0.0, 1.0, 3.0], [1.0, 1.0, 0.0]]),
        (Partial(PartialOp::Min), [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]], [[1.0, 1.0, 0.0], [0.0, 1.0, 3.0]]),
        // Zeros, and a product that overflows.
        (PRODUCT, [[0.0, 0.0, BIG], [4.0, 0.0, BIG]], [[4.0, 0.0, 3.0 * BIG], [0.0, 0.0, 3.0 * BIG]]),
        (SUM, [[1.0, nan, 2.0], [4.0, 5.0, 0.0]], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]),
    ];
    on_mesh(&[2], |world, mesh| {
        for (device, (from, locals, expected)) in tracked_devices().iter().cartesian_product(cases) {
            for to in [R, S(0)] {
                let leaf = Tensor::<1>::from_floats(locals[world.rank()], device).require_grad();
                let y = DTensor::from_local(leaf.clone(), mesh, &[from])?.redistribute(&[to])?;
                let g = Tensor::<1>::from_floats([1.0, 2.0, 3.0], device);
                let g = DTensor::distribute_local(g, mesh, &[to])?.to_local();
                let grads = (y.to_local() * g).sum().backward();
                assert_eq!(values(leaf.grad(&grads).unwrap()), expected[world.rank()], "{from} -> {to}");
            }
        }
        Ok(())
    });
}

/// `loss = sum(w * tanh(2 x))` through every pair of layouts, against the single-device gradient.
#[test]
fn gradients_pass_every_pair_of_layouts_under_both_checkpointing_strategies() {
    let shape = [5, 4];
    for device in tracked_devices() {
        let reference = {
            let x = ramp(shape, -9.0, &device).div_scalar(10.0).require_grad();
            let w = ramp(shape, 1.0, &device);
            let grads = ((x.clone() * 2.0).tanh() * w).sum().backward();
            x.grad(&grads).unwrap()
        };
        for mesh_shape in [&[2][..], &[3], &[2, 2]] {
            on_mesh(mesh_shape, |_, mesh| {
                let all = placements_of(mesh.ndim(), 2);
                for (from, to) in all.iter().cartesian_product(&all) {
                    let full = ramp(shape, -9.0, &device).div_scalar(10.0).require_grad();
                    let x = DTensor::distribute_local(full, mesh, from)?;
                    let leaf = x.local().clone();
                    let doubled = DTensor::from_local_with_shape(leaf.clone() * 2.0, mesh, from, shape)?;
                    let y = doubled.redistribute(to)?.to_local().tanh();
                    let y = DTensor::from_local_with_shape(y, mesh, to, shape)?.redistribute(from)?;
                    let w = DTensor::distribute_local(ramp(shape, 1.0, &device), mesh, from)?;
                    let grads = (y.to_local() * w.to_local()).sum().backward();
                    let expected = DTensor::distribute_local(reference.clone(), mesh, from)?;
                    let grad = leaf.grad(&grads).unwrap();
                    assert_eq!(grad.into_data(), expected.to_local().into_data(), "{from:?} -> {to:?}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn other_float_types_keep_their_type_both_ways() {
    on_mesh(&[2], |_, mesh| {
        for dtype in [DType::F16, DType::BF16, DType::F64] {
            for (from, to) in
                [(S(0), R), (R, S(0)), (AVG, R), (MAX, S(0)), (PRODUCT, R), (S(0), S(1)), (R, SUM), (S(1), SUM)]
            {
                let device = Device::flex().autodiff();
                let local = ramp([2, 2], 1.0, &device).cast(dtype).detach().require_grad();
                let x = DTensor::from_local(local.clone(), mesh, &[from])?;
                let y = x.redistribute(&[to])?;
                assert_eq!((y.dtype(), y.local().dtype()), (dtype, dtype));
                let grads = y.to_local().sum().backward();
                assert_eq!(local.grad(&grads).unwrap().dtype(), dtype, "{from} -> {to}");
            }
        }
        Ok(())
    });
}

// --------------------------------------------------------------------------------------- vary

/// Three projections of one replicated activation, each rank with its own columns.
#[test]
fn q_k_and_v_share_one_all_reduce() {
    for device in tracked_devices() {
        let weight = |seed: f32| ramp([3, 4], seed, &device).div_scalar(10.0);
        let (reference_loss, reference_grad) = {
            let x = ramp([2, 3], 0.0, &device).require_grad();
            let qkv = [1.0, 2.0, 3.0].map(|seed| x.clone().matmul(weight(seed)).tanh().sum());
            let loss = qkv.into_iter().reduce(|a, b| a + b).unwrap();
            let grads = loss.backward();
            (loss.into_scalar::<f32>(), values(x.grad(&grads).unwrap()))
        };
        on_mesh(&[2], |world, mesh| {
            let leaf = ramp([2, 3], 0.0, &device).require_grad();
            // A second step over the same leaf needs a new handle: the first one's node is spent.
            let x = DTensor::from_local(leaf.clone(), mesh, &[R])?;
            for _ in 0..2 {
                world.ledger().reset();
                let mut loss = None;
                for (x, seed) in [x.clone(), x.clone(), x.clone()].into_iter().zip([1.0, 2.0, 3.0]) {
                    let columns = DTensor::distribute_local(weight(seed), mesh, &[S(1)])?;
                    let y = x.vary(&[0])?.matmul(columns.to_local()).tanh().sum();
                    loss = Some(loss.map_or(y.clone(), |loss| loss + y));
                }
                let loss = DTensor::from_local(loss.unwrap(), mesh, &[SUM])?.full_tensor()?;
                let grads = loss.backward();
                let ledger = world.ledger();
                assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
                assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 1, "the loss");
                assert_eq!(ledger.total(|_| true).calls, 2);
                assert!((loss.into_scalar::<f32>() - reference_loss).abs() < 1e-5);
                let grad = values(leaf.grad(&grads).unwrap());
                assert!(grad.iter().zip(&reference_grad).all(|(a, b)| (a - b).abs() < 1e-5), "{grad:?}");
            }
            Ok(())
        });
    }
}

/// The same from a row-sharded activation (sequence parallel): FSDP's row of the table.
#[test]
fn gather_vary_is_one_all_gather_and_one_reduce_scatter() {
    for device in tracked_devices() {
        let weight = ramp([3, 4], 1.0, &device).div_scalar(10.0);
        let reference = {
            let x = ramp([5, 3], 0.0, &device).div_scalar(20.0).require_grad();
            let loss = x.clone().matmul(weight.clone()).tanh().powi_scalar(2).sum();
            x.grad(&loss.backward()).unwrap()
        };
        for mesh_shape in [&[2][..], &[2, 2]] {
            on_mesh(mesh_shape, |world, mesh| {
                let tp = mesh.ndim() - 1;
                let mut placements = vec![R; mesh.ndim()];
                placements[tp] = S(0);
                let full = ramp([5, 3], 0.0, &device).div_scalar(20.0).require_grad();
                let x = DTensor::distribute_local(full, mesh, &placements)?;
                let leaf = x.local().clone();
                placements[tp] = S(1);
                let columns = DTensor::distribute_local(weight.clone(), mesh, &placements)?.to_local();
                world.ledger().reset();
                let clone = x.clone();
                let half = |x: &DTensor<2>, columns: Tensor<2>| -> Result<Tensor<1>> {
                    Ok(x.gather_vary(&[tp])?.matmul(columns).tanh().powi_scalar(2).sum().mul_scalar(0.5))
                };
                let loss = half(&x, columns.clone())? + half(&clone, columns)?;
                let grads = loss.backward();
                let ledger = world.ledger();
                assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
                assert_eq!(ledger.calls_in(Op::ReduceScatter, Phase::Backward), 1);
                assert_eq!(ledger.total(|_| true).calls, 2);
                placements[tp] = S(0);
                let expected = DTensor::distribute_local(reference.clone(), mesh, &placements)?.to_local();
                let (grad, expected) = (values(leaf.grad(&grads).unwrap()), values(expected));
                assert!(grad.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{grad:?} {expected:?}");
                Ok(())
            });
        }
    }
}

/// Every placement of a 2-D mesh, gathered on every set of mesh dimensions, where ranks that differ
/// along these weigh the result differently: the gradient is the sum of their terms.
#[test]
fn gather_vary_sums_the_terms_of_every_placement() {
    let shape = [5, 3];
    let device = Device::flex().autodiff();
    let weight = |along: &[usize]| ramp(shape, along.iter().fold(1.0, |sum, &at| 3.0 * sum + at as f32), &device);
    on_mesh(&[2, 2], |_, mesh| {
        for placements in placements_of(2, 2) {
            for dims in [&[0][..], &[1], &[0, 1]] {
                let full = ramp(shape, 0.0, &device).require_grad();
                let x = DTensor::distribute_local(full, mesh, &placements)?;
                let leaf = x.local().clone();
                let varied = x.gather_vary(dims)?;
                let mut after = placements.clone();
                dims.iter().for_each(|&dim| after[dim] = R);
                let own: Vec<usize> = dims.iter().map(|&dim| mesh.coordinate().unwrap()[dim]).collect();
                let part = DTensor::distribute_local(weight(&own), mesh, &after)?.to_local();
                let grads = (varied * part).sum().backward();
                let all = dims.iter().map(|_| 0..2).multi_cartesian_product();
                let sum = all.map(|along| weight(&along)).reduce(|a, b| a + b).unwrap();
                let expected = DTensor::distribute_local(sum, mesh, &placements)?.to_local();
                let grad = leaf.grad(&grads).unwrap();
                assert_eq!(grad.into_data(), expected.into_data(), "{placements:?} {dims:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_partial_value_can_vary_too() {
    on_mesh(&[2], |world, mesh| {
        let device = Device::flex().autodiff();
        let leaf = ramp([3], world.rank() as f32, &device).require_grad();
        let x = DTensor::from_local(leaf.clone(), mesh, &[AVG])?;
        let varied = x.gather_vary(&[0])?;
        assert_eq!(values(varied.clone()), [0.5, 1.5, 2.5]);
        let grads = (varied * (world.rank() as f32 + 1.0)).sum().backward();
        assert_eq!(values(leaf.grad(&grads).unwrap()), [1.5; 3]);
        Ok(())
    });
}

#[test]
fn local_gradients_are_summed_where_the_caller_says_so() {
    on_mesh(&[2, 2], |world, mesh| {
        let device = Device::flex().autodiff();
        let run = |placements: [Placement; 2], grad_placements: [Placement; 2]| -> Result<Vec<f32>> {
            let leaf = ramp([2], 0.0, &device).require_grad();
            let x = DTensor::from_local(leaf.clone(), mesh, &placements)?;
            let local = x.to_local_with_grad_placements(&grad_placements)?;
            let grads = (local * (world.rank() as f32)).sum().backward();
            Ok(values(leaf.grad(&grads).unwrap()))
        };
        let rank = world.rank();
        assert_eq!(run([R, R], [R, R])?, [rank as f32; 2]);
        assert_eq!(run([S(0), R], [S(0), SUM])?, [[1.0, 1.0, 5.0, 5.0][rank]; 2]);
        assert_eq!(run([R, SUM], [SUM, R])?, [[2.0, 4.0, 2.0, 4.0][rank]; 2]);
        assert_eq!(run([R, SUM], [SUM, SUM])?, [6.0; 2]);
        Ok(())
    });
}

// ------------------------------------------------------------------------------------ the rest

#[test]
fn a_rank_that_leaves_before_backward_is_named_by_those_that_wait() {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["a"])?;
        let leaf = ramp([4], 0.0, &Device::flex().autodiff()).require_grad();
        let x = DTensor::from_local(leaf, &mesh, &[R])?;
        let y = x.redistribute(&[S(0)])?.to_local().sum();
        if world.rank() == 0 {
            y.backward();
        }
        Ok::<_, Error>(())
    })
    .unwrap_err();
    let Error::Comm(CommError::RankLeft { rank: 1, during }) = &error.cause else {
        panic!("{error}");
    };
    assert!(during.to_string().contains("redistribute [R] -> [S(0)]"), "{during}");
}

#[test]
fn a_tensor_and_its_spec_say_what_they_are() {
    let text = on_mesh(&[2, 2], |_, mesh| {
        let x = DTensor::<2>::zeros([8, 16], mesh, &[S(0), R], &Device::flex())?;
        let spec = x.spec().with_layout(Layout::new(&[2, 2], &[S(0), S(1)])?)?;
        let line = Layout::new(&[2, 2], &[S(0), S(0)])?;
        let line = DTensorSpec::new(mesh, line, Shape::from([5]), DType::I64)?;
        Ok((x.to_string(), format!("{x:?}"), picture(&spec), picture(x.spec()), picture(&line)))
    });
    let (display, debug, cells, rows, line) = &text[0];
    assert_eq!(display, "DTensor[8, 16] f32 on DeviceMesh(a=2, b=2; ranks 0..4): [S(0), R], local [4, 16]");
    assert_eq!(display, debug);
    assert_eq!(
        cells,
        "\
[8, 16] f32 on DeviceMesh(a=2, b=2; ranks 0..4): [S(0), S(1)]

       0..8   8..16
     +------+-------+
0..4 | 0    | 1     |
     +------+-------+
4..8 | 2    | 3     |
     +------+-------+
"
    );
    assert!(rows.contains("| 0 1   |\n") && rows.contains("| 2 3   |\n"), "{rows}");
    assert!(line.contains("0..2   2..3   3..4   4..5"), "{line}");
    assert!(line.contains("| 0    | 1    | 2    | 3    |"), "{line}");
}
