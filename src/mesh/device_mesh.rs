//! [`DeviceMesh`]: construction and accessors.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use super::array::{along, rank_count, unravel, validate};
use super::{DimNames, MeshError};
use crate::Result;
use crate::comm::{Communicator, World};

/// An array of ranks with named dimensions, and one communicator per dimension.
///
/// Cloning is cheap. See the [module](super) for a picture.
///
/// A mesh belongs to one rank of one launch, because its communicators do. Two meshes are equal if
/// they belong to the same rank, have equal ranks, shapes, names and communicators, and are slices
/// of equal meshes or of none.
///
/// [`Display`](std::fmt::Display) writes one line, and with `{:#}` also a grid of ranks:
///
/// ```text
/// DeviceMesh(dp=2, tp=4; ranks 0..8)
///
///      tp  0  1  2  3
/// dp 0     0  1  2  3
/// dp 1     4  5  6  7
/// ```
#[derive(Clone)]
pub struct DeviceMesh(Arc<MeshInner>);

struct MeshInner {
    world: World,
    shape: SmallVec<[usize; 3]>,
    names: Vec<String>,
    /// For each dimension, the dimensions of the root that it consists of.
    made_of: Vec<RootDims>,
    /// Global ranks, row-major.
    ranks: Vec<usize>,
    /// Hash of everything that equality compares, computed once because a mesh is part of the key
    /// of every operator decision.
    hash: u64,
    /// Coordinate of the calling rank, if it is a member.
    coordinate: Option<SmallVec<[usize; 3]>>,
    /// One communicator per dimension; empty if the caller is not a member.
    communicators: Vec<Communicator>,
    /// For a slice: the mesh from which it was sliced.
    root: Option<DeviceMesh>,
    /// Index among the root's slices along the same dimensions.
    index: usize,
    /// True if the communicators are groups of the world.
    of_world: bool,
    /// For a root: names of flattened dimensions, with the dimensions that each consists of.
    flattened: Mutex<Vec<MeshDim>>,
}

/// Dimensions of a root, the last varying fastest. One dimension, or several that were flattened
/// into one.
pub(super) type RootDims = SmallVec<[usize; 2]>;

/// A dimension of a root or of a slice: its name, and the dimensions of the root that it consists
/// of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MeshDim {
    pub(super) name: String,
    pub(super) made_of: RootDims,
}

impl DeviceMesh {
    /// Creates a mesh of the ranks `0..n`, where `n` is the product of `shape`.
    ///
    /// The world may be larger than the mesh. A rank outside the mesh gets one without a
    /// [`coordinate`](Self::coordinate).
    ///
    /// # Collective
    /// Local: nothing is sent, and no rank waits. Every rank of the mesh passes the same arguments.
    ///
    /// # Errors
    /// A [`MeshError`] if shape and names do not fit each other, or the world is too small.
    pub fn new(world: &World, shape: impl AsRef<[usize]>, names: impl DimNames) -> Result<Self> {
        let shape = shape.as_ref();
        let needed = rank_count(shape);
        if needed > world.size() {
            return Err(MeshError::WorldTooSmall {
                shape: shape.to_vec(),
                needed,
                world_size: world.size(),
            }
            .into());
        }
        Self::from_ranks(world, (0..needed).collect::<Vec<_>>(), shape, names)
    }

    /// Returns the mesh of a program that runs on one device, without a
    /// [`launch`](crate::comm::launch()): one rank in one dimension, `device`. A model over
    /// DTensors trains and generates on it as on any other mesh, and nothing is communicated.
    ///
    /// All calls with the same device, with or without autodiff, return the same mesh. Any thread
    /// may use it. Local: the mesh has one rank.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_dtensor::prelude::*;
    ///
    /// let device = Device::flex();
    /// let layer = LinearConfig::new(4, 2).init(&device);
    /// let x = Tensor::<2>::ones([3, 4], &device);
    /// let y = layer.forward_dtensor(DTensor::from(x.clone()));
    /// assert_eq!(y.mesh(), &DeviceMesh::single_device(&device));
    /// assert_eq!(y.to_local().into_data(), layer.forward(x).into_data());
    /// ```
    pub fn single_device(device: &Device) -> Self {
        static MESHES: Mutex<Vec<DeviceMesh>> = Mutex::new(Vec::new());
        let mut meshes = MESHES.lock();
        if let Some(mesh) = meshes.iter().find(|mesh| mesh.device() == device) {
            return mesh.clone();
        }
        let mesh =
            Self::new(&World::of_device(device), [1], ["device"]).expect("one rank is a mesh");
        meshes.push(mesh.clone());
        mesh
    }

