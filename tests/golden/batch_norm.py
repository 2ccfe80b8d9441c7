"""Golden values of PyTorch's BatchNorm1d, 2d and 3d in training, on one process.

One step of each case: the output, and the gradients of (output * weights).sum().
Results go to one JSON file (first argument, default: batch_norm.json). Every
number list is flat, row-major, and holds exact float32 values.
"""

import json
import sys

import torch

SHAPES = [(7, 4), (4, 3, 5), (5, 3, 2, 2), (3, 2, 2, 1, 2)]
LAYERS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
MOMENTUM = 0.3
EPSILON = 1e-3


def case(shape):
    channels = shape[1]
    layer = LAYERS[len(shape)](channels, eps=EPSILON, momentum=MOMENTUM)
    own = [1, channels] + [1] * (len(shape) - 2)
    with torch.no_grad():
        layer.weight.copy_(1 + torch.rand(channels))
        layer.bias.copy_(torch.randn(channels))
        x = 2 * torch.randn(own) + torch.randn(shape) * (1 + torch.rand(own))
    x.requires_grad_()
    weights = torch.randn(shape)
    y = layer(x)
    (y * weights).sum().backward()
    tensors = {
        "gamma": layer.weight,
        "beta": layer.bias,
        "x": x,
        "weights": weights,
        "y": y,
        "x_grad": x.grad,
        "beta_grad": layer.bias.grad,
        "gamma_grad": layer.weight.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
    }
    flat = {name: tensor.detach().flatten().tolist() for name, tensor in tensors.items()}
    return {"shape": list(shape), **flat}


def main():
    torch.manual_seed(20)
    golden = {
        "about": f"PyTorch {torch.__version__.split('+')[0]}, CPU. running_var has Bessel's correction.",
        "momentum": MOMENTUM,
        "epsilon": EPSILON,
        "cases": [case(shape) for shape in SHAPES],
    }
    path = sys.argv[1] if len(sys.argv) > 1 else "batch_norm.json"
    with open(path, "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")


main()
