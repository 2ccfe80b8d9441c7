//! Records of shards: each rank's loads on that rank.

use burn::module::{Module, list_param_ids};
use burn::nn::{Linear, LinearConfig};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Bytes, Device};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{on_device, values};
use crate::logged::warnings;
use crate::own_process::own_process;

/// Shards of equal shapes on all ranks.
fn even(value: u64) -> Linear {
    let device = Device::flex();
    device.seed(value);
    let linear = LinearConfig::new(4, 8).init(&device);
    let _ = values(&linear, None);
    linear
}

fn bytes(model: &Linear) -> Result<Vec<u8>> {
    Ok(model
        .clone()
        .into_record()
        .into_bytes()
        .map_err(Error::other)?
        .to_vec())
}

fn load(model: Linear, bytes: &[u8]) -> Result<Linear, RecordError> {
    model.try_load_record(ModuleRecord::from_bytes(Bytes::from_bytes_vec(
        bytes.to_vec(),
    ))?)
}

fn distribute(model: Linear, mesh: &DeviceMesh) -> Result<Linear> {
    let model = match mesh.names().iter().any(|name| name == "tp") {
        true => parallelize(
            model,
            &mesh.slice("tp")?,
            Plan::new().with_style("", Style::colwise()),
        )?,
        false => model,
    };
    let data: Vec<_> = mesh.names().iter().filter(|name| *name != "tp").collect();
    if data.is_empty() {
        Ok(model)
    } else {
        fully_shard(model, &mesh.slice(data)?, FullyShard::new())
    }
}

