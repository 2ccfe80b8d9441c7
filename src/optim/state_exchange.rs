//! [`StateExchange`]: states that pass between optimizers and [`OptimizerState`](super::OptimizerState) without burn's record.
//!
//! burn's record of an optimizer can be read and made only as bytes, into which every tensor is
//! copied. States of this crate's optimizers ([`RealignedState`](super::realigned::RealignedState))
//! need no bytes: while an exchange is active on a thread, they give their fields to it or take
//! them from it, and burn's record has nothing of them but the number of dimensions.
//!
//! ```text
//! take    optimizer -- fields --> exchange
//! probe   optimizer -- id ------> exchange     whose states take part, and whose are in burn's record
//! give    optimizer <-- fields -- exchange
//! ```

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::{Bytes, DType, Device, TensorData};

use super::state::StateFields;

thread_local! {
    /// The exchange that is active on this thread.
    static ACTIVE: RefCell<Option<StateExchange>> = const { RefCell::new(None) };
}

/// States by their parameters' ids, without the ids in the names of fields.
pub(super) type States = BTreeMap<u64, StateSink>;

/// An exchange of states by their parameters' ids.
pub(super) enum StateExchange {
    /// From the optimizer, of all parameters apart from `except`.
    Take {
        except: BTreeSet<u64>,
        taken: States,
    },
    /// The parameters whose states take part.
    Probe(BTreeSet<u64>),
    /// To the optimizer. `loaded` has the fields that it made of them.
    Give {
        given: States,
        loaded: BTreeMap<u64, StateFields>,
    },
}

impl StateExchange {
    /// Calls burn's optimizer while the exchange is active on this thread. Also returns the
    /// exchange.
    pub(super) fn during<T>(self, call: impl FnOnce() -> T) -> (T, Self) {
        /// Ends the exchange, also if burn panics.
        struct End;

        impl Drop for End {
            fn drop(&mut self) {
                ACTIVE.take();
            }
        }

        ACTIVE.set(Some(self));
        let end = End;
        let result = call();
        let exchange = ACTIVE.take().expect("nothing else ends it");
        drop(end);
        (result, exchange)
    }
}

/// Takes the fields of a state in place of burn's record. Returns false if burn's record is to have
/// them.
pub(super) fn take(id: &str, state: &impl RecordState) -> bool {
    let Ok(id) = id.parse() else { return false };
    let Some(except) = ACTIVE.with_borrow(|active| match active {
        Some(StateExchange::Take { except, .. }) => Some(except.contains(&id)),
        _ => None,
    }) else {
        return false;
    };
    if !except {
        let fields = flattened(state);
        ACTIVE.with_borrow_mut(|active| match active {
            Some(StateExchange::Take { taken, .. }) => _ = taken.insert(id, fields),
            _ => unreachable!("an exchange is active during the call of burn's optimizer"),
        });
    }
    true
}

/// Returns the state that an exchange gives to an optimizer and its float dtype, or `None` in it if
/// there is none. Returns `None` if burn's record has the state.
pub(super) fn give<S: RecordState>(
    id: &str,
    device: &Device,
) -> Option<Option<(S, Option<DType>)>> {
    let id = id.parse().ok()?;
    let given = ACTIVE.with_borrow_mut(|active| match active {
        Some(StateExchange::Probe(ids)) => {
            ids.insert(id);
            Some(None)
        }
        Some(StateExchange::Give { given, .. }) => given.remove(&id).map(Some),
        _ => None,
    })?;
    Some(given.and_then(|StateSink { tensors, scalars }| {
        let source = |tensors: Vec<(String, TensorData)>| {
            let mut source = StateSource::new(scalars.iter().cloned().collect());
            tensors
                .into_iter()
                .for_each(|(field, data)| source.insert_tensor(field, aligned(data)));
            source
        };
        // The fields of a state can be read only with copies of their values.
        let state = S::state_unflatten("", &mut source(without_elements(&tensors)), device)?;
        let flattened = flattened(&state);
        let loaded = StateFields::of(&flattened);
        ACTIVE.with_borrow_mut(|active| match active {
            Some(StateExchange::Give { loaded: all, .. }) => _ = all.insert(id, loaded),
            _ => unreachable!("an exchange is active during the call of burn's optimizer"),
        });
        let state = S::state_unflatten("", &mut source(tensors), device)?;
        Some((state, float_dtype(&flattened)))
    }))
}

/// Returns the fields of a state.
pub(super) fn flattened(state: &impl RecordState) -> StateSink {
    let mut fields = StateSink::default();
    state.state_flatten("", &mut fields);
    fields
}

/// Returns the dtype of the state's tensors of floats, `None` if it has none.
pub(super) fn float_dtype(fields: &StateSink) -> Option<DType> {
    let mut dtypes = fields.tensors.iter().map(|(_, data)| data.dtype());
    dtypes.find(DType::is_float)
}

/// Returns tensors with these names, dtypes and numbers of dimensions.
fn without_elements(tensors: &[(String, TensorData)]) -> Vec<(String, TensorData)> {
    let empty = |data: &TensorData| {
        TensorData::from_bytes(
            Bytes::from_elems::<u64>(Vec::new()),
            vec![0; data.shape().num_dims()],
            data.dtype(),
        )
    };
    tensors
        .iter()
        .map(|(field, data)| (field.clone(), empty(data)))
        .collect()
}

/// Returns the data with bytes that are aligned for every element type, if it has no elements.
pub(super) fn aligned(data: TensorData) -> TensorData {
    match data.num_elements() {
        0 => TensorData::from_bytes(
            Bytes::from_elems::<u64>(Vec::new()),
            data.shape().clone(),
            data.dtype(),
        ),
        _ => data,
    }
}
