//! `llama_3d --weights`: a Llama in Hugging Face's layout, loaded into shards, compared with burn's
//! own reader and a forward with Hugging Face's rotary encoding.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use burn::module::{Module, Param};
use burn::store::ModuleSnapshot;
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::prelude::*;
use burn_dtensor::pretrained::pytorch_safetensors;
use burn_dtensor::testing::MeshTest;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::model::{Llama, LlamaConfig};
use super::weights::Weights;
use super::{HIDDEN, SEQ, VOCAB, config, plan, reference, tokens};
use crate::fsdp::support::{fill, furthest};

const FILES: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];
const UNUSED: &str = "model.layers.0.self_attn.rotary_emb.inv_freq";

/// Other values than the defaults of the example.
fn llama() -> LlamaConfig {
    LlamaConfig {
        norm_epsilon: 1e-3,
        rope_theta: 50.0,
        ..config()
    }
}

fn config_file(is_tied: bool) -> Value {
    let LlamaConfig {
        dim,
        layers,
        heads,
        kv_heads,
        norm_epsilon,
        rope_theta,
        ..
    } = llama();
    json!({
        "vocab_size": VOCAB, "hidden_size": dim, "intermediate_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": norm_epsilon,
        "rope_theta": rope_theta, "rope_scaling": null, "hidden_act": "silu", "tie_word_embeddings": is_tied,
    })
}

/// Writes a folder with random weights in two files.
fn write(name: &str, is_tied: bool) -> PathBuf {
    let folder = env::temp_dir().join(format!("burn-dtensor-llama-{name}-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config_file(is_tied).to_string()).unwrap();
    let LlamaConfig {
        dim,
        layers,
        heads,
        kv_heads,
        ..
    } = llama();
    let kv_dim = dim / heads * kv_heads;
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, dim])];
    for layer in 0..layers {
        let of_layer = [
            ("input_layernorm", vec![dim]),
            ("self_attn.q_proj", vec![dim, dim]),
            ("self_attn.k_proj", vec![kv_dim, dim]),
            ("self_attn.v_proj", vec![kv_dim, dim]),
            ("self_attn.o_proj", vec![dim, dim]),
            ("post_attention_layernorm", vec![dim]),
            ("mlp.gate_proj", vec![HIDDEN, dim]),
            ("mlp.up_proj", vec![HIDDEN, dim]),
            ("mlp.down_proj", vec![dim, HIDDEN]),
        ];
        shapes.extend(
            of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)),
        );
    }
    shapes.extend([
        ("model.norm.weight".to_owned(), vec![dim]),
        (UNUSED.to_owned(), vec![dim / heads / 2]),
    ]);
    if !is_tied {
        shapes.push(("lm_head.weight".to_owned(), vec![VOCAB, dim]));
    }
    let tensors = shapes
        .into_iter()
        .zip(1..)
        .map(|((name, shape), seed)| (name, fill(seed, &shape)));
    let tensors: BTreeMap<String, TensorData> = tensors.collect();
    let (first, last) = (tensors.len() / 2, &mut serde_json::Map::new());
    for (at, file) in FILES.into_iter().enumerate() {
        let of_file =
            tensors
                .iter()
                .skip(at * first)
                .take(if at == 0 { first } else { usize::MAX });
        let views = of_file.map(|(name, data)| {
            last.insert(name.clone(), file.into());
            (
                name,
                TensorView::new(Dtype::F32, data.shape().to_vec(), data.as_bytes()).unwrap(),
            )
        });
        safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &folder.join(file))
            .unwrap();
    }
    let index = json!({ "metadata": {}, "weight_map": last });
    fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    folder
}

