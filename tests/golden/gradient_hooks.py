"""Golden values of PyTorch's gradient communication hooks.

Two processes on the gloo backend call the hooks of
torch.distributed.algorithms.ddp_comm_hooks on hand-made buckets. All inputs
and results go to one JSON file (first argument, default: hooks.json).
Every number list is flat, row-major, and holds exact float32 values.
"""

import json
import os
import sys
import tempfile
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as psgd
from torch.distributed.algorithms.ddp_comm_hooks import (
    quantization_hooks as quant,
)

WORLD = 2
COUNT = 37
CHANNEL = 16
SHAPES = {"a": (6, 5), "b": (4, 3, 2), "c": (7,)}

POWER_SGD_ABOUT = (
    "powerSGD_hook called directly on one bucket. The flat buffer holds a, "
    "then b, then c, each row-major; the error memory is one flat vector in "
    "the same order (here cut into a, b and c). a is the matrix 6 x 5, b is "
    "the matrix 4 x 6 (first dimension against the rest), c is a vector and "
    "is averaged without compression. initial_q is the Q as drawn, before "
    "it is orthogonalized (a: 5 x 2, b: 6 x 2). The error memory covers c "
    "too: there it is the local value minus the average, and it is added "
    "back at the next iteration. p is the P after the all-reduce (a sum, "
    "not an average) and the orthogonalization; q is the Q after the "
    "all-reduce and the division by the number of processes; it is "
    "orthogonalized at the start of the next iteration, not at the end of "
    "this one. error is the error after the iteration, per rank."
)
COMPRESS_ABOUT = (
    "The vector is cast to {0} (nearest, ties to even), then divided by the "
    "number of processes in {0} (rounded again), then summed in {0} (each "
    "addition of two values is done in float32 and rounded to {0}), then "
    "cast back to float32. PyTorch divides before the sum."
)
QUANT_ABOUT = (
    "The hook itself ran on CPU tensors, no formula was transcribed. scale, "
    "zero_point and quantized are those of each rank's own vector; result "
    "is the average, equal on both ranks. The minimum and maximum always "
    "include 0. scale = max((max - min) / 255, 1.1920929e-07); zero_point = "
    "clamp(0 - round(min / scale), 0, 255); quantized = clamp(round(x / "
    "scale) + zero_point, 0, 255); value = scale * (quantized - "
    "zero_point); result = (value of rank 0 + value of rank 1) / 2. All in "
    "float32; round is to nearest, ties to even."
)
CHANNEL_ABOUT = (
    " The vector is padded with zeros to a multiple of bucket_size and each "
    "run of bucket_size values has its own scale and zero point. A vector "
    "whose length is already a multiple gets one more channel of zeros, "
    "which is cut off again. quantized includes the padding."
)


class Bucket:
    """The part of GradBucket that the hooks use."""

    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        self.flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.flat

    def gradients(self):
        sizes = [shape.numel() for shape in self.shapes]
        parts = self.flat.split(sizes)
        return [p.view(s) for p, s in zip(parts, self.shapes)]


def numbers(tensor):
    """A flat list; Python floats hold every float32 exactly."""
    return tensor.detach().reshape(-1).tolist()


def gather(value):
    """The same value of every rank, in rank order."""
    out = [None] * WORLD
    dist.all_gather_object(out, value)
    return out


def same(value):
    """A value that must be equal on all ranks."""
    values = gather(value)
    assert all(v == values[0] for v in values), "ranks disagree"
    return values[0]


def cut(flat, names, sizes):
    """Cut a flat tensor into named lists."""
    return dict(zip(names, map(numbers, flat.split(sizes))))


def draw(seed, *shape):
    values = np.random.RandomState(seed).standard_normal(shape)
    return torch.from_numpy(values.astype(np.float32))


def power_sgd(rank):
    state = psgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        use_error_feedback=True,
        warm_start=True,
    )
    # The constructor refuses 0, which only guards against DDP regrouping
    # its buckets. These buckets never change.
    state.start_powerSGD_iter = 0

    names = list(SHAPES)
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    initial = {"a": draw(11, 5, 2), "b": draw(12, 6, 2)}
    waiting = list(initial.values())

    def given(*shape, **_):
        value = waiting.pop(0)
        assert (1, *value.shape) == tuple(shape)
        return value.unsqueeze(0)

    iterations = []
    for step in range(2):
        grads = [
            draw(100 + 10 * step + 5 * rank + i, *shape)
            for i, shape in enumerate(SHAPES.values())
        ]
        bucket = Bucket(grads)
        with mock.patch.object(torch, "randn", given):
            result = psgd.powerSGD_hook(state, bucket).wait()
        assert not waiting and state.iter == step + 1
        error = state.error_dict[0]
        iterations.append(
            {
                "gradients": gather(dict(zip(names, map(numbers, grads)))),
                "reduced": same(cut(result, names, sizes)),
                "error": gather(cut(error, names, sizes)),
                "p": same(cut(state.p_memory_dict[0], "ab", [12, 8])),
                "q": same(cut(state.q_memory_dict[0], "ab", [10, 12])),
            }
        )
    return {
        "about": POWER_SGD_ABOUT,
        "matrix_approximation_rank": 2,
        "orthogonalization_epsilon": 0.0,
        "shapes": SHAPES,
        "initial_q": {k: numbers(v) for k, v in initial.items()},
        "iterations": iterations,
    }


