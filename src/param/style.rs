//! [`Style`]: what becomes of a layer's parameters and activations.

use std::fmt;
use std::sync::Arc;

use crate::placement::Placement;

/// How a layer is split over the ranks of one tensor-parallel mesh dimension.
///
/// | style | `Linear` weight `[d_in, d_out]` | `Linear` bias | `Embedding` weight `[vocab, d]` | input | output |
/// |---|---|---|---|---|---|
/// | [`colwise`](Self::colwise) | `S(1)` | `S(0)` | `S(1)` | `R` | left as it is: sharded along its last dimension |
/// | [`rowwise`](Self::rowwise) | `S(0)` | `R` | `S(0)`: by vocabulary | left as it is | `R` |
///
/// [`sequence_parallel`](Self::sequence_parallel) and [`placed`](Self::placed) take any layer or
/// parameter. A [`Placement`] is a style by itself, that of all parameters it is given to. And
/// [`custom`](Self::custom) is a style of one's own, for layers of one's own.
///
/// Input and output are the placements that the layer's forward over
/// [`DTensor`](crate::dtensor::DTensor) brings its activations to; burn's own forward computes with
/// the whole weights and knows nothing of them.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    params: Params,
    input: Option<Placement>,
    output: Option<Placement>,
    heads: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Params {
    Colwise,
    Rowwise,
    Placed(Placement),
    Custom(&'static str, PlaceParam),
}

/// Places a parameter; `None` if it does not know the layer.
type PlaceParam = fn(LayerParam<'_>) -> Option<Placement>;

/// A parameter of a layer, as a [style of one's own](Style::custom) sees it.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct LayerParam<'a> {
    /// Type of the module that has the parameter as a field, such as `Linear`; empty in a collection of parameters.
    pub layer: &'a str,
    /// Name of the field.
    pub name: &'a str,
    /// Shape of the whole parameter.
    pub shape: &'a [usize],
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

    /// Places parameters as `place` says: what a layer of one's own becomes. It is asked of every parameter that the
    /// plan's pattern takes, and answers `None` for one that it does not know, which makes the plan an error.
    ///
    /// ```
    /// use burn_dtensor::parallel::{LayerParam, Style};
    /// use burn_dtensor::placement::Placement::{self, Replicate, Shard};
    ///
    /// /// Splits the output features of layers that store `[d_out, d_in]`.
    /// const COLWISE: Style = Style::custom("colwise", |param: LayerParam<'_>| match (param.layer, param.name) {
    ///     ("Projection", "weight" | "bias") => Some(Shard(0)),
    ///     _ => None,
    /// })
    /// .with_input(Replicate);
    /// ```
    ///
    /// `name` is what messages call it. The layer's forward brings activations to the style's input and output by
    /// [`styled`](crate::nn::apply_style).
    pub const fn custom(name: &'static str, place: fn(LayerParam<'_>) -> Option<Placement>) -> Self {
        Self { params: Params::Custom(name, place), input: None, output: None, heads: None }
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

    /// What becomes of `param`; `None` if the style does not know the layer. `named` says whether it was given to
    /// the layer itself or the parameter, and not to a module around it, of which columns and rows are not known.
    pub(crate) fn placement(&self, param: LayerParam<'_>, named: bool) -> Option<Placement> {
        let split = SPLITS.iter().find(|split| named && split.layer == param.layer && split.param == param.name);
        match self.params {
            Params::Placed(placement) => Some(placement),
            Params::Colwise => split.map(|split| split.colwise),
            Params::Rowwise => split.map(|split| split.rowwise),
            Params::Custom(_, place) => place(param),
        }
    }
}

/// What a layer's parameters were given: a style for each dimension of the mesh, and where these bring activations.
#[derive(Debug)]
pub(crate) struct LayerStyles {
    pub(crate) styles: Box<[Style]>,
    /// `None` if no style moves the input.
    pub(crate) input: Option<Arc<[Option<Placement>]>>,
    pub(crate) output: Option<Arc<[Option<Placement>]>>,
}

impl LayerStyles {
    /// Of one style per mesh dimension.
    pub(crate) fn new(styles: Vec<Style>) -> Self {
        let wanted = |of: fn(&Style) -> Option<Placement>| {
            let wanted: Arc<[_]> = styles.iter().map(of).collect();
            wanted.iter().any(Option::is_some).then_some(wanted)
        };
        let (input, output) = (wanted(Style::input), wanted(Style::output));
        Self { styles: styles.into(), input, output }
    }
}

impl From<Placement> for Style {
    fn from(placement: Placement) -> Self {
        Self::placed(placement)
    }
}

/// `colwise`, `rowwise`, the name it was given or the placement.
impl fmt::Display for Style {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.params {
            Params::Colwise => f.write_str("colwise"),
            Params::Custom(name, _) => f.write_str(name),
            Params::Rowwise => f.write_str("rowwise"),
            Params::Placed(placement) => write!(f, "{placement}"),
        }
    }
}
