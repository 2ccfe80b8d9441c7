//! [`CallSignature`]: the arguments of a call on which all ranks must agree.

use std::fmt::{self, Debug};
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::comm::{Call, Digests, Divergence, Op, ReduceOp, ShardedModel, TensorMeta};
use crate::placement::ShardSizes;

/// The arguments of one collective, except for the data. The ranks compare them.
///
/// A backend whose ranks are in several processes sends signatures with serde, and checks that a
/// received one [fits](Self::fits) its group.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallSignature {
    /// The operation.
    pub op: Op,
    /// Label of the call.
    pub label: Arc<str>,
    /// Reduction, if the operation reduces.
    pub reduce: Option<ReduceOp>,
    /// Group rank of the root, if the operation has one.
    pub root: Option<usize>,
    /// As in [`Call::model`].
    pub model: Option<ShardedModel>,
    /// As in [`Call::forward_index`].
    pub forward_index: Option<u64>,
    /// As in [`Call::decision`].
    pub decision: Option<Arc<str>>,
    /// As in [`Call::global_tensor`].
    pub global_tensor: Option<TensorMeta>,
    /// As in [`Call::operand_shapes`].
    pub operand_shapes: Option<Arc<str>>,
    /// Names of the first tensors, one per tensor.
    pub names: Option<Arc<[Arc<str>]>>,
    /// The full tensors.
    pub tensors: Arc<[TensorSignature]>,
    /// True for a receive that accepts any tensors.
    pub any: bool,
    /// Arguments of an all-to-all of lists, which each pair of ranks must agree on separately.
    pub pairs: Option<Box<PairwiseSignature>>,
    /// Digests of values that must be identical on all ranks.
    pub digests: Option<Arc<[Digests]>>,
    /// Name of the data plane by which the ranks exchange the tensors, so that no bytes accompany
    /// the call.
    pub exchange: Option<Arc<str>>,
}

/// Tensors that one rank sends to each rank of its group, and those that it receives from each, in
/// group order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PairwiseSignature {
    /// Group rank of this rank.
    pub member: usize,
    /// Tensor that this rank sends to each rank.
    pub sent: Vec<Option<TensorMeta>>,
    /// Tensor that this rank receives from each rank.
    pub received: Vec<Option<TensorMeta>>,
}

impl PairwiseSignature {
    /// Returns the number of bytes sent to other ranks.
    pub fn bytes(&self) -> u64 {
        let others = self
            .sent
            .iter()
            .enumerate()
            .filter(|(to, _)| *to != self.member);
        others
            .filter_map(|(_, meta)| {
                meta.as_ref()
                    .map(|meta| (meta.shape.num_elements() * meta.dtype.size()) as u64)
            })
            .sum()
    }

    fn fits(&self, ranks: usize) -> bool {
        let Self {
            member,
            sent,
            received,
        } = self;
        let mut metas = sent.iter().chain(received).flatten();
        *member < ranks
            && [sent.len(), received.len()] == [ranks; 2]
            && metas.all(|meta| is_plain(&meta.shape, meta.dtype))
    }

    fn difference(&self, other: &Self) -> Option<String> {
        let says =
            |from: usize, to: usize| format!("tensor of group rank {from} for group rank {to}");
        let own = self.member;
        let its = other.member;
        differ(
            &says(own, its),
            &self.sent[its],
            &other.received[own],
            tensor_text,
        )
        .or_else(|| {
            differ(
                &says(its, own),
                &self.received[its],
                &other.sent[own],
                tensor_text,
            )
        })
    }
}

/// Shape, dtype and sharding of one tensor of a collective.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSignature {
    /// Shape of the full tensor.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// Sharding of the tensor, if it is sharded.
    pub sharding: Option<ShardSignature>,
    /// Sharding after an all-to-all.
    pub to: Option<ShardSignature>,
}

/// Sharding of a full tensor whose shape is known.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShardSignature {
    /// Sharded dimension.
    pub dim: usize,
    /// Explicit shard sizes, if the sharding is uneven.
    pub uneven_sizes: Option<Arc<[usize]>>,
}

