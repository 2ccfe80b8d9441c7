//! [`BurnLayer`]: recognizes layers of burn-nn among the modules of a model.
//!
//! Some layers need special treatment: burn reads the stored shape of an `RmsNorm`'s weight, and
//! the columns of a `Linear` are its output features. A visitor gets only the name of a type, and a
//! program may have a `Linear` of its own that stores its weight in another layout.
//!
//! # What it relies on
//! burn derives the code that calls a visitor. So the place of the call, which `#[track_caller]`
//! returns, is the place of `#[derive(Module)]` at the type. A type is burn's if its place is the
//! one that a layer of burn has.
//!
//! # The issue to file
//! The issue is the one of [`visitor`](super::visitor): with a `TypeId` next to the name this file
//! would be a comparison.

use std::panic::Location;
use std::sync::OnceLock;

use burn::module::{Module, ModuleVisitor};
use burn::nn::attention::MultiHeadAttentionConfig;
use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, DropoutConfig, EmbeddingConfig, LinearConfig, RmsNormConfig,
};
use burn::tensor::Device;

/// A layer of burn-nn that this crate treats in a special way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BurnLayer {
    Linear,
    Embedding,
    BatchNorm,
    RmsNorm,
    Dropout,
    PositionWiseFeedForward,
    MultiHeadAttention,
}

/// Place at which a type is declared.
type Place = &'static Location<'static>;

impl BurnLayer {
    const ALL: [Self; 7] = [
        Self::Linear,
        Self::Embedding,
        Self::BatchNorm,
        Self::RmsNorm,
        Self::Dropout,
        Self::PositionWiseFeedForward,
        Self::MultiHeadAttention,
    ];

    /// Returns the name of its type.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Linear => "Linear",
            Self::Embedding => "Embedding",
            Self::BatchNorm => "BatchNorm",
            Self::RmsNorm => "RmsNorm",
            Self::Dropout => "Dropout",
            Self::PositionWiseFeedForward => "PositionWiseFeedForward",
            Self::MultiHeadAttention => "MultiHeadAttention",
        }
    }

    /// Returns the layer that is the struct of this name, declared at this place.
    pub(super) fn of(name: &str, declared_at: Place) -> Option<Self> {
        let layer = Self::ALL.into_iter().find(|layer| layer.name() == name)?;
        static PLACES: [OnceLock<Option<Place>>; BurnLayer::ALL.len()] =
            [const { OnceLock::new() }; 7];
        let place = PLACES[layer as usize].get_or_init(|| layer.place());
        (*place == Some(declared_at)).then_some(layer)
    }

    /// Returns the place at which burn declares it.
    fn place(self) -> Option<Place> {
        #[cfg(feature = "flex")]
        let device = Device::flex();
        #[cfg(not(feature = "flex"))]
        let device = Device::default();
        match self {
            Self::Linear => place_of(&LinearConfig::new(1, 1).init(&device)),
            Self::Embedding => place_of(&EmbeddingConfig::new(1, 1).init(&device)),
            Self::BatchNorm => place_of::<BatchNorm>(&BatchNormConfig::new(1).init(&device)),
            Self::RmsNorm => place_of(&RmsNormConfig::new(1).init(&device)),
            Self::Dropout => place_of(&DropoutConfig::new(0.5).init()),
            Self::PositionWiseFeedForward => {
                place_of(&PositionWiseFeedForwardConfig::new(1, 1).init(&device))
            }
            Self::MultiHeadAttention => {
                place_of(&MultiHeadAttentionConfig::new(1, 1).init(&device))
            }
        }
    }
}

/// Returns true if a type declared at this place is one of this crate.
pub(super) fn is_of_this_crate(declared_at: Place) -> bool {
    let sources = file!().strip_suffix("burn_compat/layers.rs");
    sources.is_some_and(|sources| declared_at.file().starts_with(sources))
}

/// Returns the place at which the type of `module` is declared.
fn place_of<M: Module>(module: &M) -> Option<Place> {
    let mut first = FirstPlace(None);
    module.visit(&mut first);
    first.0
}

/// Visitor that records where the first field is declared.
struct FirstPlace(Option<Place>);

impl ModuleVisitor for FirstPlace {
    #[track_caller]
    fn enter_module(&mut self, _: &str, _: &str) {
        self.0.get_or_insert(Location::caller());
    }
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::module::Param;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Tensor;

    use super::*;
    use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};

    mod own {
        use super::*;

        /// Has the name and the fields of burn's.
        #[derive(Module, Debug)]
        pub(super) struct RmsNorm {
            pub(super) gamma: Param<Tensor<1>>,
        }
    }

    #[derive(Module, Debug)]
    struct Net {
        ours: own::RmsNorm,
        burns: Vec<burn::nn::RmsNorm>,
        linear: Option<Linear>,
    }

    #[derive(Default)]
    struct Layers(Vec<(String, Option<BurnLayer>)>);

    impl TensorVisitor for Layers {
        fn float<const D: usize>(&mut self, path: &ModulePath, _: &Param<Tensor<D>>) {
            self.0.push((
                path.join(),
                path.last().and_then(|(_, container)| container.layer()),
            ));
        }
    }

    #[test]
    fn layers_of_burn_are_told_from_others_of_the_same_name() {
        let device = Device::flex();
        let net = Net {
            ours: own::RmsNorm {
                gamma: Param::from_tensor(Tensor::ones([2], &device)),
            },
            burns: vec![RmsNormConfig::new(2).init(&device)],
            linear: Some(LinearConfig::new(2, 2).with_bias(false).init(&device)),
        };
        let mut layers = Layers::default();
        visit_tensors(&net, &mut layers);
        let expected = [
            ("ours.gamma", None),
            ("burns.0.gamma", Some(BurnLayer::RmsNorm)),
            ("linear.weight", Some(BurnLayer::Linear)),
        ];
        assert_eq!(
            layers.0,
            expected.map(|(path, layer)| (path.to_string(), layer))
        );
    }

    #[test]
    fn every_layer_has_a_place_of_its_own() {
        let places: Vec<_> = BurnLayer::ALL
            .iter()
            .filter_map(|layer| layer.place())
            .collect();
        assert_eq!(places.len(), BurnLayer::ALL.len());
        assert!(
            (0..places.len()).all(|a| (0..a).all(|b| places[a] != places[b])),
            "{places:?}"
        );
        assert!(
            !places.iter().any(|place| is_of_this_crate(place)),
            "{places:?}"
        );
        let here = place_of(&own::RmsNorm {
            gamma: Param::from_tensor(Tensor::ones([2], &Device::flex())),
        });
        assert!(here.is_some_and(is_of_this_crate), "{here:?}");
    }
}
