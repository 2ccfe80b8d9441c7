//! Scaled dot-product attention.
//!
//! Causal masks use global positions: a rank that holds a shard of the queries masks the keys after
//! *its* rows.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor, module};

use super::{EinsumRule, Operator, apply};
use crate::dtensor::DTensor;

/// Rule for query, key and value, followed by a mask, a bias of the scores, or both.
const ATTENTION: EinsumRule = of_scores("attention");
const ATTENTION_FALLBACK: EinsumRule = of_scores("attention_fallback");

const fn of_scores(name: &'static str) -> EinsumRule {
    EinsumRule::new(name, "bhsD, bhTD, bhTe, b?h?s?T?* -> bhse").linear(&[2])
}

/// Computes `softmax(query @ keyᵀ * scale) @ value`, as burn's [`attention`](module::attention).
///
/// Shapes: query `[batch, heads, queries, dim]`, key `[batch, heads, keys, dim]`, value `[batch,
/// heads, keys, dim_v]`. The optional mask (true: not attended) and the optional bias of the scores
/// are `[batch, heads, queries, keys]` or broadcast to it.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn attention(
    query: DTensor<4>,
    key: DTensor<4>,
    value: DTensor<4>,
    mask: Option<DTensor<4, Bool>>,
    attn_bias: Option<DTensor<4>>,
    options: AttentionModuleOptions,
) -> DTensor<4> {
    apply(
        &ATTENTION,
        (query, key, value, mask, attn_bias),
        |inputs, op| local(inputs, op, options, module::attention),
    )
}

/// Computes [`attention`] with other operators of the backend, as burn's
/// [`attention_fallback`](module::attention_fallback). It is the reference for a backend's own
/// attention.
///
/// # Collective
/// As for [`attention`].
///
/// # Panics
/// As for [`attention`].
#[must_use]
#[track_caller]
pub fn attention_fallback(
    query: DTensor<4>,
    key: DTensor<4>,
    value: DTensor<4>,
    mask: Option<DTensor<4, Bool>>,
    attn_bias: Option<DTensor<4>>,
    options: AttentionModuleOptions,
) -> DTensor<4> {
    apply(
        &ATTENTION_FALLBACK,
        (query, key, value, mask, attn_bias),
        |inputs, op| local(inputs, op, options, module::attention_fallback),
    )
}

type Mask = Option<Tensor<4, Bool>>;
type Bias = Option<Tensor<4>>;

/// Computes this rank's shard with `attention`.
fn local(
    (query, key, value, mask, attn_bias): (Tensor<4>, Tensor<4>, Tensor<4>, Mask, Bias),
    op: &Operator,
    options: AttentionModuleOptions,
    attention: impl FnOnce(
        Tensor<4>,
        Tensor<4>,
        Tensor<4>,
        Mask,
        Bias,
        AttentionModuleOptions,
    ) -> Tensor<4>,
) -> Tensor<4> {
    let (mask, is_causal) = visible(op, &query, mask, options.is_causal);
    attention(
        query,
        key,
        value,
        mask,
        attn_bias,
        AttentionModuleOptions {
            is_causal,
            ..options
        },
    )
}

/// Returns the mask for this rank's queries, and whether burn should still apply its causal mask. A
/// rank that holds only some of the queries gets an explicit mask, because burn aligns the last
/// query with the last key.
fn visible(op: &Operator, query: &Tensor<4>, mask: Mask, is_causal: bool) -> (Mask, bool) {
    let rows = op.input_range(0, 2);
    let queries = op.input_spec(0).shape()[2];
    let keys = op.input_spec(1).shape()[2];
    if !is_causal || rows.len() == queries || rows.is_empty() {
        return (mask, is_causal && !rows.is_empty());
    }
    let offset = (rows.start + keys) as i64 - queries as i64;
    let later =
        Tensor::<2, Bool>::tril_mask([rows.len(), keys], offset, &query.device()).unsqueeze::<4>();
    let mask = match mask {
        Some(mask) => mask.bool_or(later),
        None => later,
    };
    (Some(mask), false)
}