/// Each rank loads every rank's record: those of the same parts, and no others.
fn exchanged(shape: &[usize], names: &[&'static str], same: impl Fn(usize, usize) -> bool + Sync) {
    let (trained, fresh) = (even(1), even(2));
    let test = MeshTest::new(shape, names.to_vec());
    let records = test.run(|mesh| bytes(&distribute(on_device(&trained, mesh.device()), mesh)?));
    test.run(|mesh| {
        let model = distribute(on_device(&fresh, mesh.device()), mesh)?;
        let expected = distribute(on_device(&trained, mesh.device()), mesh)?;
        for (other, record) in records.iter().enumerate() {
            match load(model.clone(), record) {
                Ok(loaded) => {
                    assert!(
                        same(mesh.rank(), other),
                        "rank {} has loaded the record of rank {other}",
                        mesh.rank()
                    );
                    assert_eq!(values(&loaded, None), values(&expected, None));
                    assert_eq!(named_parameters(&loaded)?.len(), 2);
                }
                Err(error) => assert!(
                    !same(mesh.rank(), other),
                    "rank {} of rank {other}: {error}",
                    mesh.rank()
                ),
            }
        }
        Ok(())
    });
}

#[test]
fn a_rank_loads_records_of_its_own_part_only() {
    exchanged(&[2], &["shard"], |rank, other| rank == other);
    exchanged(&[2], &["tp"], |rank, other| rank == other);
    exchanged(&[2, 2], &["dp", "tp"], |rank, other| rank == other);
    // Replicas hold the same.
    exchanged(&[2, 2], &["replicate", "shard"], |rank, other| {
        rank % 2 == other % 2
    });
}

#[test]
fn the_error_says_which_part_is_missing() {
    let layer =
        |d_input, device: &Device| LinearConfig::new(d_input, 8).with_bias(false).init(device);
    let model = layer(4, &Device::flex());
    let test = MeshTest::new([2], ["shard"]);
    let records = test.run(|mesh| bytes(&distribute(model.clone(), mesh)?));
    test.run(|mesh| {
        let sharded = distribute(model.clone(), mesh)?;
        let part = [
            "weight.distributed.part [0:2, 0:8] of [4, 8]",
            "weight.distributed.part [2:4, 0:8] of [4, 8]",
        ];
        let refused = |record: &[u8]| match load(sharded.clone(), record) {
            Err(RecordError::Validation(text)) => text,
            other => panic!("{:?}", other.map(|_| ())),
        };
        let text = refused(&records[1 - mesh.rank()]);
        assert!(
            text.contains("Missing") && text.contains(part[mesh.rank()]),
            "{text}"
        );
        // So is a record that says nothing of parts: that of an ordinary layer of the shard's
        // shape.
        let silent = bytes(&layer(2, mesh.device()))?;
        let text = refused(&silent);
        assert!(text.contains(part[mesh.rank()]), "{text}");
        let allowed = ModuleRecord::from_bytes(Bytes::from_bytes_vec(silent))
            .map_err(Error::other)?
            .allow_partial(true);
        assert!(sharded.clone().try_load_record(allowed).is_ok());
        // An ordinary model loads no part, of whatever shape.
        assert!(load(model.clone(), &records[mesh.rank()]).is_err());
        assert!(load(layer(2, mesh.device()), &records[mesh.rank()]).is_err());
        Ok(())
    });
}

/// A full record meets shards, or the other way round: burn's error gets the remedy, by `?` and in
/// the report of a panic.
#[test]
fn records_of_the_wrong_kind_say_what_to_do() {
    let (model, test) = (even(1), MeshTest::new([2], ["shard"]));
    let full = bytes(&model).unwrap();
    let sharded = |mesh: &DeviceMesh| distribute(on_device(&model, mesh.device()), mesh);
    let shards = test.run(|mesh| bytes(&sharded(mesh)?));
    let (before, save) = (
        "load a record of the full model before `fully_shard`",
        "Save the full model instead",
    );
    let told = |model: Linear, record: &[u8]| {
        Error::from(load(model, record).map(drop).unwrap_err()).to_string()
    };
    test.run(|mesh| {
        let says = |text: String, parts: [&str; 2]| {
            assert!(parts.iter().all(|part| text.contains(part)), "{text}")
        };
        says(
            told(sharded(mesh)?, &full),
            ["weight: shape mismatch", before],
        );
        says(
            told(model.clone(), &shards[mesh.rank()]),
            ["weight: shape mismatch", save],
        );
        says(
            told(sharded(mesh)?, &shards[1 - mesh.rank()]),
            ["Missing tensors", before],
        );
        // An ordinary layer of the shard's shape.
        let layer = |bias| LinearConfig::new(2, 8).with_bias(bias).init(mesh.device());
        says(
            told(layer(false), &shards[mesh.rank()]),
            ["Unused tensors", save],
        );
        let small = bytes(&layer(true))?;
        // Two models of which neither is a shard of the other.
        let text = told(LinearConfig::new(3, 7).init(mesh.device()), &small);
        assert!(!text.contains(before) && !text.contains(save), "{text}");
        Ok(())
    });
    let record = || ModuleRecord::from_bytes(Bytes::from_bytes_vec(full.clone())).unwrap();
    let error = test.run_failing(|mesh| {
        let _ = sharded(mesh)?.load_record(record());
        Ok(())
    });
    assert!(
        error.to_string().lines().next().unwrap().contains(before),
        "{error}"
    );
}

/// One line a process, whatever is saved how often.
#[test]
fn the_first_record_of_shards_causes_a_warning() {
    own_process(
        "fsdp::records::the_first_record_of_shards_causes_a_warning",
        || {
            let told = warnings("full_model", || {
                MeshTest::new([2], ["shard"]).run(|mesh| {
                    let sharded = distribute(on_device(&even(1), mesh.device()), mesh)?;
                    let _ = (
                        sharded.num_params(),
                        list_param_ids(&sharded),
                        full_model(&sharded)?,
                    );
                    let before = warnings("full_model", || ());
                    mesh.world().barrier("nothing is saved yet")?;
                    (0..2).try_for_each(|_| bytes(&sharded).map(drop))?;
                    assert_eq!(before, [""; 0]);
                    Ok(())
                });
            });
            assert!(
                told.len() == 1 && told[0].contains("has only this rank's shards"),
                "{told:?}"
            );
        },
    );
}

/// One rank holds the whole: its records are those of the ordinary model.
#[test]
fn a_record_of_the_full_model_is_an_ordinary_one() {
    let (trained, fresh) = (even(1), even(2));
    MeshTest::new([1], ["shard"]).run(|mesh| {
        let sharded = distribute(fresh.clone(), mesh)?;
        let loaded = load(sharded, &bytes(&trained)?).map_err(Error::other)?;
        assert_eq!(
            values(
                &load(fresh.clone(), &bytes(&loaded)?).map_err(Error::other)?,
                None
            ),
            values(&trained, None)
        );
        Ok(())
    });
}
