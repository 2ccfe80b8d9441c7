//! Random values are the same on every mesh, to the bit.

use burn::nn::DropoutConfig;
use burn::tensor::{Device, Distribution, Tensor};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::ops::{module, random};
use burn_dtensor::prelude::*;
use itertools::Itertools;

use super::{R, S, SUM, on_mesh, placements_of, ramp, values};
use crate::launched;

const SHAPE: [usize; 2] = [5, 6];
const MESHES: [&[usize]; 4] = [&[1], &[2], &[4], &[2, 2]];

pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// What `program` gives on every rank, for every mesh and every placement of shards and replicas:
/// asserted to be one thing.
pub fn same_everywhere(
    program: impl Fn(&DeviceMesh, &[Placement]) -> Result<Vec<Vec<u32>>> + Sync,
) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for mesh_shape in MESHES {
        for placements in placements_of(mesh_shape.len(), 2) {
            for outcome in on_mesh(mesh_shape, |_, mesh| program(mesh, &placements)) {
                all.push((format!("mesh {mesh_shape:?}, {placements:?}"), outcome));
            }
        }
    }
    let (first, expected) = all[0].clone();
    for (at, outcome) in all {
        assert_eq!(outcome, expected, "{at} against {first}");
    }
    expected
}

#[test]
fn initialization_is_bitwise_the_same_on_every_mesh() {
    let distributions = [
        Distribution::Default,
        Distribution::Uniform(-0.1, 0.1),
        Distribution::Normal(0.0, 0.02),
        Distribution::Bernoulli(0.3),
    ];
    let bits = same_everywhere(|mesh, placements| {
        random::seed(7);
        let one = |distribution| {
            let seed = random::next_seed();
            let made =
                DTensor::<2>::random(SHAPE, distribution, seed, mesh, placements, mesh.device())?;
            let like = made.random_like(distribution);
            Ok([bits(made.full_tensor()?), bits(like.full_tensor()?)])
        };
        let all: Result<Vec<_>> = distributions.into_iter().map(one).collect();
        Ok(all?.into_iter().flatten().collect())
    });
    assert!(bits.iter().all_unique(), "every draw has a seed of its own");
}

/// What is kept whole and what is cut, at once: rows over the first mesh dimension.
#[test]
fn replicas_draw_the_same_and_shards_differ() {
    let draw = |like: bool, distribution| {
        on_mesh(&[2, 2], |_, mesh| {
            random::seed(4);
            let ones = DTensor::<2>::ones([8, 6], mesh, &[S(0), R], mesh.device())?;
            let seed = random::next_seed();
            let made =
                DTensor::<2>::random([8, 6], distribution, seed, mesh, &[S(0), R], mesh.device())?;
            Ok(bits(
                if like {
                    ones.random_like(distribution)
                } else {
                    made
                }
                .to_local(),
            ))
        })
    };
    for distribution in [
        Distribution::Default,
        Distribution::Normal(0.0, 1.0),
        Distribution::Uniform(2.0, 3.0),
    ] {
        for like in [false, true] {
            let parts = draw(like, distribution);
            assert_eq!((&parts[0], &parts[2]), (&parts[1], &parts[3]), "replicas");
            assert!(
                parts[0].iter().zip(&parts[2]).all(|(a, b)| a != b),
                "shards"
            );
            assert_eq!(draw(like, distribution), parts, "at every run");
        }
    }
    let masks = on_mesh(&[2, 2], |_, mesh| {
        let x = DTensor::<2>::ones([64, 6], mesh, &[S(0), R], mesh.device())?;
        Ok(bits(module::dropout(x, 0.5, 1).to_local()))
    });
    assert_eq!((&masks[0], &masks[2]), (&masks[1], &masks[3]), "replicas");
    let same = masks[0]
        .iter()
        .zip(&masks[2])
        .filter(|(a, b)| a == b)
        .count();
    // Of 192 elements about a half: five standard errors.
    assert!(
        same.abs_diff(96) < 35,
        "{same} of 192 are alike on two shards"
    );
}

