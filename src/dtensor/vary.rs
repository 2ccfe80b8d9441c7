//! Replicate -> varying: what a computation that differs between ranks reads.
//!
//! ```text
//!             forward                     backward
//!  x (R) ---- vary ---- x @ wq (S) ---.   dq @ wq^T  \
//!                  \--- x @ wk (S) ---.   dk @ wk^T   > summed by the graph: a term of a sum
//!                   \-- x @ wv (S) ---.   dv @ wv^T  /  over the ranks; vary all-reduces it, once
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
    /// The local tensor, for a computation that differs between the ranks of `mesh_dims`, on all
    /// of which the tensor is Replicate.
    ///
    /// Free in forward; in backward the gradient is summed over `mesh_dims` by one all-reduce. The handle
    /// is cached: until backward, and without gradients as long as this tensor or a clone of it lives,
    /// further calls return the same one, and their gradients share the all-reduce. So two losses computed
    /// from one tensor are one graph: take the gradient of their sum.
    ///
    /// # Collective
    /// In backward: every rank of the mesh.
    ///
    /// # Errors
    /// [`DTensorError::NotReplicated`] or [`MeshError::DimOutOfRange`](crate::mesh::MeshError::DimOutOfRange).
    #[track_caller]
    pub fn vary(&self, mesh_dims: &[usize]) -> Result<Tensor<D>> {
        let dims = self.dims_of(mesh_dims)?;
        for &dim in &dims {
            let placement = self.placements()[dim];
            if placement != Placement::Replicate {
                let mesh_dim = mesh_dim_name(self.mesh(), dim);
                return Err(DTensorError::NotReplicated { mesh_dim, placement }.into());
            }
        }
        self.shared_handle(self.layout(), &dims, "vary")
    }

    /// [`vary`](Self::vary) of a tensor that is first made Replicate on `mesh_dims`.
    ///
    /// Of a sharded dimension this is one all-gather forward and one reduce-scatter backward. The
    /// gathered tensor is cached with the handle: until backward, and without gradients as long as
    /// this tensor or a clone of it lives.
    ///
    /// # Collective
    /// In forward and in backward: every rank of the mesh.
    ///
    /// # Errors
    /// [`MeshError::DimOutOfRange`](crate::mesh::MeshError::DimOutOfRange), or [`CommError`](crate::comm::CommError) if
    /// a collective fails.
    #[track_caller]
    pub fn all_gather_varying(&self, mesh_dims: &[usize]) -> Result<Tensor<D>> {
        let dims = self.dims_of(mesh_dims)?;
        let gathered = |dim, own| if dims.contains(&dim) { Placement::Replicate } else { own };
        self.shared_handle(&self.layout().replaced(gathered)?, &dims, "all_gather_varying")
    }

    /// The local tensor as it is, its gradient summed over `dims`.
    #[track_caller]
    pub(super) fn with_summed_grad(&self, dims: &[usize]) -> Result<Tensor<D>> {
        self.shared_handle(self.layout(), &self.dims_of(dims)?, "to_local_with_grad_placements")
    }

    #[track_caller]
    fn shared_handle(&self, layout: &Layout, dims: &[usize], operator: &'static str) -> Result<Tensor<D>> {
        let handles = self.handles.get_or_init();
        self.destination(layout, dims, operator)?.redistribute(self.local.clone(), &self.spec, Some(handles))
    }

    fn dims_of(&self, mesh_dims: &[usize]) -> Result<MeshDims> {
        let mesh = self.mesh();
        for &dim in mesh_dims {
            mesh.communicator(dim)?;
        }
        let mut dims: MeshDims = mesh_dims.iter().copied().filter(|&dim| mesh.shape()[dim] > 1).collect();
        dims.sort_unstable();
        dims.dedup();
        Ok(dims)
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The same tensor, whose owner makes its handles for computations that differ between the ranks
    /// of some of `mesh_dims`, and sums the gradients that arrive there.
    pub(crate) fn with_varied(self, mesh_dims: &[usize], make: Arc<MakeVarying<D>>) -> Self {
        let shape = self.mesh().shape();
        let varying = mesh_dims.iter().copied().filter(|&dim| shape[dim] > 1).collect();
        let handles = RedistributeCache { given: Some(VaryingRecipe { varying, make }), ..Default::default() };
        Self { handles: SharedCache::Of(Arc::new(handles)), ..self }
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

    /// A leaf outlives its backward by an optimizer step and more.
    #[test]
    fn what_a_leaf_was_gathered_to_goes_with_its_node() {
        let run = launch(Launch::threads(2), |world| -> crate::Result<()> {
            let mesh = DeviceMesh::new(world, [2], ["tp"])?;
            let leaf = Tensor::<2>::ones([4, 2], &world.device().clone().autodiff()).require_grad();
            let x = DTensor::distribute_replicated(leaf, &mesh, &[Shard(0)])?;
            let gathered = x.clone().all_gather_varying(&[0])?;
            let kept = || {
                let made = x.handles.get().expect("it has a clone").made.lock();
                made.iter().filter(|handle| handle.kept.lock().is_some()).count()
            };
            assert_eq!(kept(), 1);
            let grads = gathered.sum().backward();
            assert_eq!(kept(), 0, "before anything else is asked of the leaf");
            assert!(x.local().grad(&grads).is_some());
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }

    /// A gathered input whose readers all compute different things: its own node has no gradient to pull.
    #[test]
    fn what_a_style_gathered_goes_with_the_node_that_varies() {
        let run = launch(Launch::threads(2), |world| -> crate::Result<()> {
            let mesh = DeviceMesh::new(world, [2], ["tp"])?;
            let leaf = Tensor::<2>::ones([4, 2], &world.device().clone().autodiff()).require_grad();
            let x = DTensor::distribute_replicated(leaf, &mesh, &[Shard(0)])?;
            let full = x.clone().redistribute_each(&[Some(Replicate)])?;
            let kept = || {
                let made = x.handles.get().expect("it has a clone").made.lock();
                made.iter().filter(|handle| handle.kept.lock().is_some()).count()
            };
            assert_eq!(kept(), 1);
            let grads = full.vary(&[0])?.sum().backward();
            assert_eq!(kept(), 0, "before anything else is asked of the leaf");
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
            assert!(made.load(Ordering::Relaxed) > 0, "the owner was asked");
            assert_eq!(world.ledger().calls(Op::AllGather), 1);
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }
}
