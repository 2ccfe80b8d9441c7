//! Models without autodiff: which shards a gathered weight was made of is told by their memory.

use std::sync::LazyLock;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit, unshard};
use burn_dtensor::testing::{MeshTest, gpu};

use super::rounding;
use crate::fsdp::support::{on_device, values};

#[derive(Module, Debug)]
struct Net {
    layer: Linear,
}

/// Every parameter one more than it was.
struct Shift;

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| base + 1.0)
    }
}

/// Drawn once: ranks that draw at once share the state of the generator.
static NET: LazyLock<Net> = LazyLock::new(|| {
    let net = Net {
        layer: LinearConfig::new(3, 4).init(&Device::flex()),
    };
    let _ = values(&net, None);
    net
});

fn output(net: &Net, device: &Device) -> Vec<f32> {
    let x = Tensor::<2>::ones([1, 3], device);
    unit(net, x, |net, x| net.layer.forward(x))
        .into_data()
        .try_to_vec()
        .unwrap()
}

/// Adding one to the weights of three inputs and to the bias adds four.
fn shifted(before: &[f32], after: &[f32]) -> bool {
    before
        .iter()
        .zip(after)
        .all(|(before, after)| (after - before - 4.0).abs() < rounding(1e-4))
}

#[test]
fn what_was_gathered_of_older_shards_is_not_used() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone();
            let model = fully_shard(on_device(&*NET, &device), mesh, FullyShard::new())?;
            let before = output(&model, &device);
            let _prefetched = unshard(&model)?;
            assert_eq!(
                output(&model, &device),
                before,
                "gathered ahead of the same shards"
            );
            let _prefetched = unshard(&model)?;
            let stepped = model.map(&mut Shift);
            let after = output(&stepped, &device);
            assert!(shifted(&before, &after), "{before:?} {after:?}");
            Ok(())
        });
}

#[test]
fn a_clone_with_other_shards_has_its_own_weights() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone();
            let student = fully_shard(on_device(&*NET, &device), mesh, FullyShard::new())?;
            let teacher = student.clone().map(&mut Shift);
            let before = output(&student, &device);
            let x = Tensor::<2>::ones([1, 3], &device);
            let read = unit(&student, x, |student, x| {
                (student.layer.forward(x.clone()), teacher.layer.forward(x))
            });
            let [own, other] =
                [read.0, read.1].map(|output| output.into_data().try_to_vec::<f32>().unwrap());
            assert_eq!(own, before);
            assert!(shifted(&own, &other), "{own:?} {other:?}");
            Ok(())
        });
}
