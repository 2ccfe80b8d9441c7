//! [`Style`]: tensor-parallel placement of a layer's parameters and activations.

use std::fmt;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::prepare::ModuleIoLayouts;
use crate::burn_compat::BurnLayer;
use crate::mesh::DeviceMesh;
use crate::param::{DistributedParameter, walk};
use crate::placement::Placement;

/// Describes how a layer is split over the ranks of one tensor-parallel mesh dimension.
///
/// | style | `Linear` weight `[d_in, d_out]` | `Linear` bias | `Embedding` weight `[vocab, d]` | input | output |
/// |---|---|---|---|---|---|
/// | [`colwise`](Self::colwise) | `S(1)` | `S(0)` | `S(1)` | `R` | left as it is: sharded along its last dimension |
/// | [`rowwise`](Self::rowwise) | `S(0)` | `R` | `S(0)`: by vocabulary | left as it is | `R` |
///
/// [`sequence_parallel`](Self::sequence_parallel) and [`placed`](Self::placed) accept any layer or
/// parameter. A [`Placement`] converts to the style that places all its parameters so.
/// [`custom`](Self::custom) is for user-defined layers.
///
/// Input and output are the placements to which the layer's forward over
/// [`DTensor`](crate::dtensor::DTensor) redistributes its activations. burn's own forward computes
/// with the full weights and ignores them.
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

/// Function that returns the placement of a parameter, or `None` if it does not support the layer.
type PlaceParam = fn(LayerParam<'_>) -> Option<Placement>;

/// A parameter of a layer, as a [custom style](Style::custom) receives it.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct LayerParam<'a> {
    /// Type of the module that has the parameter as a field, such as `Linear`; empty in a
    /// collection of parameters.
    pub layer: &'a str,
    /// Name of the field.
    pub name: &'a str,
    /// Shape of the full parameter.
    pub shape: &'a [usize],
}

/// A parameter that `colwise` and `rowwise` can split, with its placement in each.
struct Split {
    layer: BurnLayer,
    param: &'static str,
    colwise: Placement,
    rowwise: Placement,
}

const SPLITS: [Split; 3] = {
    use Placement::{Replicate, Shard};
    [
        Split {
            layer: BurnLayer::Linear,
            param: "weight",
            colwise: Shard(1),
            rowwise: Shard(0),
        },
        Split {
            layer: BurnLayer::Linear,
            param: "bias",
            colwise: Shard(0),
            rowwise: Replicate,
        },
        Split {
            layer: BurnLayer::Embedding,
            param: "weight",
            colwise: Shard(1),
            rowwise: Shard(0),
        },
    ]
};

impl Style {
    /// Splits the output features: each rank computes some of them. The layer needs its full input
    /// and leaves its output sharded along the last dimension.
    pub const fn colwise() -> Self {
        Self {
            params: Params::Colwise,
            input: Some(Placement::Replicate),
            output: None,
            heads: None,
        }
    }

    /// Splits the input features, or an embedding's vocabulary: each rank computes a partial
    /// output, and the partial outputs are summed.
    ///
    /// `.with_output(Shard(1))` scatters the sum over the sequence: sequence parallelism.
    pub const fn rowwise() -> Self {
        Self {
            params: Params::Rowwise,
            input: None,
            output: Some(Placement::Replicate),
            heads: None,
        }
    }

    /// Replicates the parameters and splits the sequence: activations `[batch, seq, ..]` are
    /// `S(1)`. [`with_input`](Self::with_input) sets another dimension.
    pub const fn sequence_parallel() -> Self {
        Self::placed(Placement::Replicate).with_input(Placement::Shard(1))
    }

    /// Gives the parameters this placement, and leaves activations as they are.
    pub const fn placed(placement: Placement) -> Self {
        Self {
            params: Params::Placed(placement),
            input: None,
            output: None,
            heads: None,
        }
    }

