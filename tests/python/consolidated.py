"""Compares a checkpoint of `train_gpt` and what `checkpoint consolidate` made of it, in PyTorch: `.ci/python` runs

    python consolidated.py RUN EXPORTED STORIES VALIDATION_LOSS

1. Every tensor of `EXPORTED/model.safetensors` equals, to the bit, the chunks of the ranks' files, joined by the manifest.
2. Python's safetensors opens the ranks' files, and finds the same chunks.
3. The tensors load into a GPT of `torch.nn`, strictly, and it has the validation loss that the training printed.
"""

import json
import math
import pathlib
import sys

import numpy
import safetensors.numpy
import torch
from safetensors.torch import load_file
from torch import nn

LAYERS, HEADS, SEQ, VALIDATION_ROWS = 4, 4, 64, 256


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        y = self.attention_norm(x)
        query, key, value = heads(self.query(y)), heads(self.key(y)), heads(self.value(y))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def joined(folder):
    """The full tensors of a checkpoint, and how many chunks Python's safetensors finds where the manifest has them."""
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    files = [folder / file["name"] for file in manifest["files"]]
    opened = [safetensors.numpy.load_file(file) for file in files]
    tensors, chunks = {}, 0
    for name, tensor in manifest["tensors"].items():
        assert tensor["dtype"] == "F32", name
        tensors[name] = numpy.full(tensor["shape"], numpy.nan, numpy.float32)
        for offsets, shape, file, begin, _ in tensor["chunks"]:
            part = numpy.fromfile(files[file], numpy.float32, math.prod(shape), offset=begin).reshape(shape)
            ranges = [slice(first, first + length) for first, length in zip(offsets, shape)]
            tensors[name][tuple(ranges)] = part
            region = ",".join(f"{part.start}:{part.stop}" for part in ranges)
            stored = opened[file][name if shape == tensor["shape"] else f"{name}[{region}]"]
            assert stored.tobytes() == part.tobytes(), name
            chunks += 1
    assert chunks == sum(map(len, opened)), "the files have nothing else"
    return tensors, chunks


def validation_loss(gpt, stories):
    """The loss on the last tenth of the text, which begins with a paragraph or a line if one begins near."""
    text = stories.read_text()
    tokens = [sorted(set(text)).index(character) for character in text]
    first = len(text) * 9 // 10
    near = text[first : first + (len(text) - first) // 2]
    for separator in ["\n\n", "\n"]:
        if separator in near:
            first += near.index(separator) + len(separator)
            break
    rows = min((len(text) - first - 1) // SEQ, VALIDATION_ROWS)
    windows = torch.tensor([tokens[first + row * SEQ : first + (row + 1) * SEQ + 1] for row in range(rows)])
    with torch.no_grad():
        logits = gpt(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def latest(run):
    """The newest checkpoint. Other folders are of saves and removals, or set aside."""
    steps = [path.name.removeprefix("step-") for path in run.glob("step-*")]
    return run / f"step-{max(int(step) for step in steps if step.isdigit())}"


def main():
    run, exported, stories = map(pathlib.Path, sys.argv[1:4])
    saved, chunks = joined(latest(run))
    state = load_file(exported / "model.safetensors")
    gpt = Gpt(*state["token.weight"].shape)
    linears = {f"{name}.weight" for name, module in gpt.named_modules() if isinstance(module, nn.Linear)}
    found = 0
    for key, full in saved.items():
        if not key.startswith("model."):
            continue
        name = key.removeprefix("model.").replace(".gamma", ".weight").replace(".beta", ".bias")
        full = full.T if name in linears else full
        assert state[name].shape == full.shape and state[name].numpy().tobytes() == full.tobytes(), name
        found += 1
    assert found == len(state), state.keys()
    gpt.load_state_dict(state)
    loss, expected = validation_loss(gpt, stories), float(sys.argv[4])
    assert abs(loss - expected) < 2e-4, (loss, expected)  # It was printed with four digits.
    print(f"{found} of {len(saved)} tensors from {chunks} chunks are equal; validation loss {loss:.4f}, printed {expected}")


if __name__ == "__main__":
    main()
