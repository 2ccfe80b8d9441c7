//! Losses, against burn's, and what burn has not against the definition on whole rows.

use burn::nn::loss::{
    CrossEntropyLoss as PlainLoss, CrossEntropyLossConfig as PlainConfig, MseLoss,
};
use burn::tensor::{DType, Float, Int, Tensor, activation};
use burn_dtensor::dtensor::ops::loss::{
    CrossEntropyLoss, CrossEntropyLossConfig, Reduction, binary_cross_entropy_with_logits,
    cross_entropy, mse_loss, nll_loss,
};
use burn_dtensor::testing::prove::{Case, CaseInput, case};

const WEIGHTS: [f32; 4] = [1.0, 0.5, 2.0, 1.5];

/// Losses and weights of samples, from log-probabilities `[samples, classes]`.
struct Reference {
    weights: Vec<f32>,
    smoothing: f64,
    ignored: i64,
}

impl Reference {
    fn plain(classes: usize) -> Self {
        Self {
            weights: vec![1.0; classes],
            smoothing: 0.0,
            ignored: -1,
        }
    }

    fn losses(&self, log_probs: Tensor<2>, targets: Tensor<1, Int>) -> (Tensor<1>, Tensor<1>) {
        let [samples, classes] = log_probs.dims();
        let weights = Tensor::<1>::from_floats(self.weights.as_slice(), &log_probs.device());
        let hard = targets.clone().one_hot::<2>(classes).float();
        let soft = hard * (1.0 - self.smoothing) + self.smoothing / classes as f64;
        let kept = targets.clone().not_equal_elem(self.ignored).float();
        let losses = (soft * weights.clone().reshape([1, classes]) * log_probs)
            .sum_dim(1)
            .reshape([samples])
            .neg();
        (losses * kept.clone(), weights.select(0, targets) * kept)
    }

    fn mean(&self, log_probs: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let (losses, weights) = self.losses(log_probs, targets);
        losses.sum() / weights.sum()
    }
}

fn scored(samples: usize, classes: usize) -> [CaseInput; 2] {
    [
        CaseInput::float("logits", [samples, classes]),
        CaseInput::int("targets", [samples], classes as i64),
    ]
}

fn of(config: CrossEntropyLossConfig) -> CrossEntropyLoss {
    config.init(&burn::tensor::Device::flex())
}

/// A case of burn's loss on `[samples, classes]` logits.
fn of_burn(shape: [usize; 2], plain: PlainConfig, config: CrossEntropyLossConfig) -> Case {
    let device = burn::tensor::Device::flex();
    let (plain, loss) = (plain.init(&device), of(config));
    Case::new(
        "cross_entropy",
        scored(shape[0], shape[1]),
        move |inputs| {
            let weights = plain.weights.clone().map(Tensor::autodiff);
            PlainLoss {
                weights,
                ..plain.clone()
            }
            .forward(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>())
        },
        move |inputs| loss.forward(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>()),
    )
}

/// A case of `[samples, classes]` logits: log-probabilities to `reference`, both to `sharded`.
macro_rules! cross_entropy {
    ($name:literal, $shape:expr, $reference:expr, $sharded:expr) => {
        Case::new(
            $name,
            scored($shape.0, $shape.1),
            |inputs| {
                let log_probs = activation::log_softmax(inputs[0].tensor::<2, Float>(), 1);
                let reference: fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1> = $reference;
                reference(log_probs, inputs[1].tensor::<1, Int>())
            },
            |inputs| $sharded(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>()),
        )
    };
}

fn everything() -> CrossEntropyLossConfig {
    CrossEntropyLossConfig::new()
        .with_weights(WEIGHTS)
        .with_smoothing(0.1)
        .with_ignore_index(1)
}

fn reference_of_everything() -> Reference {
    Reference {
        weights: WEIGHTS.to_vec(),
        smoothing: f64::from(0.1f32),
        ignored: 1,
    }
}

