"""Seconds a training step in PyTorch on one device, beside `cargo bench --bench step -- --device cuda --ranks 1`.

The same GPT, batch and optimizer in f32 without TF32: with FSDP2 over one rank, and unsharded. Both kinds of steps alternate;
a part of a step ends when the device has done its work. `pip install torch`, then `python benches/step_torch.py --dim 2048`.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, LAYERS, HEADS, BATCH = 4096, 256, 8, 8, 4


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, seq, dim = x.shape
        h = self.norms[0](x)
        heads = [p(h).view(batch, seq, HEADS, -1).transpose(1, 2) for p in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, seq, dim)
        x = x + self.output(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step(model, optimizer, device, finish):
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SEQ), device=device) for _ in range(2))
    finish()
    times = [time.perf_counter()]
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    for part in (lambda: None, loss.backward, lambda: (optimizer.step(), optimizer.zero_grad())):
        part()
        finish()
        times.append(time.perf_counter())
    return [times[3] - times[0]] + [after - before for before, after in zip(times, times[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each kind in each repeat")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fused", action="store_true", help="AdamW with fused=True")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(args.device, (1,))
    kinds = []
    for sharded in (True, False):
        model = Gpt(args.dim).to(args.device)
        if sharded:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.fused or None)
        kinds.append((model, optimizer, []))
    finish = torch.cuda.synchronize if cuda else lambda: None
    for index in range(args.warmup + args.steps * args.repeats):
        for model, optimizer, times in kinds:
            taken = step(model, optimizer, args.device, finish)
            if index >= args.warmup:
                times.append(taken)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'CPU'}")
    print(f"{'':<24} {'s/step':>8} {'forward':>8} {'backward':>8} {'AdamW':>8} {'tokens/s':>10}")
    for name, (_, _, times) in zip(("FSDP2, 1 rank", "unsharded"), kinds):
        medians = [statistics.median(part) for part in zip(*times)]
        print(f"{name:<24}", *(f"{seconds:>8.4f}" for seconds in medians), f"{BATCH * SEQ / medians[0]:>10.0f}")
    groups = zip(*([kind[2][i : i + args.steps] for i in range(0, len(kind[2]), args.steps)] for kind in kinds))
    ratios = sorted(statistics.median(t[0] for t in a) / statistics.median(t[0] for t in b) for a, b in groups)
    print(f"ratio FSDP2 / unsharded: {statistics.median(ratios):.3f}, of {len(ratios)} {ratios[0]:.3f} to {ratios[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
