"""Seconds a training step in PyTorch, data parallel over two processes on gloo, beside `cargo bench --bench step -- --replicate`.

The same GPT, batch and optimizer in f32, one thread a process: with DistributedDataParallel, and as two unsharded copies at
once. Both kinds of steps alternate. `pip install torch`, then `python benches/step_ddp.py`.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from step_torch import BATCH, SEQ, VOCAB, Gpt


def step(model, optimizer):
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SEQ)) for _ in range(2))
    dist.barrier()
    start = time.perf_counter()
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - start


def worker(rank, options, rendezvous):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
    models = [DistributedDataParallel(Gpt(options.dim)), Gpt(options.dim)]
    kinds = [(model, torch.optim.AdamW(model.parameters(), lr=1e-4)) for model in models]
    seconds = [[], []]
    for at in range(options.warmup + options.steps * options.repeats):
        for (model, optimizer), of_kind in zip(kinds, seconds):
            taken = step(model, optimizer)
            if at >= options.warmup:
                of_kind.append(taken)
    if rank == 0:
        groups = [[of_kind[at:at + options.steps] for at in range(0, len(of_kind), options.steps)] for of_kind in seconds]
        ratios = sorted(statistics.median(one) / statistics.median(other) for one, other in zip(*groups))
        for name, of_kind in zip((f"DDP, {options.ranks} processes", f"{options.ranks} unsharded copies"), seconds):
            print(f"{name:<24} {statistics.median(of_kind):8.4f} s/step")
        print(f"ratio DDP / unsharded: {statistics.median(ratios):.3f}, of {len(ratios)} repeats {ratios[0]:.3f} to {ratios[-1]:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [("ranks", 2), ("dim", 512), ("steps", 6), ("warmup", 2), ("repeats", 5)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (parser.parse_args(), os.path.join(folder, "rendezvous")), nprocs=parser.parse_args().ranks)
