"""The training of the stage files by PyTorch's own means: autograd on the whole model, DistributedDataParallel,
clip_grad_norm_, Adam. Data, modules, initial weights and command line are borrowed from stage 0."""

import gc
import json
import pathlib
import random
import sys
import types

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import stage0_ddp as stage  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        blocks = {f"block {i}": stage.Block for i in range(cfg.layers)}
        self.layers = torch.nn.ModuleDict()
        for name, kind in {"embedding": stage.Embedding, **blocks, "head": stage.Head}.items():
            torch.manual_seed(random.Random(f"{cfg.seed}/{name}").getrandbits(63))  # as the stage files do
            self.layers[name] = kind(cfg)

    def forward(self, x, y):
        for layer in self.layers.values():
            x = layer(x, y)
        return x


def main():
    cfg, device = stage.parse_args(), torch.device("cpu")
    dist.init_process_group("gloo")
    comm = types.SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    model = Model(cfg)
    data, model = stage.load_data(cfg), torch.nn.parallel.DistributedDataParallel(model)
    adam = torch.optim.Adam(model.parameters())
    with open(cfg.log_file, "w") if comm.rank == 0 else open("/dev/null", "w") as log:
        for step in range(cfg.steps):
            adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / cfg.warmup)
            adam.zero_grad()
            ((x, y),) = stage.load_batches(data, step, cfg, comm, device)
            loss = model(x, y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            adam.step()
            loss = loss.detach()
            dist.all_reduce(loss)
            print(json.dumps({"event": "step", "loss": loss.item() / comm.world_size, "norm": norm.item()}), file=log)
    del model  # DDP must not be the last to let go of the group: it would wait for gloo's thread, and that for the GIL
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
