//! All-to-all of a tensor's rows, with a number of rows for each pair of ranks.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::comm::backend::{CallSignature, PairwiseSignature};
use crate::comm::{Call, CommError, Communicator, Op, ShardedTensor, TensorMeta, Work, arguments};
use crate::placement::ShardSizes;

impl Communicator {
    /// Sends rows of a tensor, along its first dimension, to each rank of the group: the first
    /// `send_counts[0]` to group rank 0, the next `send_counts[1]` to group rank 1, and so on.
    /// Returns the rows from all ranks for this one, `recv_counts[i]` from group rank `i`, in group
    /// order (`torch.distributed.all_to_all_single`).
    ///
    /// If a rank does not know how many rows it will receive,
    /// [`exchange_splits`](Self::exchange_splits) returns the counts.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// // Rank r sends r + 1 rows to each rank, as a router of tokens might.
    /// launch(Launch::threads(2), |world| {
    ///     let (comm, send_counts) = (world.all(), [world.rank() + 1; 2]);
    ///     let rows = Tensor::<2>::full([2 * send_counts[0], 4], world.rank() as f32, world.device());
    ///     let recv_counts = comm.exchange_splits("route".into(), &send_counts).wait()?;
    ///     let got = comm.all_to_all_single("route".into(), rows.into_dispatch(), &send_counts, &recv_counts).wait()?;
    ///     assert_eq!((recv_counts, Tensor::<2>::from_dispatch(got).dims()), (vec![1, 2], [3, 4]));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn all_to_all_single(
        &self,
        call: Call,
        tensor: DispatchTensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Work<DispatchTensor> {
        let checked = arguments::split(&tensor, send_counts, recv_counts, self.group());
        let full = accepted!(
            self.on_own_device(checked, [&tensor]),
            self,
            Op::AllToAllList,
            call
        );
        if self.is_alone() {
            return Work::done(tensor);
        }
        let rows = |count: &usize| {
            let mut shape = full.shape.clone();
            shape[0] = *count;
            Some(TensorMeta {
                shape,
                dtype: full.dtype,
            })
        };
        let member = self.group().rank();
        let [send_metas, recv_metas] =
            [send_counts, recv_counts].map(|counts| counts.iter().map(rows).collect());
        let pairs = PairwiseSignature {
            member,
            sent: send_metas,
            received: recv_metas,
        };
        let signature = CallSignature {
            pairs: Some(pairs.into()),
            ..CallSignature::new(Op::AllToAllList, &call, Vec::new())
        };
        self.post(None, call, signature, None, |group, context| {
            group.all_to_all_v(context, tensor, send_counts, recv_counts)
        })
    }

    /// Sends `send_counts[i]`, a number of rows, to group rank `i`. Returns the numbers from all
    /// ranks for this one, in group order: the `recv_counts` of
    /// [`all_to_all_single`](Self::all_to_all_single).
    pub fn exchange_splits(&self, call: Call, send_counts: &[usize]) -> Work<Vec<usize>> {
        accepted!(
            arguments::one_each("send counts", send_counts.len(), self.group()),
            self,
            Op::AllToAllList,
            call
        );
        let parts = send_counts
            .iter()
            .map(|count| Some(numbers(&[*count], self)))
            .collect();
        let metas = vec![Some(numbers_meta(1)); send_counts.len()];
        let work = self.exchange(Op::AllToAllList, call, None, parts, metas);
        work.then(|parts| parts.into_iter().flatten().flat_map(read_numbers).collect())
    }
}

impl Communicator {
    /// Gathers numbers from all ranks, the same count from each, in group order.
    pub(crate) fn all_gather_numbers(
        &self,
        call: Call,
        own: &[usize],
    ) -> Result<Vec<usize>, CommError> {
        let sizes = ShardSizes::Chunked(WORDS * own.len() * self.group().size());
        let shard = ShardedTensor {
            tensor: numbers(own, self),
            dim: 0,
            sizes,
        };
        Ok(read_numbers(
            self.all_gather(call, vec![shard]).wait()?.remove(0),
        ))
    }

    /// Returns true if `own` is true on any rank of the group.
    pub(crate) fn any(&self, call: Call, own: bool) -> Result<bool, CommError> {
        Ok(self
            .all_gather_numbers(call, &[usize::from(own)])?
            .contains(&1))
    }
}

/// Number of 32-bit words per number. Every backend supports 32-bit integers.
const WORDS: usize = 2;

/// Creates a tensor from `numbers`.
pub(super) fn numbers(numbers: &[usize], comm: &Communicator) -> DispatchTensor {
    let words: Vec<i32> = numbers
        .iter()
        .flat_map(|&n| [n as u32 as i32, (n as u64 >> 32) as i32])
        .collect();
    words_of(words, comm)
}

/// Describes the tensor that [`numbers`] creates from `count` numbers.
pub(super) fn numbers_meta(count: usize) -> TensorMeta {
    TensorMeta {
        shape: [WORDS * count].into(),
        dtype: DType::I32,
    }
}

pub(super) fn read_numbers(tensor: DispatchTensor) -> Vec<usize> {
    read_words(tensor)
        .chunks_exact(WORDS)
        .map(|words| (u64::from(words[0] as u32) | u64::from(words[1] as u32) << 32) as usize)
        .collect()
}

/// Creates a tensor from 32-bit words.
pub(super) fn words_of(words: Vec<i32>, comm: &Communicator) -> DispatchTensor {
    let len = words.len();
    let data = TensorData::new(words, [len]);
    Tensor::<1, Int>::from_data(data, (comm.device(), DType::I32)).into_dispatch()
}

pub(super) fn read_words(tensor: DispatchTensor) -> Vec<i32> {
    let data = Tensor::<1, Int>::from_dispatch(tensor).into_data();
    data.try_into_vec().expect("words are 32-bit integers")
}
