//! [`Region`]: a box of a tensor's elements.

use std::fmt;
use std::ops::Range;

use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// A box of a tensor's elements. Of a tensor without dimensions, the region without dimensions is
/// its one element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Region {
    /// First index in each dimension.
    pub offsets: Vec<usize>,
    /// Length in each dimension.
    pub shape: Vec<usize>,
}

/// Writes the elements, of `size` bytes each, of a matrix of `rows` by `columns` to `to` as those
/// of the transposed matrix.
pub(crate) fn transpose(from: &[u8], to: &mut [u8], shape: [usize; 2], size: usize) {
    match size {
        1 => transpose_tiles::<1>(from, to, shape),
        2 => transpose_tiles::<2>(from, to, shape),
        4 => transpose_tiles::<4>(from, to, shape),
        8 => transpose_tiles::<8>(from, to, shape),
        size => unreachable!("no element has {size} bytes"),
    }
}

fn transpose_tiles<const SIZE: usize>(from: &[u8], to: &mut [u8], [rows, columns]: [usize; 2]) {
    /// Elements of a tile's side: its lines of either matrix stay in a first-level cache.
    const TILE: usize = 32;
    let (from, _) = from.as_chunks::<SIZE>();
    let (to, _) = to.as_chunks_mut::<SIZE>();
    for (first_row, first_column) in (0..rows)
        .step_by(TILE)
        .cartesian_product((0..columns).step_by(TILE))
    {
        for column in first_column..columns.min(first_column + TILE) {
            let to = &mut to[column * rows..][first_row..rows.min(first_row + TILE)];
            let from = from[first_row * columns + column..].iter().step_by(columns);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        }
    }
}

impl Region {
    /// Returns the region of one slice in each dimension.
    pub fn of_slices(slices: &[Range<usize>]) -> Self {
        Self {
            offsets: slices.iter().map(|slice| slice.start).collect(),
            shape: slices.iter().map(ExactSizeIterator::len).collect(),
        }
    }

    /// Returns the region of all elements of a tensor.
    pub fn full(shape: &[usize]) -> Self {
        Self {
            offsets: vec![0; shape.len()],
            shape: shape.to_vec(),
        }
    }

    /// Returns the number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if the region has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Returns the elements that both regions of a tensor have, or `None` if there are none.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let slices = self.slices().zip_eq(other.slices());
        let common = slices.map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
        let common: Vec<_> = common.take_while(|slice| !slice.is_empty()).collect();
        (common.len() == self.shape.len()).then(|| Self::of_slices(&common))
    }

    /// Returns the slice in each dimension.
    pub fn slices(&self) -> impl Iterator<Item = Range<usize>> {
        self.offsets
            .iter()
            .zip_eq(&self.shape)
            .map(|(&offset, &len)| offset..offset + len)
    }

    /// Returns the position of the first element of `part`, which lies inside, among this region's
    /// elements in row-major order.
    pub fn offset_of(&self, part: &Self) -> usize {
        let dims = part
            .offsets
            .iter()
            .zip_eq(&self.offsets)
            .zip_eq(&self.shape);
        dims.fold(0, |position, ((&at, &begin), &len)| {
            position * len + (at - begin)
        })
    }

    /// Splits the region along its first dimension with a length of more than 1, so that the
    /// elements of each part are consecutive in the memory of the region. A part has at most
    /// `most_elements` elements, or one row if a row has more.
    ///
    /// ```text
    /// [0:1,4:9,0:2], 4 elements   ->   [0:1,4:6,0:2]  [0:1,6:8,0:2]  [0:1,8:9,0:2]
    /// ```
    pub fn split(&self, most_elements: usize) -> Vec<Self> {
        if self.is_empty() {
            return Vec::new();
        }
        let Some(dim) = self.shape.iter().position(|&len| len > 1) else {
            return vec![self.clone()];
        };
        let row: usize = self.shape[dim + 1..].iter().product();
        let rows = (most_elements / row).max(1);
        let part = |begin| {
            let mut part = self.clone();
            part.offsets[dim] += begin;
            part.shape[dim] = rows.min(self.shape[dim] - begin);
            part
        };
        (0..self.shape[dim]).step_by(rows).map(part).collect()
    }

    /// Returns the region of a matrix as one of the transposed matrix.
    pub fn transposed(mut self) -> Self {
        self.offsets.reverse();
        self.shape.reverse();
        self
    }

    /// Returns true if no two of the regions of a tensor, none of which is empty, share an element.
    ///
    /// Groups of regions are separated by planes between them, as those of a mesh are. Returns
    /// false as well for more than 256 regions that no plane separates, although they may be
    /// disjoint. The order of `regions` changes.
    pub fn are_disjoint(regions: &mut [&Self]) -> bool {
        separated(regions, 32)
    }
}

