"""Host time of PyTorch's FSDP2, for `cargo bench --bench host_time -- --peer PYTHON`, which starts this. `pip install torch`.

Forward and backward of units whose compute is next to nothing. Ranks are processes on gloo with one thread each. Prints one
JSON line: for each round the median over its steps, in microseconds a unit, of `fully_shard` and of the same model unsharded.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(8, 8) / 8) for _ in range(params)])

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return x


def model(args):
    return nn.Sequential(*[Block(args.params) for _ in range(args.units)])


def time_round(module, x, args):
    """Microseconds a unit for forward and for backward, medians over the steps of a round."""
    forward, backward = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        y = module(x)
        middle = time.perf_counter()
        y.sum().backward()
        end = time.perf_counter()
        for param in module.parameters():
            param.grad = None
        forward.append(middle - start)
        backward.append(end - middle)
    return [statistics.median(times) * 1e6 / args.units for times in (forward, backward)]


def run(rank, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,))
    x = torch.ones(4, 8)
    unsharded, sharded = model(args), model(args)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    rounds = {"unsharded": [], "sharded": []}
    for _ in range(args.rounds + 1):
        for name, module in (("unsharded", unsharded), ("sharded", sharded)):
            dist.barrier()
            rounds[name].append(time_round(module, x, args))
    if rank == 0:
        # The first round warms up.
        print(json.dumps({"torch": torch.__version__, **{name: times[1:] for name, times in rounds.items()}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--units", type=int, default=50)
    parser.add_argument("--params", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(port, arguments), nprocs=arguments.ranks)
