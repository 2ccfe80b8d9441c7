//! Streams of seeds: how they advance, and going on with one that was saved.

use burn::nn::DropoutConfig;
use burn::tensor::Distribution;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::ops::random::{self, RngState};
use burn_dtensor::prelude::*;
use itertools::Itertools;

use super::random::bits;
use super::{R, S, on_mesh};

/// The bits of what was drawn.
#[derive(Debug, PartialEq)]
struct Draws {
    /// By all ranks together.
    shared: Vec<Vec<u32>>,
    /// By this rank.
    own: Vec<Vec<u32>>,
}

/// Everything that draws.
fn draws(mesh: &DeviceMesh, placements: &[Placement]) -> Result<Draws> {
    let device = mesh.device().clone().autodiff();
    let (mut shared, mut own) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let x = DTensor::<2>::ones([5, 6], mesh, placements, &device)?;
        shared.push(bits(x.random_like(Distribution::Default).full_tensor()?));
        shared.push(bits(
            DropoutConfig::new(0.5)
                .init()
                .forward_dtensor(x)
                .full_tensor()?,
        ));
        let seed = random::next_seed();
        let made = DTensor::<2>::random(
            [5, 6],
            Distribution::Default,
            seed,
            mesh,
            placements,
            &device,
        )?;
        shared.push(bits(made.full_tensor()?));
        own.push(bits(random::tensor::<1>(
            [6],
            Distribution::Default,
            &device,
        )));
        own.push(bits(burn_dtensor::nn::dropout(
            burn::Tensor::<1>::ones([64], &device),
            0.5,
        )));
    }
    Ok(Draws { shared, own })
}

/// As a checkpoint keeps it.
fn saved_and_loaded(stream: RngState) -> RngState {
    serde_json::from_str(&serde_json::to_string(&stream).expect("it is saved"))
        .expect("it is loaded")
}

#[test]
fn a_resumed_stream_draws_what_the_uninterrupted_one_does_on_any_mesh() {
    let runs = on_mesh(&[4], |_, mesh| {
        random::seed(17);
        let before = draws(mesh, &[S(0)])?;
        Ok((before, random::rng_state(), draws(mesh, &[S(0)])?))
    });
    let (before, stream, after) = &runs[0];
    assert_ne!(before, after);
    assert!(
        runs.iter().map(|(_, stream, _)| stream).all_equal(),
        "every rank saves the same"
    );
    for shape in [&[1][..], &[2], &[3], &[2, 2]] {
        for placement in [R, S(1)] {
            let resumed = on_mesh(shape, |_, mesh| {
                random::set_rng_state(saved_and_loaded(*stream));
                draws(mesh, &vec![placement; shape.len()])
            });
            for (rank, drawn) in resumed.into_iter().enumerate() {
                assert_eq!(drawn.shared, after.shared, "rank {rank} of {shape:?}");
                assert_eq!(
                    drawn.own, runs[rank].2.own,
                    "rank {rank} of {shape:?}: its own"
                );
            }
        }
    }
}

/// What a stream has drawn shows in it: one seed a call, whatever was drawn and how it lies.
#[test]
fn a_stream_advances_by_one_for_each_call_whatever_it_draws() {
    let after = |placements: [Placement; 2], shape: [usize; 2], drop: bool, own: usize| {
        let streams = on_mesh(&[2, 3], |_, mesh| {
            random::seed(1);
            let device = mesh.device().clone();
            let x = DTensor::<2>::ones(shape, mesh, &placements, &device)?;
            let _ = x.random_like(Distribution::Default);
            if drop {
                // Nothing is dropped outside of training, and nothing drawn.
                let _ = DropoutConfig::new(0.5).init().forward_dtensor(x);
            }
            for _ in 0..own {
                let _ = random::tensor::<1>([1000], Distribution::Default, &device);
            }
            Ok((random::rng_state(), random::next_seed()))
        });
        assert!(streams.iter().all_equal());
        streams[0]
    };
    let (stream, next) = after([S(0), S(1)], [4, 6], false, 0);
    assert_eq!(after([R, R], [4, 6], false, 0).0, stream);
    assert_eq!(after([S(1), R], [13, 17], true, 0).0, stream);
    let (with_own, next_with_own) = after([R, R], [4, 6], false, 2);
    assert_ne!(with_own, stream, "what is a rank's own is counted too");
    assert_eq!(next_with_own, next, "and apart");
    random::seed(1);
    let fresh = random::rng_state();
    random::next_seed();
    assert_eq!(random::rng_state(), stream, "one call");
    assert!(
        format!("{stream:?}").contains(" shared: 1,"),
        "{stream:?} counts by one"
    );
    assert_ne!(fresh, stream);
}

#[test]
fn a_thread_without_a_stream_goes_on_with_one() {
    random::seed(8);
    let stream = random::rng_state();
    let expected = random::next_seed();
    let on_a_thread = std::thread::spawn(move || {
        assert!(
            std::panic::catch_unwind(random::rng_state).is_err(),
            "it has none to be saved"
        );
        random::set_rng_state(stream);
        random::next_seed()
    });
    assert_eq!(on_a_thread.join().expect("no panic"), expected);
    let ranks = launch(Launch::threads(2), |_| Ok(random::rng_state()));
    let ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    random::seed(0);
    let expected = random::rng_state();
    assert_eq!(
        ranks,
        [(0, expected), (1, expected)],
        "a rank's begins at seed 0"
    );
}
