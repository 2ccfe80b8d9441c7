//! `1_shard_layout.json`: what every rank holds of `arange(n).reshape(shape)`.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
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
        let placements: Vec<StridedPlacement> = self
            .placements
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        StridedLayout::new(&self.mesh, &placements).unwrap()
    }

    /// What torch recorded, by coordinate.
    fn recorded(&self) -> impl Iterator<Item = (Vec<usize>, Local)> {
        let coordinates = super::coordinates(&self.mesh);
        assert_eq!(coordinates.len(), self.ranks.len(), "{self:?}");
        coordinates.into_iter().zip(&self.ranks).filter_map(
            |(coordinate, (shape, offset, values))| {
                Some((
                    coordinate,
                    (shape.clone()?, offset.clone()?, values.clone()?),
                ))
            },
        )
    }

    /// Local values and shape of the product of these intervals of each dimension.
    fn local(&self, runs: &[Vec<Range<usize>>], offset: Vec<usize>) -> Local {
        let mut values = vec![0];
        for (runs, len) in runs.iter().zip(&self.shape) {
            let indices = || runs.iter().cloned().flatten();
            values = values
                .iter()
                .flat_map(|value| indices().map(move |index| value * len + index))
                .collect();
        }
        let shape = runs
            .iter()
            .map(|runs| runs.iter().map(ExactSizeIterator::len).sum())
            .collect();
        (
            shape,
            offset,
            values.into_iter().map(|value| value as f64).collect(),
        )
    }

    fn by_layout(&self, layout: &Layout, coordinate: &[usize]) -> Local {
        let slices = layout.local_slices(&self.shape, coordinate);
        let local_shape = layout.local_shape(&self.shape, coordinate);
        assert!(
            slices.iter().map(ExactSizeIterator::len).eq(local_shape),
            "{self:?}"
        );
        let runs: Vec<_> = slices.into_iter().map(|slice| vec![slice]).collect();
        self.local(&runs, layout.global_offset(&self.shape, coordinate))
    }

    fn by_strides(&self, layout: &StridedLayout, coordinate: &[usize]) -> Local {
        let runs: Vec<_> = layout
            .local_runs(&self.shape, coordinate)
            .into_iter()
            .map(|runs| runs.to_vec())
            .collect();
        let starts = runs
            .iter()
            .zip(&self.shape)
            .map(|(runs, &len)| runs.first().map_or(len, |run| run.start));
        let offset = starts.collect();
        self.local(&runs, offset)
    }

    /// Returns the elements of each dimension that the rank at `coordinate` holds of a tensor of
    /// `shape`, where the mesh dimensions cut one after another, each into pieces and every piece
    /// into one chunk per rank.
    fn slice(
        &self,
        shape: &[usize],
        shardings: &[(usize, usize)],
        coordinate: &[usize],
    ) -> Vec<Vec<usize>> {
        let mut elements: Vec<Vec<usize>> = shape.iter().map(|&len| (0..len).collect()).collect();
        let chunk = |elements: &[usize], chunks: usize, at: usize| {
            let size = elements.len().div_ceil(chunks);
            elements
                .iter()
                .copied()
                .skip(at * size)
                .take(size)
                .collect::<Vec<_>>()
        };
        for &(mesh_dim, blocks) in shardings {
            let Some((dim, _)) = self.shard(mesh_dim) else {
                continue;
            };
            let block = |at| chunk(&elements[dim], blocks, at);
            elements[dim] = (0..blocks)
                .flat_map(|at| chunk(&block(at), self.mesh[mesh_dim], coordinate[mesh_dim]))
                .collect();
        }
        elements
    }

    /// The tensor dimension and the split factor of a mesh dimension.
    fn shard(&self, mesh_dim: usize) -> Option<(usize, usize)> {
        match self.strided().placements()[mesh_dim] {
            StridedPlacement::Plain(placement) => Some((placement.shard_dim()?, 1)),
            StridedPlacement::Strided { dim, split_factor } => Some((dim, split_factor)),
        }
    }

    /// Whether mesh dimensions that cut in this order leave the same elements on every rank as the
    /// placements do.
    fn is_sharded_so(&self, shape: &[usize], order: &[usize]) -> bool {
        let strided: Vec<_> = (0..self.mesh.len())
            .map(|mesh_dim| {
                (
                    mesh_dim,
                    self.shard(mesh_dim).map_or(1, |(_, blocks)| blocks),
                )
            })
            .collect();
        let order: Vec<_> = order.iter().map(|&mesh_dim| (mesh_dim, 1)).collect();
        let sizes = |shardings: &[(usize, usize)]| {
            super::coordinates(&self.mesh)
                .iter()
                .map(|at| self.slice(shape, shardings, at))
                .collect::<Vec<_>>()
        };
        sizes(&order) == sizes(&strided)
    }

    /// The orders of cuts that the placements stand for: those that leave the same elements on
    /// every rank of a tensor that all cuts divide evenly.
    fn orders(&self) -> Vec<Vec<usize>> {
        let mesh_dims = 0..self.mesh.len();
        let blocks = mesh_dims
            .clone()
            .filter_map(|mesh_dim| Some(self.shard(mesh_dim)?.1))
            .product::<usize>();
        let even = vec![blocks * self.mesh.iter().product::<usize>(); self.shape.len()];
        let count = mesh_dims.len();
        mesh_dims
            .permutations(count)
            .filter(|order| self.is_sharded_so(&even, order))
            .collect()
    }

    /// The whole tensor from the parts and the parts from it; whether an order of cuts did not do.
    fn read_and_write<const D: usize>(&self, mesh: &DeviceMesh) -> burn_dtensor::Result<bool> {
        let device = mesh.device();
        // From values, since burn reshapes nothing to a shape with a dimension of length 0.
        let elements: Vec<f32> = (0..self.shape.iter().product())
            .map(|element: usize| element as f32)
            .collect();
        let full = Tensor::<D>::from_data(TensorData::new(elements, self.shape.clone()), device);
        let strided = self.strided();
        let runs = strided.local_runs(&self.shape, mesh.coordinate().expect("a member"));
        // Where torch crashed, what its other ranks lack.
        let computed = self.local(
            &runs
                .into_iter()
                .map(|runs| runs.to_vec())
                .collect::<Vec<_>>(),
            Vec::new(),
        );
        let (shape, _, values) = match &self.ranks[mesh.rank()] {
            (Some(shape), _, Some(values)) => (shape.clone(), Vec::new(), values.clone()),
            _ => computed,
        };
        let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
        let local = Tensor::<D>::from_data(TensorData::new(values, shape), device);

        let ledger = mesh.world().ledger();
        ledger.reset();
        let read = DTensor::from_strided(
            local.clone(),
            mesh,
            strided.placements(),
            self.shape.clone(),
        )?;
        let sent = ledger.total(|_| true).calls > 0;
        // Elements move only where no order of cuts has them where they are.
        let in_place = self
            .orders()
            .iter()
            .any(|order| self.is_sharded_so(&self.shape, order));
        assert_eq!(sent, !in_place, "{self:?}: {read}");
        assert_eq!(read.full_tensor()?.into_data(), full.to_data(), "{self:?}");
        let plain: Vec<Placement> = mesh.shape().iter().map(|_| Placement::Shard(0)).collect();
        let written =
            DTensor::distribute_replicated(full, mesh, &plain)?.to_strided(strided.placements())?;
        assert_eq!(written.into_data(), local.into_data(), "{self:?}");
        Ok(sent)
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
            assert_eq!(
                case.by_strides(&layout, &coordinate),
                recorded,
                "{case:?} at {coordinate:?}"
            );
            if is_plain {
                let layout = super::layout(&case.mesh, &case.placements).unwrap();
                assert_eq!(
                    case.by_layout(&layout, &coordinate),
                    recorded,
                    "{case:?} at {coordinate:?}"
                );
            }
            ranks += 1;
        }
        *if is_plain { &mut plain } else { &mut strided } += 1;
    }
    println!("{plain} plain and {strided} strided cases, {ranks} ranks");
    let crashed = cases
        .iter()
        .flat_map(|case| &case.ranks)
        .filter(|(shape, ..)| shape.is_none())
        .count();
    let all: usize = cases.iter().map(|case| case.ranks.len()).sum();
    assert_eq!((plain + strided, ranks), (cases.len(), all - crashed));
    assert!(plain > 0 && strided > 0);
}