#[test]
fn dropout_is_bitwise_the_same_on_every_mesh_forward_and_backward() {
    let bits = same_everywhere(|mesh, placements| {
        let device = mesh.device().clone().autodiff();
        let leaf =
            |offset| DTensor::distribute_replicated(ramp(SHAPE, offset, &device), mesh, placements);
        let x = leaf(0.5)?.require_grad();
        let y = module::dropout(x.clone(), 0.3, 11);
        let grads = (y.local().clone() * leaf(-7.25)?.to_local())
            .sum()
            .backward();
        let grad = DTensor::from_local_with_shape(
            x.local().grad(&grads).unwrap(),
            mesh,
            placements,
            SHAPE,
        )?;
        Ok(vec![bits(y.full_tensor()?), bits(grad.full_tensor()?)])
    });
    let kept = bits[0].iter().filter(|&&value| value != 0).count();
    assert!((10..30).contains(&kept), "{kept} of 30");
    for (&y, x) in bits[0]
        .iter()
        .zip(values(ramp(SHAPE, 0.5, &Device::flex())))
    {
        assert!(
            y == 0 || (f32::from_bits(y) / x - 1.0 / 0.7).abs() < 1e-5,
            "what is kept is scaled"
        );
    }
}

/// Every rank drops the same elements of its term of a sum.
#[test]
fn a_pending_sum_passes_dropout() {
    let plain = on_mesh(&[1], |_, mesh| {
        let x = DTensor::distribute_replicated(ramp(SHAPE, 1.0, &Device::flex()), mesh, &[R])?;
        Ok(values(module::dropout(x, 0.5, 3).full_tensor()?))
    });
    on_mesh(&[2], |_, mesh| {
        let half = ramp(SHAPE, 1.0, &Device::flex()).div_scalar(2.0);
        let y = module::dropout(DTensor::from_local(half, mesh, &[SUM])?, 0.5, 3);
        assert_eq!(y.placements(), [SUM]);
        assert_eq!(values(y.full_tensor()?), plain[0]);
        Ok(())
    });
}

#[test]
fn seeds_are_a_stream_that_starts_equally_on_every_rank() {
    let drawn = on_mesh(&[4], |_, _| {
        let first: [u64; 3] = std::array::from_fn(|_| random::next_seed());
        random::seed(0);
        assert_eq!(
            std::array::from_fn(|_| random::next_seed()),
            first,
            "a rank begins at seed 0"
        );
        random::seed(1);
        let second: [u64; 3] = std::array::from_fn(|_| random::next_seed());
        Ok(first
            .into_iter()
            .chain(second)
            .chain((0..3).map(|rank| random::fold_in(1, rank)))
            .collect_vec())
    });
    assert!(drawn.iter().all_equal());
    assert!(drawn[0].iter().all_unique(), "{drawn:?}");
}

#[test]
fn a_probability_to_drop_is_below_one() {
    on_mesh(&[1], |_, mesh| {
        let x = DTensor::<2>::ones(SHAPE, mesh, &[S(0)], mesh.device())?;
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            module::dropout(x.clone(), 1.0, 0)
        }));
        let error = refused
            .expect_err("nothing would be left")
            .downcast::<Error>()
            .expect("a typed error");
        assert!(error.to_string().contains("dropout of 1"), "{error}");
        assert_eq!(values(module::dropout(x, 0.0, 0).to_local()), [1.0; 30]);
        Ok(())
    });
}

/// What dropout keeps of ones on the calling rank's slice called `tp`.
fn kept(mesh: &DeviceMesh, placement: Placement) -> Result<Vec<u32>> {
    let (slice, device) = (mesh.slice("tp")?, mesh.device().clone().autodiff());
    let x = DTensor::<2>::ones(SHAPE, &slice, &[placement], &device)?;
    Ok(bits(
        DropoutConfig::new(0.5)
            .init()
            .forward_dtensor(x)
            .full_tensor()?,
    ))
}

