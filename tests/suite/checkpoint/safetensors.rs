//! Weights in safetensors files that another library wrote, loaded into every layout.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_dtensor::checkpoint::{SafetensorsWeights, StateDict, WeightSource};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::folder::Folder;
use super::net::{LAYOUTS, Net, WIDTH, device, test, values};

/// Rows of other tensors before and after one with which they are fused.
const OTHERS: [usize; 2] = [3, 2];

/// Returns the tensor transposed, and with other rows around it, by burn's operations.
fn stored(path: &str, value: TensorData) -> TensorData {
    if path == "mask" || path == "steps" {
        return value;
    }
    let cpu = Device::flex();
    match path {
        "up.weight" => Tensor::<2>::from_data(value, &cpu).transpose().into_data(),
        "down.weight" => {
            let [before, after] = OTHERS.map(|rows| Tensor::<2>::full([rows, WIDTH], 9.0, &cpu));
            Tensor::cat(vec![before, Tensor::from_data(value, &cpu), after], 0).into_data()
        }
        "frozen.weight" => {
            let [before, after] = OTHERS.map(|rows| Tensor::<2>::full([rows, WIDTH], 9.0, &cpu));
            Tensor::cat(
                vec![
                    before,
                    Tensor::<2>::from_data(value, &cpu).transpose(),
                    after,
                ],
                0,
            )
            .into_data()
        }
        _ => value,
    }
}

fn source(path: &str) -> Option<WeightSource> {
    let source = WeightSource::new(format!("transformer.{path}"));
    let rows = |len: usize| OTHERS[0]..OTHERS[0] + len;
    Some(match path {
        "up.weight" => source.transposed(),
        "down.weight" => source.rows(rows(7)),
        "frozen.weight" => source.rows(rows(1)).transposed(),
        _ => source,
    })
}

fn dtype(data: &TensorData) -> Dtype {
    match data.dtype() {
        DType::F32 => Dtype::F32,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::Bool(_) => Dtype::BOOL,
        other => panic!("the model has no {other:?}"),
    }
}

/// Writes the model's tensors into two files with an index.
fn write(folder: &std::path::Path, model: &BTreeMap<String, TensorData>) {
    let tensors: Vec<_> = model
        .iter()
        .map(|(path, value)| (path, stored(path, value.clone())))
        .collect();
    let mut index = serde_json::Map::new();
    for (file, part) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        // With characters that a checkpoint's own files do not have.
        let name = format!("mod\u{e8}le {} of 2.safetensors", file + 1);
        let views = part.iter().map(|(path, data)| {
            index.insert(format!("transformer.{path}"), name.clone().into());
            let view =
                TensorView::new(dtype(data), data.shape().to_vec(), data.as_bytes()).unwrap();
            (format!("transformer.{path}"), view)
        });
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::serialize_to_file(views, Some(metadata), &folder.join(&name)).unwrap();
    }
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": index });
    fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
}

#[test]
fn weights_of_other_libraries_load_into_every_layout() {
    let folder = Folder::new("weights");
    let expected = values(&Net::new(1, &Device::flex()));
    write(&folder, &expected);
    test().run(|mesh| {
        let weights = SafetensorsWeights::open(&*folder, mesh)?;
        assert_eq!(weights.keys().count(), expected.len());
        for (layout, distribute) in LAYOUTS {
            let model = distribute(Net::new(2, &device(mesh)), mesh)?;
            let (model, report) = weights.load_model(model, source)?;
            assert_eq!(report.loaded.len(), expected.len(), "{layout}: {report:?}");
            assert!(
                report.missing.is_empty() && report.unexpected.is_empty(),
                "{layout}: {report:?}"
            );
            assert_eq!(
                StateDict::of_model(&model, mesh)?.full()?,
                expected,
                "{layout}"
            );
        }
        Ok(())
    });
}

