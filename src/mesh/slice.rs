//! Slices of a mesh, and slices put together again.

use super::device_mesh::first_repeated;
use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;

impl DeviceMesh {
    /// The mesh of the ranks that share the caller's position in all other dimensions:
    /// `mesh.slice("tp")` or `mesh.slice(["dp", "tp"])`, names in the order of the mesh.
    ///
    /// Shares the mesh's communicators. Naming all dimensions gives the mesh itself.
    ///
    /// # Errors
    /// [`NoNames`](MeshError::NoNames), [`UnknownName`](MeshError::UnknownName),
    /// [`DuplicateName`](MeshError::DuplicateName), [`NameOrder`](MeshError::NameOrder), and
    /// [`NotAMember`](MeshError::NotAMember) outside the mesh.
    pub fn slice(&self, names: impl DimNames) -> Result<Self> {
        let dims = self.dims(names)?;
        if dims.len() == self.ndim() {
            return Ok(self.clone());
        }
        Ok(self.sub_mesh(&dims, self.member("slice it")?))
    }

    /// The mesh over the dimensions of several slices of one mesh: of `dp` and `tp`, the slice
    /// (dp, tp). Its dimensions come in the order of that mesh, which must be theirs.
    ///
    /// # Errors
    /// [`DifferentRoots`](MeshError::DifferentRoots) unless all are slices of one mesh, and as
    /// [`slice`](Self::slice).
    pub fn concatenate(&self, others: &[&Self]) -> Result<Self> {
        if let Some(other) = others.iter().find(|other| other.root() != self.root()) {
            return Err(MeshError::DifferentRoots { left: self.to_string(), right: other.to_string() }.into());
        }
        let names: Vec<&String> = self.names().iter().chain(others.iter().flat_map(|other| other.names())).collect();
        self.root().slice(names)
    }

    /// Indices of the named dimensions.
    pub(super) fn dims(&self, names: impl DimNames) -> Result<Vec<usize>> {
        let names = names.dim_names();
        let owned = || names.iter().map(ToString::to_string).collect();
        if names.is_empty() {
            return Err(MeshError::NoNames { mesh: self.to_string() }.into());
        }
        let dims = names.iter().map(|name| self.dim(name)).collect::<Result<Vec<_>>>()?;
        if let Some(&dim) = first_repeated(&dims) {
            return Err(MeshError::DuplicateName { name: self.names()[dim].clone(), names: owned() }.into());
        }
        if !dims.is_sorted() {
            let expected = self.names().iter().filter(|name| names.contains(&name.as_str())).cloned().collect();
            return Err(MeshError::NameOrder { given: owned(), expected, mesh: self.to_string() }.into());
        }
        Ok(dims)
    }
}
