//! [`Style`]: what becomes of a layer's parameters and activations.

use std::fmt;

use crate::placement::Placement;

/// How a layer is split over the ranks of the tensor-parallel mesh.
///
/// | style | `Linear` weight `[d_in, d_out]` | `Linear` bias | `Embedding` weight `[vocab, d]` | input | output |
/// |---|---|---|---|---|---|
/// | [`colwise`](Self::colwise) | `S(1)` | `S(0)` | `S(1)` | `R` | left as it is: sharded along its last dimension |
/// | [`rowwise`](Self::rowwise) | `S(0)` | `R` | `S(0)`: by vocabulary | left as it is | `R` |
///
/// [`sequence_parallel`](Self::sequence_parallel) and [`placed`](Self::placed) take any layer or
/// parameter. A [`Placement`] is a style by itself, that of all parameters it is given to.
///
/// Input and output are the placements that the layer's forward over
/// [`DTensor`](crate::dtensor::DTensor) brings its activations to; burn's own forward computes with
/// the whole weights and knows nothing of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    params: Params,
    input: Option<Placement>,
    output: Option<Placement>,
    heads: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Params {
    Colwise,
    Rowwise,
    Placed(Placement),
}

/// A parameter of a layer that can be split by columns and by rows.
struct Split {
    layer: &'static str,
    param: &'static str,
    colwise: Placement,
    rowwise: Placement,
}

const SPLITS: [Split; 3] = {
    use Placement::{Replicate, Shard};
    [
        Split { layer: "Linear", param: "weight", colwise: Shard(1), rowwise: Shard(0) },
        Split { layer: "Linear", param: "bias", colwise: Shard(0), rowwise: Replicate },
        Split { layer: "Embedding", param: "weight", colwise: Shard(1), rowwise: Shard(0) },
    ]
};

impl Style {
    /// Splits the output features: each rank computes its own. The layer reads its input whole and
    /// leaves its output sharded along the last dimension.
    pub const fn colwise() -> Self {
        Self { params: Params::Colwise, input: Some(Placement::Replicate), output: None, heads: None }
    }

    /// Splits the input features, or an embedding's vocabulary: each rank computes a term of the
    /// output, and the terms are added up.
    ///
    /// `.with_output(Shard(1))` scatters the sum over the sequence: sequence parallelism.
    pub const fn rowwise() -> Self {
        Self { params: Params::Rowwise, input: None, output: Some(Placement::Replicate), heads: None }
    }

    /// Every rank holds the parameters whole and computes its part of the sequence: activations
    /// `[batch, seq, ..]` are `S(1)`; [`with_input`](Self::with_input) sets another dimension.
    pub const fn sequence_parallel() -> Self {
        Self::placed(Placement::Replicate).with_input(Placement::Shard(1))
    }

    /// Places the parameters so, and leaves activations as they are.
    pub const fn placed(placement: Placement) -> Self {
        Self { params: Params::Placed(placement), input: None, output: None, heads: None }
    }

    /// Brings the layer's input to this placement; to `Replicate` instead of a shard of which a rank
    /// would have nothing, such as that of one token in decoding.
    pub const fn with_input(mut self, placement: Placement) -> Self {
        self.input = Some(placement);
        self
    }

    /// Brings the layer's output to this placement, as [`with_input`](Self::with_input) does.
    pub const fn with_output(mut self, placement: Placement) -> Self {
        self.output = Some(placement);
        self
    }

    /// Says that the split features are those of so many attention heads, which must stay whole:
    /// their number must divide by the number of ranks.
    ///
    /// For the query, key, value and output projections of attention. Key and value may have
    /// fewer heads than the query (grouped heads): give each its own number.
    pub const fn with_heads(mut self, heads: usize) -> Self {
        self.heads = Some(heads);
        self
    }

    /// Where the layer brings its input; `None` leaves it.
    pub fn input(&self) -> Option<Placement> {
        self.input
    }

    /// Where the layer brings its output; `None` leaves it.
    pub fn output(&self) -> Option<Placement> {
        self.output
    }

    /// The number of attention heads, if it was given.
    pub fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// What becomes of field `param` of a layer of type `layer`; `None` if the style does not know
    /// the layer.
    pub(crate) fn placement(&self, layer: Option<&str>, param: &str) -> Option<Placement> {
        let split = SPLITS.iter().find(|split| Some(split.layer) == layer && split.param == param);
        match self.params {
            Params::Placed(placement) => Some(placement),
            Params::Colwise => split.map(|split| split.colwise),
            Params::Rowwise => split.map(|split| split.rowwise),
        }
    }
}

impl From<Placement> for Style {
    fn from(placement: Placement) -> Self {
        Self::placed(placement)
    }
}

/// `colwise`, `rowwise` or the placement.
impl fmt::Display for Style {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.params {
            Params::Colwise => f.write_str("colwise"),
            Params::Rowwise => f.write_str("rowwise"),
            Params::Placed(placement) => write!(f, "{placement}"),
        }
    }
}
