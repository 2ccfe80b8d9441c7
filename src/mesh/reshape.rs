//! Flattening of several mesh dimensions into one, and splitting of one into several.

use super::array::{rank_count, validate};
use super::device_mesh::MeshDim;
use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;

impl DeviceMesh {
    /// Returns the 1-D slice over the named dimensions. Its name consists of their names, joined
    /// with `_`: `mesh.flatten(["dp", "cp"])` is the mesh `dp_cp`.
    ///
    /// From then on [`slice`](Self::slice) accepts the name on this rank, by itself or together with
    /// other dimensions. This applies to the mesh and to all its clones and slices that have the
    /// dimensions. Flattening the same dimensions a second time returns an equal mesh. Flattening a
    /// single dimension returns its slice.
    ///
    /// # Collective
    /// Local: nothing is sent, and no rank waits. Every rank that will communicate over the result
    /// calls it.
    ///
    /// # Errors
    /// As [`flatten_as`](Self::flatten_as).
    pub fn flatten(&self, names: impl DimNames) -> Result<Self> {
        let name = names.dim_names().join("_");
        self.flatten_as(names, &name)
    }

    /// Like [`flatten`](Self::flatten), but with the name `name`.
    ///
    /// # Collective
    /// Local, like [`flatten`](Self::flatten).
    ///
    /// # Errors
    /// As [`slice`](Self::slice); [`EmptyName`](MeshError::EmptyName), and
    /// [`NameTaken`](MeshError::NameTaken) if the mesh, or the one from which it was sliced, has
    /// other dimensions of this name.
    pub fn flatten_as(&self, names: impl DimNames, name: &str) -> Result<Self> {
        let dims = self.dims(names)?;
        let root = self.root();
        let flat = MeshDim {
            name: name.into(),
            made_of: dims.iter().flat_map(|dim| dim.made_of.clone()).collect(),
        };
        root.member("flatten it")?;
        if name.is_empty() {
            return Err(MeshError::EmptyName {
                mesh_dim: flat.made_of[0],
            }
            .into());
        }
        let mut flattened = root.flattened();
        let known = root
            .mesh_dims()
            .chain(flattened.iter().cloned())
            .find(|known| known.name == name);
        if let Some(known) = &known
            && known.made_of != flat.made_of
        {
            let text = |dim: &MeshDim| {
                dim.made_of
                    .iter()
                    .map(|&dim| root.names()[dim].clone())
                    .collect()
            };
            let taken = text(known);
            let given = text(&flat);
            return Err(MeshError::NameTaken {
                name: name.into(),
                taken,
                given,
                mesh: root.to_string(),
            }
            .into());
        }
        if known.is_none() {
            flattened.push(flat.clone());
        }
        drop(flattened);
        root.sliced(vec![flat])
    }

    /// Returns the mesh with the dimension `name` split into several, the last varying fastest.
    /// With (dp=8, tp=2), `unflatten("dp", [2, 4], ["efsdp", "ep"])` is (efsdp=2, ep=4, tp=2). The
    /// result is a root.
    ///
    /// The new dimensions use groups of the world. The other dimensions keep their communicators
    /// and [deadlines](Self::with_deadline), and so does a new dimension with all ranks of the old
    /// one.
    ///
    /// # Collective
    /// Local, like [`new`](Self::new). Every rank of the mesh passes the same arguments.
    ///
    /// # Errors
    /// [`UnknownName`](MeshError::UnknownName), [`Unflatten`](MeshError::Unflatten) if the product
    /// of `sizes` is not the dimension's size, and the errors for names in [`new`](Self::new).
    pub fn unflatten(
        &self,
        name: &str,
        sizes: impl AsRef<[usize]>,
        names: impl DimNames,
    ) -> Result<Self> {
        let dim = self.dim(name)?;
        let sizes = sizes.as_ref();
        let size = self.size_of(dim);
        if sizes.is_empty() || rank_count(sizes) != size {
            return Err(MeshError::Unflatten {
                name: name.into(),
                size,
                sizes: sizes.to_vec(),
            }
            .into());
        }
        let names: Vec<String> = names.dim_names().into_iter().map(Into::into).collect();
        if names.len() != sizes.len() {
            return Err(MeshError::NameCount {
                names,
                shape: sizes.to_vec(),
            }
            .into());
        }
        let mut shape = self.shape().to_vec();
        let mut all_names = self.names().to_vec();
        shape.splice(dim..=dim, sizes.iter().copied());
        all_names.splice(dim..=dim, names);
        validate(self.world().size(), self.ranks(), &shape, &all_names)?;
        let known = |new: usize| {
            let old = match new {
                _ if new < dim => new,
                _ if new >= dim + sizes.len() => new + 1 - sizes.len(),
                _ if shape[new] == size => dim,
                _ => return None,
            };
            self.communicator(old).ok().cloned()
        };
        let world = self.world();
        let ranks = self.ranks().to_vec();
        let communicators = Self::communicators_along(world, &ranks, &shape, known)?;
        Ok(Self::over(
            world,
            ranks,
            &shape,
            all_names,
            communicators,
            self.slice_index(),
            self.joins_dims(),
        ))
    }
}
