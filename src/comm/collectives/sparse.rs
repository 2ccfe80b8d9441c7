//! All-reduce of sparse tensors.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Float, IndexingUpdateOp, Int, Tensor, TensorData, kind};

use crate::Result;
use crate::comm::{Call, Communicator, Op, ShardedTensor, arguments};
use crate::placement::ShardSizes;

impl Communicator {
    /// Sums sparse tensors, such as the gradient of an embedding, over the ranks. Row `i` of
    /// `values` belongs to the index `indices[i]`. Returns the indices that occur on any rank, in
    /// ascending order without duplicates, and the sums of their rows. The results are identical on
    /// all ranks.
    ///
    /// Rows are added in the order of the ranks, and within a rank in its order; f16 and bf16 are
    /// summed in f32 and rounded once.
    ///
    /// ```
    /// use burn::tensor::{Int, Tensor};
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let indices = Tensor::<1, Int>::from_data([world.rank(), 5], world.device());
    ///     let rows = Tensor::<2>::ones([2, 3], world.device());
    ///     let (indices, rows) = world.all().all_reduce_sparse("rows".into(), indices, rows)?;
    ///     assert_eq!(indices.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 1, 5]);
    ///     assert_eq!(rows.sum_dim(1).into_data().to_vec::<f32>().unwrap(), [3.0, 3.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_reduce_sparse<const D: usize, K: kind::Numeric + kind::Autodiff>(
        &self,
        call: Call,
        indices: Tensor<1, Int>,
        values: Tensor<D, K>,
    ) -> Result<(Tensor<1, Int>, Tensor<D, K>)> {
        let rows = indices.dims()[0];
        if let Err(problem) = arguments::rows_of(&values.dims(), rows) {
            return Ok(self.refuse(Op::AllReduce, &call, problem).wait()?);
        }
        let sizes = ShardSizes::Uneven(self.all_gather_numbers(call.clone(), &[rows])?.into());
        let shards = [indices.into_dispatch(), values.into_dispatch()];
        let shards = shards.map(|tensor| ShardedTensor {
            tensor,
            dim: 0,
            sizes: sizes.clone(),
        });
        let mut full_tensors = self.all_gather(call, shards.into()).wait()?.into_iter();
        let indices = full_tensors.next().expect("the first of two");
        let values = full_tensors.next().expect("the second of two");
        let dtype = indices.dtype();
        let of_rows: Vec<i64> = Tensor::<1, Int>::from_dispatch(indices)
            .into_data()
            .iter::<i64>()
            .collect();
        let mut union = of_rows.clone();
        union.sort_unstable();
        union.dedup();
        let places: Vec<i64> = of_rows
            .iter()
            .map(|index| {
                union
                    .binary_search(index)
                    .expect("the union has every index") as i64
            })
            .collect();
        let int = |values: Vec<i64>, dtype: DType| {
            let len = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [len]), (self.device(), dtype))
        };
        let places = int(places, dtype);
        Ok((
            int(union.clone(), dtype),
            added(Tensor::from_dispatch(values), places, union.len()),
        ))
    }
}

/// Returns a tensor of `rows` rows that is zero except for the sums of the rows of `values` at
/// `places`.
fn added<const D: usize, K: kind::Numeric + kind::Autodiff>(
    values: Tensor<D, K>,
    places: Tensor<1, Int>,
    rows: usize,
) -> Tensor<D, K> {
    let dtype = values.dtype();
    if dtype.is_float() && dtype.size() < DType::F32.size() {
        let wide = Tensor::<D, Float>::from_dispatch(values.into_dispatch()).cast(DType::F32);
        return Tensor::from_dispatch(added(wide, places, rows).cast(dtype).into_dispatch());
    }
    let mut dims = values.dims();
    dims[0] = rows;
    let zeros = Tensor::<D, K>::zeros(dims, (&values.device(), dtype));
    if rows == 0 {
        zeros
    } else {
        zeros.select_assign(0, places, values, IndexingUpdateOp::Add)
    }
}
