//! [`FsdpMeshDims`]: the dimensions of a mesh that shard each parameter, and those that replicate it.
//!
//! ```text
//!   mesh             efsdp   ep     tp
//!   a parameter      S(0) over both  -       shard_dims(["efsdp", "ep"])
//!   expert weights   S(0)    -      -        placed over `ep` by `parallelize`
//!   placed by hand   R       S(0)   -        ParamPlacement::with_mesh_dims("ep")
//! ```

use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::mesh::DeviceMesh;
use crate::param::FsdpMeshInfo;

use super::FsdpError;
use super::config::FullyShard;

/// The data-parallel dimensions of a mesh, and the meshes over which parameters are sharded and
/// replicated.
pub(super) struct FsdpMeshDims<'a> {
    mesh: &'a DeviceMesh,
    /// Indices of the dimensions that shard, unless a parameter's placement names others.
    shard: MeshDims,
    /// Indices of all data-parallel dimensions, ascending.
    all: MeshDims,
    /// True if the configuration names the dimensions.
    is_named: bool,
    /// True if all dimensions of the mesh are data-parallel by default.
    is_all: bool,
    /// The meshes in use, each with the dimensions that shard and those that replicate.
    made: Vec<(MeshDims, MeshDims, FsdpMeshInfo)>,
}

impl<'a> FsdpMeshDims<'a> {
    /// Determines the data-parallel dimensions that `config` names, or those of a 1-D or 2-D mesh.
    ///
    /// # Errors
    /// [`FsdpError::MeshDims`], [`FsdpError::NoShardDims`], and the mesh's errors for names that it
    /// does not have, that are repeated, or that are in another order.
    pub(super) fn new(mesh: &'a DeviceMesh, config: &FullyShard) -> Result<Self> {
        let shard = &config.shard_dims;
        let replicate = &config.replicate_dims;
        let (shard, mut all) = match (shard.is_empty(), replicate.is_empty()) {
            (true, true) if (1..=2).contains(&mesh.ndim()) => (
                MeshDims::from_slice(&[mesh.ndim() - 1]),
                (0..mesh.ndim()).collect(),
            ),
            (true, true) => {
                return Err(FsdpError::MeshDims {
                    mesh: mesh.to_string(),
                }
                .into());
            }
            (true, false) => {
                return Err(FsdpError::NoShardDims {
                    mesh: mesh.to_string(),
                }
                .into());
            }
            (false, _) => {
                let sharding = mesh.slice(shard)?;
                if !replicate.is_empty() {
                    mesh.slice(replicate)?.concatenate(&[&sharding])?;
                }
                let dims = |names: &[String]| {
                    names
                        .iter()
                        .map(|name| mesh.dim(name))
                        .collect::<Result<MeshDims>>()
                };
                let shard = dims(shard)?;
                let replicate = dims(replicate)?;
                let all: MeshDims = shard.iter().copied().chain(replicate).collect();
                (shard, all)
            }
        };
        all.sort_unstable();
        Ok(Self {
            mesh,
            shard,
            all,
            is_named: !config.shard_dims.is_empty() && !config.has_default_dims,
            is_all: config.has_default_dims,
            made: Vec::new(),
        })
    }

    /// Returns the group of all ranks that have distinct data.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and a failure of the world.
    pub(super) fn all(&self) -> Result<Communicator> {
        self.mesh.communicator_over(&self.all)
    }

    /// Returns the group of ranks that differ from this one only in dimensions that are not
    /// data-parallel, if the mesh has such. These ranks hold the same values of every parameter
    /// that is not parallelized.
    ///
    /// # Errors
    /// Those of [`all`](Self::all).
    pub(super) fn others(&self) -> Result<Option<Communicator>> {
        let others: MeshDims = (0..self.mesh.ndim())
            .filter(|dim| !self.all.contains(dim))
            .collect();
        if others.is_empty() {
            Ok(None)
        } else {
            self.mesh.communicator_over(&others).map(Some)
        }
    }