    /// Creates a mesh of `ranks`, row-major.
    ///
    /// # Collective
    /// Local, like [`new`](Self::new).
    ///
    /// # Errors
    /// A [`MeshError`] if ranks, shape and names do not fit each other or the world.
    pub fn from_ranks(
        world: &World,
        ranks: impl Into<Vec<usize>>,
        shape: impl AsRef<[usize]>,
        names: impl DimNames,
    ) -> Result<Self> {
        let ranks = ranks.into();
        let shape = shape.as_ref();
        let names: Vec<String> = names.dim_names().into_iter().map(Into::into).collect();
        validate(world.size(), &ranks, shape, &names)?;
        let communicators = Self::communicators_along(world, &ranks, shape, |_| None)?;
        Ok(Self::over(
            world,
            ranks,
            shape,
            names,
            communicators,
            0,
            true,
        ))
    }

    /// Returns the caller's communicator along each dimension, or none outside the mesh: the one
    /// that `known` returns, or else the group of the world.
    pub(super) fn communicators_along(
        world: &World,
        ranks: &[usize],
        shape: &[usize],
        known: impl Fn(usize) -> Option<Communicator>,
    ) -> Result<Vec<Communicator>> {
        let Some(position) = ranks.iter().position(|&rank| rank == world.rank()) else {
            return Ok(Vec::new());
        };
        let coordinate = unravel(position, shape);
        let group = |dim| world.group(&along(ranks, shape, &coordinate, &[dim]));
        (0..shape.len())
            .map(|dim| known(dim).map_or_else(|| group(dim), Ok))
            .collect()
    }

    /// Creates a root mesh with these communicators, one per dimension, or none outside the mesh.
    pub(super) fn over(
        world: &World,
        ranks: Vec<usize>,
        shape: &[usize],
        names: Vec<String>,
        communicators: Vec<Communicator>,
        index: usize,
        of_world: bool,
    ) -> Self {
        let position = ranks.iter().position(|&rank| rank == world.rank());
        Self(Arc::new(MeshInner {
            world: world.clone(),
            hash: identity_hash(world, &ranks, shape, &names, None),
            shape: shape.into(),
            names,
            made_of: (0..shape.len()).map(|dim| smallvec![dim]).collect(),
            coordinate: position.map(|position| unravel(position, shape)),
            ranks,
            communicators,
            root: None,
            index,
            of_world,
            flattened: Mutex::default(),
        }))
    }

    /// Returns the slice of this mesh with these dimensions that contains the calling rank. The
    /// mesh must be a root.
    ///
    /// # Errors
    /// [`NotAMember`](MeshError::NotAMember) outside the mesh, and errors of creating groups.
    pub(super) fn sub_mesh(&self, dims: Vec<MeshDim>) -> Result<Self> {
        let MeshInner {
            world,
            shape,
            ranks,
            ..
        } = &*self.0;
        let coordinate = self.member("slice it")?;
        let (names, made_of): (Vec<String>, Vec<RootDims>) =
            dims.into_iter().map(|dim| (dim.name, dim.made_of)).unzip();
        let kept: RootDims = made_of.iter().flatten().copied().collect();
        let ranks = along(ranks, shape, coordinate, &kept);
        let join = |of: &[usize], dims: &RootDims| {
            dims.iter()
                .fold(0, |index, &dim| index * shape[dim] + of[dim])
        };
        let others: RootDims = (0..self.ndim()).filter(|dim| !kept.contains(dim)).collect();
        let sizes: SmallVec<[usize; 3]> = made_of
            .iter()
            .map(|dims| dims.iter().map(|&dim| shape[dim]).product())
            .collect();
        let communicators = made_of
            .iter()
            .map(|dims| self.communicator_over(dims))
            .collect::<Result<_>>()?;
        Ok(Self(Arc::new(MeshInner {
            hash: identity_hash(world, &ranks, &sizes, &names, Some(self)),
            world: world.clone(),
            shape: sizes,
            names,
            ranks,
            coordinate: Some(made_of.iter().map(|dims| join(coordinate, dims)).collect()),
            communicators,
            root: Some(self.clone()),
            of_world: self.0.of_world,
            index: others.iter().fold(self.0.index, |index, &dim| {
                index * shape[dim] + coordinate[dim]
            }),
            made_of,
            flattened: Mutex::default(),
        })))
    }

