//! Scaled dot-product attention.

use burn::tensor::ops::AttentionModuleOptions;
use burn_dtensor::testing::prove::{Case, case};

fn causal() -> AttentionModuleOptions {
    AttentionModuleOptions { is_causal: true, ..Default::default() }
}

fn scaled() -> AttentionModuleOptions {
    AttentionModuleOptions { scale: Some(0.4), softcap: Some(2.0), is_causal: false }
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
    ]
}
