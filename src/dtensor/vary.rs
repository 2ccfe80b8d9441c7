//! The layout change Replicate -> varying, for replicated values with which ranks compute different
//! things.
//!
//! ```text
//!             forward                     backward
//!  x (R) ---- vary ---- x @ wq (S) ---.   dq @ wq^T  \
//!                  \--- x @ wk (S) ---.   dk @ wk^T   > added up by the graph: this rank's partial sum.
//!                   \-- x @ wv (S) ---.   dv @ wv^T  /  The backward of vary all-reduces it, once.
//! ```

use std::sync::Arc;

use burn::tensor::Tensor;

use super::redistribute_cache::{MakeVarying, RedistributeCache, SharedCache, VaryingRecipe};
use super::spec::mesh_dim_name;
use super::vjp::MeshDims;
use super::{DTensor, DTensorError, Kind};
use crate::Result;
use crate::placement::{Layout, Placement};

impl<const D: usize> DTensor<D> {
    /// Returns the local tensor, for a computation that differs between the ranks of `mesh_dims`.
    /// The tensor must be Replicate on all these mesh dimensions.
    ///
    /// Forward costs nothing. Backward sums the gradient over `mesh_dims` with one all-reduce. The
    /// result is cached until backward (without gradients: as long as this tensor or a clone of it
    /// lives), so further calls return the same handle and their gradients share the all-reduce. As
    /// a consequence, two losses computed from one tensor form one graph: call `backward` on their
    /// sum.
    ///
    /// # Collective
    /// In backward: every rank of the mesh.
    ///
    /// # Errors
    /// [`DTensorError::NotReplicated`] or
    /// [`MeshError::DimOutOfRange`](crate::mesh::MeshError::DimOutOfRange).
    #[track_caller]
    pub fn vary(&self, mesh_dims: &[usize]) -> Result<Tensor<D>> {
        let dims = self.dims_of(mesh_dims)?;
        for &dim in &dims {
            let placement = self.placements()[dim];
            if placement != Placement::Replicate {
                let mesh_dim = mesh_dim_name(self.mesh(), dim);
                return Err(DTensorError::NotReplicated {
                    mesh_dim,
                    placement,
                }
                .into());
            }
        }
        self.shared_handle(self.layout(), &dims, "vary")
    }

    /// Like [`vary`](Self::vary), but first makes the tensor Replicate on `mesh_dims`.
    ///
    /// For a sharded dimension, this is one all-gather in forward and one reduce-scatter in
    /// backward. The gathered tensor is cached together with the handle: until backward, or without
    /// gradients as long as this tensor or a clone of it lives.
    ///
    /// # Collective
    /// In forward and in backward: every rank of the mesh.
    ///
    /// # Errors
    /// [`MeshError::DimOutOfRange`](crate::mesh::MeshError::DimOutOfRange), or
    /// [`CommError`](crate::comm::CommError) if a collective fails.
    #[track_caller]
    pub fn all_gather_varying(&self, mesh_dims: &[usize]) -> Result<Tensor<D>> {
        let dims = self.dims_of(mesh_dims)?;
        self.shared_handle(
            &self.layout().replaced(|dim, own| {
                if dims.contains(&dim) {
                    Placement::Replicate
                } else {
                    own
                }
            })?,
            &dims,
            "all_gather_varying",
        )
    }

    /// Returns the local tensor unchanged; backward sums its gradient over `dims`.
    #[track_caller]
    pub(super) fn with_summed_grad(&self, dims: &[usize]) -> Result<Tensor<D>> {
        self.shared_handle(
            self.layout(),
            &self.dims_of(dims)?,
            "to_local_with_grad_placements",
        )
    }

    #[track_caller]
    fn shared_handle(
        &self,
        layout: &Layout,
        dims: &[usize],
        operator: &'static str,
    ) -> Result<Tensor<D>> {
        let handles = self.handles.get_or_init();
        self.destination(layout, dims, operator)?.redistribute(
            self.local.clone(),
            &self.spec,
            Some(handles),
        )
    }

