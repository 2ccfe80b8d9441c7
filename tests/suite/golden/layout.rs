//! `1_shard_layout.json`: what every rank holds of `arange(n).reshape(shape)`.

use std::ops::Range;

use burn::tensor::{Shape, Tensor, TensorData};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, Placement, PlacementError, StridedLayout, StridedPlacement};
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Case {
    mesh: Vec<usize>,
    shape: Vec<usize>,
    placements: Vec<String>,
    /// By rank.
    ranks: Vec<Recorded>,
}

/// Local shape, global offset and local values; nulls where torch itself crashed.
type Recorded = (Option<Vec<usize>>, Option<Vec<usize>>, Option<Vec<f64>>);

/// Local shape, global offset and local values of one rank.
type Local = (Vec<usize>, Vec<usize>, Vec<f64>);

impl Case {
    fn strided(&self) -> StridedLayout {
        let placements: Vec<StridedPlacement> = self.placements.iter().map(|text| text.parse().unwrap()).collect();
        StridedLayout::new(&self.mesh, &placements).unwrap()
    }

    /// What torch recorded, by coordinate.
    fn recorded(&self) -> impl Iterator<Item = (Vec<usize>, Local)> {
        let coordinates = super::coordinates(&self.mesh);
        assert_eq!(coordinates.len(), self.ranks.len(), "{self:?}");
        coordinates.into_iter().zip(&self.ranks).filter_map(|(coordinate, (shape, offset, values))| {
            Some((coordinate, (shape.clone()?, offset.clone()?, values.clone()?)))
        })
    }

    /// Local values and shape of the product of these intervals of each dimension.
    fn local(&self, runs: &[Vec<Range<usize>>], offset: Vec<usize>) -> Local {
        let mut values = vec![0];
        for (runs, len) in runs.iter().zip(&self.shape) {
            let indices = || runs.iter().cloned().flatten();
            values = values.iter().flat_map(|value| indices().map(move |index| value * len + index)).collect();
        }
        let shape = runs.iter().map(|runs| runs.iter().map(ExactSizeIterator::len).sum()).collect();
        (shape, offset, values.into_iter().map(|value| value as f64).collect())
    }

    fn by_layout(&self, layout: &Layout, coordinate: &[usize]) -> Local {
        let slices = layout.local_slices(&self.shape, coordinate);
        let local_shape = layout.local_shape(&self.shape, coordinate);
        assert!(slices.iter().map(ExactSizeIterator::len).eq(local_shape), "{self:?}");
        let runs: Vec<_> = slices.into_iter().map(|slice| vec![slice]).collect();
        self.local(&runs, layout.global_offset(&self.shape, coordinate))
    }

    fn by_strides(&self, layout: &StridedLayout, coordinate: &[usize]) -> Local {
        let runs: Vec<_> = layout.local_runs(&self.shape, coordinate).into_iter().map(|runs| runs.to_vec()).collect();
        let starts = runs.iter().zip(&self.shape).map(|(runs, &len)| runs.first().map_or(len, |run| run.start));
        let offset = starts.collect();
        self.local(&runs, offset)
    }

    /// The whole tensor from the parts and the parts from it; 1 if an order of cuts did not do.
    fn read_and_write<const D: usize>(&self, mesh: &DeviceMesh) -> burn_dtensor::Result<usize> {
        let device = mesh.device();
        let whole: Tensor<D> = Tensor::arange(0..self.shape.iter().product::<usize>() as i64, device)
            .float()
            .reshape::<D, _>(Shape::from(self.shape.clone()));
        let strided = self.strided();
        let runs = strided.local_runs(&self.shape, mesh.coordinate().expect("a member"));
        // Where torch crashed, what its other ranks lack.
        let computed = self.local(&runs.into_iter().map(|runs| runs.to_vec()).collect::<Vec<_>>(), Vec::new());
        let (shape, _, values) = match &self.ranks[mesh.rank()] {
            (Some(shape), _, Some(values)) => (shape.clone(), Vec::new(), values.clone()),
            _ => computed,
        };
        let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
        let local = Tensor::<D>::from_data(TensorData::new(values, shape), device);

        let ledger = mesh.world().ledger();
        ledger.reset();
        let read = DTensor::from_strided(local.clone(), mesh, strided.placements(), self.shape.clone())?;
        let sent = ledger.total(|_| true).calls > 0;
        let at_once = read.placements().iter().zip(strided.placements()).all(|(own, given)| match given {
            StridedPlacement::Strided { dim, .. } => *own == Placement::Shard(*dim),
            StridedPlacement::Plain(_) => true,
        });
        assert_eq!(sent, !at_once, "{self:?}: {read}");
        assert_eq!(read.full_tensor()?.into_data(), whole.to_data(), "{self:?}");
        let plain: Vec<Placement> = mesh.shape().iter().map(|_| Placement::Shard(0)).collect();
        let written = DTensor::distribute_local(whole, mesh, &plain)?.to_strided(strided.placements())?;
        assert_eq!(written.into_data(), local.into_data(), "{self:?}");
        Ok(usize::from(sent))
    }

