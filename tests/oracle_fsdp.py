"""What stage 3 should compute, by PyTorch's own means: fully_shard, clip_grad_norm_ and torch.optim.Adam, in fp32.

The model, its initial weights, the data and the options are those of oracle_ddp.py.
"""

import gc
import json
import types

import torch
import torch.distributed as dist
from oracle_ddp import Model, stage
from torch.distributed.fsdp import fully_shard


def main():
    cfg = stage.parse_args()
    dist.init_process_group("gloo")
    comm = types.SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    data, model = stage.load_data(cfg), Model(cfg)
    mesh = dist.device_mesh.init_device_mesh("cpu", (comm.world_size,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    adam = torch.optim.Adam(model.parameters())
    with open(cfg.log_file, "w") if comm.rank == 0 else open("/dev/null", "w") as log:
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
