//! Random layouts.

use burn_dtensor::placement::{Layout, Placement};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Draws a layout of `ndim` dimensions, of which `share` of the placements are `partial`.
pub fn draw(
    rng: &mut StdRng,
    mesh: &[usize],
    ndim: usize,
    share: f64,
    partial: impl Fn(&mut StdRng) -> Placement,
) -> Layout {
    loop {
        let mut sizes = rng.random_range(0..ndim);
        let placement = |_| {
            if rng.random_bool(share) {
                return partial(rng);
            }
            if rng.random_bool(0.25) {
                return Placement::Replicate;
            }
            // Often the dimension that is cut already.
            if rng.random_bool(0.6) {
                sizes = rng.random_range(0..ndim);
            }
            Placement::Shard(sizes)
        };
        let placements: Vec<_> = mesh.iter().map(placement).collect();
        // Reductions that do not commute are no layout.
        let Ok(layout) = Layout::new(mesh, &placements) else {
            continue;
        };
        let turned: Vec<(usize, Vec<usize>)> = layout
            .orders()
            .map(|(dim, shardings)| {
                (
                    dim,
                    if rng.random_bool(0.5) {
                        shardings.to_vec()
                    } else {
                        shardings.iter().rev().copied().collect()
                    },
                )
            })
            .collect();
        let turned: Vec<(usize, &[usize])> = turned
            .iter()
            .map(|(dim, shardings)| (*dim, &shardings[..]))
            .collect();
        return Layout::with_shard_order(mesh, &placements, &turned)
            .expect("the cuts are those of the placements");
    }
}

/// Every third of these layouts with ragged cuts, which ones a function of `salt`: so the programs
/// are otherwise those of chunks. The outermost cut of each tensor dimension gets lengths, often 0.
pub fn uneven(layout: Layout, shape: &[usize], salt: u64) -> Layout {
    let mut rng = StdRng::seed_from_u64(salt);
    if !rng.random_bool(1.0 / 3.0) {
        return layout;
    }
    let outermost: Vec<_> = layout
        .orders()
        .map(|(dim, shardings)| (dim, shardings[0]))
        .collect();
    outermost
        .into_iter()
        .fold(layout, |layout, (dim, mesh_dim)| {
            let mut ends: Vec<usize> = (1..layout.mesh_shape()[mesh_dim])
                .map(|_| rng.random_range(0..=shape[dim]))
                .collect();
            ends.push(shape[dim]);
            ends.sort_unstable();
            let starts = std::iter::once(0).chain(ends.iter().copied());
            let lengths: Vec<usize> = ends
                .iter()
                .zip(starts)
                .map(|(end, start)| end - start)
                .collect();
            layout
                .with_uneven_sizes(mesh_dim, lengths)
                .expect("one length per rank of a cut")
        })
}