/// Without a word about seeds: each group has rows of its own, and one tensor is one on its ranks.
#[test]
fn data_parallel_groups_drop_different_elements_and_the_ranks_of_one_the_same() {
    let run = |shape: [usize; 2], placement| {
        let masks = launch(Launch::threads(shape[0] * shape[1]), |world| {
            kept(&DeviceMesh::new(world, shape, ["dp", "tp"])?, placement)
        });
        masks
            .map(launched::values)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let masks = run([3, 2], R);
    let groups: Vec<_> = masks
        .chunks(2)
        .map(|group| group.iter().all_equal_value().expect("one mask a group"))
        .collect();
    assert!(groups.iter().all_unique(), "{groups:?}");
    // However many ranks hold a group's tensor, and how.
    assert_eq!(run([3, 2], S(1)), masks);
    assert_eq!(
        run([3, 1], R),
        masks.iter().step_by(2).cloned().collect_vec()
    );
    // A mesh of one group is as one that is no slice.
    let full = on_mesh(&[2], |_, mesh| {
        let x = DTensor::<2>::ones(SHAPE, mesh, &[S(0)], &mesh.device().clone().autodiff())?;
        Ok(bits(
            DropoutConfig::new(0.5)
                .init()
                .forward_dtensor(x)
                .full_tensor()?,
        ))
    });
    assert_eq!(&full, &masks[..2]);
}

#[test]
fn slices_of_slices_and_flattened_ones_are_told_apart() {
    let found = launch(Launch::threads(12), |world| {
        let mesh = DeviceMesh::new(world, [2, 3, 2], ["pp", "dp", "tp"])?;
        let stage = mesh.slice(["dp", "tp"])?;
        let flat = mesh.flatten(["dp", "tp"])?;
        let tp = stage.slice("tp")?;
        assert_eq!(tp.slice_index(), mesh.slice("tp")?.slice_index());
        Ok([
            mesh.slice_index(),
            stage.slice_index(),
            flat.slice_index(),
            tp.slice_index(),
        ])
    });
    let expected = (0..12)
        .map(|rank| (rank, [0, rank / 6, rank / 6, rank / 2]))
        .collect_vec();
    assert_eq!(found.unwrap_or_else(|error| panic!("{error}")), expected);
}

/// Seeds of a thread are none of any other's, and those of one thread are the same on all ranks.
#[test]
fn every_thread_of_a_rank_draws_from_a_stream_of_its_own() {
    let masks = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [1, 2], ["dp", "tp"])?;
        let on_a_new_thread = || {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| [kept(&mesh, R), kept(&mesh, R)])
                    .join()
                    .expect("no panic")
            })
        };
        let [a, b] = on_a_new_thread();
        let [c, d] = on_a_new_thread();
        [kept(&mesh, R), a, b, kept(&mesh, R), c, d]
            .into_iter()
            .collect::<Result<Vec<_>>>()
    });
    let masks = masks
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(masks[0], masks[1]);
    assert!(masks[0].iter().all_unique(), "{:?}", masks[0]);
}

/// The first tensor that a thread draws says which ranks run it, and how many such threads there
/// were.
#[test]
fn threads_whose_first_tensors_are_on_other_groups_of_ranks_draw_from_other_streams() {
    let masks = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let tp = mesh.slice("tp")?;
        let draw = |mesh: &DeviceMesh| {
            let x = DTensor::<2>::ones(
                SHAPE,
                mesh,
                &vec![R; mesh.shape().len()],
                &mesh.device().clone().autodiff(),
            )?;
            Ok::<_, Error>(bits(
                DropoutConfig::new(0.5)
                    .init()
                    .forward_dtensor(x)
                    .full_tensor()?,
            ))
        };
        let on_a_new_thread = |mesh: &DeviceMesh| {
            std::thread::scope(|scope| scope.spawn(|| draw(mesh)).join().unwrap())
        };
        Ok([on_a_new_thread(&mesh)?, on_a_new_thread(&tp)?])
    });
    let masks = masks
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"));
    for [full, tp] in &masks {
        assert_ne!(full, tp);
    }
    assert!(masks.iter().map(|[full, _]| full).all_equal());
    assert_eq!(masks[0][1], masks[1][1]);
    assert_eq!(masks[2][1], masks[3][1]);
    assert_ne!(masks[0][1], masks[2][1]);
}

#[test]
fn a_seed_is_refused_on_a_thread_that_has_no_stream() {
    let draw = || std::panic::catch_unwind(random::next_seed);
    let refused = std::thread::spawn(draw)
        .join()
        .expect("caught")
        .expect_err("no stream");
    // No launch would catch a typed error there.
    let told = refused
        .downcast::<String>()
        .expect("a panic with the error's text");
    assert!(told.contains("Call `random::seed` on it"), "{told}");
    let seeded = std::thread::spawn(move || {
        random::seed(0);
        draw()
    });
    assert!(seeded.join().expect("caught").is_ok());
}

/// An operator has given it one that other ranks have too.
#[test]
fn values_of_a_ranks_own_are_refused_on_a_thread_whose_stream_ranks_share() {
    let refused = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let draw = || {
            kept(&mesh, R)?;
            let own = || random::tensor::<1>([2], Distribution::Default, world.device());
            Ok::<_, Error>(std::panic::catch_unwind(std::panic::AssertUnwindSafe(own)).is_err())
        };
        let refused = std::thread::scope(|scope| scope.spawn(draw).join().expect("caught"))?;
        Ok((refused, draw()?))
    });
    assert_eq!(
        refused.unwrap_or_else(|error| panic!("{error}")),
        [(0, (true, false)), (1, (true, false))]
    );
}
