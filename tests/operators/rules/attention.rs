//! Scaled dot-product attention.

use burn::nn::{PositionalEncodingConfig, RotaryEncodingConfig};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Float};
use burn_dtensor::nn::DTensorForward;
use burn_dtensor::testing::prove::{Case, CaseInput, case};

fn causal() -> AttentionModuleOptions {
    AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    }
}

fn scaled() -> AttentionModuleOptions {
    AttentionModuleOptions {
        scale: Some(0.4),
        softcap: Some(2.0),
        is_causal: false,
    }
}

pub fn cases() -> Vec<Case> {
    vec![
        case!("attention", (q: 4 = [2, 2, 3, 2], k: 4 = [2, 2, 4, 2], v: 4 = [2, 2, 4, 2]) =>
            module::attention(q, k, v, None, None, scaled())),
        case!("attention", (q: 4 = [1, 3, 3, 2], k: 4 = [1, 3, 5, 2]) =>
            module::attention(q, k.clone(), k, None, None, causal())),
        case!("attention", (x: 4 = [1, 2, 3, 2], m: 4 bool = [1, 2, 3, 3]) =>
            module::attention(x.clone(), x.clone(), x, Some(m), None, scaled())),
        case!("attention", (x: 4 = [2, 1, 3, 2], m: 4 bool = [1, 1, 3, 3], b: 4 = [2, 1, 3, 3]) =>
            module::attention(x.clone(), x.clone(), x, Some(m), Some(b), causal())),
        case!("attention", (x: 4 = [2, 2, 3, 2], b: 4 = [1, 2, 3, 3]) =>
            module::attention(x.clone(), x.clone(), x, None, Some(b), causal())),
        case!("attention_fallback", (q: 4 = [2, 2, 3, 2], k: 4 = [2, 2, 4, 2], v: 4 = [2, 2, 4, 2]) =>
            module::attention_fallback(q, k, v, None, None, scaled())),
        case!("attention_fallback", (x: 4 = [2, 1, 3, 2], m: 4 bool = [1, 1, 3, 3]) =>
            module::attention_fallback(x.clone(), x.clone(), x, Some(m), None, causal())),
        rotary([2, 3, 4]),
        rotary([3, 5, 2]),
        positional([2, 3, 4]),
        positional([3, 5, 2]),
    ]
}

/// Against burn's layer.
fn rotary(shape: [usize; 3]) -> Case {
    let layer =
        move || RotaryEncodingConfig::new(shape[1], shape[2]).init(&Device::flex().autodiff());
    Case::new(
        "rotary_encoding",
        [CaseInput::float("x", shape)],
        move |inputs| layer().forward(inputs[0].tensor::<3, Float>()),
        move |inputs| layer().forward_dtensor(inputs[0].tensor::<3, Float>()),
    )
}

/// Against burn's layer.
fn positional(shape: [usize; 3]) -> Case {
    let layer = move || {
        PositionalEncodingConfig::new(shape[2])
            .with_max_sequence_size(shape[1] + 2)
            .init(&Device::flex())
    };
    Case::new(
        "positional_encoding",
        [CaseInput::float("x", shape)],
        move |inputs| layer().forward(inputs[0].tensor::<3, Float>()),
        move |inputs| layer().forward_dtensor(inputs[0].tensor::<3, Float>()),
    )
}
