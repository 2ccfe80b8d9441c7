"""PyTorch's distributed checkpoint (DCP) on the tensors of `cargo bench --bench checkpoint -- --peer PYTHON`, which starts
this. `pip install torch numpy`.

Reads a line with the folder, the number of ranks and the shapes by name. Then it answers each line `save` or `load` with
the seconds that it took. Ranks are processes on gloo with one thread each, tensors are DTensors in `Shard(0)`.
"""

import json
import os
import shutil
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty


def main():
    task = json.loads(sys.stdin.readline())
    folder, ranks = task["folder"], task["ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def new():
        return {name: empty(shape, device_mesh=mesh, placements=[Shard(0)]) for name, shape in task["shapes"].items()}

    state = new()
    for tensor in state.values():
        tensor.to_local().uniform_()
    while True:
        command = [sys.stdin.readline().strip() if rank == 0 else None]
        dist.broadcast_object_list(command)
        into = new() if command == ["load"] else None
        if command == ["save"] and rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        start = time.perf_counter()
        match command:
            case ["save"]:
                dcp.save(state, checkpoint_id=folder)  # syncs its files
            case ["load"]:
                dcp.load(into, checkpoint_id=folder)
            case _:
                dist.destroy_process_group()
                return
        dist.barrier()
        if rank == 0:
            print(time.perf_counter() - start, flush=True)
        if into:
            assert all(torch.equal(into[name].to_local(), state[name].to_local()) for name in state)


if __name__ == "__main__":
    main()
