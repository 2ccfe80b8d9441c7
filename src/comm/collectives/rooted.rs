//! Collectives with a root: one rank sends to all, or receives from all.

use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::lists::all_for;
use crate::comm::backend::CallSignature;
use crate::comm::{Call, CollectivePlan, Communicator, Op, ReduceOp, TensorMeta, Work, arguments};
use crate::placement::ShardSizes;

impl Communicator {
    /// Sends tensors from group rank `root` to all ranks. `metas` describes them on every rank;
    /// `tensors` is `Some` on the root and ignored elsewhere.
    pub fn broadcast(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::rooted(tensors.as_deref(), &metas, root, self.group());
        let tensors = tensors
            .filter(|_| self.group().rank() == root)
            .unwrap_or_default();
        let signatures = accepted!(
            self.on_own_device(checked, &tensors),
            self,
            Op::Broadcast,
            call
        );
        if self.is_alone() {
            return Work::done(tensors);
        }
        let signature = CallSignature {
            root: Some(root),
            ..CallSignature::new(Op::Broadcast, &call, signatures)
        };
        self.post(None, call, signature, None, |group, context| {
            group.broadcast(context, tensors, metas, root)
        })
    }

    /// Sends each rank its shards of the tensors of group rank `root`: `shardings[i]` contains the
    /// dimension and the shard sizes of tensor `i`. `metas` describes the full tensors on every
    /// rank; `tensors` is `Some` on the root and ignored elsewhere.
    pub fn scatter(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        shardings: Vec<(usize, ShardSizes)>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::rooted(tensors.as_deref(), &metas, root, self.group())
            .and_then(|signatures| arguments::sharded(signatures, &shardings, self.group()));
        let tensors = tensors
            .filter(|_| self.group().rank() == root)
            .unwrap_or_default();
        let signatures = accepted!(
            self.on_own_device(checked, &tensors),
            self,
            Op::Scatter,
            call
        );
        if self.is_alone() {
            return Work::done(tensors);
        }
        let signature = CallSignature {
            root: Some(root),
            ..CallSignature::new(Op::Scatter, &call, signatures)
        };
        self.post(None, call, signature, None, |group, context| {
            group.scatter(context, tensors, metas, shardings, root)
        })
    }

    /// Reduces tensors of the same shape over the ranks. Group rank `root` receives the result, the
    /// other ranks receive `None`.
    pub fn reduce(
        &self,
        call: Call,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
        root: usize,
    ) -> Work<Option<Vec<DispatchTensor>>> {
        let checked = arguments::member("root", root, self.group())
            .and_then(|()| arguments::reduced(&tensors, op));
        let signatures = accepted!(
            self.on_own_device(checked, &tensors),
            self,
            Op::Reduce,
            call
        );
        if self.is_alone() {
            return Work::done(Some(self.of_one(tensors, op)));
        }
        let size = self.group().size();
        let is_root = self.group().rank() == root;
        let shardings = tensors
            .iter()
            .map(|tensor| all_for(root, tensor, size))
            .collect();
        let plan = Arc::new(CollectivePlan::new(
            Op::Reduce,
            Some(op),
            signatures,
            shardings,
            size,
        ));
        let signature = CallSignature::new(Op::Reduce, &call, plan.tensors.clone());
        let signature = CallSignature {
            reduce: Some(op),
            root: Some(root),
            ..signature
        };
        let work = self.post(None, call, signature, None, |group, context| {
            group.reduce_scatter(context, plan, tensors, op)
        });
        work.then(move |tensors| is_root.then_some(tensors))
    }

    /// Gathers one tensor of any shape and dtype from every rank on group rank `root`, in group
    /// order. The other ranks receive `None`. `metas` describes the tensors on the root, and is
    /// `None` elsewhere.
    pub fn gather(
        &self,
        call: Call,
        tensor: DispatchTensor,
        metas: Option<Vec<TensorMeta>>,
        root: usize,
    ) -> Work<Option<Vec<DispatchTensor>>> {
        let size = self.group().size();
        let is_root = self.group().rank() == root;
        accepted!(
            arguments::on_root("metas", metas.is_some(), root, self.group()),
            self,
            Op::Gather,
            call
        );
        let mut parts = vec![None; size];
        parts[root] = Some(tensor);
        let metas = metas.map_or_else(
            || vec![None; size],
            |metas| metas.into_iter().map(Some).collect(),
        );
        let work = self.exchange(Op::Gather, call, Some(root), parts, metas);
        work.then(move |parts| is_root.then(|| parts.into_iter().flatten().collect()))
    }

    /// Sends a different tensor, of any shape and dtype, from group rank `root` to each rank:
    /// tensor `i` goes to group rank `i`. `tensors` is `Some` on the root and `None` elsewhere;
    /// `meta` describes the tensor for this rank.
    pub fn scatter_list(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        meta: TensorMeta,
        root: usize,
    ) -> Work<DispatchTensor> {
        let size = self.group().size();
        let checked = arguments::on_root("tensors", tensors.is_some(), root, self.group());
        let given = tensors.as_ref().map_or(size, Vec::len);
        accepted!(
            checked.and_then(|()| arguments::one_each("tensors", given, self.group())),
            self,
            Op::Scatter,
            call
        );
        let parts = tensors.map_or_else(
            || vec![None; size],
            |tensors| tensors.into_iter().map(Some).collect(),
        );
        let mut metas = vec![None; size];
        metas[root] = Some(meta);
        let work = self.exchange(Op::Scatter, call, Some(root), parts, metas);
        work.then(move |mut parts| {
            parts[root]
                .take()
                .expect("the root sends each rank a tensor")
        })
    }
}