def compress(rank, hook, dtype, large, tiny):
    # Ordinary values, then values near both ends of the range of the type,
    # then ties: halfway between two neighbours of the type.
    x = draw(200 + rank, COUNT)
    x[8:12] *= large
    x[12:20] *= tiny
    step = torch.finfo(dtype).eps
    x[20] = 1 + step / 2
    x[21] = -(1 + 3 * step / 2)
    x[22] = torch.finfo(dtype).max
    x[23] = -torch.finfo(dtype).max
    x[24] = torch.finfo(dtype).smallest_normal
    x[25] = (1 + step) * [1, -1][rank]
    x[26] = torch.finfo(dtype).smallest_normal * step * (1 + 2 * rank)
    x[27] = -0.0
    inputs = gather(numbers(x))
    result = same(numbers(hook(None, Bucket([x])).wait()))
    assert np.isfinite([*inputs, result]).all()
    name = str(dtype).split(".")[1]
    return {
        "about": COMPRESS_ABOUT.format(name),
        "inputs": inputs,
        "result": result,
    }


def quantize_per_tensor(rank):
    if rank == 0:
        x = draw(300, COUNT)
    else:
        # A scale of exactly 1 / 128, so that ties and the clamp occur.
        values = np.random.RandomState(301).randint(-100, 150, COUNT)
        x = torch.from_numpy(values.astype(np.float32)) + 0.25
        x[0], x[1] = -101.5, 153.5
        x[2:8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 152.5])
        x /= 128
    inputs = gather(numbers(x))
    observer = torch.ao.quantization.MinMaxObserver()
    observer(x)
    scale, zero = observer.calculate_qparams()
    codes = quant._quantize_per_tensor_backend(x, scale[0], zero[0].float())
    result = quant.quantization_pertensor_hook(None, Bucket([x])).wait()
    return {
        "about": QUANT_ABOUT,
        "inputs": inputs,
        "scale": gather(scale.item()),
        "zero_point": gather(zero.item()),
        "quantized": gather(numbers(codes)),
        "result": same(numbers(result)),
    }


def quantize_per_channel(rank):
    # Rank 0: positive values in the first channel, negative ones in the
    # last. Both ranks: a second channel so small that the scale is floored.
    x = draw(400 + rank, COUNT)
    x[CHANNEL : 2 * CHANNEL] *= 2e-6
    if rank == 0:
        x[:CHANNEL].abs_()
        x[2 * CHANNEL :] = -x[2 * CHANNEL :].abs()
    inputs = gather(numbers(x))
    padded = torch.nn.functional.pad(x, (0, CHANNEL - COUNT % CHANNEL))
    padded = padded.view(-1, CHANNEL)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(padded)
    scale, zero = observer.calculate_qparams()
    codes = quant._quantize_per_channel_backend(padded, scale, zero.float())
    result = quant.quantization_perchannel_hook(
        None, Bucket([x]), bucket_size=CHANNEL
    ).wait()
    return {
        "about": QUANT_ABOUT + CHANNEL_ABOUT,
        "bucket_size": CHANNEL,
        "inputs": inputs,
        "scale": gather(numbers(scale)),
        "zero_point": gather(numbers(zero)),
        "quantized": gather(numbers(codes)),
        "result": same(numbers(result)),
    }


def work(rank, init, path):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=WORLD
    )
    cases = {
        "about": "PyTorch " + torch.__version__.split("+")[0]
        + ", 2 processes, gloo, CPU. Lists of two are in rank order.",
        "world_size": WORLD,
        "power_sgd": power_sgd(rank),
        "bf16_compress": compress(
            rank,
            default_hooks.bf16_compress_hook,
            torch.bfloat16,
            1e37,
            1e-39,
        ),
        "fp16_compress": compress(
            rank,
            default_hooks.fp16_compress_hook,
            torch.float16,
            2e4,
            1e-6,
        ),
        "quantize_per_tensor": quantize_per_tensor(rank),
        "quantize_per_channel": quantize_per_channel(rank),
    }
    if rank == 0:
        with open(path, "w") as file:
            json.dump(cases, file, indent=1, allow_nan=False)
            file.write("\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "hooks.json"
    with tempfile.TemporaryDirectory() as folder:
        store = "file://" + os.path.join(folder, "store")
        mp.spawn(work, args=(store, target), nprocs=WORLD)
