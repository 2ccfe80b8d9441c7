//! [`Print`]: what every rank of a collective must agree on.

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::{DType, Shape};

use super::board::Fingerprint;
use crate::comm::{Op, ReduceOp, TensorMeta};

/// The arguments of one collective, but for the data.
#[derive(Debug, Clone)]
pub(crate) struct Print {
    pub op: Op,
    pub label: Arc<str>,
    pub reduce: Option<ReduceOp>,
    pub root: Option<usize>,
    pub drawn: Option<u64>,
    pub whole: Option<TensorMeta>,
    pub terms: Option<Arc<str>>,
    pub tensors: Vec<TensorPrint>,
}

/// One tensor of a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPrint {
    /// Shape of the whole.
    pub shape: Shape,
    pub dtype: DType,
    /// The cut dimension.
    pub dim: Option<usize>,
    /// The dimension cut afterwards (all-to-all).
    pub to_dim: Option<usize>,
}

impl TensorPrint {
    /// Bytes of the whole.
    pub fn bytes(&self) -> u64 {
        (self.shape.num_elements() * self.dtype.size()) as u64
    }
}

impl Fingerprint for Print {
    fn op(&self) -> Op {
        self.op
    }

    fn label(&self) -> Arc<str> {
        self.label.clone()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        differ("operation", &self.op, &other.op, Op::to_string)
            .or_else(|| differ("label", &self.label, &other.label, |label| format!("`{label}`")))
            .or_else(|| differ("reduction", &self.reduce, &other.reduce, some))
            .or_else(|| differ("root", &self.root, &other.root, some))
            .or_else(|| differ("place in forward", &self.drawn, &other.drawn, some))
            .or_else(|| differ("global tensor", &self.whole, &other.whole, whole))
            .or_else(|| {
                differ("reduction of", &self.terms, &other.terms, |terms| terms.as_deref().unwrap_or("none").into())
            })
            .or_else(|| differ("number of tensors", &self.tensors.len(), &other.tensors.len(), usize::to_string))
            .or_else(|| {
                let mut pairs = self.tensors.iter().zip(&other.tensors).enumerate();
                pairs.find_map(|(i, (a, b))| a.difference(b).map(|what| format!("tensor {i}: {what}")))
            })
    }
}

impl TensorPrint {
    fn difference(&self, other: &Self) -> Option<String> {
        differ("shape", &self.shape, &other.shape, |shape| format!("{:?}", &shape[..]))
            .or_else(|| differ("dtype", &self.dtype, &other.dtype, |dtype| dtype.name().to_string()))
            .or_else(|| differ("cut dimension", &self.dim, &other.dim, some))
            .or_else(|| differ("new cut dimension", &self.to_dim, &other.to_dim, some))
    }
}

fn differ<T: PartialEq>(what: &str, a: &T, b: &T, show: impl Fn(&T) -> String) -> Option<String> {
    (a != b).then(|| format!("{what} {} vs {}", show(a), show(b)))
}

fn some<T: Debug>(value: &Option<T>) -> String {
    value.as_ref().map_or("none".into(), |value| format!("{value:?}"))
}

fn whole(meta: &Option<TensorMeta>) -> String {
    meta.as_ref().map_or("none".into(), |TensorMeta { shape, dtype }| format!("{:?} {}", &shape[..], dtype.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print() -> Print {
        let tensor = TensorPrint { shape: Shape::from([4, 8]), dtype: DType::F32, dim: Some(0), to_dim: None };
        Print {
            op: Op::AllGather,
            label: "a".into(),
            reduce: None,
            root: None,
            drawn: None,
            whole: None,
            terms: None,
            tensors: vec![tensor],
        }
    }

    #[test]
    fn says_exactly_what_differs() {
        assert_eq!(print().difference(&print()), None);
        let says = |change: fn(&mut Print)| {
            let mut other = print();
            change(&mut other);
            print().difference(&other).unwrap()
        };
        assert_eq!(says(|p| p.op = Op::Barrier), "operation all_gather vs barrier");
        assert_eq!(says(|p| p.label = "b".into()), "label `a` vs `b`");
        assert_eq!(says(|p| p.reduce = Some(ReduceOp::Sum)), "reduction none vs Sum");
        assert_eq!(says(|p| p.drawn = Some(3)), "place in forward none vs 3");
        let whole = |p: &mut Print| p.whole = Some(TensorMeta { shape: Shape::from([4, 8]), dtype: DType::F32 });
        assert_eq!(says(whole), "global tensor none vs [4, 8] f32");
        assert_eq!(says(|p| p.terms = Some("[4, 2]".into())), "reduction of none vs [4, 2]");
        assert_eq!(says(|p| p.tensors.clear()), "number of tensors 1 vs 0");
        assert_eq!(says(|p| p.tensors[0].shape = Shape::from([4, 9])), "tensor 0: shape [4, 8] vs [4, 9]");
        assert_eq!(says(|p| p.tensors[0].dtype = DType::F16), "tensor 0: dtype f32 vs f16");
        assert_eq!(says(|p| p.tensors[0].dim = Some(1)), "tensor 0: cut dimension 0 vs 1");
    }
}
