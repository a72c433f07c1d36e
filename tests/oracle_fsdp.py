"""What stage 3 should compute, by PyTorch's own means: fully_shard, clip_grad_norm_ and torch.optim.Adam, in fp32.

Of the stage file it borrows the model, its initial weights, the data and the options.
"""

import gc
import json
import pathlib
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import stage3_param as stage  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        blocks = {f"block {i}": stage.Block(cfg) for i in range(cfg.layers)}
        self.layers = torch.nn.ModuleDict({"embedding": stage.Embedding(cfg), **blocks, "head": stage.Head(cfg)})

    def forward(self, x, y):
        for layer in self.layers.values():
            x = layer(x, y)
        return x


def load_initial_weights(model, cfg, comm):
    for name, module in model.layers.items():
        layer = stage.Layer(name, module, cfg, comm, torch.device("cpu"), torch.float32)
        for weight, piece in zip(module.parameters(), layer.initial_weights(cfg).split(layer.sizes)):
            weight.copy_(piece.view(weight.shape))


def main():
    cfg = stage.parse_args()
    dist.init_process_group("gloo")
    comm = types.SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    data, model = stage.load_data(cfg), Model(cfg)
    with torch.no_grad():
        load_initial_weights(model, cfg, comm)
    mesh = dist.device_mesh.init_device_mesh("cpu", (comm.world_size,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    adam = torch.optim.Adam(model.parameters())
    with open(cfg.log, "w") if comm.rank == 0 else open("/dev/null", "w") as log:
        for step in range(cfg.steps):
            adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / cfg.warmup)
            adam.zero_grad()
            mean = torch.zeros(())
            for x, y in stage.load_batches(data, step, cfg, comm, torch.device("cpu")):
                loss = model(x, y) / cfg.micro_batches
                loss.backward()
                mean += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()
            adam.step()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            print(json.dumps({"event": "step", "loss": mean.item(), "norm": norm.item()}), file=log)
    del model, module, loss, adam  # as in oracle_ddp.py: nothing but this function may hold the group when it goes
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