    /// Returns the index, among the [`meshes`](Self::meshes), of the mesh of a parameter. `over`
    /// are the dimensions that its placement names, if any. `placed` is its spec if `parallelize`
    /// placed it.
    ///
    /// # Errors
    /// [`FsdpError::TensorParallelDim`], [`FsdpError::ReplicatedOverDataDim`],
    /// [`FsdpError::MeshDimInUse`], [`FsdpError::NoShardDimLeft`], and the mesh's errors for names
    /// that are repeated or in another order.
    pub(super) fn of(
        &mut self,
        param: &str,
        over: Option<&[String]>,
        placed: Option<&DTensorSpec>,
    ) -> Result<usize> {
        let mesh = self.mesh;
        if self.is_all {
            self.check_is_data_mesh(param, placed)?;
        }
        let mut free = self.all.clone();
        for (at, mesh_dim) in placed.iter().flat_map(|spec| self.shared_with(spec)) {
            if placed.is_some_and(|spec| spec.placements()[at].is_replicate()) {
                self.check_is_data_mesh(param, placed)?;
                let mesh_dim = mesh.names()[mesh_dim].clone();
                return Err(FsdpError::ReplicatedOverDataDim {
                    param: param.into(),
                    mesh_dim,
                }
                .into());
            }
            free.retain(|dim| *dim != mesh_dim);
        }
        let shard: MeshDims = match over {
            None => self
                .shard
                .iter()
                .copied()
                .filter(|dim| free.contains(dim))
                .collect(),
            Some(names) => {
                let not_free =
                    |name: &&String| !free.iter().any(|&dim| mesh.names()[dim] == **name);
                if let Some(name) = names.iter().find(not_free) {
                    let free = free.iter().map(|&dim| mesh.names()[dim].clone()).collect();
                    let param = param.into();
                    let mesh_dim = name.clone();
                    let mesh = mesh.to_string();
                    return Err(FsdpError::MeshDimInUse {
                        param,
                        mesh_dim,
                        mesh,
                        free,
                    }
                    .into());
                }
                mesh.slice(names)?;
                names
                    .iter()
                    .map(|name| mesh.dim(name))
                    .collect::<Result<_>>()?
            }
        };
        if shard.is_empty() {
            self.check_is_data_mesh(param, placed)?;
            return Err(FsdpError::NoShardDimLeft {
                param: param.into(),
                mesh: mesh.to_string(),
            }
            .into());
        }
        let replicate: MeshDims = free
            .into_iter()
            .filter(|dim| !shard.contains(dim))
            .collect();
        if let Some(known) = self
            .made
            .iter()
            .position(|(a, b, _)| (a, b) == (&shard, &replicate))
        {
            return Ok(known);
        }
        let over_data = self.over(&shard, &replicate)?;
        self.made.push((shard, replicate, over_data));
        Ok(self.made.len() - 1)
    }

    /// Checks that the program has named dimensions of the mesh, or passed a mesh without other
    /// dimensions than those of the parameter's tensor-parallel mesh. Otherwise the program
    /// probably meant the other dimensions.
    fn check_is_data_mesh(
        &self,
        param: &str,
        placed: Option<&DTensorSpec>,
    ) -> Result<(), FsdpError> {
        let shared: MeshDims = placed
            .iter()
            .flat_map(|spec| self.shared_with(spec))
            .map(|(_, dim)| dim)
            .collect();
        let name = |dim: usize| self.mesh.names()[dim].clone();
        let rest: Vec<_> = self
            .all
            .iter()
            .filter(|dim| !shared.contains(dim))
            .map(|&dim| name(dim))
            .collect();
        match (shared.first(), &rest[..]) {
            (Some(&dim), [_, ..]) if !self.is_named => Err(FsdpError::TensorParallelDim {
                param: param.into(),
                mesh_dim: name(dim),
                mesh: self.mesh.to_string(),
                rest: if let [one] = &rest[..] {
                    format!("{one:?}")
                } else {
                    format!("{rest:?}")
                },
            }),
            _ => Ok(()),
        }
    }

    /// Returns the dimensions of a parameter's tensor-parallel mesh that are data-parallel for
    /// other parameters, each with the corresponding dimension of this mesh.
    fn shared_with(&self, placed: &DTensorSpec) -> Vec<(usize, usize)> {
        let shared = |at| Some((at, self.mesh.dim_in_common(placed.mesh(), at)?));
        let shared = (0..placed.mesh().ndim()).filter_map(shared);
        shared
            .filter(|(_, mesh_dim)| self.all.contains(mesh_dim))
            .collect()
    }

    /// Like [`shared_with`](Self::shared_with), but returns only the dimensions of the
    /// tensor-parallel mesh.
    pub(super) fn data_dims(&self, placed: &DTensorSpec) -> MeshDims {
        self.shared_with(placed)
            .into_iter()
            .map(|(at, _)| at)
            .collect()
    }

    fn over(&self, shard: &[usize], replicate: &[usize]) -> Result<FsdpMeshInfo> {
        if let ([shard], 0 | 1) = (shard, replicate.len())
            && 1 + replicate.len() == self.mesh.ndim()
        {
            return Ok(FsdpMeshInfo {
                mesh: self.mesh.clone(),
                shard: *shard,
            });
        }
        let names = |dims: &[usize]| {
            dims.iter()
                .map(|&dim| self.mesh.names()[dim].clone())
                .collect::<Vec<_>>()
        };
        let sharding = self.mesh.flatten(names(shard))?;
        let mesh = match replicate {
            [] => sharding.clone(),
            replicate => self
                .mesh
                .flatten(names(replicate))?
                .concatenate(&[&sharding])?,
        };
        Ok(FsdpMeshInfo {
            shard: mesh.dim(&sharding.names()[0])?,
            mesh,
        })
    }

    /// Returns the meshes in use, in the order of the indices that [`of`](Self::of) returns.
    pub(super) fn meshes(&self) -> impl Iterator<Item = &FsdpMeshInfo> {
        self.made.iter().map(|(.., mesh)| mesh)
    }
}
