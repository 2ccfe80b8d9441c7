//! `3_ops.json`.

use std::collections::BTreeMap;

use burn_dtensor::placement::Layout;
use serde::Deserialize;

/// A shape and row-major values. Integers and booleans (0 and 1) are numbers too.
pub type Values = (Vec<usize>, Vec<f64>);

#[derive(Deserialize)]
pub struct Golden {
    pub ops: BTreeMap<String, Operator>,
}

#[derive(Deserialize)]
pub struct Operator {
    /// Full values.
    pub inputs: Vec<Array>,
    pub cases: Vec<Case>,
    #[serde(default)]
    fulls: Vec<Array>,
    #[serde(default)]
    ref_grads: Vec<Option<Array>>,
}

#[derive(Deserialize)]
pub struct Array {
    pub shape: Vec<usize>,
    data: Vec<Number>,
}

/// JSON has no infinities.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Other(String),
}

#[derive(Deserialize)]
pub struct Case {
    pub mesh: Vec<usize>,
    pub in_pl: Vec<Vec<String>>,
    /// Torch's collectives by kind.
    #[serde(default)]
    pub comm: BTreeMap<String, u64>,
    #[serde(default)]
    pub outs: Vec<Out>,
    pub torch_fwd_error: Option<String>,
    pub torch_out_error: Option<String>,
    pub torch_bwd_error: Option<String>,
    #[serde(default, rename = "TORCH_FWD_MISMATCH")]
    pub torch_fwd_mismatch: bool,
    #[serde(default, rename = "TORCH_GRAD_MISMATCH")]
    pub torch_grad_mismatch: bool,
}

#[derive(Deserialize)]
pub struct Out {
    pl: Vec<String>,
    pub gshape: Vec<usize>,
    local: Option<Local>,
    full: Option<usize>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Local {
    Ranks(Ranks),
    /// `=shard(full)`.
    Shard(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ranks {
    Same(Array),
    PerRank(Vec<Array>),
}

impl Array {
    pub fn values(&self) -> Values {
        let number = |number: &Number| match number {
            Number::Finite(value) => *value,
            Number::Other(text) => text
                .parse()
                .unwrap_or_else(|_| panic!("{text} is no number")),
        };
        (self.shape.clone(), self.data.iter().map(number).collect())
    }
}

impl Operator {
    /// The full value of each output. Empty where torch has none in any case.
    ///
    /// Taken from the case with replicated inputs: no sharding, no disagreement with itself.
    pub fn truth(&self) -> Vec<Values> {
        let right = |case: &&Case| {
            !case.torch_fwd_mismatch && case.outs.iter().any(|out| out.full.is_some())
        };
        let replicated = |case: &&Case| {
            case.in_pl
                .iter()
                .flatten()
                .all(|placement| placement == "R")
        };
        let with_values = || self.cases.iter().filter(right);
        let case = with_values()
            .find(replicated)
            .or_else(|| with_values().next());
        let full =
            |out: &Out| self.fulls[out.full.expect("all outputs of a case have values")].values();
        case.map_or(vec![], |case| case.outs.iter().map(full).collect())
    }

    /// The unsharded gradients of the inputs, `None` for those that have none. Empty where torch
    /// has none in any case.
    pub fn gradients(&self) -> Vec<Option<Values>> {
        self.ref_grads
            .iter()
            .map(|grad| grad.as_ref().map(Array::values))
            .collect()
    }

    /// The shape of the first output.
    pub fn shape(&self) -> Option<Vec<usize>> {
        self.cases
            .iter()
            .find_map(|case| Some(case.outs.first()?.gshape.clone()))
    }
}

impl Case {
    /// With replicated inputs, for what torch has no values of: the local operator itself.
    pub fn unsharded(mesh: &[usize], inputs: usize) -> Self {
        Self {
            mesh: mesh.to_vec(),
            in_pl: vec![vec!["R".into(); mesh.len()]; inputs],
            comm: BTreeMap::new(),
            outs: vec![],
            torch_fwd_error: None,
            torch_out_error: None,
            torch_bwd_error: None,
            torch_fwd_mismatch: false,
            torch_grad_mismatch: false,
        }
    }

    /// Whether torch refuses the forward pass, does not survive it, or gets it wrong.
    pub fn torch_fails_forward(&self) -> bool {
        self.torch_fwd_error.is_some() || self.torch_out_error.is_some() || self.torch_fwd_mismatch
    }

    /// The same of the backward pass.
    pub fn torch_fails_backward(&self) -> bool {
        self.torch_fails_forward() || self.torch_bwd_error.is_some() || self.torch_grad_mismatch
    }

    /// Torch's collectives in forward, of any kind.
    pub fn calls(&self) -> u64 {
        self.comm.values().sum()
    }
}

impl Out {
    /// Torch's layout; `None` if it is none here: `MaskP(sum)`, and strided shards that no order
    /// of cuts makes.
    pub fn layout(&self, mesh: &[usize]) -> Option<Layout> {
        let known = |placement: &String| !placement.starts_with("Mask");
        self.pl
            .iter()
            .all(known)
            .then(|| super::super::layout(mesh, &self.pl).ok())?
    }

    /// What torch holds on `rank`, if it is more than the part of the full value.
    pub fn local(&self, rank: usize) -> Option<Values> {
        match self.local.as_ref()? {
            Local::Shard(text) => {
                assert_eq!(text, "=shard(full)");
                None
            }
            Local::Ranks(Ranks::Same(array)) => Some(array.values()),
            Local::Ranks(Ranks::PerRank(arrays)) => Some(arrays[rank].values()),
        }
    }
}