pub fn cases() -> Vec<Case> {
    vec![
        of_burn([5, 6], PlainConfig::new(), CrossEntropyLossConfig::new()),
        of_burn(
            [7, 4],
            PlainConfig::new()
                .with_weights(Some(WEIGHTS.to_vec()))
                .with_smoothing(Some(0.1))
                .with_pad_tokens(Some(vec![1])),
            everything(),
        ),
        case!("ctc_loss", (p: 3 within(-2.0..-0.1) = [4, 5, 4], t: 2 int(1..4) = [5, 2]) => {
            let first = t.clone().narrow(1, 0, 1).reshape([5]);
            module::ctc_loss(p, t, first.ones_like() * 4, first.clamp_max(2), 0)
        }),
        cross_entropy!(
            "cross_entropy",
            (4, 3),
            |p, t| Reference::plain(3).losses(p, t).0,
            |l, t| { of(CrossEntropyLossConfig::new()).forward_no_reduction(l, t) }
        ),
        Case::new(
            "cross_entropy",
            [
                CaseInput::float("logits", [3, 4]).with_dtype(DType::BF16),
                CaseInput::int("targets", [3], 4).with_dtype(DType::U8),
            ],
            |inputs| {
                let loss = PlainConfig::new().init(&inputs[0].tensor::<2, Float>().device());
                loss.forward(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>())
            },
            |inputs| cross_entropy(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>()),
        ),
        cross_entropy!(
            "cross_entropy",
            (3, 4),
            |p, t| reference_of_everything().losses(p, t).0.sum(),
            |l, t| { of(everything().with_reduction(Reduction::Sum)).forward(l, t) }
        ),
        Case::new(
            "cross_entropy",
            [
                CaseInput::float("logits", [2, 3, 4]),
                CaseInput::int("targets", [2, 3], 4),
            ],
            |inputs| {
                let log_probs =
                    activation::log_softmax(inputs[0].tensor::<3, Float>().reshape([6, 4]), 1);
                Reference {
                    ignored: 0,
                    ..Reference::plain(4)
                }
                .mean(log_probs, inputs[1].tensor::<2, Int>().reshape([6]))
            },
            |inputs| {
                let loss = of(CrossEntropyLossConfig::new().with_ignore_index(0));
                loss.forward(inputs[0].tensor::<3, Float>(), inputs[1].tensor::<2, Int>())
            },
        ),
        Case::new(
            "nll_loss",
            scored(5, 4),
            |inputs| {
                Reference::plain(4)
                    .mean(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>())
            },
            |inputs| nll_loss(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>()),
        ),
        Case::new(
            "nll_loss",
            scored(6, 4),
            |inputs| {
                reference_of_everything()
                    .mean(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>())
            },
            |inputs| {
                let loss = of(everything().with_log_probs(true));
                loss.forward(inputs[0].tensor::<2, Float>(), inputs[1].tensor::<1, Int>())
            },
        ),
        Case::new(
            "mse_loss",
            [
                CaseInput::float("x", [5, 3]),
                CaseInput::float("target", [5, 3]),
            ],
            |inputs| {
                MseLoss::new().forward(
                    inputs[0].tensor::<2, Float>(),
                    inputs[1].tensor(),
                    burn::nn::loss::Reduction::Mean,
                )
            },
            |inputs| {
                mse_loss(
                    inputs[0].tensor::<2, Float>(),
                    inputs[1].tensor(),
                    Reduction::Mean,
                )
            },
        ),
        Case::new(
            "binary_cross_entropy_with_logits",
            [
                CaseInput::float("logits", [3, 2]),
                CaseInput::float("target", [3, 2]).with_range(0.0..1.0),
            ],
            |inputs| {
                let (x, target) = (inputs[0].tensor::<2, Float>(), inputs[1].tensor());
                ((-x.clone()).exp().log1p() + x * (-target + 1.0)).sum()
            },
            |inputs| {
                binary_cross_entropy_with_logits(
                    inputs[0].tensor::<2, Float>(),
                    inputs[1].tensor(),
                    Reduction::Sum,
                )
            },
        ),
        case!("cross_entropy_with_logits", (x: 2 = [3, 4], p: 2 positive = [3, 4]) => {
            loss::cross_entropy_with_logits(x, p)
        }),
        case!("cross_entropy_with_logits", (x: 3 = [2, 3, 2], p: 3 positive = [2, 3, 2]) => {
            loss::cross_entropy_with_logits(x, p)
        }),
        case!("ctc_loss", (x: 3 = [4, 3, 3], t: 2 int(1..3) = [3, 2], n: 1 int(3..5) = [3], m: 1 int(1..3) = [3]) => {
            module::ctc_loss(activation::log_softmax(x, 2), t, n, m, 0)
        }),
        case!("ctc_loss", (x: 3 = [3, 6, 2], t: 2 int(0..1) = [6, 1], n: 1 int(1..4) = [6], m: 1 int(0..2) = [6]) => {
            module::ctc_loss(x, t, n, m, 1)
        }),
    ]
}