    /// Places the parameters of user-defined layers by a function. `place` is called for every
    /// parameter that the plan's pattern matches. If it returns `None`, the style does not support
    /// the parameter, and the plan fails with an error.
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
    /// Error messages call the style `name`. [`apply_style`](crate::nn::apply_style) runs the
    /// layer's forward and redistributes activations to the style's input and output placements.
    pub const fn custom(
        name: &'static str,
        place: fn(LayerParam<'_>) -> Option<Placement>,
    ) -> Self {
        Self {
            params: Params::Custom(name, place),
            input: None,
            output: None,
            heads: None,
        }
    }

    /// Redistributes the layer's input to this placement. If a rank's shard would be empty, such as
    /// that of one token in decoding, the input becomes `Replicate` instead.
    pub const fn with_input(mut self, placement: Placement) -> Self {
        self.input = Some(placement);
        self
    }

    /// Redistributes the layer's output to this placement, as [`with_input`](Self::with_input)
    /// does.
    pub const fn with_output(mut self, placement: Placement) -> Self {
        self.output = Some(placement);
        self
    }

    /// Declares that the split features form this many attention heads, which are not split
    /// further. The number of heads must be divisible by the number of ranks.
    ///
    /// Use it for the query, key, value and output projections of attention. Key and value may have
    /// fewer heads than the query (grouped heads): pass each layer its own number.
    pub const fn with_heads(mut self, heads: usize) -> Self {
        self.heads = Some(heads);
        self
    }

    /// Returns the placement to which the layer redistributes its input; `None` leaves it as it is.
    pub fn input(&self) -> Option<Placement> {
        self.input
    }

    /// Returns the placement to which the layer redistributes its output; `None` leaves it as it
    /// is.
    pub fn output(&self) -> Option<Placement> {
        self.output
    }

    /// Returns the number of attention heads, if it is set.
    pub fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// Returns the placement of `param`, or `None` if the style does not support the layer. `layer`
    /// is the layer of burn that the plan names, itself or by the parameter: a module around a
    /// layer has no known columns and rows.
    pub(super) fn placement(
        &self,
        param: LayerParam<'_>,
        layer: Option<BurnLayer>,
    ) -> Option<Placement> {
        let split = SPLITS
            .iter()
            .find(|split| Some(split.layer) == layer && split.param == param.name);
        match self.params {
            Params::Placed(placement) => Some(placement),
            Params::Colwise => split.map(|split| split.colwise),
            Params::Rowwise => split.map(|split| split.rowwise),
            Params::Custom(_, place) => place(param),
        }
    }
}

/// Record that [`parallelize`](super::parallelize) attaches to each parameter of a layer: the
/// layer's styles, one for each mesh dimension, and the layouts of the activations around it.
#[derive(Debug)]
pub(crate) struct LayerStyles {
    styles: Box<[Style]>,
    /// Placement of the input for each mesh dimension; `None` if no style redistributes it.
    pub(crate) input: Option<Arc<[Option<Placement>]>>,
    /// Placement of the output for each mesh dimension; `None` if no style redistributes it.
    pub(crate) output: Option<Arc<[Option<Placement>]>>,
    /// Input and output layouts of the modules around the parameter, each with the number of path
    /// components from the module down to the parameter.
    pub(super) modules: Vec<(usize, Arc<ModuleIoLayouts>)>,
}

impl LayerStyles {
    /// Combines the styles of a layer, one for each mesh dimension, and the layouts of the modules
    /// around it.
    pub(super) fn new(styles: Vec<Style>, modules: Vec<(usize, Arc<ModuleIoLayouts>)>) -> Self {
        let wanted = |of: fn(&Style) -> Option<Placement>| {
            let wanted: Arc<[_]> = styles.iter().map(of).collect();
            wanted.iter().any(Option::is_some).then_some(wanted)
        };
        let input = wanted(Style::input);
        let output = wanted(Style::output);
        Self {
            styles: styles.into(),
            input,
            output,
            modules,
        }
    }

    /// Returns the record of a parameter, or `None` without tensor-parallel placements.
    pub(super) fn of(param: &DistributedParameter) -> Option<&Self> {
        let parallel = param.info().parallel.as_ref()?;
        Some(
            parallel
                .layer
                .downcast_ref()
                .expect("`parallelize` attaches the layer's styles"),
        )
    }
}

/// Returns the styles of `param`'s layer, or `None` without tensor-parallel placements.
pub(crate) fn layer_styles<const D: usize>(param: &Param<Tensor<D>>) -> Option<&LayerStyles> {
    LayerStyles::of(param.reparameterization()?)
}

/// Information about a module that its parameters carry.
pub(crate) struct Prepared {
    /// The mesh on which its parameters are parallelized, if any of them is.
    pub(crate) mesh: Option<DeviceMesh>,
    /// The input and output layouts that the plan declares for the module, if any.
    pub(crate) layouts: Option<Arc<ModuleIoLayouts>>,
}

/// Returns the mesh and the layouts that the parameters inside `module` carry.
pub(crate) fn prepared_of<M: Module>(module: &M) -> Prepared {
    let distributed = walk(module).distributed;
    // Every parameter carries the layouts of all modules around it, so the first one is as good as
    // any other.
    let first = distributed
        .iter()
        .find_map(|found| Some((found, LayerStyles::of(&found.param)?)));
    let Some((found, layer)) = first else {
        return Prepared {
            mesh: None,
            layouts: None,
        };
    };
    let own = layer
        .modules
        .iter()
        .find(|(above, _)| *above == found.depth);
    let mesh = found
        .param
        .info()
        .parallel
        .as_ref()
        .map(|parallel| parallel.spec.mesh().clone());
    Prepared {
        mesh,
        layouts: own.map(|(_, layouts)| layouts.clone()),
    }
}

/// The styles of a parameter.
pub trait ParamStyles {
    /// Returns the styles with which [`parallelize`](super::parallelize) placed the parameter and
    /// its layer's activations, one for each dimension of its mesh. Empty for a parameter without
    /// tensor-parallel placements.
    fn styles(&self) -> &[Style];
}

impl<const D: usize> ParamStyles for Param<Tensor<D>> {
    fn styles(&self) -> &[Style] {
        layer_styles(self).map_or(&[], |layer| &layer.styles)
    }
}

impl From<Placement> for Style {
    fn from(placement: Placement) -> Self {
        Self::placed(placement)
    }
}

/// Writes `colwise`, `rowwise`, the name of a custom style, or the placement.
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
