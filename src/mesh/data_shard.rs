//! [`DataShard`]: the part of the data that a rank's position in the mesh assigns to it.

use super::{DeviceMesh, DimNames};
use crate::Result;

/// One of the `count` parts into which data-parallel ranks divide a dataset and each of its
/// batches.
///
/// [`DeviceMesh::data_shard`] computes it. A program without a mesh, such as an unsharded baseline,
/// uses [`ALL`](Self::ALL).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DataShard {
    /// Index of the part, below `count`.
    pub index: usize,
    /// Number of parts.
    pub count: usize,
}

impl DataShard {
    /// The only part of data that is not divided.
    pub const ALL: Self = Self { index: 0, count: 1 };
}

impl DeviceMesh {
    /// Returns the data shard of the calling rank, if the mesh dimensions `names` divide the data.
    /// Ranks that differ only along other dimensions, such as `tp`, have the same data shard, and
    /// therefore read the same rows.
    ///
    /// ```text
    /// (replicate=2, shard=2, tp=2), mesh.data_shard(["replicate", "shard"]):
    ///
    /// rank    0  1  2  3  4  5  6  7
    /// index   0  0  1  1  2  2  3  3    of 4
    /// ```
    ///
    /// Names are as for [`slice`](Self::slice). The last one varies fastest. Without any name the
    /// data is not divided: every rank has [`DataShard::ALL`].
    ///
    /// Local: no communication.
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice) for names that do not fit, and
    /// [`NotAMember`](super::MeshError::NotAMember) outside the mesh.
    pub fn data_shard(&self, names: impl DimNames) -> Result<DataShard> {
        let dims = if names.dim_names().is_empty() {
            Vec::new()
        } else {
            self.dims(names)?
        };
        let root = self.root();
        let coordinate = root.member("own a shard of the data")?;
        let divide = |DataShard { index, count }: DataShard, &dim: &usize| DataShard {
            index: index * root.size_of(dim) + coordinate[dim],
            count: count * root.size_of(dim),
        };
        Ok(dims
            .iter()
            .flat_map(|dim| &dim.made_of)
            .fold(DataShard::ALL, divide))
    }
}