impl ShardSignature {
    pub(crate) fn new(dim: usize, sizes: &ShardSizes) -> Self {
        Self {
            dim,
            uneven_sizes: sizes.lengths().cloned(),
        }
    }

    /// Returns the shard sizes of a dimension of length `len`.
    pub fn of(&self, len: usize) -> ShardSizes {
        self.uneven_sizes
            .clone()
            .map_or(ShardSizes::Chunked(len), ShardSizes::Uneven)
    }
}

impl fmt::Display for ShardSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dim)?;
        self.uneven_sizes
            .as_ref()
            .map_or(Ok(()), |lengths| write!(f, " with sizes {lengths:?}"))
    }
}

impl TensorSignature {
    /// Returns the number of bytes of the full tensor.
    pub fn bytes(&self) -> u64 {
        (self.shape.num_elements() * self.dtype.size()) as u64
    }

    fn fits(&self, ranks: usize) -> bool {
        let is_total = |lengths: &[usize], len: usize| {
            let total = lengths
                .iter()
                .try_fold(0_usize, |total, length| total.checked_add(*length));
            lengths.len() == ranks && total == Some(len)
        };
        let is_sharded = |ShardSignature { dim, uneven_sizes }: &ShardSignature| {
            let len = self.shape.get(*dim);
            len.is_some_and(|len| {
                uneven_sizes
                    .as_ref()
                    .is_none_or(|sizes| is_total(sizes, *len))
            })
        };
        is_plain(&self.shape, self.dtype) && self.sharding.iter().chain(&self.to).all(is_sharded)
    }
}

/// Returns true if a tensor of this shape is not quantized and its number of bytes does not
/// overflow.
fn is_plain(shape: &Shape, dtype: DType) -> bool {
    let bytes = shape
        .iter()
        .try_fold(dtype.size(), |bytes, len| bytes.checked_mul(*len));
    bytes.is_some() && !matches!(dtype, DType::QFloat(_))
}

impl CallSignature {
    /// Creates the signature of the operation `op` with the properties of `call`.
    pub(crate) fn new(op: Op, call: &Call, tensors: impl Into<Arc<[TensorSignature]>>) -> Self {
        let tensors = tensors.into();
        let Call {
            label,
            model,
            forward_index,
            decision,
            global_tensor,
            operand_shapes,
            names,
            digests,
            ..
        } = call.clone();
        Self {
            op,
            label,
            reduce: None,
            root: None,
            model,
            forward_index,
            decision,
            global_tensor,
            operand_shapes,
            names,
            tensors,
            any: false,
            pairs: None,
            digests,
            exchange: None,
        }
    }

