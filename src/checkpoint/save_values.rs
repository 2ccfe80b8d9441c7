//! [`agree_on_values`]: compares the values and steps of a state on all ranks.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{CheckpointError, State};
use crate::Result;
use crate::comm::{Call, Communicator};

/// Returns a digest, the same in all processes.
fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

type Values = (BTreeMap<String, String>, BTreeMap<String, Vec<String>>);

/// Compares the values and steps of all ranks, and collects the values that each has of its own.
pub(super) fn agree_on_values(state: &State, comm: &Communicator) -> Result<Values> {
    // Only digests of what all ranks should have: it may be large, as the description of an
    // optimizer is.
    let digests: BTreeMap<_, _> = state
        .values
        .iter()
        .map(|(key, value)| (key.clone(), digest(value)))
        .collect();
    let own = (digest(&digests), state.rank_values.clone(), state.step);
    let of_ranks = comm.all_gather_object(Call::new("checkpoint_values"), &own)?;
    let ranks = comm.group().ranks();
    let (first, first_own, first_step) = &of_ranks[0];
    if let Some(other) = of_ranks.iter().position(|(.., step)| step != first_step) {
        let text = |step: Option<u64>| step.map_or("no step".into(), |step| step.to_string());
        let found = text(of_ranks[other].2);
        let expected = text(*first_step);
        let rank = ranks[other];
        let of = ranks[0];
        return Err(CheckpointError::Disagree {
            key: "step".into(),
            rank,
            found,
            of,
            expected,
        }
        .into());
    }
    if let Some(other) = of_ranks.iter().position(|(values, ..)| values != first) {
        let by_key = comm.all_gather_object(Call::new("checkpoint_digests"), &digests)?;
        return Err(difference(&by_key[0], &by_key[other], ranks[other], ranks[0], "value").into());
    }
    if let Some(other) = of_ranks
        .iter()
        .position(|(_, values, _)| !values.keys().eq(first_own.keys()))
    {
        let keys =
            |values: &BTreeMap<String, String>| values.keys().map(|key| (key.clone(), 0)).collect();
        let expected = keys(first_own);
        let found = keys(&of_ranks[other].1);
        return Err(difference(
            &expected,
            &found,
            ranks[other],
            ranks[0],
            "value of its own",
        )
        .into());
    }
    let of_key = |key: &String| {
        of_ranks
            .iter()
            .map(|(_, values, _)| values[key].clone())
            .collect()
    };
    let rank_values = first_own
        .keys()
        .map(|key| (key.clone(), of_key(key)))
        .collect();
    Ok((state.values.clone(), rank_values))
}

/// Returns the error for the first key in which the digests of the values of two ranks differ.
fn difference(
    expected: &BTreeMap<String, u64>,
    found: &BTreeMap<String, u64>,
    rank: usize,
    of: usize,
    what: &str,
) -> CheckpointError {
    let mut keys = expected.keys().chain(found.keys());
    let key = keys
        .find(|key| expected.get(*key) != found.get(*key))
        .cloned()
        .unwrap_or_default();
    let describe = |values: &BTreeMap<String, u64>, other: &str| match values.contains_key(&key) {
        true => format!("{other} {what}"),
        false => format!("no {what}"),
    };
    let found = describe(found, "another");
    let expected = describe(expected, "a");
    CheckpointError::Disagree {
        key,
        rank,
        found,
        of,
        expected,
    }
}
