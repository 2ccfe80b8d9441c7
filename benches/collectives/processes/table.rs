//! What has been measured, as text.

use std::collections::HashMap;

use super::{Collective, Raw, Sample, Way, median};
use crate::{MIB, SIZES, size_text};

/// From here on, ours is to have a share of the raw bandwidth; below, to take little more time.
const LARGE: usize = 4 * MIB;

/// Seconds that ours may take more.
const ABOVE: f64 = 60e-6;

/// Prints one table for each collective whose name has `only` in it.
pub fn print(count: usize, only: &str, samples: &[Sample]) {
    let mut seconds = HashMap::<_, Vec<f64>>::new();
    for sample in samples {
        seconds
            .entry((sample.collective, sample.bytes, sample.way))
            .or_default()
            .extend(&sample.seconds);
    }
    println!("{count} processes; ms of one call, medians; GB/s of the whole");
    for collective in Collective::named(only) {
        println!(
            "\n{:<20} {:>8} {:>8} {:>8} | {:>8} {:>9} {:>8} {:>8} | {:>6} {:>8}",
            collective.name(),
            "GB/s",
            "ours",
            "moving",
            "blocking",
            "immediate",
            "exchange",
            "fresh",
            "of raw",
            "above us"
        );
        for bytes in SIZES {
            let time = |way| seconds.get(&(collective, bytes, way)).cloned().map(median);
            let Some(ours) = time(Way::Ours) else {
                continue;
            };
            let fastest = |way: fn(Raw) -> Way| {
                collective
                    .raw()
                    .into_iter()
                    .filter_map(|raw| time(way(raw)))
                    .fold(f64::MAX, f64::min)
            };
            let (raw, fresh) = (fastest(Way::Raw), fastest(Way::Fresh));
            let ms = |seconds: Option<f64>| {
                seconds.map_or("-".into(), |seconds| format!("{:.3}", seconds * 1e3))
            };
            println!(
                "{:>20} {:>8.2} {:>8} {:>8} | {:>8} {:>9} {:>8} {:>8} | {:>6.2} {:>8.0}  {}",
                size_text(bytes),
                bytes as f64 / ours / 1e9,
                ms(Some(ours)),
                ms(time(Way::Moving)),
                ms(time(Way::Raw(Raw::Blocking))),
                ms(time(Way::Raw(Raw::Immediate))),
                ms(time(Way::Raw(Raw::Exchange))),
                ms(Some(fresh)),
                raw / ours,
                (ours - raw) * 1e6,
                verdict(collective, bytes, ours, raw)
            );
        }
    }
    println!(
        "\nmoving: what of ours a rank takes to make its result of what has come. fresh: raw, into new memory.\n\
         of raw, above us: beside the faster of the two calls that count as raw."
    );
}

fn verdict(collective: Collective, bytes: usize, ours: f64, raw: f64) -> String {
    let (met, bar) = if bytes < LARGE {
        (
            ours - raw <= ABOVE,
            format!("at most {:.0} us above", ABOVE * 1e6),
        )
    } else {
        (
            raw / ours >= collective.bar(),
            format!("at least {} of raw", collective.bar()),
        )
    };
    if met { bar } else { format!("MISSED: {bar}") }
}
