//! Checks that the ranks hold what their placements claim:
//! [`from_local_checked`](DTensor::from_local_checked), and the check of replicated values that
//! [`Launch::with_replica_checks`](crate::comm::Launch::with_replica_checks) enables.

use burn::tensor::{DType, Int, Shape, Tensor, TensorData};
use itertools::Itertools;
use std::cell::LazyCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::collective::all_gather;
use super::local::is_require_grad;
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, Digests, ReplicatedValue};
use crate::memory::digests;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, ShardSizes};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Like [`from_local`](Self::from_local), but compares the local tensors of all ranks. The
    /// global shape is computed from them, so they may be uneven in the way that
    /// [`chunk`](crate::placement::chunk) produces.
    ///
    /// The ranks compare dtype, `require_grad` and shape, and bit for bit the values of ranks that
    /// hold replicas. Every rank reads all its values, so use this for set-up and debugging.
    /// Differences are reported, not repaired; PyTorch's `run_check` broadcasts the first rank's
    /// values instead.
    ///
    /// # Collective
    /// Every rank of the mesh. All ranks return the same error.
    ///
    /// # Errors
    /// As [`from_local`](Self::from_local), [`DTensorError::RanksDisagree`],
    /// [`DTensorError::LocalShape`] for the first rank whose local tensor does not fit the others,
    /// and [`CommError`](crate::comm::CommError) if a collective fails.
    pub fn from_local_checked(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let layout = Layout::new(mesh.shape(), placements)?;
        layout.check(D)?;
        // Membership is checked before anything is sent.
        DTensorSpec::new(mesh, layout.clone(), local.shape(), local.dtype())?;
        let table = Table::gather(&local, mesh, layout)?;
        let shape = table.global_shape::<D>();
        table.check(&shape)?;
        let spec = DTensorSpec::new(mesh, table.layout, shape, local.dtype())?;
        Ok(Self::from_parts(local, spec.shared()))
    }
}

/// If the launch checks replicas, compares `value` with the ranks along each mesh dimension in
/// `dims`, bit for bit.
///
/// # Collective
/// If the launch checks replicas: every rank of the mesh that differs only in these dimensions.
///
/// # Errors
/// [`CommError::Diverged`](crate::comm::CommError::Diverged), or
/// [`CommError::Mismatch`](crate::comm::CommError::Mismatch) for another shape or dtype.
#[inline]
pub(super) fn check_replicas<const D: usize, K: Kind>(
    value: &Tensor<D, K>,
    mesh: &DeviceMesh,
    dims: impl IntoIterator<Item = usize>,
) -> Result<()> {
    if mesh.world().checks_replicas() {
        compare_replicas(value, mesh, dims)
    } else {
        Ok(())
    }
}

/// Compares `value` with the ranks along each mesh dimension in `dims`. A separate function, so
/// that a launch without checks pays for one branch.
#[cold]
fn compare_replicas<const D: usize, K: Kind>(
    value: &Tensor<D, K>,
    mesh: &DeviceMesh,
    dims: impl IntoIterator<Item = usize>,
) -> Result<()> {
    let digest = LazyCell::new(|| {
        let plain = value.clone().inner().into_dispatch();
        let known = digests(std::iter::once(&plain)).remove(0);
        known.unwrap_or_else(|| hash(value.to_data().as_bytes()) as u64)
    });
    for dim in dims.into_iter().filter(|&dim| mesh.shape()[dim] > 1) {
        let shape = value.dims();
        let dtype = value.dtype().name();
        let name = format!(
            "{shape:?} {dtype} on mesh dimension `{}`",
            mesh.names()[dim]
        );
        let digests = Digests {
            of: ReplicatedValue::LocalTensor,
            step: 0,
            names: [name.into()].into(),
            values: [Some(*digest)].into(),
        };
        let call = Call::new("check of a replicated tensor").with_digests(vec![digests]);
        mesh.communicator(dim)?.barrier(call).wait()?;
    }
    Ok(())
}

/// Description of one rank's local tensor, as gathered from that rank.
#[derive(Debug, PartialEq)]
struct RankRow {
    rank: usize,
    coordinate: Vec<usize>,
    shape: Vec<usize>,
    dtype: String,
    require_grad: bool,
    /// Hash of the bytes of the values.
    hash: i64,
}

struct Table {
    layout: Layout,
    rows: Vec<RankRow>,
}

