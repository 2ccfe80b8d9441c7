//! Weights of PyTorch, loaded on the first rank, and written for PyTorch.
//!
//! `tests/golden/pretrained/make.py` wrote the files with PyTorch, and the outputs that PyTorch
//! computes with them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use burn::module::{Module, Param, ParamId};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::store::{ModuleSnapshot, ModuleStore, PytorchStore, SafetensorsStore};
use burn::tensor::activation::gelu;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::prelude::*;
use burn_dtensor::pretrained::{self, PretrainedError, pytorch_safetensors};
use burn_dtensor::testing::MeshTest;
use serde::Deserialize;
use serde_json::Value;

use crate::fsdp::support::furthest;

const VOCABULARY: usize = 11;
const WIDTH: usize = 8;
const HIDDEN: usize = 16;

/// `Net` of `make.py`.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm1: LayerNorm,
    mixer: Mixer,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

/// The first layer of a block. The variants are in burn's paths, and not in PyTorch's.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a test has a few of them")]
enum Mixer {
    Attention(MultiHeadAttention),
    Linear(Linear),
}

impl Net {
    /// Lazy.
    fn new(hidden: usize, device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(WIDTH, 2)
            .with_dropout(0.0)
            .init(device);
        let linear = LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(device);
        let block = |mixer| Block {
            norm1: LayerNormConfig::new(WIDTH).init(device),
            mixer,
            norm2: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, hidden).init(device),
            down: LinearConfig::new(hidden, WIDTH).init(device),
        };
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            blocks: [Mixer::Attention(attention), Mixer::Linear(linear)]
                .map(block)
                .into(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    /// `[batch, seq]` to `[batch, seq, vocabulary]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let mut x = net.embedding.forward(tokens);
            for block in &net.blocks {
                x = unit(block, x, |block, x| {
                    let h = block.norm1.forward(x.clone());
                    let x = x + match &block.mixer {
                        Mixer::Attention(attention) => {
                            attention.forward(MhaInput::self_attn(h)).context
                        }
                        Mixer::Linear(linear) => linear.forward(h),
                    };
                    x.clone()
                        + block
                            .down
                            .forward(gelu(block.up.forward(block.norm2.forward(x))))
                });
            }
            net.head.forward(net.norm.forward(x))
        })
    }
}

#[derive(Deserialize)]
struct Values {
    tokens: Vec<[i64; 5]>,
    output: Vec<f32>,
    output_bf16: Vec<f32>,
}

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/pretrained")
        .join(file)
}

fn golden_values() -> Values {
    serde_json::from_str(&fs::read_to_string(golden("values.json")).unwrap()).unwrap()
}

/// A folder that is gone when this is.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path =
            env::temp_dir().join(format!("burn-dtensor-pretrained-{}-{name}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn meshes() -> [MeshTest; 3] {
    [
        MeshTest::new([2], ["shard"]),
        MeshTest::new([3], ["shard"]),
        MeshTest::new([2, 2], ["shard", "tp"]),
    ]
}

fn distribute(net: Net, mesh: &DeviceMesh) -> Result<Net> {
    let units = FullyShard::new().with_units(["blocks.*"]);
    if mesh.ndim() == 1 {
        return fully_shard(net, mesh, units);
    }
    let plan = Plan::new()
        .with_style("blocks.*.up", Style::colwise())
        .with_style("blocks.*.down", Style::rowwise());
    fully_shard(
        parallelize(net, &mesh.slice("tp")?, plan)?,
        &mesh.slice("shard")?,
        units,
    )
}

/// Loads files of PyTorch, and returns the largest difference from its output.
fn difference<S: ModuleStore>(
    test: &MeshTest,
    store: impl Fn() -> S + Sync,
    output: &[f32],
) -> f64 {
    let Values { tokens, .. } = golden_values();
    let tokens: Vec<_> = tokens.into_iter().flatten().collect();
    let stored = parse(&golden("model.safetensors")).0.len();
    let differences = test.run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = Net::new(HIDDEN, &device);
        let (net, report) = pretrained::load_from(net, mesh, &mut store())?;
        assert_eq!((report.applied.len(), report.skipped.len()), (stored, 0));
        assert_eq!((report.missing.len(), report.unused.len()), (0, 0));
        let is_first = mesh.rank() == 0;
        assert_eq!(
            net.head.weight.is_initialized(),
            is_first,
            "the other ranks stay lazy"
        );
        let net = distribute(net, mesh)?;
        assert_eq!(net.head.weight.base().dtype(), DType::F32);
        assert!(net.head.weight.base().is_require_grad());
        let rows = tokens.len() / 5;
        let tokens = Tensor::from_data(TensorData::new(tokens.clone(), [rows, 5]), &device);
        Ok(furthest(
            &net.forward(tokens).into_data().try_to_vec::<f32>().unwrap(),
            output,
        ))
    });
    differences.into_iter().fold(0.0, f64::max)
}