    /// Returns the number of bytes of the full tensors, plus the bytes that the rank sends to
    /// others in an all-to-all of lists.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorSignature::bytes).sum::<u64>()
            + self.pairs.as_ref().map_or(0, |pairs| pairs.bytes())
    }

    /// Returns true if the fields fit each other and a group of `ranks` ranks. Those of a call
    /// always do; those of a signature that was received may not, and must not be used then.
    pub fn fits(&self, ranks: usize) -> bool {
        let Self {
            root,
            tensors,
            pairs,
            ..
        } = self;
        let sum = |bytes: u64, tensor: &TensorSignature| bytes.checked_add(tensor.bytes());
        root.is_none_or(|root| root < ranks)
            && tensors.iter().all(|tensor| tensor.fits(ranks))
            && tensors.iter().try_fold(0_u64, sum).is_some()
            && pairs.as_ref().is_none_or(|pairs| pairs.fits(ranks))
    }

    /// Returns a hash of all fields that is the same in all processes. Two ranks whose calls agree
    /// may have different hashes, because their [models](ShardedModel) may have been sharded at
    /// different lines.
    pub fn hash128(&self) -> u128 {
        XxHash3_128::oneshot(&postcard::to_stdvec(self).expect("a vector takes every signature"))
    }

    /// Describes the first difference from `other`, with the value of `self` first. Returns `None`
    /// if the calls agree.
    pub fn difference(&self, other: &Self) -> Option<String> {
        differ("operation", &self.op, &other.op, Op::to_string)
            .or_else(|| {
                differ("label", &self.label, &other.label, |label| {
                    format!("`{label}`")
                })
            })
            .or_else(|| self.models_differ(other))
            .or_else(|| differ("reduction", &self.reduce, &other.reduce, some))
            .or_else(|| differ("root", &self.root, &other.root, some))
            .or_else(|| {
                differ(
                    "forward index",
                    &self.forward_index,
                    &other.forward_index,
                    some,
                )
            })
            .or_else(|| match (&self.decision, &other.decision) {
                (Some(own), Some(its)) => {
                    differ("decided by", own, its, |inputs| format!("({inputs})"))
                }
                _ => None,
            })
            .or_else(|| {
                differ(
                    "global tensor",
                    &self.global_tensor,
                    &other.global_tensor,
                    tensor_text,
                )
            })
            .or_else(|| {
                differ(
                    "reduction of",
                    &self.operand_shapes,
                    &other.operand_shapes,
                    |shapes| shapes.as_deref().unwrap_or("none").into(),
                )
            })
            .or_else(|| self.tensors_differ(other))
            .or_else(|| self.states_differ(other))
            .or_else(|| match (&self.pairs, &other.pairs) {
                (Some(own), Some(theirs)) => own.difference(theirs),
                (own, theirs) => differ(
                    "tensors of",
                    &own.is_some(),
                    &theirs.is_some(),
                    |is_of_pairs| {
                        if *is_of_pairs {
                            "each pair of ranks"
                        } else {
                            "each rank"
                        }
                        .into()
                    },
                ),
            })
            .or_else(|| self.compared_otherwise(other))
            .or_else(|| {
                differ(
                    "tensors exchanged by",
                    &self.exchange,
                    &other.exchange,
                    |plane| {
                        plane
                            .as_ref()
                            .map_or("no data plane".into(), |plane| format!("`{plane}`"))
                    },
                )
            })
    }

    /// Compares the digests of all ranks of a collective. `signatures` yields them in group order;
    /// no two of them may have a [`difference`](Self::difference). Returns the first divergence.
    pub fn divergence<'a>(
        signatures: impl Iterator<Item = &'a Self> + Clone,
    ) -> Option<Divergence> {
        Divergence::among(signatures.map(Self::digests))
    }

    /// Describes why a receive with this signature rejects the message `sent`, with its own value
    /// first. Returns `None` if it accepts the message.
    pub fn refusal(&self, sent: &Self) -> Option<String> {
        let label = differ("label", &self.label, &sent.label, |label| {
            format!("`{label}`")
        });
        label.or_else(|| {
            if self.any {
                None
            } else {
                self.tensors_differ(sent)
            }
        })
    }

    /// Describes both models, if they are not the same.
    fn models_differ(&self, other: &Self) -> Option<String> {
        let number = |model: &Option<ShardedModel>| model.as_ref().map(|model| model.number);
        let says = |model: &Option<ShardedModel>| {
            model
                .as_ref()
                .map_or("none".into(), ShardedModel::to_string)
        };
        (number(&self.model) != number(&other.model))
            .then(|| format!("model {} vs {}", says(&self.model), says(&other.model)))
    }

    /// Describes the first difference between the states of one model's parameters, with the
    /// parameter's name if it has one.
    fn states_differ(&self, other: &Self) -> Option<String> {
        let own = self.model.as_ref()?;
        let its = other.model.as_ref()?;
        if own.states == its.states {
            return None;
        }
        let state = |model: &ShardedModel, i: usize| {
            *model.states.get(i).or(model.states.first()).unwrap_or(&0)
        };
        let i = (0..own.states.len().max(its.states.len()))
            .find(|i| state(own, *i) != state(its, *i))
            .unwrap_or_default();
        let clone = format!("clone of model {own}: {} is in state", self.tensor(i));
        Some(format!(
            "{clone} {:08x} vs {:08x}",
            state(own, i) >> 32,
            state(its, i) >> 32
        ))
    }

    fn tensors_differ(&self, other: &Self) -> Option<String> {
        let number = differ(
            "number of tensors",
            &self.tensors.len(),
            &other.tensors.len(),
            usize::to_string,
        );
        number
            .map(|number| {
                number
                    + &self
                        .named_otherwise(other)
                        .map(|name| format!("; {name}"))
                        .unwrap_or_default()
            })
            .or_else(|| self.named_otherwise(other))
            .or_else(|| {
                let mut pairs = self.tensors.iter().zip(&*other.tensors).enumerate();
                pairs.find_map(|(i, (a, b))| {
                    a.difference(b)
                        .map(|what| format!("{}: {what}", self.tensor(i)))
                })
            })
    }

    /// Returns true if each pair of ranks must agree separately: from two pairs that agree it does
    /// not follow that a third does.
    pub fn is_of_pairs(&self) -> bool {
        self.pairs.is_some()
    }

    fn digests(&self) -> &[Digests] {
        self.digests.as_deref().unwrap_or_default()
    }

    /// Describes the first list of digests that does not describe the same values in both.
    fn compared_otherwise(&self, other: &Self) -> Option<String> {
        let own = self.digests();
        let its = other.digests();
        let mut pairs = (0..own.len().max(its.len())).map(|list| (own.get(list), its.get(list)));
        let (own, its) = pairs.find(|(own, its)| {
            !own.zip(*its)
                .is_some_and(|(own, its)| own.are_of_the_same(its))
        })?;
        let says = |digests: Option<&Digests>| digests.map_or("none".into(), Digests::to_string);
        Some(format!("values to compare {} vs {}", says(own), says(its)))
    }

    fn names(&self) -> &[Arc<str>] {
        self.names.as_deref().unwrap_or_default()
    }

    /// Returns the text by which messages identify tensor `i`: its name or its index.
    fn tensor(&self, i: usize) -> String {
        self.names()
            .get(i)
            .map_or_else(|| format!("tensor {i}"), |name| format!("`{name}`"))
    }

    /// Describes the first tensor that has another name in `other`.
    fn named_otherwise(&self, other: &Self) -> Option<String> {
        if self.names == other.names {
            return None;
        }
        let name = |signature: &Self, i: usize| {
            signature
                .names()
                .get(i)
                .map_or("none".into(), |name| format!("`{name}`"))
        };
        let count = self.names().len().max(other.names().len());
        let mut pairs = (0..count).map(|i| (i, name(self, i), name(other, i)));
        pairs.find_map(|(i, a, b)| (a != b).then(|| format!("tensor {i}: {a} vs {b}")))
    }
}

