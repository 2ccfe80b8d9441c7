//! Dimensions of a mesh made one, or one made several.

use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;

impl DeviceMesh {
    /// The 1-D mesh over the named dimensions, called by their names joined with `_`:
    /// `mesh.flatten(["dp", "cp"])` is the mesh `dp_cp` of the caller's slice.
    ///
    /// # Collective
    /// Every rank of the mesh: it makes a group.
    ///
    /// # Errors
    /// As [`slice`](Self::slice).
    pub fn flatten(&self, names: impl DimNames) -> Result<Self> {
        let slice = self.slice(names)?;
        let name = slice.names().join("_");
        Self::with_index(slice.world(), slice.ranks().to_vec(), &[slice.size()], [name], slice.slice_index())
    }

    /// The mesh with adjacent dimensions made one, called by their names joined with `_`: of
    /// (replicate, dp, cp), `flatten_dims(["dp", "cp"])` is (replicate, dp_cp).
    ///
    /// # Collective
    /// Every rank of the world, as for [`new`](Self::new): it makes groups.
    ///
    /// # Errors
    /// [`NotAdjacent`](MeshError::NotAdjacent), [`DuplicateName`](MeshError::DuplicateName) if
    /// another dimension has the joined name, and the errors of names in [`slice`](Self::slice).
    pub fn flatten_dims(&self, names: impl DimNames) -> Result<Self> {
        let dims = self.dims(names)?;
        let (first, last) = (dims[0], dims[dims.len() - 1]);
        let flattened = self.names()[first..=last].to_vec();
        if dims.len() != flattened.len() {
            let given = dims.iter().map(|&dim| self.names()[dim].clone()).collect();
            return Err(MeshError::NotAdjacent { given, mesh: self.to_string() }.into());
        }
        let size = self.shape()[first..=last].iter().product();
        self.replace_dims(first..last + 1, &[size], &[flattened.join("_")])
    }

    /// The mesh with the dimension `name` split in several, the last varying fastest: of
    /// (dp=8, tp=2), `unflatten("dp", [2, 4], ["efsdp", "ep"])` is (efsdp=2, ep=4, tp=2).
    ///
    /// # Collective
    /// Every rank of the world, as for [`new`](Self::new): it makes groups.
    ///
    /// # Errors
    /// [`UnknownName`](MeshError::UnknownName), [`Unflatten`](MeshError::Unflatten) if the
    /// product of `sizes` is not the dimension's size, and the errors of names in
    /// [`new`](Self::new).
    pub fn unflatten(&self, name: &str, sizes: impl AsRef<[usize]>, names: impl DimNames) -> Result<Self> {
        let (dim, sizes) = (self.dim(name)?, sizes.as_ref());
        let size = self.size_of(dim);
        if sizes.is_empty() || sizes.iter().product::<usize>() != size {
            return Err(MeshError::Unflatten { name: name.into(), size, sizes: sizes.to_vec() }.into());
        }
        let names: Vec<String> = names.dim_names().into_iter().map(Into::into).collect();
        if names.len() != sizes.len() {
            return Err(MeshError::NameCount { names, shape: sizes.to_vec() }.into());
        }
        self.replace_dims(dim..dim + 1, sizes, &names)
    }

    fn replace_dims(&self, dims: std::ops::Range<usize>, sizes: &[usize], names: &[String]) -> Result<Self> {
        let (mut shape, mut all_names) = (self.shape().to_vec(), self.names().to_vec());
        shape.splice(dims.clone(), sizes.iter().copied());
        all_names.splice(dims, names.iter().cloned());
        Self::with_index(self.world(), self.ranks().to_vec(), &shape, all_names, self.slice_index())
    }
}
