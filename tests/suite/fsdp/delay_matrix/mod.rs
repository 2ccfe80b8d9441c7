//! The matrix: every delay, in every mode of resharding, in every precision, on one rank to eight,
//! to the bit.
//!
//! | | |
//! |---|---|
//! | delays | before and after all-gathers, in forward, before and after reductions, before the optimizer, everywhere |
//! | of | one rank, drawn anew for each step; all |
//! | resharding | `Auto`, `Always`, `Never`, `Ranks` where they divide |
//! | precision | single, bf16 reduced in single, f16 |
//! | ranks | 1, 2, 3, 4, 8, and 2 x 2 with replicas: threads; 2, 3 and 4: processes |
//! | gathered ahead | nothing, the next two units, everything |
//!
//! Of 2, 3 and 4 ranks every combination, but that all are late in single precision alone; of
//! others in half precision, and of processes, fewer delays. Without `LONG_TESTS`, of more than 2
//! ranks a third of the delays, and each delay in one mode only, which is another in each
//! precision; without a delay in every mode. What is expected is data parallelism by hand
//! ([`by_hand`]), whose reductions add in the same tree; and of that, in single precision, one
//! device that sees the batches of all ranks.

mod delays;
mod net;
#[cfg(feature = "mpi")]
mod processes;
mod train;

use burn_dtensor::Result;
use burn_dtensor::fsdp::ReshardAfterForward;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;

use super::support::{furthest, max_diff};
use delays::{Late, Place, Whom};
use net::Net;
use train::{Cell, Precision, PrefetchMode, Trained, alone, by_hand, steps};

/// Nobody is late, and these ranks are, wherever.
fn delays(of: &[Whom]) -> Vec<Option<Late>> {
    let late = Place::ALL.into_iter().cartesian_product(of.to_vec());
    [None]
        .into_iter()
        .chain(late.map(|(place, whom)| Some(Late { place, whom })))
        .collect()
}

/// The modes of resharding that so many ranks have.
fn modes(ranks: usize) -> Vec<ReshardAfterForward> {
    use ReshardAfterForward::{Always, Auto, Never, Ranks};
    let few = (2..ranks)
        .rev()
        .find(|few| ranks.is_multiple_of(*few))
        .map(Ranks);
    [Auto, Always, Never].into_iter().chain(few).collect()
}

fn test(shape: &[usize]) -> MeshTest {
    MeshTest::new(shape, &["replicate", "shard"][2 - shape.len()..])
}

/// Trains each cell of one precision; returns what all of them have made.
fn to_the_bit(net: &Net, mesh: &DeviceMesh, cells: &[Cell]) -> Result<Trained> {
    let expected = by_hand(net, mesh, cells[0].precision)?;
    let mut all = expected.weights.values().flatten().chain(&expected.losses);
    assert!(all.all(|x| x.is_finite()) && expected.losses.last() < expected.losses.first());
    for cell in cells {
        assert_eq!(cell.train(net, mesh)?, expected, "{cell:?}");
    }
    Ok(expected)
}

/// Every combination of these.
fn cells(
    precision: Precision,
    modes: &[ReshardAfterForward],
    prefetch: PrefetchMode,
    late: &[Option<Late>],
) -> Vec<Cell> {
    let pairs = modes
        .iter()
        .copied()
        .cartesian_product(late.iter().copied());
    pairs
        .map(|(reshard, late)| Cell {
            precision,
            reshard,
            prefetch,
            late,
        })
        .collect()
}

/// On ranks that are threads, in every precision and mode; in single precision as one device
/// trains, too.
fn train_on(shape: &[usize], prefetch: PrefetchMode, late: fn(Precision) -> Vec<Option<Late>>) {
    let net = Net::new();
    for precision in Precision::ALL {
        let late = late(precision);
        let every = if shape == [2] || late.len() < 3 || crate::effort::is_long() {
            1
        } else {
            3
        };
        let late: Vec<_> = late.into_iter().step_by(every).collect();
        let modes = modes(shape[shape.len() - 1]);
        let mut cells = cells(precision, &modes, prefetch, &late);
        if !crate::effort::is_long() {
            let mut at = 0..;
            let is_tried = |mode: usize, delay: usize| {
                delay == 0 || (mode + delay + precision as usize).is_multiple_of(modes.len())
            };
            cells.retain(|_| {
                at.next()
                    .is_some_and(|at: usize| is_tried(at / late.len(), at % late.len()))
            });
        }
        let ranks = test(shape).run(|mesh| to_the_bit(&net, mesh, &cells));
        println!("{} cells in {precision:?} on {}", cells.len(), test(shape));
        if precision == Precision::Single {
            let one = alone(&net, ranks.len());
            let apart = max_diff(&ranks[0].weights, &one.weights);
            assert!(apart < 1e-5, "weights part by {apart}");
            let mean = |step: usize| {
                ranks.iter().map(|rank| rank.losses[step]).sum::<f32>() / ranks.len() as f32
            };
            let apart = furthest(
                &(0..steps() as usize).map(mean).collect::<Vec<_>>(),
                &one.losses,
            );
            assert!(apart < 1e-6, "losses part by {apart}");
        }
    }
}

/// One rank is late, or none; in single precision all are, too.
fn of_one_and_all(precision: Precision) -> Vec<Option<Late>> {
    match precision {
        Precision::Single => delays(&[Whom::One, Whom::All]),
        Precision::Bf16 | Precision::F16 => delays(&[Whom::One]),
    }
}

/// One rank is late, or none; in half precision everywhere, or nowhere.
fn of_one(precision: Precision) -> Vec<Option<Late>> {
    match precision {
        Precision::Single => delays(&[Whom::One]),
        Precision::Bf16 | Precision::F16 => vec![
            None,
            Some(Late {
                place: Place::Everywhere,
                whom: Whom::One,
            }),
        ],
    }
}

#[test]
fn one_rank_trains_as_by_hand() {
    for prefetch in [
        PrefetchMode::Nothing,
        PrefetchMode::NextTwo,
        PrefetchMode::Everything,
    ] {
        train_on(&[1], prefetch, |_| vec![None]);
    }
}

#[test]
fn no_delay_changes_a_bit_on_two_ranks() {
    train_on(&[2], PrefetchMode::Nothing, of_one_and_all);
}

#[test]
fn no_delay_changes_a_bit_on_three_ranks() {
    train_on(&[3], PrefetchMode::Nothing, of_one_and_all);
}

#[test]
fn no_delay_changes_a_bit_on_four_ranks() {
    train_on(&[4], PrefetchMode::Nothing, of_one_and_all);
}

#[test]
fn no_delay_changes_a_bit_on_eight_ranks() {
    train_on(&[8], PrefetchMode::Nothing, of_one);
}

#[test]
fn no_delay_changes_a_bit_with_replicas() {
    train_on(&[2, 2], PrefetchMode::Nothing, of_one);
}

#[test]
fn no_delay_changes_a_bit_where_the_next_two_units_are_prefetched() {
    for shape in [[2], [3]] {
        train_on(&shape, PrefetchMode::NextTwo, of_one);
    }
}

#[test]
fn no_delay_changes_a_bit_where_every_unit_is_gathered_before_forward() {
    for shape in [[2], [3]] {
        train_on(&shape, PrefetchMode::Everything, of_one);
    }
}