/// Strided placements are read as an order of cuts exactly where they stand for one. The layout
/// with that order holds what torch's ranks do where that order of cuts does, and is written back
/// as placements that mean the same.
#[test]
fn golden_strided_shards_are_shard_orders() {
    let cases: Vec<Case> = super::cases("1_shard_layout.json");
    let (mut decoded, mut refused, mut agreed) = (0, 0, 0);
    for case in cases
        .iter()
        .filter(|case| case.placements.iter().any(|text| text.starts_with("SS")))
    {
        let (strided, orders) = (case.strided(), case.orders());
        let layout = match Layout::from_strided(&case.mesh, strided.placements()) {
            Ok(layout) => layout,
            Err(error) => {
                assert!(
                    matches!(error, PlacementError::Strided { .. }),
                    "{case:?}: {error}"
                );
                assert!(
                    orders.is_empty(),
                    "{case:?} is the order of cuts {orders:?}"
                );
                refused += 1;
                continue;
            }
        };
        assert!(
            !orders.is_empty(),
            "{case:?} is no order of cuts, not {layout}"
        );
        let written = StridedLayout::new(&case.mesh, &layout.to_strided()).unwrap();
        for coordinate in super::coordinates(&case.mesh) {
            let runs = |layout: &StridedLayout| layout.local_runs(&case.shape, &coordinate);
            assert_eq!(runs(&written), runs(&strided), "{case:?} at {coordinate:?}");
        }
        // Torch itself cannot gather where they differ, such as an uneven `[SS(0,4), SS(0,2),
        // S(0)]`.
        let same = super::coordinates(&case.mesh).iter().all(|coordinate| {
            let (by_layout, by_strides) = (
                case.by_layout(&layout, coordinate),
                case.by_strides(&strided, coordinate),
            );
            (by_layout.0, by_layout.2) == (by_strides.0, by_strides.2)
        });
        let expected = orders
            .iter()
            .any(|order| case.is_sharded_so(&case.shape, order));
        assert_eq!(same, expected, "{case:?}, read as {layout}");
        agreed += usize::from(same);
        decoded += 1;
    }
    println!(
        "{decoded} orders of cuts, {agreed} of them equal, {refused} strides that are no order"
    );
    assert!(agreed > 0 && decoded > agreed && refused > 0);
}