impl Table {
    fn gather<const D: usize, K: Kind>(
        local: &Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
    ) -> Result<Self> {
        let data = local.to_data();
        let mut row: Vec<i64> = local.dims().iter().map(|&len| len as i64).collect();
        row.extend([
            i64::from_le_bytes(dtype_code(local.dtype())),
            is_require_grad(local).into(),
            hash(data.as_bytes()),
            mesh.rank() as i64,
        ]);
        let fields = row.len();
        let device = local.device().without_autodiff();
        let data = TensorData::new(row, [fields]);
        let mut rows: Tensor<1, Int> = Tensor::from_data(data, (&device, DType::I64));
        let call = Call::new(format!("check {layout}"));
        for mesh_dim in (0..mesh.ndim()).rev() {
            let comm = mesh.communicator(mesh_dim)?;
            let len = rows.dims()[0] * comm.group().size();
            rows = all_gather(comm, call.clone(), rows, 0, ShardSizes::Chunked(len)).wait()?;
        }
        let values: Vec<i64> = rows.into_data().iter::<i64>().collect();
        let coordinates = mesh
            .shape()
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product();
        let rows = values
            .chunks(fields)
            .zip(coordinates)
            .map(|(row, coordinate)| RankRow {
                rank: row[D + 3] as usize,
                coordinate,
                shape: row[..D].iter().map(|&len| len as usize).collect(),
                dtype: String::from_utf8_lossy(&row[D].to_le_bytes())
                    .trim_end()
                    .into(),
                require_grad: row[D + 1] != 0,
                hash: row[D + 2],
            });
        Ok(Self {
            layout,
            rows: rows.collect(),
        })
    }

    /// Returns the global shape. The length of a sharded dimension is the sum of the shards of
    /// those ranks that have index 0 in all mesh dimensions that do not shard it.
    fn global_shape<const D: usize>(&self) -> Shape {
        let len = |dim| {
            let shardings = self.layout.shard_order(dim);
            let others_first = |row: &&RankRow| {
                let mut indices = row.coordinate.iter().enumerate();
                indices.all(|(mesh_dim, &index)| index == 0 || shardings.contains(&mesh_dim))
            };
            self.rows
                .iter()
                .filter(others_first)
                .map(|row| row.shape[dim])
                .sum::<usize>()
        };
        Shape::from((0..D).map(len).collect::<Vec<_>>())
    }

    fn check(&self, global: &Shape) -> Result<(), DTensorError> {
        let first = &self.rows[0];
        for row in &self.rows {
            if row.dtype != first.dtype {
                let remedy = "Cast one of the local tensors: a tensor has one dtype";
                return Err(disagree(
                    "the dtype",
                    first,
                    row,
                    |row| row.dtype.clone(),
                    remedy,
                ));
            }
            if row.require_grad != first.require_grad {
                let remedy = "Call `require_grad` on every rank or on none";
                return Err(disagree(
                    "require_grad",
                    first,
                    row,
                    |row| format!("require_grad = {}", row.require_grad),
                    remedy,
                ));
            }
        }
        for row in &self.rows {
            let expected = self.layout.local_shape(global, &row.coordinate);
            if row.shape != expected {
                return Err(DTensorError::LocalShape {
                    rank: row.rank,
                    local: row.shape.clone(),
                    expected,
                    global: global.to_vec(),
                    layout: self.layout.to_string(),
                });
            }
        }
        for (mesh_dim, placement) in self.layout.placements().iter().enumerate() {
            if !placement.is_replicate() {
                continue;
            }
            for row in &self.rows {
                let mut coordinate = row.coordinate.clone();
                coordinate[mesh_dim] = 0;
                let twin = self
                    .rows
                    .iter()
                    .find(|row| row.coordinate == coordinate)
                    .unwrap_or(row);
                if twin.hash != row.hash {
                    let remedy = "Distribute one rank's values with `distribute_tensor`";
                    return Err(disagree(
                        "the values",
                        twin,
                        row,
                        |row| format!("values #{:x}", row.hash),
                        remedy,
                    ));
                }
            }
        }
        Ok(())
    }
}

fn disagree(
    what: &'static str,
    row: &RankRow,
    other: &RankRow,
    text: impl Fn(&RankRow) -> String,
    remedy: &'static str,
) -> DTensorError {
    let found = text(row);
    let other_found = text(other);
    DTensorError::RanksDisagree {
        what,
        rank: row.rank,
        other: other.rank,
        found,
        other_found,
        remedy,
    }
}

/// Returns the first eight letters of the dtype's name, padded with blanks.
fn dtype_code(dtype: DType) -> [u8; 8] {
    let mut code = [b' '; 8];
    code.iter_mut()
        .zip(dtype.name().bytes())
        .for_each(|(to, from)| *to = from);
    code
}

/// Hashes bytes. All ranks that run the same build compute the same hash.
fn hash(bytes: &[u8]) -> i64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish() as i64
}