#[test]
fn files_of_pytorch_compute_its_output() {
    let Values {
        output,
        output_bf16,
        ..
    } = golden_values();
    for test in meshes() {
        let pt = difference(
            &test,
            || PytorchStore::from_file(golden("model.pt")),
            &output,
        );
        let safetensors = difference(
            &test,
            || pytorch_safetensors(golden("model.safetensors")),
            &output,
        );
        // Into parameters of f32.
        let bf16 = difference(
            &test,
            || pytorch_safetensors(golden("model.bf16.safetensors")),
            &output_bf16,
        );
        assert!(
            [pt, safetensors, bf16]
                .iter()
                .all(|difference| *difference < 1e-5),
            "{pt}, {safetensors}, {bf16}"
        );
    }
    let other = difference(
        &meshes()[0],
        || pytorch_safetensors(golden("model.bf16.safetensors")),
        &output,
    );
    assert!(other > 1e-3, "rounding tells the two outputs apart");
}

/// Every rank gets the error, of the rank that reads, and they continue.
fn assert_fails<S: ModuleStore>(hidden: usize, store: impl Fn() -> S + Sync, expected: &str) {
    for test in [
        MeshTest::new([2], ["shard"]),
        MeshTest::new([2, 3], ["each", "shard"]),
    ] {
        test.run(|mesh| {
            let mesh = mesh.slice("shard")?;
            let net = Net::new(hidden, mesh.device());
            let error = pretrained::load_from(net, &mesh, &mut store())
                .map(drop)
                .unwrap_err();
            mesh.world().barrier("after it")?;
            let Error::Pretrained(PretrainedError::Load { rank, reason }) = &error else {
                panic!("{error}")
            };
            assert_eq!(*rank, mesh.ranks()[0]);
            assert!(reason.contains(expected), "{expected}: {reason}");
            assert!(error.to_string().contains(reason));
            Ok(())
        });
    }
}

#[test]
fn every_rank_gets_the_error_of_the_rank_that_reads() {
    assert_fails(
        HIDDEN,
        || PytorchStore::from_file(golden("none.pt")),
        "No such file",
    );
    assert_fails(
        HIDDEN,
        || pytorch_safetensors(golden("none.safetensors")),
        "No such file",
    );
    assert_fails(
        HIDDEN,
        || pytorch_safetensors(golden("values.json")),
        "SafeTensors error",
    );
    let renamed = || {
        pytorch_safetensors(golden("model.safetensors"))
            .with_key_remapping("^head.bias$", "head.offset")
    };
    assert_fails(HIDDEN, renamed, "head.bias");
    assert_fails(
        HIDDEN + 1,
        || PytorchStore::from_file(golden("model.pt")),
        "blocks.0.up.weight",
    );
    let unvalidated = || pytorch_safetensors(golden("model.safetensors")).validate(false);
    assert_fails(HIDDEN + 1, unvalidated, "blocks.0.up.weight");
}

