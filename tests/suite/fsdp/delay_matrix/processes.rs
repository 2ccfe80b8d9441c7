//! The same in several processes, to the bits of threads.

use burn_dtensor::fsdp::ReshardAfterForward;

use super::delays::{Late, Place, Whom};
use super::net::Net;
use super::train::{Cell, Precision, PrefetchMode, Trained, by_hand};
use super::{cells, test, to_the_bit};

/// Nobody is late, or one everywhere, whatever is gathered ahead.
fn some(precision: Precision) -> Vec<Cell> {
    let late = [
        None,
        Some(Late {
            place: Place::Everywhere,
            whom: Whom::One,
        }),
    ];
    let prefetch = [
        PrefetchMode::Nothing,
        PrefetchMode::NextTwo,
        PrefetchMode::Everything,
    ];
    prefetch
        .into_iter()
        .flat_map(|prefetch| cells(precision, &[ReshardAfterForward::Always], prefetch, &late))
        .collect()
}

fn bits(rank: usize, precision: Precision, trained: &Trained) -> String {
    let bits = trained
        .weights
        .values()
        .flatten()
        .chain(&trained.losses)
        .map(|x| x.to_bits());
    let hash = bits.fold(0u64, |hash, bits| {
        hash.wrapping_mul(0x100_0000_01b3) ^ u64::from(bits)
    });
    format!("rank {rank} in {precision:?} has the bits {hash:016x}")
}

fn in_processes(count: usize) {
    let net = Net::new();
    let text = test(&[count]).with_processes(count).run(|mesh| {
        for precision in Precision::ALL {
            println!(
                "{}",
                bits(
                    mesh.rank(),
                    precision,
                    &to_the_bit(&net, mesh, &some(precision))?
                )
            );
        }
        Ok(())
    });
    let Some(text) = text else { return };
    for precision in Precision::ALL {
        println!(
            "{} cells in {precision:?} in {count} processes",
            some(precision).len()
        );
        let ranks = test(&[count]).run(|mesh| by_hand(&net, mesh, precision));
        for (rank, trained) in ranks.iter().enumerate() {
            let expected = bits(rank, precision, trained);
            assert!(text.contains(&expected), "{expected}\n{text}");
        }
    }
}

#[test]
fn no_delay_changes_a_bit_in_two_processes() {
    in_processes(2);
}

#[test]
fn no_delay_changes_a_bit_in_three_processes() {
    in_processes(3);
}

#[test]
fn no_delay_changes_a_bit_in_four_processes() {
    in_processes(4);
}
