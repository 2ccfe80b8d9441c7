//! Collectives of plain tensors over a mesh: [`DeviceMesh::broadcast`] and others.

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, kind};

use super::DeviceMesh;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, ShardedTensor, TensorMeta};
use crate::placement::ShardSizes;

/// # Collectives of plain tensors
///
/// They run over all ranks of the mesh, in its row-major order. To communicate along one dimension,
/// use its slice: `mesh.slice("tp")?.broadcast(x, 0)`. Results are plain, whether or not the
/// tensors have autodiff. For gradients through collectives, and for uneven shards, use a
/// [`DTensor`](crate::dtensor::DTensor). In errors and in the [ledger](crate::comm::Ledger), the
/// label is `mesh_` followed by the names of the dimensions.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
///     let own = Tensor::<1>::full([1], world.rank() as f32, world.device());
///     let values = |x: Tensor<1>| x.into_data().to_vec::<f32>().unwrap();
///     let tp = mesh.slice("tp")?; // ranks 0 and 1, ranks 2 and 3
///     assert_eq!(values(tp.broadcast(own.clone(), 1)?), [[1.0], [1.0], [3.0], [3.0]][world.rank()]);
///     assert_eq!(values(mesh.all_gather(own, 0)?), [0.0, 1.0, 2.0, 3.0]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// All return [`NotAMember`](super::MeshError::NotAMember) outside the mesh. They return a
/// [`CommError`](crate::comm::CommError) if a rank fails or passes another shape or element type,
/// if the tensor does not have the dimension, or if the mesh does not have the source.
impl DeviceMesh {
    /// Returns the tensor of the rank at position `source` of the mesh; 0 is the first. The other
    /// ranks pass a tensor of the same shape and element type, whose values are ignored.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [all of these](#collectives-of-plain-tensors).
    pub fn broadcast<const D: usize, K: kind::Autodiff>(
        &self,
        tensor: Tensor<D, K>,
        source: usize,
    ) -> Result<Tensor<D, K>> {
        let metas = vec![meta(&tensor)];
        Ok(self
            .all()?
            .broadcast(self.call(), Some(plain(tensor)), metas, source)
            .single()?)
    }

    /// Returns this rank's [chunk](crate::placement::chunk), along dimension `dim`, of the full
    /// tensor on the rank at position `source`. It may be shorter than other chunks, or empty. The
    /// other ranks pass a tensor of the same shape and element type, whose values are ignored.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [all of these](#collectives-of-plain-tensors).
    pub fn scatter<const D: usize, K: kind::Autodiff>(
        &self,
        full: Tensor<D, K>,
        dim: usize,
        source: usize,
    ) -> Result<Tensor<D, K>> {
        let metas = vec![meta(&full)];
        let shardings = vec![(dim, chunks(&full, dim, 1))];
        Ok(self
            .all()?
            .scatter(self.call(), Some(plain(full)), metas, shardings, source)
            .single()?)
    }

    /// Concatenates the tensors of all ranks, which have the same shape, along `dim`.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [all of these](#collectives-of-plain-tensors).
    pub fn all_gather<const D: usize, K: kind::Autodiff>(
        &self,
        part: Tensor<D, K>,
        dim: usize,
    ) -> Result<Tensor<D, K>> {
        let sizes = chunks(&part, dim, self.size());
        Ok(self
            .all()?
            .all_gather(self.call(), sharded(part, dim, sizes))
            .single()?)
    }

    /// Reduces the tensors of all ranks, and returns this rank's [chunk](crate::placement::chunk)
    /// of the result along dimension `dim`.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [all of these](#collectives-of-plain-tensors).
    pub fn reduce_scatter<const D: usize, K: kind::Autodiff>(
        &self,
        full: Tensor<D, K>,
        dim: usize,
        op: ReduceOp,
    ) -> Result<Tensor<D, K>> {
        let sizes = chunks(&full, dim, 1);
        Ok(self
            .all()?
            .reduce_scatter(self.call(), sharded(full, dim, sizes), op)
            .single()?)
    }

    /// Changes the sharded dimension: from shards of `dim`, which have the same shape, to
    /// [chunks](crate::placement::chunk) of `to_dim`. The result has the full length along `dim`.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [all of these](#collectives-of-plain-tensors).
    pub fn all_to_all<const D: usize, K: kind::Autodiff>(
        &self,
        part: Tensor<D, K>,
        dim: usize,
        to_dim: usize,
    ) -> Result<Tensor<D, K>> {
        let sizes = chunks(&part, dim, self.size());
        let to_sizes = chunks(&part, to_dim, 1);
        let shard = ShardedTensor {
            tensor: part.inner().into_dispatch(),
            dim,
            sizes,
        };
        Ok(Tensor::from_dispatch(
            self.all()?
                .all_to_all(self.call(), shard, to_dim, to_sizes)
                .wait()?,
        ))
    }

    /// Returns the communicator of all ranks of the mesh.
    pub(crate) fn all(&self) -> Result<Communicator> {
        self.communicator_over(&(0..self.ndim()).collect::<Vec<_>>())
    }

    /// Returns the label of a collective over the mesh.
    pub(super) fn call(&self) -> Call {
        Call::new(format!("mesh_{}", self.names().join("_")))
    }
}

fn meta<const D: usize, K: kind::Autodiff>(tensor: &Tensor<D, K>) -> TensorMeta {
    TensorMeta {
        shape: tensor.shape(),
        dtype: tensor.dtype(),
    }
}

fn plain<const D: usize, K: kind::Autodiff>(tensor: Tensor<D, K>) -> Vec<DispatchTensor> {
    vec![tensor.inner().into_dispatch()]
}

fn sharded<const D: usize, K: kind::Autodiff>(
    tensor: Tensor<D, K>,
    dim: usize,
    sizes: ShardSizes,
) -> Vec<ShardedTensor> {
    vec![ShardedTensor {
        tensor: tensor.inner().into_dispatch(),
        dim,
        sizes,
    }]
}

/// Returns chunks of `times` the length of `dim`. If the dimension does not exist, the communicator
/// reports the error.
fn chunks<const D: usize, K: kind::Autodiff>(
    tensor: &Tensor<D, K>,
    dim: usize,
    times: usize,
) -> ShardSizes {
    ShardSizes::Chunked(tensor.dims().get(dim).map_or(0, |len| len * times))
}
