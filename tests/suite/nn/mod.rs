//! burn-nn's layers over DTensors, against burn's own forward on one rank.

mod activations;
mod batch_norm;
mod composition;
mod counts;
mod dropout;
mod layers;
mod llama;
pub mod misuse;
mod norms;
mod prepare;
mod resnet;
mod rnn;
mod same;
mod transformer;
mod unet;
mod vision;

use burn::module::Module;
use burn::tensor::Tensor;

/// Programs that import all of burn's attention and of the prelude.
mod imports {
    use burn::nn::attention::*;
    use burn::tensor::{Device, Tensor};
    #[allow(unused_imports)] // names that both would have are ambiguous where they are used
    use burn_dtensor::prelude::*;

    #[test]
    fn the_prelude_has_no_name_of_burns_attention() {
        let x = Tensor::<3>::ones([1, 2, 4], &Device::flex());
        let layer = MultiHeadAttentionConfig::new(4, 2).init(&x.device());
        assert_eq!(
            layer.forward(MhaInput::self_attn(x)).context.dims(),
            [1, 2, 4]
        );
    }
}

/// A layer as a field of a model, for plans to name.
#[derive(Module, Debug)]
struct Only<L> {
    layer: L,
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32")
}

fn near(found: &[f32], expected: &[f32], what: impl Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    for (at, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= 2e-5 * (1.0 + b.abs()),
            "{}: element {at} is {a}, expected {b}",
            what()
        );
    }
}
