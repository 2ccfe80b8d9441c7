//! Scaled dot-product attention.
//!
//! | | `query` `[b, h, s, d]` | `key` `[b, h, t, d]` | `value` `[b, h, t, e]` | mask, bias `[b, h, s, t]` | output `[b, h, s, e]` |
//! |---|---|---|---|---|---|
//! | batch | `S(0)` | `S(0)` | `S(0)` | `S(0)`, broadcast `R` | `S(0)` |
//! | heads | `S(1)` | `S(1)` | `S(1)` | `S(1)`, broadcast `R` | `S(1)` |
//! | queries | `S(2)` | `R` | `R` | `S(2)`, broadcast `R` | `S(2)` |
//! | values | `R` | `R` | `S(3)` | `R` | `S(3)` |
//! | linear | `R` | `R` | `P(sum)`, `P(avg)` | `R` | that of `value` |
//!
//! Queries see keys by their global positions: a rank with a part of the queries of a causal
//! attention masks what comes after *its* rows.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Shape, Tensor, module};
use smallvec::SmallVec;

use super::args::misfit;
use super::placements::{AVG, R, S, SUM};
use super::{Resolved, Rule, Strategy, resolve, strategy};
use crate::Result;
use crate::dtensor::DTensor;

/// Inputs after query, key and value are scores' companions: a mask, a bias or both.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Attention;

impl Rule for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let [query, key, value, companions @ ..] = inputs else { unreachable!("attention reads q, k and v") };
        let scores = [query[0], query[1], query[2], key[2]];
        let broadcasts = |shape: &Shape| shape.iter().zip(scores).all(|(&len, full)| len == full || len == 1);
        let why = if key[..2] != query[..2] || value[..2] != query[..2] {
            "query, key and value `[batch, heads, seq, dim]` must have the same batch and heads: repeat grouped heads"
        } else if key[3] != query[3] || key[2] != value[2] {
            "keys must be as wide as queries, and as many as values"
        } else if !companions.iter().all(broadcasts) {
            "a mask or bias must have, or broadcast to, the shape `[batch, heads, queries, keys]`"
        } else {
            return Ok(vec![Shape::new([query[0], query[1], query[2], value[3]])]);
        };
        Err(misfit(self.name(), inputs, why))
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let companions = &inputs[3..];
        let row = |parts: [_; 3], dim: Option<usize>, output| {
            let cut = companions.iter().map(|shape| match dim {
                Some(dim) if shape[dim] > 1 => S(dim),
                _ => R,
            });
            strategy(parts.into_iter().chain(cut), [output])
        };
        vec![
            row([S(0); 3], Some(0), S(0)),
            row([S(1); 3], Some(1), S(1)),
            row([S(2), R, R], Some(2), S(2)),
            row([R, R, S(3)], None, S(3)),
            row([R, R, SUM], None, SUM),
            row([R, R, AVG], None, AVG),
        ]
    }
}

/// `softmax(query @ keyᵀ * scale) @ value`, as burn's [`attention`](module::attention): of a query
/// `[batch, heads, queries, dim]`, a key `[batch, heads, keys, dim]` and a value
/// `[batch, heads, keys, dim_v]`, with an optional mask (true: not seen) and an optional bias of
/// the scores, both `[batch, heads, queries, keys]` or broadcasting to it.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
pub fn attention(
    query: DTensor<4>,
    key: DTensor<4>,
    value: DTensor<4>,
    mask: Option<DTensor<4, Bool>>,
    attn_bias: Option<DTensor<4>>,
    options: AttentionModuleOptions,
) -> DTensor<4> {
    let op = {
        let mut specs: SmallVec<[_; 5]> = SmallVec::from_iter([&query.spec, &key.spec, &value.spec]);
        specs.extend(mask.as_ref().map(|mask| &mask.spec));
        specs.extend(attn_bias.as_ref().map(|bias| &bias.spec));
        resolve(&Attention, &specs).unwrap_or_else(|error| error.unwind())
    };
    let (query, key, value) = (query.enter(&op, 0), key.enter(&op, 1), value.enter(&op, 2));
    let bias_at = 3 + usize::from(mask.is_some());
    let mask = mask.map(|mask| mask.enter(&op, 3));
    let attn_bias = attn_bias.map(|bias| bias.enter(&op, bias_at));
    let (mask, is_causal) = visible(&op, &query, mask, options.is_causal);
    let options = AttentionModuleOptions { is_causal, ..options };
    op.leave(0, module::attention(query, key, value, mask, attn_bias, options))
}

/// The mask of this rank's queries, and whether they are causal by themselves: a part of the
/// queries gets a mask, since burn aligns the last query with the last key.
fn visible(
    op: &Resolved,
    query: &Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    is_causal: bool,
) -> (Option<Tensor<4, Bool>>, bool) {
    let (rows, queries, keys) = (op.input_range(0, 2), op.input(0).shape()[2], op.input(1).shape()[2]);
    if !is_causal || rows.len() == queries || rows.is_empty() {
        return (mask, is_causal && !rows.is_empty());
    }
    let offset = (rows.start + keys) as i64 - queries as i64;
    let later = Tensor::<2, Bool>::tril_mask([rows.len(), keys], offset, &query.device()).unsqueeze::<4>();
    let mask = match mask {
        Some(mask) => mask.bool_or(later),
        None => later,
    };
    (Some(mask), false)
}
