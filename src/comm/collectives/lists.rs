//! Collectives of lists: each rank passes tensors of any shape, one for each rank or one for all.

use burn::backend::{DispatchTensor, TensorMetadata};

use crate::comm::backend::{CallSignature, PairwiseSignature};
use crate::comm::{Call, Communicator, Op, ReduceOp, ShardedTensor, TensorMeta, Work, arguments};
use crate::placement::ShardSizes;

impl Communicator {
    /// Sends a different tensor, of any shape and dtype, or none, to each rank of the group:
    /// `parts[i]` is for group rank `i`. Returns the tensors from all ranks for this one, in group
    /// order. `metas` describes these, and is compared with what the ranks send. The rank's tensor
    /// for itself is returned unchanged.
    ///
    /// ```
    /// use burn::tensor::{DType, Shape, Tensor};
    /// use burn_dtensor::comm::{Launch, TensorMeta, launch};
    ///
    /// // Rank r sends r elements to its neighbour.
    /// launch(Launch::threads(3), |world| {
    ///     let (rank, next, last) = (world.rank(), (world.rank() + 1) % 3, (world.rank() + 2) % 3);
    ///     let (mut parts, mut metas) = (vec![None; 3], vec![None; 3]);
    ///     parts[next] = Some(Tensor::<1>::zeros([rank], world.device()).into_dispatch());
    ///     metas[last] = Some(TensorMeta { shape: Shape::from([last]), dtype: DType::F32 });
    ///     let mut got = world.all().all_to_all_list("neighbours".into(), parts, metas).wait()?;
    ///     assert_eq!(Tensor::<1>::from_dispatch(got[last].take().unwrap()).dims(), [last]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn all_to_all_list(
        &self,
        call: Call,
        parts: Vec<Option<DispatchTensor>>,
        metas: Vec<Option<TensorMeta>>,
    ) -> Work<Vec<Option<DispatchTensor>>> {
        self.exchange(Op::AllToAllList, call, None, parts, metas)
    }

    /// Gathers one tensor of any shape and dtype from every rank. Returns them in group order on
    /// every rank. `metas` describes all of them, on every rank.
    pub fn all_gather_list(
        &self,
        call: Call,
        tensor: DispatchTensor,
        metas: Vec<TensorMeta>,
    ) -> Work<Vec<DispatchTensor>> {
        let parts = vec![Some(tensor); self.group().size()];
        let metas = metas.into_iter().map(Some).collect();
        self.exchange(Op::AllGather, call, None, parts, metas)
            .then(|parts| parts.into_iter().flatten().collect())
    }

    /// Reduces lists of tensors over the ranks: group rank `i` receives the reduction of all ranks'
    /// `parts[i]`. `parts[i]` must have the same shape on all ranks, but tensors for different
    /// ranks may have different shapes.
    pub fn reduce_scatter_list(
        &self,
        call: Call,
        parts: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> Work<DispatchTensor> {
        let size = self.group().size();
        let own = self.group().rank();
        accepted!(
            arguments::one_each("parts", parts.len(), self.group()),
            self,
            Op::ReduceScatter,
            call
        );
        let full_tensors = parts
            .into_iter()
            .enumerate()
            .map(|(rank, tensor)| {
                let (dim, sizes) = all_for(rank, &tensor, size);
                ShardedTensor { tensor, dim, sizes }
            })
            .collect();
        self.reduce_scatter(call, full_tensors, op)
            .then(move |mut parts| parts.swap_remove(own))
    }

    /// Sends `parts[i]` to group rank `i`, and returns the tensors from all ranks, as `metas`
    /// describes. Implements all collectives of lists.
    pub(super) fn exchange(
        &self,
        op: Op,
        call: Call,
        root: Option<usize>,
        parts: Vec<Option<DispatchTensor>>,
        metas: Vec<Option<TensorMeta>>,
    ) -> Work<Vec<Option<DispatchTensor>>> {
        let checked = arguments::listed(&parts, metas.clone(), self.group());
        let pairs: PairwiseSignature = accepted!(
            self.on_own_device(checked, parts.iter().flatten()),
            self,
            op,
            call
        );
        if self.is_alone() {
            return Work::done(parts);
        }
        let signature = CallSignature {
            root,
            pairs: Some(pairs.into()),
            ..CallSignature::new(op, &call, Vec::new())
        };
        let listed =
            |parts: Vec<Option<DispatchTensor>>| parts.into_iter().map(Vec::from_iter).collect();
        let metas = metas.into_iter().map(Vec::from_iter).collect();
        let work = self.post(None, call, signature, None, |group, context| {
            group.all_to_all(context, listed(parts), metas)
        });
        work.then(|parts: Vec<Vec<_>>| parts.into_iter().map(|mut part| part.pop()).collect())
    }
}

/// Returns a sharding in which `rank` holds all of a tensor and the other ranks hold nothing.
pub(super) fn all_for(rank: usize, tensor: &DispatchTensor, size: usize) -> (usize, ShardSizes) {
    let len = tensor.shape()[0];
    let lengths: Vec<_> = (0..size)
        .map(|other| if other == rank { len } else { 0 })
        .collect();
    (0, ShardSizes::Uneven(lengths.into()))
}
