//! Panics of burn that stand for an error of this crate, recognized by their texts.
//!
//! # What it relies on
//! * A backward that reaches a node which an earlier backward has consumed panics with the number
//!   of that node, before any of its nodes has run.
//! * An operation on tensors of different element types panics with a text that contains "dtype".
//!
//! # The issue to file
//! *A typed payload for the panic of a second backward.* `AutodiffServer::backward` panics with a
//! text. If the payload were a public struct with the `NodeId`, a library could name the module to
//! which the node belongs without parsing the text.

/// Text of the panic of a second backward before the number of the node.
const CONSUMED: &str = "graph tape has already been consumed at NodeId(";

/// Returns the number of the node that was consumed before, if `text` is that of a panic in a
/// second backward.
pub(crate) fn consumed_node(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once(CONSUMED)?;
    rest.split_once(')')?.0.parse().ok()
}

/// Returns true if the `text` of a panic is about element types.
pub(crate) fn is_about_dtypes(text: &str) -> bool {
    text.to_lowercase().contains("dtype")
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::tensor::{DType, Device, Tensor};

    use super::*;
    use crate::comm::panic_text;

    fn text_of<T>(panics: impl FnOnce() -> T) -> String {
        let payload = catch_unwind(AssertUnwindSafe(|| drop(panics()))).expect_err("it panics");
        panic_text(&*payload).to_owned()
    }

    #[test]
    fn the_text_of_a_second_backward_names_a_node() {
        let x = Tensor::<1>::ones([2], &Device::flex().autodiff()).require_grad();
        let shared = x * 2.0;
        let second = shared.clone().exp().sum();
        shared.sum().backward();
        assert!(consumed_node(&text_of(|| second.backward())).is_some());
        assert_eq!(consumed_node("index out of bounds"), None);
    }

    #[test]
    fn the_text_of_an_operation_on_two_element_types_mentions_them() {
        let device = Device::flex();
        let [a, b] = [DType::F32, DType::F64].map(|dtype| Tensor::<1>::ones([2], (&device, dtype)));
        assert!(is_about_dtypes(&text_of(|| a + b)));
    }
}
