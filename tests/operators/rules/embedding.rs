//! Embedding.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("embedding", (w: 2 = [6, 3], i: 2 int(6) = [2, 3]) => module::embedding(w, i)),
        case!("embedding", (w: 2 = [3, 5], i: 2 int(3) = [3, 2]) => module::embedding(w, i)),
    ]
}
