//! Memory of Flex tensors.
//!
//! A Flex tensor reads its bytes through an allocation controller. Most controllers own the bytes.
//! Those of a gathered parameter are evicted and restored by its unit, and reading them may run a
//! collective.

use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::Bytes;
use burn_std::AllocationProperty;
use bytemuck::Pod;

/// Returns the Flex primitive of a tensor, or `None` if the tensor is on another backend.
pub(crate) fn primitive(tensor: &DispatchTensor) -> Option<&FlexTensor> {
    match &tensor.kind {
        DispatchTensorKind::Flex(
            BackendTensor::Float(primitive)
            | BackendTensor::Int(primitive)
            | BackendTensor::Bool(primitive),
        ) => Some(primitive),
        _ => None,
    }
}

/// Returns the float tensor of a primitive.
pub(super) fn wrap(tensor: FlexTensor) -> DispatchTensor {
    DispatchTensor {
        kind: DispatchTensorKind::Flex(BackendTensor::Float(tensor)),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// Returns the bytes of the elements of a row-major tensor, which may be a view. Returns `None` if
/// it is not row-major.
///
/// Uses a single pass over the dimensions: burn's `is_contiguous` and `num_elements` take four
/// times as long, which is noticeable with many small tensors.
pub(crate) fn elements(tensor: &FlexTensor) -> Option<&[u8]> {
    let layout = tensor.layout();
    let size = tensor.dtype().size();
    let mut count = 1;
    let mut is_adjacent = true;
    for (len, stride) in layout.shape().iter().zip(layout.strides()).rev() {
        is_adjacent &= *len == 1 || *stride == count as isize;
        count *= len;
    }
    match (count, layout.start_offset()) {
        (0, _) => Some(&[]),
        (_, start) => is_adjacent.then(|| &tensor.bytes()[start * size..(start + count) * size]),
    }
}

/// Returns true if the memory of `tensor` stays valid as long as a handle to it lives.
pub(crate) fn is_lasting(tensor: &FlexTensor) -> bool {
    tensor.data_arc().property() == AllocationProperty::Native
}

/// Returns true if the elements of `tensor` fill its allocation and are in row-major order.
pub(crate) fn is_alone(tensor: &FlexTensor) -> bool {
    elements(tensor).is_some_and(|elements| elements.len() == tensor.bytes().len())
}

/// Returns true if both are views of one allocation.
pub(super) fn is_same(a: &FlexTensor, b: &FlexTensor) -> bool {
    Arc::ptr_eq(&a.data_arc(), &b.data_arc())
}

/// Copies the elements of `tensor` to separate persistent memory.
///
/// Does not use burn's `into_data`, which returns the memory itself if the tensor is its only
/// handle.
pub(crate) fn copied(tensor: &FlexTensor) -> FlexTensor {
    let Some(elements) = elements(tensor) else {
        return tensor.to_contiguous();
    };
    let shape = tensor.layout().shape().clone();
    let copy = aligned(elements, tensor.dtype().size());
    FlexTensor::new(copy, Layout::contiguous(shape), tensor.dtype())
}

/// Returns a copy that is aligned for elements of `size` bytes. burn would copy unaligned bytes a
/// second time.
fn aligned(bytes: &[u8], size: usize) -> Bytes {
    fn of<E: Pod + Send + Sync>(bytes: &[u8]) -> Bytes {
        // An empty slice need not be aligned.
        let elements: &[E] = if bytes.is_empty() {
            &[]
        } else {
            bytemuck::cast_slice(bytes)
        };
        Bytes::from_elems(elements.to_vec())
    }
    match size {
        1 => of::<u8>(bytes),
        2 => of::<u16>(bytes),
        4 => of::<u32>(bytes),
        8 => of::<u64>(bytes),
        size => unreachable!("Flex has no dtype of {size} bytes"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::mem::MaybeUninit;

    use burn::tensor::{DType, Shape};
    use burn_std::{AccessError, AccessPolicy, AllocationController};

    use super::*;

    /// Memory that does not report itself as an ordinary allocation.
    struct Foreign(Vec<u128>);

    impl AllocationController for Foreign {
        fn alloc_align(&self) -> usize {
            align_of::<u128>()
        }

        fn property(&self) -> AllocationProperty {
            AllocationProperty::Other
        }

        fn capacity(&self) -> usize {
            size_of_val(self.0.as_slice())
        }

        fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
            let bytes: &[u8] = bytemuck::cast_slice(&self.0);
            // SAFETY: `u8` is a valid `MaybeUninit<u8>`.
            Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
        }

        unsafe fn memory_mut(
            &mut self,
            _: AccessPolicy,
        ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
            Err(AccessError::WouldCopy)
        }
    }

    /// Returns a tensor of `4 * rows` floats in foreign memory, of which it is the only handle.
    pub(crate) fn foreign(rows: usize) -> FlexTensor {
        let values: Vec<[f32; 4]> = (0..rows).map(|row| [row as f32; 4]).collect();
        let memory: Vec<u128> = values.into_iter().map(bytemuck::cast).collect();
        let len = size_of_val(memory.as_slice());
        // SAFETY: all `len` bytes are initialized.
        let bytes = unsafe { Bytes::from_controller(Box::new(Foreign(memory)), len) };
        FlexTensor::new(bytes, Layout::contiguous(Shape::new([rows, 4])), DType::F32)
    }

    #[test]
    fn row_major_elements_are_seen_in_place() {
        let full = foreign(3);
        let bytes = |tensor: &FlexTensor| elements(tensor).map(|elements| elements.as_ptr_range());
        let all = full.bytes().as_ptr_range();
        assert_eq!(bytes(&full), Some(all.clone()));
        assert_eq!(
            bytes(&full.narrow(0, 1, 2)),
            Some(all.start.wrapping_add(16)..all.end)
        );
        assert_eq!(
            bytes(&full.narrow(0, 2, 1).transpose(0, 1)),
            Some(all.start.wrapping_add(32)..all.end)
        );
        assert_eq!(elements(&full.narrow(1, 1, 0)), Some(&[][..]));
        assert_eq!(elements(&full.narrow(1, 0, 3)), None);
        assert_eq!(elements(&full.transpose(0, 1)), None);
    }

    #[test]
    fn a_copy_has_its_elements_alone() {
        let full = foreign(3);
        assert!(!is_lasting(&full));
        for (tensor, expected) in [
            (
                full.clone(),
                vec![0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0],
            ),
            (full.narrow(0, 1, 1), vec![1.0; 4]),
            (full.transpose(0, 1), [0.0, 1.0, 2.0].repeat(4)),
            (full.narrow(0, 1, 0), vec![]),
        ] {
            let copy = copied(&tensor);
            assert!(is_lasting(&copy) && copy.bytes().len() == 4 * expected.len());
            assert_eq!(copy.layout().shape(), tensor.layout().shape());
            assert_eq!(bytemuck::cast_slice::<u8, f32>(copy.bytes()), expected);
        }
    }
}