/// Separates the regions by planes until no group has more than a few, with at most so many levels
/// of planes.
fn separated(regions: &mut [&Region], levels: usize) -> bool {
    const FEW: usize = 16;
    const COMPARED: usize = 256;
    if regions.len() > FEW && levels > 0 {
        for dim in 0..regions[0].shape.len() {
            regions.sort_unstable_by_key(|region| region.offsets[dim]);
            let mut groups = vec![0];
            let mut end = 0;
            for (index, region) in regions.iter().enumerate() {
                if index > 0 && region.offsets[dim] >= end {
                    groups.push(index);
                }
                end = end.max(region.offsets[dim] + region.shape[dim]);
            }
            groups.push(regions.len());
            if groups.len() > 2 {
                return groups
                    .iter()
                    .tuple_windows()
                    .all(|(&a, &b)| separated(&mut regions[a..b], levels - 1));
            }
        }
    }
    regions.len() <= COMPARED
        && regions
            .iter()
            .tuple_combinations()
            .all(|(a, b)| a.intersection(b).is_none())
}

impl fmt::Display for Region {
    /// Writes the slices, such as `[0:128,64:128]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "[{}]",
            self.slices()
                .map(|slice| format!("{}:{}", slice.start, slice.end))
                .format(",")
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    type Elements = BTreeSet<Vec<usize>>;

    fn elements(region: &Region) -> Elements {
        let indices = region.slices().multi_cartesian_product();
        // The product of no ranges is nothing, but a tensor without dimensions has one element.
        if region.shape.is_empty() {
            BTreeSet::from([vec![]])
        } else {
            indices.collect()
        }
    }

    /// Returns all regions of a tensor, the empty ones included.
    fn regions(shape: &[usize]) -> Vec<Region> {
        let slices = |&len: &usize| {
            (0..=len)
                .flat_map(move |a| (a..=len).map(move |b| a..b))
                .collect_vec()
        };
        if shape.is_empty() {
            return vec![Region::full(&[])];
        }
        shape
            .iter()
            .map(slices)
            .multi_cartesian_product()
            .map(|slices| Region::of_slices(&slices))
            .collect()
    }

