//! [`StagingLayout`]: where the tensors of a call are in staging memory, and by which operation of NCCL
//! they move.
//!
//! ```text
//! all-gather         | row of rank 0 | row of rank 1 | ..     each rank copies its shards to its own row
//! reduce-scatter     | row of rank 0 | row of rank 1 | ..     each rank copies all, and receives its own row
//! all-reduce, broadcast   | tensor | tensor | ..
//! pairs              | for others | from rank 0 | from rank 1 | ..
//! ```
//!
//! All operations but pairs are in place. A row has room for the largest shard of each tensor. Shards
//! of different sizes are padded if the rows then have at most [`PADDING`] more bytes than the shards.
//! Otherwise each pair of ranks sends exactly what the other needs, in one group of sends and
//! receives.

use std::sync::Arc;

use burn::tensor::DType;

use super::api::{NativeOp, error};
use super::ways;
use crate::comm::backend::CallSignature;
use crate::comm::data::call::MessagePeer;
use crate::comm::data::plane::PlaneResult;
use crate::comm::{CollectivePlan, Op, TensorMeta};

/// Denominator of the fraction of bytes that padding may add. A collective of NCCL uses rings,
/// trees and multicast, which is worth a few bytes; a group of pairs sends no byte too many.
const PADDING: usize = 16;

/// A tensor in staging memory.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub offset: usize,
    pub meta: TensorMeta,
}

/// Bytes that are sent to, or received from, one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagingSpan {
    pub peer: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// Operation of NCCL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    /// No rank has data for another.
    Nothing,
    AllGather {
        row: usize,
    },
    ReduceScatter {
        count: usize,
        dtype: DType,
        op: NativeOp,
    },
    AllReduce {
        count: usize,
        dtype: DType,
        op: NativeOp,
    },
    Broadcast {
        bytes: usize,
        root: usize,
    },
    Pairs {
        sent: Vec<StagingSpan>,
        received: Vec<StagingSpan>,
    },
}

/// Source of a tensor that a rank copies to staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum StagingSource {
    /// Tensor of this index, which all ranks receive.
    Full(usize),
    /// Tensor of this index for a member.
    For(usize, usize),
}

/// The layout of one rank's call.
#[derive(Debug, Clone)]
pub(super) struct StagingLayout {
    /// Group rank.
    pub member: usize,
    pub way: Way,
    pub bytes: usize,
    /// Tensors that the rank copies in, and their offsets.
    pub copied_in: Vec<(StagingSource, usize)>,
    /// Tensors that the rank has afterwards, by the member that sent them; of a native reduction,
    /// its results, as those of the rank itself.
    pub result: Vec<Vec<Block>>,
    /// True if the result is reduced.
    pub is_reduced: bool,
}

/// The call of one rank, and how its memory is aligned.
#[derive(Debug, Clone, Copy)]
pub(super) struct StagedCall<'a> {
    pub signature: &'a CallSignature,
    pub ranks: usize,
    pub member: usize,
    pub align: usize,
    /// True if reductions are in the fixed tree.
    pub in_tree: bool,
    /// True if each member receives only what is for it.
    pub is_addressed: bool,
    /// True if the rank keeps what is for itself in the same way.
    pub has_own: bool,
}

fn bytes_of(meta: &TensorMeta) -> usize {
    meta.shape.num_elements() * meta.dtype.size()
}

/// Puts tensors one after the other.
struct Packer {
    align: usize,
    end: usize,
}

impl Packer {
    fn put(&mut self, bytes: usize) -> usize {
        let offset = self.end;
        self.end += bytes.next_multiple_of(self.align);
        offset
    }
}

/// Returns blocks for `metas`, one after the other.
fn blocks(packer: &mut Packer, metas: Vec<TensorMeta>) -> Vec<Block> {
    let block = |meta: TensorMeta| Block {
        offset: packer.put(bytes_of(&meta)),
        meta,
    };
    metas.into_iter().map(block).collect()
}

/// Layout of a planned call, and what it depends on besides the plan.
struct PlannedLayout {
    member: usize,
    align: usize,
    in_tree: bool,
    layout: PlaneResult<Arc<StagingLayout>>,
}