/// Reads the files by burn's store. Queries and keys have Hugging Face's order.
fn by_burn(folder: &Path, is_tied: bool) -> Llama {
    let mut model = llama().init(&Device::flex());
    let names = [
        ("^model\\.layers\\.", "blocks."),
        ("^model\\.embed_tokens", "token"),
        ("^model\\.norm", "norm"),
        ("^lm_head", "head"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn\\.q_proj", "attention.query"),
        ("self_attn\\.k_proj", "attention.key"),
        ("self_attn\\.v_proj", "attention.value"),
        ("self_attn\\.o_proj", "attention.output"),
        ("mlp\\.gate_proj", "gate.linear_inner"),
        ("mlp\\.up_proj", "gate.linear_outer"),
        ("mlp\\.down_proj", "down"),
    ];
    let mut loaded = 0;
    for file in FILES {
        let store = pytorch_safetensors(folder.join(file)).allow_partial(true);
        let mut store = names.iter().fold(store, |store, (from, to)| {
            store.with_key_remapping(*from, *to)
        });
        loaded += model.load_from(&mut store).unwrap().applied.len();
    }
    assert_eq!(loaded, 3 + 9 * llama().layers - usize::from(is_tied));
    if is_tied {
        model.head.weight = Param::from_tensor(model.token.weight.val().transpose());
    }
    model
}

/// Turns `x` `[batch, heads, seq, width]` as transformers' `apply_rotary_pos_emb` does.
fn rotate_half(x: Tensor<4>) -> Tensor<4> {
    let ([_, _, seq, width], theta) = (x.dims(), llama().rope_theta);
    let angle = |at: usize| {
        let (position, pair) = (at / width, at % width % (width / 2));
        position as f32 / theta.powf(2.0 * pair as f32 / width as f32)
    };
    let angles = (0..seq * width).map(angle).collect::<Vec<_>>();
    let angles =
        Tensor::<2>::from_data(TensorData::new(angles, [seq, width]), &x.device()).unsqueeze();
    let [first, second] = x.clone().chunk(2, 3).try_into().unwrap();
    x * angles.clone().cos() + Tensor::cat(vec![second.neg(), first], 3) * angles.sin()
}

#[test]
fn a_llama_of_hugging_face_loads_into_the_shards_of_any_mesh() {
    for (shape, names, is_tied) in [
        (vec![2, 2, 2], vec!["replicate", "shard", "tp"], false),
        (vec![3, 2], vec!["shard", "tp"], true),
        (vec![2], vec!["tp"], false),
    ] {
        let folder = write(&format!("{}", names.len()), is_tied);
        let weights = Weights::open(&folder, SEQ).unwrap();
        assert_eq!(weights.config, llama());
        let full = by_burn(&folder, is_tied);
        let input = |device: &Device| tokens(0, 0, 0, device);
        let expected =
            reference::logits_turned(&full, input(&Device::flex()), &rotate_half).into_data();
        MeshTest::new(&shape, names).run(|mesh| {
            let (tp, device) = (mesh.slice("tp")?, mesh.device().clone().autodiff());
            let lazy = plan::parallel(weights.config.init(&device), &weights.config, mesh)?;
            let (model, unused, stats) = weights.load(lazy, mesh, 1 << 20)?;
            assert_eq!(unused, [UNUSED]);
            assert_eq!(
                stats.needed,
                4 * model.num_params() as u64,
                "each rank reads its shards, and nothing twice"
            );
            assert!(model.blocks[1].attention.query.weight.is_require_grad());
            let input = DTensor::from_local(input(&device), &tp, &[Placement::Replicate])?;
            let logits = model.forward(input).full_tensor()?.into_data();
            let distance = furthest(
                &logits.try_to_vec::<f32>().unwrap(),
                &expected.try_to_vec::<f32>().unwrap(),
            );
            assert!(distance < 1e-5, "on {mesh}: {distance}");
            Ok(())
        });
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn configurations_that_the_model_does_not_have_are_refused() {
    let folder = write("refused", false);
    for (key, value, named) in [
        ("attention_bias", json!(true), "biases"),
        ("head_dim", json!(8), "head_dim"),
        (
            "rope_scaling",
            json!({ "rope_type": "llama3", "factor": 8.0 }),
            "rotary",
        ),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("vocab_size", json!("many"), "config.json"),
    ] {
        let mut file = config_file(false);
        file[key] = value;
        fs::write(folder.join("config.json"), file.to_string()).unwrap();
        let error = Weights::open(&folder, SEQ).unwrap_err();
        assert!(error.contains(named), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}