    /// Whether every cut of `layout` divides what it cuts.
    fn is_even(&self, layout: &Layout) -> bool {
        let parts = |cuts: &[usize]| cuts.iter().map(|&cut| self.mesh[cut]).product::<usize>();
        layout.orders().all(|(dim, cuts)| self.shape[dim].is_multiple_of(parts(cuts)))
    }
}

/// All cases, strided ones included, with the values that torch's own shards hold.
#[test]
fn golden_shard_layout() {
    let cases: Vec<Case> = super::cases("1_shard_layout.json");
    let (mut plain, mut strided, mut ranks) = (0, 0, 0);
    for case in &cases {
        let layout = case.strided();
        let is_plain = !case.placements.iter().any(|text| text.starts_with("SS"));
        for (coordinate, recorded) in case.recorded() {
            assert_eq!(case.by_strides(&layout, &coordinate), recorded, "{case:?} at {coordinate:?}");
            if is_plain {
                let layout = super::layout(&case.mesh, &case.placements).unwrap();
                assert_eq!(case.by_layout(&layout, &coordinate), recorded, "{case:?} at {coordinate:?}");
            }
            ranks += 1;
        }
        *if is_plain { &mut plain } else { &mut strided } += 1;
    }
    println!("{plain} plain and {strided} strided cases, {ranks} ranks");
    assert_eq!(plain + strided, cases.len());
    if super::is_own() {
        // One rank of one strided case crashed in torch and has no values.
        let all: usize = cases.iter().map(|case| case.ranks.len()).sum();
        assert_eq!((plain, strided, ranks), (666, 144, all - 1));
    }
}

/// Strided placements that stand for an order of cuts: the layout with that order holds the same
/// wherever the cuts are even, and is written back as the same placements.
#[test]
fn golden_strided_shards_are_orders_of_cuts() {
    let cases: Vec<Case> = super::cases("1_shard_layout.json");
    let (mut decoded, mut refused, mut agreed) = (0, 0, 0);
    for case in cases.iter().filter(|case| case.placements.iter().any(|text| text.starts_with("SS"))) {
        let strided = case.strided();
        let layout = match Layout::from_strided(&case.mesh, strided.placements()) {
            Ok(layout) => layout,
            Err(error) => {
                assert!(matches!(error, PlacementError::Strided { .. }), "{case:?}: {error}");
                refused += 1;
                continue;
            }
        };
        assert_eq!(layout.to_strided().as_slice(), strided.placements());
        let same = case.recorded().all(|(coordinate, recorded)| case.by_layout(&layout, &coordinate) == recorded);
        assert!(same || !case.is_even(&layout), "{case:?} is not {layout}");
        agreed += usize::from(same);
        decoded += 1;
    }
    println!("{decoded} orders of cuts, {agreed} of them equal, {refused} strides that are no order");
    if super::is_own() {
        // The four that differ are uneven `[SS(0,4), SS(0,2), S(0)]`, whose shards torch itself
        // cannot gather.
        assert_eq!((decoded, agreed, refused), (108, 104, 36));
    }
}

/// What torch's ranks hold of every strided case, one that is no order of cuts too, read as one tensor, and written
/// as torch lays it out.
#[test]
fn golden_strided_shards_are_read_and_written() {
    let cases: Vec<Case> = super::cases("1_shard_layout.json");
    let strided = cases.iter().filter(|case| case.placements.iter().any(|text| text.starts_with("SS")));
    let by_mesh = strided.into_group_map_by(|case| case.mesh.clone());
    let (mut read, mut gathered) = (0, 0);
    for (mesh, cases) in by_mesh {
        let names = ["a", "b", "c"];
        let counts = MeshTest::new(&mesh, &names[..mesh.len()]).run(|mesh| {
            let mut gathered = 0;
            for case in &cases {
                gathered += match case.shape.len() {
                    1 => case.read_and_write::<1>(mesh)?,
                    2 => case.read_and_write::<2>(mesh)?,
                    3 => case.read_and_write::<3>(mesh)?,
                    _ => panic!("{case:?} has other dimensions"),
                };
            }
            Ok(gathered)
        });
        read += cases.len();
        gathered += counts[0];
    }
    println!("{read} strided cases read and written, {gathered} of them gathered");
    if super::is_own() {
        // As many as no order of cuts expresses, or expresses otherwise.
        assert_eq!((read, gathered), (144, 36 + 4));
    }
}