impl StagedCall<'_> {
    /// Returns the layout of a planned call, which is kept with the plan.
    pub fn planned_layout(&self, plan: &CollectivePlan) -> PlaneResult<Arc<StagingLayout>> {
        let make = || PlannedLayout {
            member: self.member,
            align: self.align,
            in_tree: self.in_tree,
            layout: self.layout().map(Arc::new),
        };
        let kept = plan.kept(make);
        // Another group may use the plan, too.
        match (kept.member, kept.align, kept.in_tree) == (self.member, self.align, self.in_tree) {
            true => kept.layout.clone(),
            false => make().layout,
        }
    }

    pub fn layout(&self) -> PlaneResult<StagingLayout> {
        let Self {
            signature,
            ranks,
            member,
            ..
        } = *self;
        let dtypes = || signature.tensors.iter().map(|tensor| tensor.dtype);
        let native = signature
            .reduce
            .filter(|_| !self.in_tree)
            .and_then(|op| ways::native_of_all(op, dtypes()));
        Ok(match (signature.op, native, signature.root) {
            (Op::AllReduce, Some((op, dtype)), _) => self.all_reduce(op, dtype)?,
            (Op::Broadcast, _, Some(root)) => self.broadcast(root)?,
            (Op::AllGather, _, _) => match self.rows(|rank| self.sent(rank, member))? {
                Some(rows) => rows.all_gather(ranks, member),
                None => self.pairs()?,
            },
            (Op::ReduceScatter, Some((op, dtype)), _) => {
                match self.rows(|rank| self.sent(member, rank))? {
                    Some(rows) => rows.reduce_scatter(ranks, member, op, dtype),
                    None => self.pairs()?,
                }
            }
            _ => self.pairs()?,
        }
        .of_nothing_if_empty())
    }

    fn sent(&self, from: usize, to: usize) -> PlaneResult<Vec<TensorMeta>> {
        let sent = self.signature.tensors_sent(from, to, self.ranks);
        sent.map_or_else(
            || error(format!("{} does not exchange tensors", self.signature.op)),
            Ok,
        )
    }

    fn packer(&self) -> Packer {
        Packer {
            align: self.align,
            end: 0,
        }
    }

    fn all_reduce(&self, op: NativeOp, dtype: DType) -> PlaneResult<StagingLayout> {
        let mut packer = self.packer();
        let blocks = blocks(&mut packer, self.sent(self.member, self.member)?);
        let mut result = vec![Vec::new(); self.ranks];
        let copied_in = copied_in(&blocks, StagingSource::Full);
        result[self.member] = blocks;
        Ok(StagingLayout {
            member: self.member,
            way: Way::AllReduce {
                count: packer.end / dtype.size(),
                dtype,
                op,
            },
            bytes: packer.end,
            copied_in,
            result,
            is_reduced: true,
        })
    }

    fn broadcast(&self, root: usize) -> PlaneResult<StagingLayout> {
        let mut packer = self.packer();
        let blocks = blocks(&mut packer, self.sent(root, self.member)?);
        let mut result = vec![Vec::new(); self.ranks];
        let is_root = self.member == root;
        let copied_in = copied_in(if is_root { &blocks } else { &[] }, StagingSource::Full);
        result[root] = blocks;
        Ok(StagingLayout {
            member: self.member,
            way: Way::Broadcast {
                bytes: packer.end,
                root,
            },
            bytes: packer.end,
            copied_in,
            result,
            is_reduced: false,
        })
    }

    /// Returns rows of the tensors that `of` returns for each rank; `None` if padding would add too
    /// many bytes.
    fn rows(
        &self,
        of: impl Fn(usize) -> PlaneResult<Vec<TensorMeta>>,
    ) -> PlaneResult<Option<Rows>> {
        let tensors = (0..self.ranks).map(of).collect::<PlaneResult<Vec<_>>>()?;
        let mut packer = self.packer();
        let mut largest_of_all = 0;
        let offsets = (0..tensors[0].len()).map(|index| {
            let sizes = tensors.iter().map(|metas| bytes_of(&metas[index]));
            let largest = sizes.max().unwrap_or(0);
            largest_of_all += largest;
            packer.put(largest)
        });
        let offsets: Vec<_> = offsets.collect();
        let exact: usize = tensors.iter().flatten().map(bytes_of).sum();
        let row = packer.end;
        let is_little = self.ranks * largest_of_all <= exact + exact / PADDING;
        Ok(is_little.then_some(Rows {
            tensors,
            offsets,
            row,
        }))
    }

    /// Sends each rank exactly what it needs.
    fn pairs(&self) -> PlaneResult<StagingLayout> {
        let member = self.member;
        let mut packer = self.packer();
        let mut copied = Vec::new();
        let mut sent = Vec::new();
        let others = || (0..self.ranks).filter(move |peer| *peer != member);
        if self.is_addressed {
            for peer in others() {
                let start = packer.end;
                let blocks = blocks(&mut packer, self.sent(member, peer)?);
                copied.extend(copied_in(&blocks, |index| StagingSource::For(peer, index)));
                sent.push(span(peer, start, &packer));
            }
        } else {
            let first = others().next();
            let metas = first.map_or(Ok(Vec::new()), |peer| self.sent(member, peer))?;
            let blocks = blocks(&mut packer, metas);
            copied.extend(copied_in(&blocks, StagingSource::Full));
            sent.extend(others().map(|peer| span(peer, 0, &packer)));
        }
        let mut received = Vec::new();
        let mut result = Vec::new();
        for peer in 0..self.ranks {
            let start = packer.end;
            let metas = match peer == member && !self.has_own {
                true => Vec::new(),
                false => self.sent(peer, member)?,
            };
            let blocks = blocks(&mut packer, metas);
            if peer == member {
                let source = |index| match self.is_addressed {
                    true => StagingSource::For(member, index),
                    false => StagingSource::Full(index),
                };
                copied.extend(copied_in(&blocks, source));
            } else {
                received.push(span(peer, start, &packer));
            }
            result.push(blocks);
        }
        let has_data = |span: &StagingSpan| span.bytes > 0;
        sent.retain(has_data);
        received.retain(has_data);
        Ok(StagingLayout {
            member: self.member,
            way: Way::Pairs { sent, received },
            bytes: packer.end,
            copied_in: copied,
            result,
            is_reduced: false,
        })
    }
}

