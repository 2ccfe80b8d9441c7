//! Steps on Cube devices: one kernel for a list of tensors.
//!
//! burn's optimizer steps one parameter after the other. During a step of a model
//! ([`in_lists`]), tensors are collected, and kernels for lists of them are launched at its end. The
//! tensors that a step returns have the memory that the kernel will write, and must not be read before
//! the step of the model returns. So only [`Realigned`](crate::optim::realigned::Realigned), whose
//! results burn stores unread, collects steps.

use std::cell::RefCell;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::pass::{AfterPass, FusedPass};
use crate::kernels::cube::{MOST_ELEMENTS, StepFormula, SteppedTensors, step_list};
use crate::memory::cube::{primitive, wrap};

thread_local! {
    /// The steps that wait for the end of a model's step; `None` outside of one.
    static LISTS: RefCell<Option<Vec<StepsOfFormula>>> = const { RefCell::new(None) };
}

/// Steps of one formula on one device.
struct StepsOfFormula {
    formula: StepFormula,
    steps: Vec<SteppedTensors>,
}

/// Makes the steps of a model, whose tensors are stepped in lists. Also returns the number of
/// launches.
pub(in crate::optim) fn in_lists<T>(step: impl FnOnce() -> T) -> (T, usize) {
    /// Drops the lists, also if burn panics.
    struct EndOfLists;

    impl Drop for EndOfLists {
        fn drop(&mut self) {
            LISTS.take();
        }
    }

    if LISTS.with_borrow(Option::is_some) {
        return (step(), 0);
    }
    LISTS.set(Some(Vec::new()));
    let end = EndOfLists;
    let result = step();
    let lists = LISTS.take().unwrap_or_default();
    drop(end);
    let launches = lists
        .iter()
        .map(|list| step_list(list.formula, &list.steps));
    (result, launches.sum())
}

/// Makes a step whose result is read before that of the model ends: it is not collected.
pub(super) fn at_once<T>(step: impl FnOnce() -> T) -> T {
    /// Collects again after it, also if burn panics.
    struct CollectAgain(Option<Vec<StepsOfFormula>>);

    impl Drop for CollectAgain {
        fn drop(&mut self) {
            LISTS.set(self.0.take());
        }
    }

    let _again = CollectAgain(LISTS.take());
    step()
}

/// Returns true if the kernel takes the tensor: it is in single precision and on a Cube device
/// without fusion.
pub(super) fn is_taken(tensor: &DispatchTensor) -> bool {
    primitive(tensor).is_some_and(|tensor| {
        let elements = tensor.meta.num_elements();
        tensor.dtype == DType::F32 && elements > 0 && elements <= MOST_ELEMENTS
    })
}

/// Steps tensors of equal shapes and dtypes that are [taken](is_taken).
pub(super) fn step<const D: usize, const N: usize>(
    pass: &impl FusedPass<N>,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: [Tensor<D>; N],
) -> AfterPass<D, [Tensor<D>; N]> {
    let (formula, scalars) = pass.on_device();
    let param = own(param);
    let grad = into_contiguous(taken(grad));
    let state = state.map(own);
    let tensors = [param.clone(), grad].into_iter().chain(state.clone());
    let stepped = SteppedTensors {
        tensors: tensors.collect(),
        scalars,
    };
    let waiting = LISTS.with_borrow_mut(|lists| {
        let Some(lists) = lists else {
            return Some(stepped);
        };
        let is_same = |list: &&mut StepsOfFormula| {
            list.formula == formula && list.steps[0].tensors[0].device == param.device
        };
        match lists.iter_mut().find(is_same) {
            Some(list) => list.steps.push(stepped),
            None => lists.push(StepsOfFormula {
                formula,
                steps: vec![stepped],
            }),
        }
        None
    });
    if let Some(stepped) = waiting {
        step_list(formula, &[stepped]);
    }
    AfterPass {
        param: Tensor::from_dispatch(wrap(param)),
        state: state.map(|tensor| Tensor::from_dispatch(wrap(tensor))),
        left: None,
    }
}

/// Returns the primitive, without another handle.
fn taken<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    let tensor = tensor.into_dispatch();
    primitive(&tensor).expect("`is_taken` has checked").clone()
}

/// Returns contiguous memory that no other handle reads: that of the tensor, or a copy.
fn own<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    let tensor = into_contiguous(taken(tensor));
    match tensor.can_mut() {
        true => tensor,
        false => tensor.copy(),
    }
}
