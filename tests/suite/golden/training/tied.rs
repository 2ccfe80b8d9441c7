//! Initial values of the GPT with tied weights, which the file does not record.
//!
//! It records those of the model with a head of its own, and they follow a rule: element `i` of
//! the `k`-th parameter, by name, is `((31 i^2 + 856 i + 802 k) mod 1009) / 1009 - 1/2`, scaled and
//! rounded. Without `head.weight`, the first by name, every other parameter moves up one place.

use std::collections::HashMap;

use super::file::Array;

/// The tied model's values; `None` where those of the untied one follow another rule.
pub fn init(untied: &HashMap<String, Array>) -> Option<HashMap<String, Array>> {
    let mut names: Vec<&String> = untied.keys().collect();
    names.sort();
    let follows = |(k, name): (usize, &&String)| {
        let known = &untied[*name];
        values(k, name, &known.shape).data.iter().zip(&known.data).all(|(a, b)| (a - b).abs() < 1e-9)
    };
    if !names.iter().enumerate().all(follows) {
        return None;
    }
    let tied = names.into_iter().filter(|name| *name != "head.weight").enumerate();
    Some(tied.map(|(k, name)| (name.clone(), values(k, name, &untied[name].shape))).collect())
}

fn values(k: usize, name: &str, shape: &[usize]) -> Array {
    // Center, width and decimals.
    let (center, width, decimals) = match name {
        "tok.weight" | "pos.weight" => (0.0, 1.0, 3),
        name if name.ends_with("bias") => (0.0, 0.3, 4),
        name if name.contains("norm") => (1.0, 0.2, 4),
        _ => (0.0, 1.8 / (shape[1] as f64).sqrt(), 4),
    };
    let value = |i: usize| {
        let residue = (31 * i * i + 856 * i + 802 * k) % 1009;
        let unit = 10f64.powi(decimals);
        center + ((residue as f64 / 1009.0 - 0.5) * width * unit).round() / unit
    };
    Array { shape: shape.to_vec(), data: (0..shape.iter().product()).map(value).collect() }
}
