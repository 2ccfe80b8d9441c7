//! Optimizers in one pass over memory, against burn's own: equal in every bit of parameters and state.

use burn::grad_clipping::GradientClipping;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdamConfig, AdamWConfig, LionConfig, Optimizer, RecordState, StateSink};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_dtensor::optim::ExactOnShards;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const STEPS: usize = 6;

/// Lengths around the size of a chunk, and shapes with elements that are views of others.
const SHAPES: [[usize; 2]; 4] = [[1, 1], [3, 7], [127, 129], [1, 16385]];

/// Values of many magnitudes, also zeros.
fn values(rng: &mut StdRng, shape: [usize; 2], dtype: DType) -> Tensor<2> {
    let len = shape[0] * shape[1];
    let value = |_| match rng.random_range(0..20) {
        0 => 0.0,
        _ => rng.random_range(-1.0..1.0) * 10f64.powi(rng.random_range(-4..2)),
    };
    let values: Vec<f64> = (0..len).map(value).collect();
    Tensor::<2>::from_data(
        TensorData::new(values, shape),
        (&Device::flex(), DType::F64),
    )
    .cast(dtype)
}

/// Names and elements of a state.
fn flat(state: &impl RecordState) -> (Vec<(String, TensorData)>, String) {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    (sink.tensors, format!("{:?}", sink.scalars))
}