    #[test]
    fn regions_equal_sets_of_elements() {
        for shape in [vec![], vec![4], vec![3, 2], vec![2, 2, 2]] {
            let all = regions(&shape);
            assert!(all.contains(&Region::full(&shape)));
            for a in &all {
                assert_eq!(
                    (a.num_elements(), a.is_empty()),
                    (elements(a).len(), elements(a).is_empty())
                );
                for b in &all {
                    let common: Elements =
                        elements(a).intersection(&elements(b)).cloned().collect();
                    assert_eq!(
                        a.intersection(b).as_ref().map(elements).unwrap_or_default(),
                        common,
                        "{a} {b}"
                    );
                    assert_eq!(a.intersection(b).is_none(), common.is_empty());
                    if let Some(first) = common.first() {
                        let position = elements(a)
                            .iter()
                            .position(|element| element == first)
                            .unwrap();
                        assert_eq!(
                            a.offset_of(&a.intersection(b).unwrap()),
                            position,
                            "{a} {b}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_transposed_matrix_has_each_element_at_its_place() {
        for (size, rows, columns) in [
            (1, 3, 5),
            (2, 33, 64),
            (4, 70, 1),
            (4, 1, 70),
            (8, 65, 31),
            (4, 0, 3),
            (4, 3, 0),
        ] {
            let element = |row: usize, column: usize| {
                (0..size).map(move |byte| (row * 7 + column * 13 + byte * 101) as u8)
            };
            let matrix = (0..rows)
                .cartesian_product(0..columns)
                .flat_map(|(row, column)| element(row, column))
                .collect_vec();
            let expected = (0..columns)
                .cartesian_product(0..rows)
                .flat_map(|(column, row)| element(row, column))
                .collect_vec();
            let mut transposed = vec![0xff; matrix.len()];
            transpose(&matrix, &mut transposed, [rows, columns], size);
            assert!(
                transposed == expected,
                "{rows} by {columns} elements of {size} bytes"
            );
        }
    }

    #[test]
    fn parts_are_the_region_in_order() {
        for region in [vec![], vec![3], vec![1, 3, 2], vec![2, 0], vec![3, 3]]
            .iter()
            .flat_map(|shape| regions(shape))
        {
            for most in 1..10 {
                let parts = region.split(most);
                // Row-major order of the elements is their order as vectors.
                let joined = parts.iter().flat_map(elements).collect_vec();
                assert_eq!(
                    joined,
                    elements(&region).into_iter().collect_vec(),
                    "{region} by {most}"
                );
                let row = region
                    .shape
                    .iter()
                    .skip_while(|&&len| len == 1)
                    .skip(1)
                    .product::<usize>();
                assert!(
                    parts
                        .iter()
                        .all(|part| part.num_elements() <= most.max(row)),
                    "{region} by {most}"
                );
            }
        }
        assert_eq!(
            Region::full(&[1, 5, 2]).split(4).len(),
            3,
            "and as few as possible"
        );
    }

    #[test]
    fn many_regions_are_disjoint_if_their_sets_are() {
        let mut random = StdRng::seed_from_u64(1);
        let mut found = [0; 2];
        for case in 0..400 {
            // A grid as of a mesh, whose cells are split further, and whose first cells may have
            // moved.
            let shape = [
                random.random_range(4..9),
                random.random_range(1..9),
                random.random_range(1..5),
            ];
            let splits = |len: usize, random: &mut StdRng| {
                let inner = (1..len).filter(|_| random.random_bool(0.6)).collect_vec();
                [0].into_iter()
                    .chain(inner)
                    .chain([len])
                    .tuple_windows()
                    .map(|(a, b)| a..b)
                    .collect_vec()
            };
            let grid = shape
                .map(|len| splits(len, &mut random))
                .into_iter()
                .multi_cartesian_product();
            let mut cells = grid
                .flat_map(|slices| Region::of_slices(&slices).split(4))
                .collect_vec();
            for _ in 0..case % 3 {
                let cell = random.random_range(0..cells.len());
                let dim = random.random_range(0..3);
                if cells[cell].offsets[dim] > 0 {
                    cells[cell].offsets[dim] -= 1;
                }
            }
            let count: usize = cells.iter().map(Region::num_elements).sum();
            let disjoint = cells.iter().flat_map(elements).collect::<Elements>().len() == count;
            found[usize::from(disjoint)] += usize::from(cells.len() > 16);
            assert_eq!(
                Region::are_disjoint(&mut cells.iter().collect_vec()),
                disjoint,
                "case {case}: {cells:?}"
            );
        }
        assert!(
            found.iter().all(|&count| count > 50),
            "overlapping and disjoint ones: {found:?}"
        );
    }

    #[test]
    fn regions_that_no_plane_separates() {
        // Four blades around the middle.
        let pinwheel = [
            (0..2, 0..1),
            (0..1, 1..3),
            (1..3, 2..3),
            (2..3, 0..2),
            (1..2, 1..2),
        ];
        let mut pinwheel = pinwheel.map(|(rows, columns)| Region::of_slices(&[rows, columns]));
        assert!(Region::are_disjoint(&mut pinwheel.iter().collect_vec()));
        pinwheel[0].shape[1] = 2;
        assert!(!Region::are_disjoint(&mut pinwheel.iter().collect_vec()));
        // Many identical ones: false at once, without comparing each with each.
        let same = vec![Region::full(&[1 << 40, 2]); 1 << 20];
        assert!(!Region::are_disjoint(&mut same.iter().collect_vec()));
        // A spiral, of which every plane separates but one.
        let blade = |index: usize| match index % 2 {
            0 => Region {
                offsets: vec![index, index],
                shape: vec![1, 1 << 20],
            },
            _ => Region {
                offsets: vec![index, index],
                shape: vec![1 << 20, 1],
            },
        };
        let spiral = (0..1 << 16).map(blade).collect_vec();
        assert!(!Region::are_disjoint(&mut spiral.iter().collect_vec()));
        assert!(Region::are_disjoint(
            &mut spiral[..100].iter().collect_vec()
        ));
    }
}
