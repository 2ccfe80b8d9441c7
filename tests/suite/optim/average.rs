//! A moving average of a sharded model's weights, and a teacher beside its student.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNormConfig, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::mesh_test;
use burn_dtensor::optim::{OptimError, ema, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::net::{Net, WIDTH, config, net, with_units};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

/// How far apart the two are: each in units of its own, one after the other, or block by block.
/// Clones share units: then both are open at once.
fn distance(student: &Net, teacher: &Net, x: Tensor<2>, at_once: bool) -> Tensor<1> {
    let (own, other) = match at_once {
        false => (with_units(student, x.clone(), 0), with_units(teacher, x, 0)),
        true => unit(student, (x.clone(), x), |student, both| {
            unit(teacher, both, |teacher, (x, y)| {
                let mut both = (student.first.forward(x), teacher.first.forward(y));
                for (block, other) in student.blocks.iter().zip(&teacher.blocks) {
                    both = unit(block, both, |block, both| {
                        unit(other, both, |other, (x, y)| {
                            (block.forward(x).tanh(), other.forward(y).tanh())
                        })
                    });
                }
                (
                    both.0 * student.scale.val().unsqueeze(),
                    both.1 * teacher.scale.val().unsqueeze(),
                )
            })
        }),
    };
    (own - other.detach()).square().mean()
}

/// Element by element, in double precision.
struct Mix {
    path: Vec<String>,
    model: BTreeMap<String, Vec<f32>>,
    decay: f64,
}

impl ModuleMapper for Mix {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let other = &self.model[&self.path.join(".")];
        param.map(|was| {
            let own: Vec<f32> = was.to_data().try_to_vec().expect("numbers");
            let mix = |(&a, &b): (&f32, &f32)| {
                (f64::from(a) * self.decay + f64::from(b) * (1.0 - self.decay)) as f32
            };
            let mixed: Vec<f32> = own.iter().zip(other).map(mix).collect();
            Tensor::from_data(TensorData::new(mixed, was.dims()), &was.device())
        })
    }
}

/// Ten steps of a student that is to be like its teacher, and small.
fn as_on_one_device(mesh: &DeviceMesh) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let plain = on_device(&net(&Device::flex()), &device);
    let batch = |step: u64, rank: usize| tensor::<2>(10 * step + rank as u64, [4, WIDTH], &device);
    let loss = |student: &Net, teacher: &Net, x: Tensor<2>, at_once| {
        distance(student, teacher, x.clone(), at_once) + with_units(student, x, 0).square().mean()
    };
    let (mut student, mut teacher) = (plain.clone(), plain.clone().freeze());
    let mut optim = AdamWConfig::new().init();
    for step in 0..10 {
        let of_rank = |rank| loss(&student, &teacher, batch(step, rank), false);
        let of_all = (0..mesh.size())
            .map(of_rank)
            .reduce(|a, b| a + b)
            .expect("a rank")
            / mesh.size() as f32;
        let grads = GradientsParams::from_grads(of_all.backward(), &student);
        student = optim.step(1e-2, student, grads);
        teacher = teacher
            .map(&mut Mix {
                path: vec![],
                model: values(&student, None),
                decay: 0.9,
            })
            .freeze();
    }
    let expected = [student, teacher].map(|model| values(&model, None));
    assert!(
        max_diff(&expected[0], &expected[1]) > 1e-2,
        "the teacher is behind"
    );

    for at_once in [false, true] {
        let mut student = fully_shard(plain.clone(), mesh, config())?;
        let mut teacher = student.clone().freeze();
        let mut optim = sharded(AdamWConfig::new());
        for step in 0..10 {
            let loss = loss(&student, &teacher, batch(step, mesh.rank()), at_once);
            let grads = GradientsParams::from_grads(loss.backward(), &student);
            student = optim.step(1e-2, student, grads)?;
            teacher = ema(teacher, &student, 0.9)?;
        }
        assert!(student.first.weight.is_require_grad() && !teacher.first.weight.is_require_grad());
        for (model, expected) in [student, teacher].iter().zip(&expected) {
            let diff = max_diff(&values(&full_model(model)?, None), expected);
            assert!(diff < 2e-6, "{diff} apart, at once {at_once}");
        }
    }
    Ok(())
}

mesh_test!(
    a_teacher_next_to_its_student_is_that_of_one_device,
    [2, 2],
    ["replicate", "shard"],
    as_on_one_device
);

#[test]
fn a_teacher_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"]).run(as_on_one_device);
    }
}

#[test]
fn running_statistics_are_averaged_and_nothing_is_sent() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = (
            LinearConfig::new(4, 4).init(&device),
            BatchNormConfig::new(4).init(&device),
        );
        // A clone's running statistics are the model's own.
        let model = fully_shard(plain.clone(), mesh, FullyShard::new())?;
        let teacher = fully_shard(plain, mesh, FullyShard::new())?;
        model
            .1
            .running_mean
            .update(Tensor::full([4], 0.5, mesh.device()));
        let _ = model.1.running_mean.value_sync();
        let calls = mesh.world().ledger().total(|_| true).calls;
        let teacher = ema(teacher, &model, 0.75)?;
        assert_eq!(mesh.world().ledger().total(|_| true).calls, calls);
        // Of a half a quarter.
        let mean = teacher
            .1
            .running_mean
            .value_sync()
            .into_data()
            .try_to_vec::<f32>()?;
        assert!(
            mean.iter().all(|&mean| (mean - 0.125).abs() < 1e-6),
            "{mean:?}"
        );
        Ok(())
    });
}

#[test]
fn another_model_is_a_typed_error() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = net(mesh.device());
        let model = fully_shard(plain.clone(), mesh, config())?;
        let replicated = config().with_shard_placement_fn(|_| Some(Placement::Replicate));
        for other in [plain.clone(), fully_shard(plain, mesh, replicated)?] {
            let error = ema(other, &model, 0.9)
                .map(drop)
                .expect_err("it lies otherwise");
            let Error::Optim(OptimError::Average { path, model, .. }) = &error else {
                panic!("{error}")
            };
            assert!(
                !path.is_empty()
                    && model.contains("[S(0)]")
                    && error.to_string().contains("a clone of"),
                "{error}"
            );
        }
        Ok(())
    });
}