fn holds_for<C: ExactOnShards + Clone, B: Optimizer>(config: &C, burn: &B, what: &str)
where
    C::Optimizer: Optimizer,
{
    let (fused, clipping): (_, Option<GradientClipping>) = config.clone().build();
    assert!(clipping.is_none());
    let mut rng = StdRng::seed_from_u64(61);
    for (shape, dtype) in SHAPES
        .into_iter()
        .flat_map(|shape| TYPES.map(|dtype| (shape, dtype)))
    {
        let first = values(&mut rng, shape, dtype);
        let (mut param, mut expected) = (first.clone(), first);
        let (mut state, mut expected_state) = (None, None);
        for step in 0..STEPS {
            let lr = [1e-3, 0.5, 1e-5][step % 3];
            // Every third gradient is a view whose elements are not in order.
            let grad = match step % 3 {
                2 => values(&mut rng, [shape[1], shape[0]], dtype).swap_dims(0, 1),
                _ => values(&mut rng, shape, dtype),
            };
            // Others hold the tensors before the step, and must not see it.
            let before = (step % 2 == 0).then(|| (param.clone(), state.clone()));
            let data = before
                .as_ref()
                .map(|(param, state)| (param.clone().into_data(), state.as_ref().map(flat)));
            (param, state) = fused.step(lr, param, grad.clone(), state);
            (expected, expected_state) = burn.step(lr, expected, grad, expected_state);
            let (found, wanted) = (param.clone().into_data(), expected.clone().into_data());
            assert_eq!(
                found.as_bytes(),
                wanted.as_bytes(),
                "{what}: {shape:?} {dtype:?}, step {step}"
            );
            let [found, wanted] = [state.as_ref().map(flat), expected_state.as_ref().map(flat)];
            assert_eq!(
                found, wanted,
                "{what}: state of {shape:?} {dtype:?}, step {step}"
            );
            if let (Some((param, state)), Some(data)) = (before, data) {
                assert_eq!(
                    (param.into_data(), state.as_ref().map(flat)),
                    data,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn adamw_is_burns_to_the_bit() {
    let config = || AdamWConfig::new().with_epsilon(1e-8);
    for (what, config) in [
        ("plain", config()),
        ("decay", config().with_weight_decay(0.3)),
        ("without decay", config().with_weight_decay(0.0)),
        (
            "betas",
            config()
                .with_beta_1(0.7)
                .with_beta_2(0.95)
                .with_epsilon(1e-2),
        ),
        ("amsgrad", config().with_amsgrad(true)),
        (
            "cautious",
            config()
                .with_weight_decay(0.3)
                .with_cautious_weight_decay(true),
        ),
    ] {
        holds_for(&config, &AdamWConfig::build(&config), what);
    }
}

#[test]
fn adam_is_burns_to_the_bit() {
    let config = || AdamConfig::new().with_epsilon(1e-8);
    let decay = Some(WeightDecayConfig::new(0.3));
    for (what, config) in [
        ("plain", config()),
        ("decay", config().with_weight_decay(decay)),
        ("betas", config().with_beta_1(0.7).with_beta_2(0.95)),
        ("amsgrad", config().with_amsgrad(true)),
    ] {
        holds_for(&config, &AdamConfig::build(&config), what);
    }
}

#[test]
fn lion_is_burns_to_the_bit() {
    for (what, config) in [
        ("plain", LionConfig::new()),
        ("decay", LionConfig::new().with_weight_decay(0.3)),
        (
            "betas",
            LionConfig::new().with_beta_1(0.7).with_beta_2(0.95),
        ),
    ] {
        holds_for(&config, &LionConfig::build(&config), what);
    }
}

/// Numbers that are not, infinities and subnormal numbers pass as in burn.
#[test]
fn numbers_at_the_limits_are_burns_to_the_bit() {
    let values = [
        f32::NAN,
        f32::INFINITY,
        -f32::INFINITY,
        0.0,
        -0.0,
        f32::MIN_POSITIVE / 8.0,
        f32::MAX,
    ];
    let all = || values.into_iter().flat_map(|a| values.map(|b| (a, b)));
    let tensor = |values: Vec<f32>| Tensor::<1>::from_floats(values.as_slice(), &Device::flex());
    let of = |first: bool| tensor(all().map(|(a, b)| if first { a } else { b }).collect());
    let bits = |tensor: Tensor<1>| -> Vec<u32> {
        let values = tensor.into_data().try_to_vec::<f32>().expect("f32");
        // Which NaN results is not defined.
        values
            .iter()
            .map(|x| if x.is_nan() { 1 } else { x.to_bits() })
            .collect()
    };
    let config = AdamWConfig::new();
    let (fused, _) = ExactOnShards::build(config.clone());
    let burn = AdamWConfig::build(&config);
    let lion = LionConfig::new().with_weight_decay(0.1);
    let (fused_lion, burn_lion) = (
        ExactOnShards::build(lion.clone()).0,
        LionConfig::build(&lion),
    );
    let (mut found, mut expected) = ((of(true), None), (of(true), None));
    let (mut found_lion, mut expected_lion) = ((of(true), None), (of(true), None));
    for _ in 0..3 {
        found = fused.step(0.1, found.0, of(false), found.1);
        expected = burn.step(0.1, expected.0, of(false), expected.1);
        assert_eq!(bits(found.0.clone()), bits(expected.0.clone()));
        found_lion = fused_lion.step(0.1, found_lion.0, of(false), found_lion.1);
        expected_lion = burn_lion.step(0.1, expected_lion.0, of(false), expected_lion.1);
        assert_eq!(bits(found_lion.0.clone()), bits(expected_lion.0.clone()));
    }
}

/// The memory of a parameter and of its state that no other handle reads is written, not replaced.
#[test]
fn a_step_makes_no_tensors() {
    let device = Device::flex();
    let (fused, _) = ExactOnShards::build(AdamWConfig::new());
    let grad = || Tensor::<1>::ones([40_000], &device);
    let (param, state) = fused.step(1e-3, grad(), grad(), None);
    let place = |tensor: Tensor<1>| {
        let data = tensor.into_data();
        let place = data.as_bytes().as_ptr();
        (Tensor::<1>::from_data(data, &device), place)
    };
    let mut momentum = state.expect("AdamW has a state").momentum;
    let (param, at_first) = place(param);
    let moment_1;
    (momentum.moment_1, moment_1) = place(momentum.moment_1);
    let state = burn::optim::AdamWState::new(momentum);
    let (param, state) = fused.step(1e-3, param, grad(), Some(state));
    assert_eq!(place(param).1, at_first);
    assert_eq!(
        place(state.expect("it has one").momentum.moment_1).1,
        moment_1
    );
}
