"""Writes a Llama with random weights in Hugging Face's layout, for `llama_3d --weights`: config.json, several safetensors
files, and their index. The sizes are those of the example unless options say otherwise: `pip install numpy safetensors`,
then `python make_weights.py FOLDER`.
"""

import argparse
import json
import pathlib

import numpy
import safetensors.numpy

STORIES = pathlib.Path(__file__).parent.parent / "common" / "stories.txt"


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--vocab", type=int, default=len(set(STORIES.read_text())), help="default: the stories' characters")
    for name, default in dict(dim=64, hidden=172, layers=2, heads=8, kv_heads=4, files=3, seed=0).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    return parser.parse_args()


def shapes(o):
    """The tensors by name: [out, in] for layers of PyTorch's `Linear`."""
    kv_dim = o.dim // o.heads * o.kv_heads
    of_layer = {
        "input_layernorm": (o.dim,),
        "self_attn.q_proj": (o.dim, o.dim),
        "self_attn.k_proj": (kv_dim, o.dim),
        "self_attn.v_proj": (kv_dim, o.dim),
        "self_attn.o_proj": (o.dim, o.dim),
        "post_attention_layernorm": (o.dim,),
        "mlp.gate_proj": (o.hidden, o.dim),
        "mlp.up_proj": (o.hidden, o.dim),
        "mlp.down_proj": (o.dim, o.hidden),
    }
    layers = {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(o.layers) for name, shape in of_layer.items()
    }
    embedding = {"model.embed_tokens.weight": (o.vocab, o.dim)}
    return embedding | layers | {"model.norm.weight": (o.dim,), "lm_head.weight": (o.vocab, o.dim)}


def values(rng, shape, dtype):
    around = 1 if len(shape) == 1 else 0
    return (around + 0.02 * rng.standard_normal(shape, numpy.float32)).astype(dtype)


def main():
    o = options()
    rng = numpy.random.default_rng(o.seed)
    o.folder.mkdir(parents=True, exist_ok=True)
    tensors = list(shapes(o).items())
    per_file = -(-len(tensors) // o.files)
    count = -(-len(tensors) // per_file)
    index, total = {}, 0
    for at in range(count):
        name = f"model-{at + 1:05}-of-{count:05}.safetensors"
        part = {key: values(rng, shape, o.dtype) for key, shape in tensors[at * per_file : (at + 1) * per_file]}
        safetensors.numpy.save_file(part, o.folder / name, {"format": "pt"})
        index |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in part.values())
    config = {
        "model_type": "llama",
        "vocab_size": o.vocab,
        "hidden_size": o.dim,
        "intermediate_size": o.hidden,
        "num_hidden_layers": o.layers,
        "num_attention_heads": o.heads,
        "num_key_value_heads": o.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": o.dtype,
    }
    (o.folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (o.folder / "model.safetensors.index.json").write_text(weight_map)
    print(f"{o.folder}: {total / 1e6:.1f} MB in {count} files")


if __name__ == "__main__":
    main()