/// What torch's ranks hold of every strided case, one that is no order of cuts too, read as one
/// tensor, and written as torch lays it out.
#[test]
fn golden_strided_shards_are_read_and_written() {
    let cases: Vec<Case> = super::cases("1_shard_layout.json");
    let strided = cases
        .iter()
        .filter(|case| case.placements.iter().any(|text| text.starts_with("SS")));
    let by_mesh = strided.into_group_map_by(|case| case.mesh.clone());
    let (mut read, mut gathered) = (0, 0);
    for (mesh, cases) in by_mesh {
        let names = ["a", "b", "c", "d"];
        let counts = MeshTest::new(&mesh, &names[..mesh.len()]).run(|mesh| {
            let mut gathered = 0;
            for case in &cases {
                gathered += usize::from(match case.shape.len() {
                    1 => case.read_and_write::<1>(mesh)?,
                    2 => case.read_and_write::<2>(mesh)?,
                    3 => case.read_and_write::<3>(mesh)?,
                    4 => case.read_and_write::<4>(mesh)?,
                    _ => panic!("{case:?} has other dimensions"),
                });
            }
            Ok(gathered)
        });
        read += cases.len();
        gathered += counts[0];
    }
    println!("{read} strided cases read and written, {gathered} of them gathered");
    assert!(gathered > 0 && read > gathered);
}

/// A mesh dimension of size 1 holds every element, whatever its split factor: nothing is sent.
#[test]
fn strided_shards_over_one_rank_are_plain_shards() {
    for (mesh, placements) in [
        (&[1][..], "SS(0,2)"),
        (&[1, 2], "SS(0,4) S(0)"),
        (&[2, 1, 2], "SS(0,2) SS(0,3) S(0)"),
    ] {
        let placements: Vec<String> = placements.split(' ').map(String::from).collect();
        let ranks = vec![(None, None, None); mesh.iter().product()];
        let case = Case {
            mesh: mesh.to_vec(),
            shape: vec![12],
            placements,
            ranks,
        };
        let layout = Layout::from_strided(mesh, case.strided().placements()).unwrap();
        for coordinate in super::coordinates(mesh) {
            assert_eq!(
                case.by_layout(&layout, &coordinate),
                case.by_strides(&case.strided(), &coordinate),
                "{case:?}"
            );
        }
        let sent = MeshTest::new(mesh, &["a", "b", "c"][..mesh.len()])
            .run(|mesh| case.read_and_write::<1>(mesh));
        assert!(!sent.contains(&true), "{case:?}");
    }
}