    fn dims_of(&self, mesh_dims: &[usize]) -> Result<MeshDims> {
        let mesh = self.mesh();
        for &dim in mesh_dims {
            mesh.communicator(dim)?;
        }
        let mut dims: MeshDims = mesh_dims
            .iter()
            .copied()
            .filter(|&dim| mesh.shape()[dim] > 1)
            .collect();
        dims.sort_unstable();
        dims.dedup();
        Ok(dims)
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Replaces the cache by one with a recipe: `make` returns a handle for computations that
    /// differ between the ranks of a subset of `mesh_dims`. The owner that passes `make` also sums
    /// the gradients that arrive at those handles.
    pub(crate) fn with_varied(self, mesh_dims: &[usize], make: Arc<MakeVarying<D>>) -> Self {
        let shape = self.mesh().shape();
        let varying = mesh_dims
            .iter()
            .copied()
            .filter(|&dim| shape[dim] > 1)
            .collect();
        let handles = RedistributeCache {
            given: Some(VaryingRecipe { varying, make }),
            ..Default::default()
        };
        Self {
            handles: SharedCache::Of(Arc::new(handles)),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::tensor::Tensor;

    use crate::comm::{Launch, Op, launch};
    use crate::dtensor::DTensor;
    use crate::mesh::DeviceMesh;
    use crate::placement::Layout;
    use crate::placement::Placement::{Replicate, Shard};

    /// The tensor gathered from a leaf must be released in backward, because the leaf lives at
    /// least until the optimizer step.
    #[test]
    fn what_a_leaf_was_gathered_to_goes_with_its_node() {
        let run = launch(Launch::threads(2), |world| -> crate::Result<()> {
            let mesh = DeviceMesh::new(world, [2], ["tp"])?;
            let leaf = Tensor::<2>::ones([4, 2], &world.device().clone().autodiff()).require_grad();
            let x = DTensor::distribute_replicated(leaf, &mesh, &[Shard(0)])?;
            let gathered = x.clone().all_gather_varying(&[0])?;
            let kept = || {
                let made = x.handles.get().expect("it has a clone").made.lock();
                made.iter()
                    .filter(|handle| handle.kept.lock().is_some())
                    .count()
            };
            assert_eq!(kept(), 1);
            let grads = gathered.sum().backward();
            assert_eq!(kept(), 0, "backward must release the gathered tensor");
            assert!(x.local().grad(&grads).is_some());
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }

    /// All readers of the gathered input compute different things, so the gather's own node
    /// receives no gradient.
    #[test]
    fn what_a_style_gathered_goes_with_the_node_that_varies() {
        let run = launch(Launch::threads(2), |world| -> crate::Result<()> {
            let mesh = DeviceMesh::new(world, [2], ["tp"])?;
            let leaf = Tensor::<2>::ones([4, 2], &world.device().clone().autodiff()).require_grad();
            let x = DTensor::distribute_replicated(leaf, &mesh, &[Shard(0)])?;
            let full = x.clone().redistribute_each(&[Some(Replicate)])?;
            let kept = || {
                let made = x.handles.get().expect("it has a clone").made.lock();
                made.iter()
                    .filter(|handle| handle.kept.lock().is_some())
                    .count()
            };
            assert_eq!(kept(), 1);
            let grads = full.vary(&[0])?.sum().backward();
            assert_eq!(kept(), 0, "backward must release the gathered tensor");
            assert!(x.local().grad(&grads).is_some());
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }

    /// The owner's handle varies over one mesh dimension, and is gathered over the other.
    #[test]
    fn a_way_behind_an_owners_handle_is_walked_once() {
        let run = launch(Launch::threads(4), |world| -> crate::Result<()> {
            let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
            let leaf = Tensor::<2>::ones([4, 2], &world.device().clone().autodiff()).require_grad();
            let x = DTensor::distribute_replicated(leaf, &mesh, &[Replicate, Shard(0)])?;
            let local = x.local().clone();
            let made = Arc::new(AtomicUsize::new(0));
            let count = made.clone();
            let x = x.with_varied(
                &[0],
                Arc::new(move |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                    local.clone()
                }),
            );
            world.ledger().reset();
            let layout = Layout::replicate(mesh.shape())?;
            for _ in 0..3 {
                assert_eq!(x.shared_handle(&layout, &[0], "test")?.dims(), [4, 2]);
            }
            assert!(
                made.load(Ordering::Relaxed) > 0,
                "the owner's recipe was called"
            );
            assert_eq!(world.ledger().calls(Op::AllGather), 1);
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }
}