fn span(peer: usize, offset: usize, packer: &Packer) -> StagingSpan {
    StagingSpan {
        peer,
        offset,
        bytes: packer.end - offset,
    }
}

fn copied_in(
    blocks: &[Block],
    source: impl Fn(usize) -> StagingSource,
) -> Vec<(StagingSource, usize)> {
    let full = blocks.iter().enumerate();
    full.filter(|(_, block)| bytes_of(&block.meta) > 0)
        .map(|(index, block)| (source(index), block.offset))
        .collect()
}

/// One row for each rank, of the same length.
struct Rows {
    /// Tensors of each rank.
    tensors: Vec<Vec<TensorMeta>>,
    /// Offset of each tensor in a row.
    offsets: Vec<usize>,
    row: usize,
}

impl Rows {
    fn blocks(&self, rank: usize) -> Vec<Block> {
        let block = |(meta, offset): (&TensorMeta, &usize)| Block {
            offset: rank * self.row + offset,
            meta: meta.clone(),
        };
        self.tensors[rank]
            .iter()
            .zip(&self.offsets)
            .map(block)
            .collect()
    }

    fn all_gather(&self, ranks: usize, member: usize) -> StagingLayout {
        let result: Vec<_> = (0..ranks).map(|rank| self.blocks(rank)).collect();
        StagingLayout {
            member,
            way: Way::AllGather { row: self.row },
            bytes: ranks * self.row,
            copied_in: copied_in(&result[member], StagingSource::Full),
            result,
            is_reduced: false,
        }
    }

    fn reduce_scatter(
        &self,
        ranks: usize,
        member: usize,
        op: NativeOp,
        dtype: DType,
    ) -> StagingLayout {
        let for_rank = |rank: usize| {
            copied_in(&self.blocks(rank), move |index| {
                StagingSource::For(rank, index)
            })
        };
        let mut result = vec![Vec::new(); ranks];
        result[member] = self.blocks(member);
        StagingLayout {
            member,
            way: Way::ReduceScatter {
                count: self.row / dtype.size(),
                dtype,
                op,
            },
            bytes: ranks * self.row,
            copied_in: (0..ranks).flat_map(for_rank).collect(),
            result,
            is_reduced: true,
        }
    }
}

impl StagingLayout {
    /// Returns the layout of a message of these tensors. The receiver's result is that of one member.
    pub fn of_message(tensors: Vec<TensorMeta>, peer: MessagePeer, align: usize) -> Self {
        let mut packer = Packer { align, end: 0 };
        let blocks = blocks(&mut packer, tensors);
        let (sent, received, copied_in, result) = match peer {
            MessagePeer::To(to) => {
                let copied_in = copied_in(&blocks, StagingSource::Full);
                (
                    vec![span(to, 0, &packer)],
                    Vec::new(),
                    copied_in,
                    Vec::new(),
                )
            }
            MessagePeer::From(from) => {
                let received = vec![span(from, 0, &packer)];
                (Vec::new(), received, Vec::new(), blocks)
            }
        };
        // Blocks of messages of many sizes are used again: those of one message at a time have at most
        // twice the memory of the largest.
        let (way, bytes) = match packer.end {
            0 => (Way::Nothing, 0),
            end => (Way::Pairs { sent, received }, end.next_power_of_two()),
        };
        Self {
            member: 0,
            way,
            bytes,
            copied_in,
            result: vec![result],
            is_reduced: false,
        }
    }

    /// Returns the offset of this rank's row among rows of `row` bytes.
    pub fn row_of(&self, row: usize) -> usize {
        self.member * row
    }

    /// Returns the layout, with no operation if there is nothing to move. All ranks decide the
    /// same, because a collective moves the same bytes for all, and each pair of ranks agrees on its own.
    fn of_nothing_if_empty(self) -> Self {
        let is_empty = match &self.way {
            Way::Nothing => true,
            Way::AllGather { row } => *row == 0,
            Way::ReduceScatter { count, .. } | Way::AllReduce { count, .. } => *count == 0,
            Way::Broadcast { bytes, .. } => *bytes == 0,
            Way::Pairs { sent, received } => sent.is_empty() && received.is_empty(),
        };
        match is_empty {
            // A rank that sends nothing may still keep its own tensors.
            true => Self {
                way: Way::Nothing,
                ..self
            },
            false => self,
        }
    }
}