#[test]
fn weights_are_loaded_before_a_model_is_distributed() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let net = fully_shard(Net::new(HIDDEN, mesh.device()), mesh, FullyShard::new())?;
        let store = &mut PytorchStore::from_file(golden("model.pt"));
        let loaded = pretrained::load_from(net, mesh, store).map(drop);
        let Err(Error::Pretrained(PretrainedError::Distributed { param })) = loaded else {
            panic!("{loaded:?}")
        };
        assert_eq!(param, "embedding.weight");
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Stored {
    fc: Linear,
    left_out: Linear,
    other: Linear,
    ids: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

#[derive(Module, Debug)]
struct Wanted {
    fc: Linear,
    left_out: Linear,
    new: Linear,
    ids: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

#[test]
fn every_rank_has_the_report_and_the_integers() {
    let (scratch, device) = (Scratch::new("partial"), Device::flex());
    let file = scratch.0.join("stored.safetensors");
    let linear = |device: &Device| LinearConfig::new(2, 3).init(device);
    let stored = Stored {
        fc: linear(&device),
        left_out: linear(&device),
        other: linear(&device),
        ids: Param::initialized(ParamId::new(), Tensor::from_data([7, 5, 3], &device)),
        mask: Param::initialized(ParamId::new(), Tensor::from_data([true, false], &device)),
    };
    stored
        .save_into(&mut SafetensorsStore::from_file(&file))
        .unwrap();
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device();
        let wanted = Wanted {
            fc: linear(device),
            left_out: linear(device),
            new: linear(device),
            ids: Param::initialized(ParamId::new(), Tensor::from_data([0, 0, 0], device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_data([false, false], device)),
        };
        let store = SafetensorsStore::from_file(&file).allow_partial(true);
        let mut store = store.with_predicate(|path, _| !path.starts_with("left_out"));
        let (loaded, report) = pretrained::load_from(wanted, mesh, &mut store)?;
        assert_eq!(report.applied, ["fc.weight", "fc.bias", "ids", "mask"]);
        assert_eq!(report.skipped, ["left_out.bias", "left_out.weight"]);
        assert_eq!(report.missing, ["new.bias", "new.weight"]);
        assert_eq!(report.unused, ["other.bias", "other.weight"]);
        assert!(!loaded.new.weight.is_initialized() && !loaded.left_out.weight.is_initialized());
        assert_eq!(
            loaded
                .ids
                .val()
                .into_data()
                .iter::<i64>()
                .collect::<Vec<_>>(),
            [7, 5, 3]
        );
        assert_eq!(
            loaded
                .mask
                .val()
                .into_data()
                .iter::<bool>()
                .collect::<Vec<_>>(),
            [true, false]
        );
        Ok(())
    });
}

/// A tensor of a file: dtype, shape, bytes.
type FileTensor = (String, Vec<usize>, Vec<u8>);

/// The tensors of a safetensors file, as dtype, shape and bytes by name; and its metadata.
fn parse(file: &Path) -> (BTreeMap<String, FileTensor>, Value) {
    #[derive(Deserialize)]
    struct Entry {
        dtype: String,
        shape: Vec<usize>,
        data_offsets: [usize; 2],
    }
    let bytes = fs::read(file).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let metadata = header.remove("__metadata__").unwrap();
    let tensor = |(name, entry)| {
        let Entry {
            dtype,
            shape,
            data_offsets: [from, to],
        } = serde_json::from_value(entry).unwrap();
        (name, (dtype, shape, data[from..to].to_vec()))
    };
    (header.into_iter().map(tensor).collect(), metadata)
}

#[test]
fn a_sharded_model_is_written_as_pytorch_writes_it() {
    let scratch = Scratch::new("written");
    let (expected, _) = parse(&golden("model.safetensors"));
    for test in meshes() {
        let file = scratch.0.join("model.safetensors");
        // The second time, it replaces the file of the first.
        for _ in 0..2 {
            test.run(|mesh| {
                let net = Net::new(HIDDEN, mesh.device());
                let (net, _) = pretrained::load_from(
                    net,
                    mesh,
                    &mut PytorchStore::from_file(golden("model.pt")),
                )?;
                let path = if mesh.rank() == 0 {
                    &file
                } else {
                    Path::new("/of/no/other/rank")
                };
                pretrained::save_into(
                    &distribute(net, mesh)?,
                    mesh,
                    &mut pytorch_safetensors(path),
                )
            });
        }
        let (written, metadata) = parse(&file);
        assert_eq!(written, expected);
        assert_eq!(metadata["format"], "pt");
        assert_eq!(
            fs::read_dir(&scratch.0).unwrap().count(),
            1,
            "no temporary file stays"
        );
    }
}

#[test]
fn every_rank_gets_the_error_of_the_rank_that_writes() {
    let scratch = Scratch::new("unwritten");
    for test in meshes() {
        test.run(|mesh| {
            let net = distribute(Net::new(HIDDEN, mesh.device()), mesh)?;
            let mut store = pytorch_safetensors(scratch.0.join("no folder/model.safetensors"));
            let error = pretrained::save_into(&net, mesh, &mut store).unwrap_err();
            mesh.world().barrier("after it")?;
            let Error::Pretrained(PretrainedError::Save { rank: 0, reason }) = &error else {
                panic!("{error}")
            };
            assert!(reason.contains("No such file"), "{reason}");
            Ok(())
        });
    }
}
