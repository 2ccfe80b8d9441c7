//! Digests of tensor elements, computed without copying row-major tensors.

use std::borrow::Cow;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use rayon::prelude::*;
use twox_hash::XxHash3_64;

use super::{HostTuning, flex};

/// Returns a digest of each tensor's elements in row-major order, or `None` for a tensor that is
/// not on the CPU.
pub(crate) fn digests<'a>(tensors: impl Iterator<Item = &'a DispatchTensor>) -> Vec<Option<u64>> {
    let adjacent = |tensor: &'a FlexTensor| match tensor.is_contiguous() {
        true => Cow::Borrowed(tensor),
        false => Cow::Owned(flex::copied(tensor)),
    };
    let tensors: Vec<_> = tensors
        .map(|tensor| flex::primitive(tensor).map(adjacent))
        .collect();
    // Bytes are read on this thread: another thread would get a copy of a gathered weight.
    let bytes: Vec<_> = tensors
        .iter()
        .map(|tensor| tensor.as_deref().and_then(flex::elements))
        .collect();
    let digest = |bytes: &Option<&[u8]>| bytes.map(XxHash3_64::oneshot);
    let total: usize = bytes.iter().flatten().map(|bytes| bytes.len()).sum();
    if rayon::current_num_threads() == 1 || total < HostTuning::get().shared_bytes {
        return bytes.iter().map(digest).collect();
    }
    bytes.par_iter().with_max_len(1).map(digest).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    fn of(tensors: &[Tensor<2>]) -> Vec<u64> {
        let tensors: Vec<_> = tensors.iter().cloned().map(Tensor::into_dispatch).collect();
        digests(tensors.iter())
            .into_iter()
            .map(|digest| digest.expect("they are on the CPU"))
            .collect()
    }

    /// Digests do not depend on the layout in memory, nor on the number of threads.
    #[test]
    fn equal_elements_have_equal_digests() {
        let device = Device::flex();
        let rows = Tensor::<2>::from_data([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device);
        let turned =
            Tensor::<2>::from_data([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], &device).transpose();
        let inner = Tensor::cat(vec![rows.clone() * 9.0, rows.clone()], 0).narrow(0, 2, 2);
        let equal = of(&[rows.clone(), turned, inner]);
        assert!(equal.iter().all(|digest| *digest == equal[0]), "{equal:?}");
        let long: Vec<_> = (0..9)
            .map(|at| Tensor::<2>::full([300, 300], at, &device))
            .collect();
        let pool = |threads| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
        };
        assert_eq!(pool(1).install(|| of(&long)), pool(3).install(|| of(&long)));
    }

    #[test]
    fn one_bit_makes_another_digest() {
        let value = |bits: u32| Tensor::<2>::full([3, 3], f32::from_bits(bits), &Device::flex());
        let flipped: Vec<_> = (0..32)
            .map(|bit| value(0x3f80_0000 ^ (1 << bit)))
            .chain([value(0x3f80_0000)])
            .collect();
        let mut digests = of(&flipped);
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), flipped.len());
    }
}
