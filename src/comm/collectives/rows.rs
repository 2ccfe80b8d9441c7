//! All-to-all of a tensor's rows: of as many for each rank as the program says.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::comm::backend::{CallSignature, PairwiseSignature};
use crate::comm::{Call, CommError, Communicator, Op, ShardedTensor, TensorMeta, Work, arguments};
use crate::placement::ShardSizes;

impl Communicator {
    /// Gives each rank of the group some rows of a tensor, along its first dimension: the first `given[0]` to group rank
    /// 0, the next `given[1]` to group rank 1, and so on. The result holds what each had for this rank, `taken[i]` rows
    /// of group rank `i`, in group order (`torch.distributed.all_to_all_single`).
    ///
    /// Where a rank does not know what it will get, [`exchange_splits`](Self::exchange_splits) says.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// // Rank r has r + 1 rows for each rank, as a router of tokens may have found.
    /// launch(Launch::threads(2), |world| {
    ///     let (comm, given) = (world.all(), [world.rank() + 1; 2]);
    ///     let rows = Tensor::<2>::full([2 * given[0], 4], world.rank() as f32, world.device());
    ///     let taken = comm.exchange_splits("route".into(), &given).wait()?;
    ///     let got = comm.all_to_all_single("route".into(), rows.into_dispatch(), &given, &taken).wait()?;
    ///     assert_eq!((taken, Tensor::<2>::from_dispatch(got).dims()), (vec![1, 2], [3, 4]));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn all_to_all_single(
        &self,
        call: Call,
        tensor: DispatchTensor,
        given: &[usize],
        taken: &[usize],
    ) -> Work<DispatchTensor> {
        let checked = arguments::split(&tensor, given, taken, self.group());
        let full = match self.at_home(checked, [&tensor]) {
            Ok(full) => full,
            Err(problem) => return self.refuse(Op::AllToAllList, &call, problem),
        };
        if self.is_alone() {
            return Work::done(tensor);
        }
        let rows = |count: &usize| {
            let mut shape = full.shape.clone();
            shape[0] = *count;
            Some(TensorMeta { shape, dtype: full.dtype })
        };
        let member = self.group().rank();
        let [given_metas, taken_metas] = [given, taken].map(|counts| counts.iter().map(rows).collect());
        let pairs = PairwiseSignature { member, given: given_metas, taken: taken_metas };
        let bytes = pairs.bytes();
        let print =
            CallSignature { pairs: Some(pairs.into()), ..CallSignature::new(Op::AllToAllList, &call, Vec::new()) };
        self.post(call, print, bytes, |channel, post| channel.all_to_all_v(post, tensor, given, taken))
    }

    /// Tells each rank of the group how much this one will give it; returns how much each will give this one, in group
    /// order.
    pub fn exchange_splits(&self, call: Call, given: &[usize]) -> Work<Vec<usize>> {
        if let Err(problem) = arguments::one_each("splits", given.len(), self.group()) {
            return self.refuse(Op::AllToAllList, &call, problem);
        }
        let parts = given.iter().map(|count| Some(numbers(&[*count], self))).collect();
        let metas = vec![Some(numbers_meta(1)); given.len()];
        let work = self.exchange(Op::AllToAllList, call, None, parts, metas);
        work.then(|parts| parts.into_iter().flatten().flat_map(read_numbers).collect())
    }
}

impl Communicator {
    /// The numbers of all ranks, as many of each, in group order.
    pub(in crate::comm) fn all_gather_numbers(&self, call: Call, own: &[usize]) -> Result<Vec<usize>, CommError> {
        let sizes = ShardSizes::Chunked(WORDS * own.len() * self.group().size());
        let shard = ShardedTensor { tensor: numbers(own, self), dim: 0, sizes };
        Ok(read_numbers(self.all_gather(call, vec![shard]).wait()?.remove(0)))
    }

    /// Whether `own` is true on a rank of the group.
    pub(crate) fn any(&self, call: Call, own: bool) -> Result<bool, CommError> {
        Ok(self.all_gather_numbers(call, &[usize::from(own)])?.contains(&1))
    }
}

/// Two words a number: 32 bits are what every backend has.
const WORDS: usize = 2;

/// `numbers` as a tensor.
pub(super) fn numbers(numbers: &[usize], comm: &Communicator) -> DispatchTensor {
    let words: Vec<i32> = numbers.iter().flat_map(|&n| [n as u32 as i32, (n as u64 >> 32) as i32]).collect();
    words_of(words, comm)
}

/// What [`numbers`] makes of so many.
pub(super) fn numbers_meta(count: usize) -> TensorMeta {
    TensorMeta { shape: [WORDS * count].into(), dtype: DType::I32 }
}

pub(super) fn read_numbers(tensor: DispatchTensor) -> Vec<usize> {
    let number = |words: &[i32]| (u64::from(words[0] as u32) | u64::from(words[1] as u32) << 32) as usize;
    read_words(tensor).chunks_exact(WORDS).map(number).collect()
}

/// 32-bit words as a tensor.
pub(super) fn words_of(words: Vec<i32>, comm: &Communicator) -> DispatchTensor {
    let len = words.len();
    let data = TensorData::new(words, [len]);
    Tensor::<1, Int>::from_data(data, (comm.device(), DType::I32)).into_dispatch()
}

pub(super) fn read_words(tensor: DispatchTensor) -> Vec<i32> {
    let data = Tensor::<1, Int>::from_dispatch(tensor).into_data();
    data.try_into_vec().expect("words are 32-bit integers")
}