/// As on two hosts with caches of their own.
#[test]
fn files_that_differ_between_ranks_are_refused() {
    let folders = [1, 2].map(|seed| {
        let folder = Folder::new(&format!("revision-{seed}"));
        let mut model = values(&Net::new(1, &Device::flex()));
        if seed == 2 {
            model.remove("spare");
        }
        write(&folder, &model);
        folder
    });
    test().run(|mesh| {
        let own = &*folders[usize::from(mesh.rank() == 3)];
        let error = SafetensorsWeights::open(own, mesh)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("is not the same folder on rank 3 as on rank 0"),
            "{error}"
        );
        Ok(())
    });
}

/// Tensors of names, dtypes and shapes that no checkpoint has count only if a parameter reads them.
#[test]
fn a_file_with_odd_tensors_loads_apart_from_them() {
    let folder = Folder::new("odd");
    let file = folder.join("odd names.safetensors");
    let (ones, zeros) = ([1; 64], [0; 64]);
    let tensors = [
        ("weight[0:2,0:3]", Dtype::F32, vec![2, 3], &zeros[..24]),
        ("bias", Dtype::F32, vec![3], &zeros[..12]),
        ("steps", Dtype::I64, vec![], &zeros[..8]),
        ("nine", Dtype::U8, vec![1; 9], &ones[..1]),
        ("eighth", Dtype::F8_E4M3, vec![5], &ones[..5]),
    ];
    let views = tensors
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(dtype, shape, bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &file).unwrap();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let weights = SafetensorsWeights::open(&file, mesh)?;
        let model = || {
            fully_shard(
                LinearConfig::new(2, 3).init(mesh.device()),
                mesh,
                FullyShard::new(),
            )
        };
        let weight = |path: &str| {
            WeightSource::new(if path == "weight" {
                "weight[0:2,0:3]"
            } else {
                path
            })
        };
        let (model, report) = weights.load_model(model()?, |path| Some(weight(path)))?;
        assert!(
            values(&full_model(&model)?)
                .values()
                .all(|data| data.iter::<f32>().all(|value| value == 0.0))
        );
        assert_eq!(report.unexpected, ["eighth", "nine", "steps"]);
        for (key, saved) in [
            ("steps", "[] i64"),
            ("nine", "[1, 1, 1, 1, 1, 1, 1, 1, 1] u8"),
            ("eighth", "[5] F8_E4M3"),
        ] {
            let error = weights
                .load_model(model.clone(), |_| Some(WeightSource::new(key)))
                .map(drop)
                .unwrap_err();
            assert!(
                error.to_string().contains(&format!(
                    "`bias` is [3] f32, but `{key}` was saved as {saved}"
                )),
                "{error}"
            );
        }
        Ok(())
    });
}

/// Everything that does not fit is listed in one error on all ranks.
#[test]
fn weights_that_do_not_fit_are_listed_on_all_ranks() {
    let folder = Folder::new("misfits");
    write(&folder, &values(&Net::new(1, &Device::flex())));
    test().run(|mesh| {
        let weights = SafetensorsWeights::open(folder.join("model.safetensors.index.json"), mesh)?;
        let model = (LAYOUTS[3].1)(Net::new(2, &device(mesh)), mesh)?;
        let error = weights.load_model(model, |path| match path {
            "up.weight" => Some(WeightSource::new("transformer.up.weight")),
            "down.weight" => Some(WeightSource::new("transformer.down.weight").rows(6..14)),
            "norm.gamma" => Some(WeightSource::new("transformer.norm.gamma").transposed()),
            "frozen.bias" => Some(WeightSource::new("frozen.bias")),
            "spare" => None,
            _ => source(path),
        });
        let text = error.map(drop).unwrap_err().to_string();
        for part in [
            "`up.weight` is [5, 7]",
            "[7, 5]",
            "rows 6..14",
            "`norm.gamma`",
            "to be transposed",
            "frozen.bias",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("spare"), "{text}");
        assert!(
            text.contains("Return another `WeightSource`") && !text.contains("LoadOptions"),
            "{text}"
        );
        Ok(())
    });
}