    /// Returns the mesh of the surviving ranks in `world`, to which the mesh's own world was
    /// [shrunk](World::shrink). It keeps the indices along `mesh_dim` of which all ranks survive.
    /// Surviving ranks of other indices are not members.
    ///
    /// ```text
    /// replicate x shard    rank 3 is lost     along `replicate`
    ///   0 1                  0 1                0 1
    ///   2 3                  2                               2 holds only half of the shards; it is not a member
    /// ```
    ///
    /// # Collective
    /// Local, like [`new`](Self::new). Every rank of `world` passes the same `mesh_dim`.
    ///
    /// # Errors
    /// [`DimOutOfRange`](MeshError::DimOutOfRange), [`OtherWorld`](MeshError::OtherWorld) if
    /// `world` is not the result of shrinking this mesh's world, and
    /// [`NoSurvivors`](MeshError::NoSurvivors) if every index has lost a rank.
    pub fn survivors(&self, world: &World, mesh_dim: usize) -> Result<Self> {
        if mesh_dim >= self.ndim() {
            return Err(MeshError::DimOutOfRange {
                mesh_dim,
                ndim: self.ndim(),
                mesh: self.to_string(),
            }
            .into());
        }
        let before = world
            .ranks_before()
            .filter(|_| world.is_left_of(self.world()));
        let before = before.ok_or_else(|| MeshError::OtherWorld {
            mesh: self.to_string(),
            world: world.to_string(),
        })?;
        let place = |rank: &usize| before.binary_search(rank).ok();
        let index = |position: usize| unravel(position, self.shape())[mesh_dim];
        let is_lost = |lost: usize| {
            self.ranks()
                .iter()
                .enumerate()
                .any(|(at, rank)| index(at) == lost && place(rank).is_none())
        };
        let complete: Vec<_> = (0..self.size_of(mesh_dim))
            .filter(|&along| !is_lost(along))
            .collect();
        if complete.is_empty() {
            return Err(MeshError::NoSurvivors {
                mesh: self.to_string(),
                dim: self.names()[mesh_dim].clone(),
            }
            .into());
        }
        let kept = self
            .ranks()
            .iter()
            .enumerate()
            .filter(|(at, _)| complete.contains(&index(*at)));
        let ranks: Vec<_> = kept.filter_map(|(_, rank)| place(rank)).collect();
        let mut shape = self.shape().to_vec();
        shape[mesh_dim] = complete.len();
        Self::from_ranks(world, ranks, shape, self.names().to_vec())
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Returns the names of the dimensions.
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// Returns the global ranks, row-major.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// Returns the number of ranks along `mesh_dim`. Local.
    ///
    /// # Panics
    /// If the mesh has no such dimension.
    pub fn size_of(&self, mesh_dim: usize) -> usize {
        self.0.shape[mesh_dim]
    }

    /// Returns the caller's global rank, also if it is outside the mesh.
    pub fn rank(&self) -> usize {
        self.0.world.rank()
    }

    /// Returns the caller's coordinate, one index per dimension; `None` outside the mesh.
    pub fn coordinate(&self) -> Option<&[usize]> {
        self.0.coordinate.as_deref()
    }

    /// Returns the index of the dimension called `name`. Local.
    ///
    /// # Errors
    /// [`UnknownName`](MeshError::UnknownName), which lists the existing names.
    pub fn dim(&self, name: &str) -> Result<usize> {
        let found = self.0.names.iter().position(|known| known == name);
        Ok(found.ok_or_else(|| MeshError::UnknownName {
            name: name.into(),
            names: self.0.names.clone(),
            mesh: self.to_string(),
        })?)
    }

    /// Returns the communicator of the ranks that differ from the caller only along `mesh_dim`.
    /// Local.
    ///
    /// # Errors
    /// [`NotAMember`](MeshError::NotAMember) outside the mesh, and
    /// [`DimOutOfRange`](MeshError::DimOutOfRange) for a dimension that the mesh does not have.
    pub fn communicator(&self, mesh_dim: usize) -> Result<&Communicator> {
        if mesh_dim >= self.ndim() {
            return Err(MeshError::DimOutOfRange {
                mesh_dim,
                ndim: self.ndim(),
                mesh: self.to_string(),
            }
            .into());
        }
        Ok(self
            .0
            .communicators
            .get(mesh_dim)
            .ok_or_else(|| self.not_a_member("communicate on it"))?)
    }

    /// Returns the communicator of the ranks that differ from the caller only along `mesh_dims`. In
    /// the order of its ranks, the last of `mesh_dims` changes fastest.
    ///
    /// # Errors
    /// As [`communicator`](Self::communicator), and errors of creating a group.
    pub(crate) fn communicator_over(&self, mesh_dims: &[usize]) -> Result<Communicator> {
        if let [mesh_dim] = *mesh_dims {
            return Ok(self.communicator(mesh_dim)?.clone());
        }
        let coordinate = self.member("communicate on it")?;
        self.0
            .world
            .group(&along(&self.0.ranks, &self.0.shape, coordinate, mesh_dims))
    }

    /// Returns the mesh from which this one was sliced, or this mesh itself if it is not a slice.
    pub fn root(&self) -> &Self {
        self.0.root.as_ref().unwrap_or(self)
    }

    /// Returns the index of this slice among all slices of the root along the same dimensions,
    /// computed from its position in the other dimensions. With (dp=2, tp=4), the `tp` slices have
    /// 0 and 1. It is 0 for any other mesh, unless it was made from a slice by
    /// [`unflatten`](Self::unflatten) or [`with_deadline`](Self::with_deadline): then it is that
    /// slice's index.
    pub fn slice_index(&self) -> usize {
        self.0.index
    }

    /// Returns true if several dimensions may communicate as one. This is not possible if the
    /// program has set separate communicators or deadlines, which a group of the world would not
    /// have.
    pub(crate) fn joins_dims(&self) -> bool {
        self.0.of_world
    }

    /// Returns the dimensions, described by those of the root.
    pub(super) fn mesh_dims(&self) -> impl Iterator<Item = MeshDim> {
        let pairs = self.0.names.iter().zip(&self.0.made_of);
        pairs.map(|(name, made_of)| MeshDim {
            name: name.clone(),
            made_of: made_of.clone(),
        })
    }

    /// Returns the names of flattened dimensions. The mesh must be a root.
    pub(super) fn flattened(&self) -> parking_lot::MutexGuard<'_, Vec<MeshDim>> {
        self.0.flattened.lock()
    }

