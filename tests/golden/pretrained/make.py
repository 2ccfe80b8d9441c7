"""Writes the files of this folder with PyTorch: `pip install torch safetensors`, then `python make.py`.

`model.pt` and `model.safetensors` hold the parameters of `Net`, `model.bf16.safetensors` the same rounded to bfloat16.
`values.json` holds an input, and the outputs that PyTorch computes in float32 with each of the two. The tests need no PyTorch.

`python make.py FILE` reads a safetensors file into `Net`, strictly, and prints the largest difference of its output.
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
from torch import nn

FOLDER = pathlib.Path(__file__).parent
VOCABULARY, WIDTH, HIDDEN, HEADS = 11, 8, 16, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        mixed = nn.functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.LayerNorm(WIDTH), mixer, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(Attention()), Block(nn.Linear(WIDTH, WIDTH, bias=False))])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make():
    torch.manual_seed(40)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4)
        tokens = torch.randint(VOCABULARY, (4, 5))
        state = net.state_dict()
        torch.save(state, FOLDER / "model.pt")
        safetensors.torch.save_file(state, FOLDER / "model.safetensors", metadata={"format": "pt"})
        output = net(tokens)
        rounded = {name: value.bfloat16() for name, value in state.items()}
        safetensors.torch.save_file(rounded, FOLDER / "model.bf16.safetensors", metadata={"format": "pt"})
        net.load_state_dict(rounded)
        values = {
            "torch_version": torch.__version__,
            "note": "tokens [batch, seq]; output and output_bf16 [batch, seq, vocabulary], row-major",
            "tokens": tokens.tolist(),
            "output": output.flatten().tolist(),
            "output_bf16": net(tokens).flatten().tolist(),
        }
        (FOLDER / "values.json").write_text(json.dumps(values) + "\n")


def check(file):
    values = json.loads((FOLDER / "values.json").read_text())
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt", "transformers refuses other files"
    net = Net()
    net.load_state_dict(safetensors.torch.load_file(file))
    with torch.no_grad():
        output = net(torch.tensor(values["tokens"])).flatten()
    print((output - torch.tensor(values["output"])).abs().max().item())


if __name__ == "__main__":
    check(sys.argv[1]) if sys.argv[1:] else make()
