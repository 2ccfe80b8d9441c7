//! Initial values of the GPT with tied weights, which the file does not record.
//!
//! It records those of the model with a head of its own, and they follow a rule: element `i` of
//! the `k`-th parameter, by name, is `((a i^2 + b i + c k) mod 1009) / 1009 - 1/2`, scaled and
//! rounded, where `a`, `b` and `c` are the file's. Without `head.weight`, the first by name, every
//! other parameter moves up one place.

use std::collections::HashMap;

use super::file::Array;

const MODULUS: usize = 1009;

/// The tied model's values; `None` where those of the untied one follow another rule.
pub fn init(untied: &HashMap<String, Array>) -> Option<HashMap<String, Array>> {
    let mut names: Vec<&String> = untied.keys().collect();
    names.sort();
    let rule = Rule::of(&names, untied)?;
    let follows = |(k, name): (usize, &&String)| {
        let known = &untied[*name];
        rule.values(k, name, &known.shape)
            .data
            .iter()
            .zip(&known.data)
            .all(|(a, b)| (a - b).abs() < 1e-9)
    };
    if !names.iter().enumerate().all(follows) {
        return None;
    }
    let tied = names
        .into_iter()
        .filter(|name| *name != "head.weight")
        .enumerate();
    Some(
        tied.map(|(k, name)| (name.clone(), rule.values(k, name, &untied[name].shape)))
            .collect(),
    )
}

/// The factors of `i^2`, `i` and `k`.
struct Rule([usize; 3]);

impl Rule {
    /// Reads the factors from the first three elements of two parameters whose rounding leaves the
    /// residues apart.
    fn of(names: &[&String], values: &HashMap<String, Array>) -> Option<Self> {
        let apart = |(_, name): &(usize, &&String)| {
            let (_, width, decimals) = scale(name, &values[**name].shape);
            values[**name].data.len() > 2 && width * 10f64.powi(decimals) > 1.5 * MODULUS as f64
        };
        let mut apart = names.iter().enumerate().filter(apart).map(|(k, name)| {
            let (center, width, _) = scale(name, &values[*name].shape);
            let residue =
                |i: usize| ((values[*name].data[i] - center) / width + 0.5) * MODULUS as f64;
            (k, [0, 1, 2].map(|i| residue(i).round() as usize % MODULUS))
        });
        let ((k, first), (next_k, next)) = (apart.next()?, apart.next()?);
        // Modulo a prime: r(0) = c k, r(1) - r(0) = a + b, r(2) - r(0) = 4 a + 2 b.
        let less = |a: usize, b: usize| (a + MODULUS - b) % MODULUS;
        let by = |a: usize, divisor: usize| {
            (0..MODULUS).find(|quotient| quotient * divisor % MODULUS == a)
        };
        let (one, two) = (less(first[1], first[0]), less(first[2], first[0]));
        let a = by(less(two, 2 * one % MODULUS), 2)?;
        Some(Self([
            a,
            less(one, a),
            by(less(next[0], first[0]), next_k - k)?,
        ]))
    }

    fn values(&self, k: usize, name: &str, shape: &[usize]) -> Array {
        let (center, width, decimals) = scale(name, shape);
        let Self([a, b, c]) = self;
        let value = |i: usize| {
            let residue = (a * i * i + b * i + c * k) % MODULUS;
            let unit = 10f64.powi(decimals);
            center + ((residue as f64 / MODULUS as f64 - 0.5) * width * unit).round() / unit
        };
        Array {
            shape: shape.to_vec(),
            data: (0..shape.iter().product()).map(value).collect(),
        }
    }
}

/// The center, the width and the decimals of a parameter's values.
fn scale(name: &str, shape: &[usize]) -> (f64, f64, i32) {
    match name {
        "tok.weight" | "pos.weight" => (0.0, 1.0, 3),
        name if name.ends_with("bias") => (0.0, 0.3, 4),
        name if name.contains("norm") => (1.0, 0.2, 4),
        _ => (0.0, 1.8 / (shape[1] as f64).sqrt(), 4),
    }
}
