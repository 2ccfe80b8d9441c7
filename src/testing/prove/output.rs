//! [`CaseOutputs`]: outputs of an operator, of any number, kind and dimensions.

use burn::tensor::{DType, Tensor};

use crate::Result;
use crate::dtensor::{DTensor, Kind, as_float, is_tracked};
use crate::testing::{GraphDepth, graph_depth};

/// One output of an operator, as a full tensor.
#[derive(Debug)]
pub struct FullOutput {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) values: Vec<f64>,
    /// The output in the autodiff graph; `None` if it is not tracked.
    pub(super) tracked: Option<Tensor<1>>,
    /// Depth of this rank's local tensor in the autodiff graph.
    pub(super) depth: GraphDepth,
}

/// Return type of the operator of a [`Case`](super::Case): a tensor or DTensor of any kind, or a
/// tuple, array or `Vec` of them.
pub trait CaseOutputs {
    /// Gathers every output.
    ///
    /// # Errors
    /// If a DTensor's collectives fail.
    fn full_outputs(self) -> Result<Vec<FullOutput>>;
}

impl<const D: usize, K: Kind> CaseOutputs for Tensor<D, K> {
    fn full_outputs(self) -> Result<Vec<FullOutput>> {
        let shape = self.shape();
        let dtype = self.dtype();
        let values = self.to_data().iter::<f64>().collect();
        let elements = shape.num_elements();
        let tracked = is_tracked(&self).then(|| as_float(self).reshape([elements]));
        Ok(vec![FullOutput {
            shape: shape.to_vec(),
            dtype,
            values,
            tracked,
            depth: GraphDepth::default(),
        }])
    }
}

impl<const D: usize, K: Kind> CaseOutputs for DTensor<D, K> {
    fn full_outputs(self) -> Result<Vec<FullOutput>> {
        let shape = self.shape().to_vec();
        let (part, depth) = graph_depth(self);
        let mut full_tensors = part.full_tensor()?.full_outputs()?;
        (full_tensors[0].shape, full_tensors[0].depth) = (shape, depth);
        Ok(full_tensors)
    }
}

impl<T: CaseOutputs> CaseOutputs for Vec<T> {
    fn full_outputs(self) -> Result<Vec<FullOutput>> {
        let parts: Vec<Vec<FullOutput>> = self
            .into_iter()
            .map(CaseOutputs::full_outputs)
            .collect::<Result<_>>()?;
        Ok(parts.into_iter().flatten().collect())
    }
}

impl<T: CaseOutputs, const N: usize> CaseOutputs for [T; N] {
    fn full_outputs(self) -> Result<Vec<FullOutput>> {
        Vec::from(self).full_outputs()
    }
}

macro_rules! tuples {
    ($(($($part:ident)+))+) => {$(
        impl<$($part: CaseOutputs),+> CaseOutputs for ($($part,)+) {
            #[allow(non_snake_case)] // variables named like the types
            fn full_outputs(self) -> Result<Vec<FullOutput>> {
                let ($($part,)+) = self;
                let mut all = Vec::new();
                $(all.extend($part.full_outputs()?);)+
                Ok(all)
            }
        }
    )+};
}

tuples! { (A B) (A B C) (A B C E) }