impl TensorSignature {
    fn difference(&self, other: &Self) -> Option<String> {
        differ("shape", &self.shape, &other.shape, |shape| {
            format!("{:?}", &shape[..])
        })
        .or_else(|| {
            differ("dtype", &self.dtype, &other.dtype, |dtype| {
                dtype.name().to_string()
            })
        })
        .or_else(|| {
            differ(
                "sharded dimension",
                &self.sharding,
                &other.sharding,
                sharding_text,
            )
        })
        .or_else(|| differ("new sharded dimension", &self.to, &other.to, sharding_text))
    }
}

fn differ<T: PartialEq>(what: &str, a: &T, b: &T, show: impl Fn(&T) -> String) -> Option<String> {
    (a != b).then(|| format!("{what} {} vs {}", show(a), show(b)))
}

fn some<T: Debug>(value: &Option<T>) -> String {
    value
        .as_ref()
        .map_or("none".into(), |value| format!("{value:?}"))
}

fn sharding_text(signature: &Option<ShardSignature>) -> String {
    signature
        .as_ref()
        .map_or("none".into(), ShardSignature::to_string)
}

pub(crate) fn tensor_text(meta: &Option<TensorMeta>) -> String {
    meta.as_ref()
        .map_or("none".into(), |TensorMeta { shape, dtype }| {
            format!("{:?} {}", &shape[..], dtype.name())
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReplicatedValue;

    fn signature() -> CallSignature {
        let sharding = Some(ShardSignature::new(0, &ShardSizes::Chunked(4)));
        let tensor = TensorSignature {
            shape: Shape::from([4, 8]),
            dtype: DType::F32,
            sharding,
            to: None,
        };
        CallSignature {
            op: Op::AllGather,
            label: "a".into(),
            reduce: None,
            root: None,
            model: None,
            forward_index: None,
            decision: None,
            global_tensor: None,
            operand_shapes: None,
            names: None,
            tensors: [tensor].into(),
            any: false,
            pairs: None,
            digests: None,
            exchange: None,
        }
    }

    #[test]
    fn says_exactly_what_differs() {
        assert_eq!(signature().difference(&signature()), None);
        let says = |change: fn(&mut CallSignature)| {
            let mut other = signature();
            change(&mut other);
            signature().difference(&other).unwrap()
        };
        assert_eq!(
            says(|p| p.op = Op::Barrier),
            "operation all_gather vs barrier"
        );
        assert_eq!(says(|p| p.label = "b".into()), "label `a` vs `b`");
        assert_eq!(
            says(|p| p.exchange = Some("nccl".into())),
            "tensors exchanged by no data plane vs `nccl`"
        );
        assert_eq!(
            says(|p| p.reduce = Some(ReduceOp::Sum)),
            "reduction none vs Sum"
        );
        assert_eq!(
            says(|p| p.forward_index = Some(3)),
            "forward index none vs 3"
        );
        let full = |p: &mut CallSignature| {
            p.global_tensor = Some(TensorMeta {
                shape: Shape::from([4, 8]),
                dtype: DType::F32,
            })
        };
        assert_eq!(says(full), "global tensor none vs [4, 8] f32");
        assert_eq!(
            says(|p| p.operand_shapes = Some("[4, 2]".into())),
            "reduction of none vs [4, 2]"
        );
        fn tensor(signature: &mut CallSignature) -> &mut TensorSignature {
            &mut Arc::get_mut(&mut signature.tensors).expect("it is new")[0]
        }
        assert_eq!(says(|p| p.tensors = [].into()), "number of tensors 1 vs 0");
        assert_eq!(
            says(|p| tensor(p).shape = Shape::from([4, 9])),
            "tensor 0: shape [4, 8] vs [4, 9]"
        );
        assert_eq!(
            says(|p| tensor(p).dtype = DType::F16),
            "tensor 0: dtype f32 vs f16"
        );
        let along = |p: &mut CallSignature| {
            tensor(p).sharding = Some(ShardSignature::new(1, &ShardSizes::Chunked(8)))
        };
        assert_eq!(says(along), "tensor 0: sharded dimension 0 vs 1");
        let uneven = |p: &mut CallSignature| {
            tensor(p).sharding = Some(ShardSignature::new(0, &ShardSizes::Uneven([3, 1].into())))
        };
        assert_eq!(
            says(uneven),
            "tensor 0: sharded dimension 0 vs 0 with sizes [3, 1]"
        );
        let again = |p: &mut CallSignature| {
            tensor(p).to = Some(ShardSignature::new(1, &ShardSizes::Chunked(8)))
        };
        assert_eq!(says(again), "tensor 0: new sharded dimension none vs 1");
    }

    #[test]
    fn a_signature_that_was_received_fits_its_group_or_not() {
        let tensor = |sharding, to| {
            let shape = Shape::from([4, 8]);
            CallSignature {
                tensors: [TensorSignature {
                    shape,
                    dtype: DType::F32,
                    sharding,
                    to,
                }]
                .into(),
                ..signature()
            }
        };
        let along = |dim, sizes: &[usize]| {
            Some(ShardSignature {
                dim,
                uneven_sizes: Some(sizes.into()),
            })
        };
        let root = |root| CallSignature {
            root: Some(root),
            ..signature()
        };
        let meta = |len: usize| {
            Some(TensorMeta {
                shape: Shape::from([len]),
                dtype: DType::F32,
            })
        };
        let pairs = |member, sent: &[usize], received: &[usize]| {
            let [sent, received] =
                [sent, received].map(|lens| lens.iter().map(|len| meta(*len)).collect());
            CallSignature {
                pairs: Some(
                    PairwiseSignature {
                        member,
                        sent,
                        received,
                    }
                    .into(),
                ),
                ..signature()
            }
        };
        let all = [
            signature(),
            tensor(along(0, &[1, 3]), along(1, &[8, 0])),
            root(1),
            pairs(1, &[1, 2], &[3, 4]),
        ];
        assert!(all.iter().all(|signature| signature.fits(2)), "{all:?}");
        let none = [
            tensor(
                Some(ShardSignature {
                    dim: 2,
                    uneven_sizes: None,
                }),
                None,
            ),
            tensor(along(0, &[4]), None),
            tensor(along(0, &[3, 3]), None),
            tensor(along(0, &[usize::MAX, 5]), None),
            tensor(None, along(1, &[8, 8])),
            root(2),
            pairs(2, &[1, 2], &[3, 4]),
            pairs(0, &[1], &[3, 4]),
            pairs(0, &[1, 2], &[3, 4, 5]),
            pairs(0, &[1, usize::MAX], &[3, 4]),
        ];
        assert!(none.iter().all(|signature| !signature.fits(2)), "{none:?}");
    }

    #[test]
    fn says_if_only_one_has_tensors_of_each_pair_of_ranks() {
        let [sent, received] = [(), ()].map(|()| std::iter::repeat_n(None, 2).collect());
        let of_pairs = CallSignature {
            pairs: Some(
                PairwiseSignature {
                    member: 0,
                    sent,
                    received,
                }
                .into(),
            ),
            ..signature()
        };
        assert_eq!(
            signature().difference(&of_pairs).unwrap(),
            "tensors of each rank vs each pair of ranks"
        );
        assert_eq!(
            of_pairs.difference(&signature()).unwrap(),
            "tensors of each pair of ranks vs each rank"
        );
    }

    #[test]
    fn says_which_models_or_states_of_one_differ() {
        let of_model = |number, states: &[u64], line| {
            let origin = format!("Linear, sharded at main.rs:{line}").into();
            let names = Some(["weight".into(), "bias".into()].into());
            CallSignature {
                model: Some(ShardedModel {
                    number,
                    states: states.into(),
                    origin,
                }),
                names,
                ..signature()
            }
        };
        let says = |other: &CallSignature| of_model(1, &[4 << 32], 7).difference(other);
        let first = "model 1 (Linear, sharded at main.rs:7)";
        assert_eq!(
            says(&of_model(2, &[4 << 32], 9)).unwrap(),
            format!("{first} vs 2 (Linear, sharded at main.rs:9)")
        );
        assert_eq!(says(&signature()).unwrap(), format!("{first} vs none"));
        let state = |param, other| {
            format!("clone of {first}: `{param}` is in state 00000004 vs 0000000{other}")
        };
        assert_eq!(
            says(&of_model(1, &[3 << 32], 7)).unwrap(),
            state("weight", 3)
        );
        assert_eq!(
            says(&of_model(1, &[4 << 32, 5 << 32], 7)).unwrap(),
            state("bias", 5)
        );
        assert_eq!(
            says(&of_model(1, &[4 << 32], 9)),
            None,
            "ranks may shard a model at different lines"
        );
    }

    #[test]
    fn says_which_values_only_one_compares() {
        let comparing = |step, names: &[&str], values: &[u64]| {
            let names = names.iter().map(|&name| name.into()).collect();
            let digests = Digests {
                of: ReplicatedValue::Weight,
                step,
                names,
                values: values.iter().copied().map(Some).collect(),
            };
            CallSignature {
                digests: Some([digests].into()),
                ..signature()
            }
        };
        let both = comparing(10, &["a", "b"], &[1, 2]);
        assert_eq!(
            both.difference(&comparing(10, &["a", "b"], &[3, 4])),
            None,
            "`divergence` compares digests"
        );
        let says = |other: &CallSignature| both.difference(other).unwrap();
        let is = "values to compare weights of step 10: a, b vs";
        assert_eq!(says(&signature()), format!("{is} none"));
        assert_eq!(
            says(&comparing(9, &["a", "b"], &[1, 2])),
            format!("{is} weights of step 9: a, b")
        );
        assert_eq!(
            says(&comparing(10, &["a"], &[1])),
            format!("{is} weights of step 10: a")
        );
        let signatures = [both, comparing(10, &["a", "b"], &[1, 3])];
        assert!(CallSignature::divergence(signatures.iter()).is_some());
        assert_eq!(
            CallSignature::divergence([signature(), signature()].iter()),
            None
        );
    }

    #[test]
    fn a_receive_takes_what_it_expects() {
        let receive = CallSignature {
            op: Op::Receive,
            ..signature()
        };
        let mut sent = CallSignature {
            op: Op::Send,
            ..signature()
        };
        assert_eq!(receive.refusal(&sent), None);
        Arc::get_mut(&mut sent.tensors).expect("it is new")[0].shape = Shape::from([4, 9]);
        assert_eq!(
            receive.refusal(&sent).unwrap(),
            "tensor 0: shape [4, 8] vs [4, 9]"
        );
        let any = CallSignature {
            any: true,
            tensors: [].into(),
            ..receive
        };
        assert_eq!(any.refusal(&sent), None);
        sent.label = "b".into();
        assert_eq!(any.refusal(&sent).unwrap(), "label `a` vs `b`");
    }

    #[test]
    fn what_one_gives_is_what_the_other_takes() {
        let meta = |len: usize| {
            Some(TensorMeta {
                shape: Shape::from([len]),
                dtype: DType::F32,
            })
        };
        let pairs = |member, sent: [usize; 2], received: [usize; 2]| {
            let pairs = PairwiseSignature {
                member,
                sent: sent.map(meta).into(),
                received: received.map(meta).into(),
            };
            CallSignature {
                pairs: Some(pairs.into()),
                ..signature()
            }
        };
        let first = pairs(0, [1, 2], [1, 3]);
        assert_eq!(
            first.pairs.as_ref().unwrap().bytes(),
            8,
            "the rank's tensor for itself is not sent"
        );
        assert_eq!(first.difference(&pairs(1, [3, 4], [2, 4])), None);
        let says = |other| first.difference(&other).unwrap();
        assert_eq!(
            says(pairs(1, [3, 4], [5, 4])),
            "tensor of group rank 0 for group rank 1 [2] f32 vs [5] f32"
        );
        assert_eq!(
            says(pairs(1, [5, 4], [2, 4])),
            "tensor of group rank 1 for group rank 0 [3] f32 vs [5] f32"
        );
    }

    #[test]
    fn says_which_tensor_differs_by_its_name() {
        let named = |names: &[&str], width: usize| {
            let tensor = TensorSignature {
                shape: Shape::from([4, width]),
                ..signature().tensors[0].clone()
            };
            let names = Some(names.iter().map(|&name| name.into()).collect());
            CallSignature {
                names,
                tensors: [tensor.clone(), tensor].into(),
                ..signature()
            }
        };
        let says = |a: &CallSignature, b: &CallSignature| a.difference(b).unwrap();
        let both = named(&["a", "b"], 8);
        assert_eq!(both.difference(&named(&["a", "b"], 8)), None);
        assert_eq!(
            says(&both, &named(&["a", "b"], 9)),
            "`a`: shape [4, 8] vs [4, 9]"
        );
        // Tensors sent in addition to the parameters have no name.
        assert_eq!(
            says(&named(&[], 8), &named(&[], 9)),
            "tensor 0: shape [4, 8] vs [4, 9]"
        );
        assert_eq!(says(&both, &named(&["a", "c"], 8)), "tensor 1: `b` vs `c`");
        let mut fewer = named(&["a"], 8);
        fewer.tensors = fewer.tensors[..1].into();
        assert_eq!(
            says(&both, &fewer),
            "number of tensors 2 vs 1; tensor 1: `b` vs none"
        );
    }
}