    /// Returns the ranks that differ from `coordinate` only along `mesh_dim`, in the order of their
    /// group.
    pub(super) fn row(&self, coordinate: &[usize], mesh_dim: usize) -> Vec<usize> {
        along(&self.0.ranks, &self.0.shape, coordinate, &[mesh_dim])
    }

    /// Returns the world that the mesh belongs to.
    pub fn world(&self) -> &World {
        &self.0.world
    }

    /// Returns the caller's device, without autodiff.
    pub fn device(&self) -> &Device {
        self.0.world.device()
    }

    /// Returns the coordinate of the rank at `position`, row-major.
    ///
    /// # Errors
    /// [`PositionOutOfRange`](MeshError::PositionOutOfRange).
    pub(crate) fn coordinate_at(&self, position: usize) -> Result<SmallVec<[usize; 3]>, MeshError> {
        if position >= self.size() {
            return Err(MeshError::PositionOutOfRange {
                position,
                size: self.size(),
                mesh: self.to_string(),
            });
        }
        Ok(unravel(position, self.shape()))
    }

    /// Returns the caller's coordinate, or the error that it is outside the mesh and cannot do
    /// `action`.
    pub(crate) fn member(&self, action: &'static str) -> Result<&[usize], MeshError> {
        self.coordinate().ok_or_else(|| self.not_a_member(action))
    }

    fn not_a_member(&self, action: &'static str) -> MeshError {
        MeshError::NotAMember {
            rank: self.rank(),
            mesh: self.to_string(),
            action,
        }
    }

    /// Returns true if both meshes have the same ranks, shape, names and communicators, and belong
    /// to the same rank of the same launch. Unlike equality, this ignores what they were sliced
    /// from. Tensors on congruent meshes can be combined.
    pub(crate) fn congruent(&self, other: &Self) -> bool {
        let ours = &self.0.communicators;
        let theirs = &other.0.communicators;
        let one = || {
            ours.iter()
                .zip(theirs)
                .all(|(ours, theirs)| ours.is_same(theirs))
        };
        Arc::ptr_eq(&self.0, &other.0) || (self.identity() == other.identity() && one())
    }

    fn identity(&self) -> ((u64, usize), &[usize], &[usize], &[String]) {
        (
            self.0.world.identity(),
            self.ranks(),
            self.shape(),
            self.names(),
        )
    }
}

fn identity_hash(
    world: &World,
    ranks: &[usize],
    shape: &[usize],
    names: &[String],
    root: Option<&DeviceMesh>,
) -> u64 {
    let mut hasher = DefaultHasher::new();
    (world.identity(), ranks, shape, names, root).hash(&mut hasher);
    hasher.finish()
}

impl PartialEq for DeviceMesh {
    fn eq(&self, other: &Self) -> bool {
        let a = &self.0;
        let b = &other.0;
        // A slice is identified by its root, and a mesh created from a slice by its index.
        let same_slice = || a.root == b.root && (a.root.is_some() || a.index == b.index);
        Arc::ptr_eq(a, b) || (a.hash == b.hash && self.congruent(other) && same_slice())
    }
}

impl Eq for DeviceMesh {}

impl Hash for DeviceMesh {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}
