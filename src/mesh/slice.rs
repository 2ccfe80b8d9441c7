//! Slicing of a mesh, and concatenation of slices.

use super::array::first_repeated;
use super::device_mesh::MeshDim;
use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;

impl DeviceMesh {
    /// Returns the mesh of the ranks that have the caller's index in all other dimensions:
    /// `mesh.slice("tp")` or `mesh.slice(["dp", "tp"])`, with names in the order of the mesh.
    ///
    /// A name is that of a dimension, or one that [`flatten`](Self::flatten) has given to several
    /// dimensions. If dp and cp of (pp, dp, cp, tp) were flattened, `mesh.slice(["dp_cp", "tp"])`
    /// has two dimensions.
    ///
    /// Local: the slice shares the mesh's communicators. If all dimensions are named, it is the
    /// mesh itself.
    ///
    /// # Errors
    /// [`NoNames`](MeshError::NoNames), [`UnknownName`](MeshError::UnknownName),
    /// [`DuplicateName`](MeshError::DuplicateName), [`Overlap`](MeshError::Overlap),
    /// [`NameOrder`](MeshError::NameOrder), and [`NotAMember`](MeshError::NotAMember) outside the
    /// mesh.
    pub fn slice(&self, names: impl DimNames) -> Result<Self> {
        let dims = self.dims(names)?;
        if dims.iter().cloned().eq(self.mesh_dims()) {
            return Ok(self.clone());
        }
        self.root().sliced(dims)
    }

    /// Returns the mesh over the dimensions of several slices of one mesh, in that mesh's order.
    /// For example, the slices `dp` and `tp` yield the slice (dp, tp). Local, as
    /// [`slice`](Self::slice).
    ///
    /// # Errors
    /// [`DifferentRoots`](MeshError::DifferentRoots) unless all are slices of one mesh,
    /// [`DuplicateName`](MeshError::DuplicateName) and [`Overlap`](MeshError::Overlap) for slices
    /// that share a dimension.
    pub fn concatenate(&self, others: &[&Self]) -> Result<Self> {
        if let Some(other) = others.iter().find(|other| other.root() != self.root()) {
            return Err(MeshError::DifferentRoots {
                left: self.to_string(),
                right: other.to_string(),
            }
            .into());
        }
        let mut dims: Vec<_> = self
            .mesh_dims()
            .chain(others.iter().flat_map(|other| other.mesh_dims()))
            .collect();
        self.root().check_apart(&dims)?;
        dims.sort_by_key(MeshDim::first);
        self.root().sliced(dims)
    }

    /// Returns the dimension of this mesh that is dimension `mesh_dim` of `other`, if both are
    /// slices of the same mesh and share it.
    pub(crate) fn dim_in_common(&self, other: &Self, mesh_dim: usize) -> Option<usize> {
        let theirs = other
            .mesh_dims()
            .nth(mesh_dim)
            .filter(|_| self.root() == other.root())?;
        self.mesh_dims()
            .position(|dim| dim.made_of == theirs.made_of)
    }

    /// Returns the slice of this mesh, which must be a root, with these dimensions; the mesh itself
    /// if these are all its dimensions.
    pub(super) fn sliced(&self, dims: Vec<MeshDim>) -> Result<Self> {
        if dims.iter().cloned().eq(self.mesh_dims()) {
            Ok(self.clone())
        } else {
            self.sub_mesh(dims)
        }
    }

    /// Returns the named dimensions.
    pub(super) fn dims(&self, names: impl DimNames) -> Result<Vec<MeshDim>> {
        let names = names.dim_names();
        if names.is_empty() {
            return Err(MeshError::NoNames {
                mesh: self.to_string(),
            }
            .into());
        }
        let known: Vec<_> = self.mesh_dims().chain(self.joined()).collect();
        let find = |name: &&str| {
            let unknown = || MeshError::UnknownName {
                name: (*name).into(),
                names: known.iter().map(|dim| dim.name.clone()).collect(),
                mesh: self.to_string(),
            };
            known
                .iter()
                .find(|dim| dim.name == *name)
                .cloned()
                .ok_or_else(unknown)
        };
        let dims = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        self.check_apart(&dims)?;
        if !dims.is_sorted_by_key(MeshDim::first) {
            let mut expected = dims.clone();
            expected.sort_by_key(MeshDim::first);
            let [given, expected] =
                [dims, expected].map(|dims| dims.into_iter().map(|dim| dim.name).collect());
            return Err(MeshError::NameOrder {
                given,
                expected,
                mesh: self.to_string(),
            }
            .into());
        }
        Ok(dims)
    }

    /// Returns the flattened dimensions that consist of dimensions of this mesh.
    fn joined(&self) -> Vec<MeshDim> {
        let held: Vec<usize> = self.mesh_dims().flat_map(|dim| dim.made_of).collect();
        self.root()
            .flattened()
            .iter()
            .filter(|dim| dim.made_of.iter().all(|dim| held.contains(dim)))
            .cloned()
            .collect()
    }

    /// Checks that no dimension is named twice, by its own name or by that of a flattened
    /// dimension.
    fn check_apart(&self, dims: &[MeshDim]) -> Result<(), MeshError> {
        let given = || dims.iter().map(|dim| dim.name.clone()).collect::<Vec<_>>();
        if let Some(name) = first_repeated(&given()) {
            return Err(MeshError::DuplicateName {
                name: name.clone(),
                names: given(),
            });
        }
        let made_of: Vec<usize> = dims
            .iter()
            .flat_map(|dim| dim.made_of.iter().copied())
            .collect();
        match first_repeated(&made_of) {
            Some(&dim) => {
                let name = self.root().names()[dim].clone();
                Err(MeshError::Overlap {
                    given: given(),
                    name,
                    mesh: self.root().to_string(),
                })
            }
            None => Ok(()),
        }
    }
}

impl MeshDim {
    fn first(&self) -> usize {
        self.made_of[0]
    }
}
