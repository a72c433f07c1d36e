"""The model of the stage files, trained by what PyTorch ships. --ways says by which of these, one after another; all
other options are those of stage 0:

    ddp              DistributedDataParallel: nothing is partitioned
    ddp_views        the same with gradient_as_bucket_view=True
    zero_redundancy  the same with ZeroRedundancyOptimizer: the optimizer states are partitioned
    no_reshard       fully_shard a layer with reshard_after_forward=False: a layer stays whole from forward to backward
    fully_shard      fully_shard a layer
    root_only        fully_shard once, the whole model
    mixed            fully_shard a layer with bfloat16 parameters and gradients, by MixedPrecisionPolicy
    hybrid           fully_shard a layer over pairs of ranks; the pairs are replicas of each other

    torchrun --standalone --nproc-per-node 2 notebooks/peers.py --ways ddp,fully_shard --steps 5

All of them store and compute in fp32, but for the arithmetic of `mixed`. Notebook 05 writes counter.py, which counts
the last step.
"""

import argparse
import gc
import json
import pathlib
import sys
import types

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import stage0_ddp as stage  # noqa: E402


class Model(torch.nn.Module):
    """The layers of the stage files under the names that they have there, with activation checkpoints (§3.2)."""

    def __init__(self, cfg):
        super().__init__()
        blocks = {f"block {i}": stage.Block(cfg) for i in range(cfg.layers)}
        self.layers = torch.nn.ModuleDict({"embedding": stage.Embedding(cfg), **blocks, "head": stage.Head(cfg)})

    def forward(self, x, y):
        for layer in self.layers.values():
            x = checkpoint(layer, x, y, use_reentrant=False)
        return x


def initial_model(cfg, device):
    """The model with the initial weights of the stage files."""
    model, alone = Model(cfg).to(device), types.SimpleNamespace(rank=0, world_size=1)
    with torch.no_grad():
        for module, layer in zip(model.layers.values(), stage.make_layers(cfg, alone, device)):
            for weight, piece in zip(module.parameters(), layer.master.split(layer.sizes)):
                weight.copy_(piece.view(weight.shape))
    return model


def wrap(way, model, keep=()):
    """The model and its Adam, by one of the ways above. `keep`: names of layers that stay whole after forward."""
    knobs, parts = {}, dict(model.layers) | {"the rest": model}
    if way in ("ddp", "ddp_views", "zero_redundancy"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=way == "ddp_views")
    else:
        if way == "no_reshard":
            keep = parts
        if way == "root_only":
            parts = {"the whole": model}
        if way == "mixed":
            knobs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if way == "hybrid":
            kind = next(model.parameters()).device.type
            knobs["mesh"] = init_device_mesh(kind, (dist.get_world_size() // 2, 2))
        for name, part in parts.items():
            fully_shard(part, reshard_after_forward=False if name in keep else None, **knobs)
    if way == "zero_redundancy":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, fused=True)
    return model, torch.optim.Adam(model.parameters(), fused=True)


def train_step(model, adam, batches, lr, clip, mark=lambda label: None):
    """One step. Returns the mean loss of this rank and the global norm of the gradient. `mark` is called at the end of
    each part of the step."""
    adam.zero_grad()
    loss = torch.zeros((), device=batches[0][0].device)
    for x, y in batches:
        part = model(x, y) / len(batches)
        mark("forward")
        part.backward()
        mark("backward")
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    adam.param_groups[0]["lr"] = lr
    adam.step()
    mark("norm and Adam")
    return loss, getattr(norm, "full_tensor", lambda: norm)()  # fully_shard's norm is a DTensor


def local(tensors):
    """What this rank holds: the local part of each DTensor."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]


def states(model, adam):
    """{category: tensors that this rank keeps from step to step, and its gradients}"""
    inner = getattr(adam, "optim", adam)  # ZeroRedundancyOptimizer has one in it, for this rank's part
    moments = [state[name] for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
    weights = list(model.parameters())
    return {
        "parameters": local(weights),
        "gradients": local(weight.grad for weight in weights),
        "optimizer": local(moments),
    }


def nbytes(tensors):
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def train(way, cfg, options, comm, device, record):
    """Trains one model, and records its losses and what the counter saw in the last step."""
    from counter import Counter

    data, counter, first = stage.load_data(cfg), Counter(), 0
    counter.looking = False
    with counter:  # from the start: what lives from step to step is born here
        model, adam = wrap(way, initial_model(cfg, device), options.keep.split(","))
        if options.load:
            first = load_checkpoint(model, adam, options.load)
        for step in range(first, cfg.steps):
            batches = stage.load_batches(data, step, cfg, comm, device)
            counter.looking = step == cfg.steps - 1  # at every operation, which is slow
            counter.sent.clear()
            marks = []  # (operations until here, the part of the step that has ended)
            loss, norm = train_step(
                model, adam, batches, cfg.lr * min(1, (step + 1) / max(1, cfg.warmup)), cfg.clip,
                lambda label: marks.append((len(counter.trace), label)),
            )  # fmt: skip
            counted = {"live": counter.live(), "trace": list(counter.trace), "sent": dict(counter.sent)}
            counted["marks"] = marks
            dist.all_reduce(loss)
            record("step", way=way, step=step, loss=loss.item() / comm.world_size, norm=norm.item())
            if step + 1 == options.save_after:
                save_checkpoint(model, adam, options.save, step + 1)
    mine = counted | {category: nbytes(tensors) for category, tensors in states(model, adam).items()}
    everyone = [None] * comm.world_size
    dist.all_gather_object(everyone, mine)
    for rank, fields in enumerate(everyone):
        record("counted", way=way, rank=rank, **fields)


def save_checkpoint(model, adam, folder, step):
    """Every rank writes its own part, at once."""
    weights, moments = get_state_dict(model, adam)
    dcp.save({"model": weights, "adam": moments, "step": step}, checkpoint_id=folder)


def load_checkpoint(model, adam, folder):
    """Every rank reads the part that it has now, whoever wrote it. Returns the number of steps done."""
    weights, moments = get_state_dict(model, adam)
    content = {"model": weights, "adam": moments, "step": 0}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(model, adam, model_state_dict=content["model"], optim_state_dict=content["adam"])
    return content["step"]


def main():
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ways", default="fully_shard")
    parser.add_argument("--keep", default="")  # names of layers that are not resharded after forward
    parser.add_argument("--save", default="")  # a folder for a checkpoint
    parser.add_argument("--save-after", type=int)  # so many steps
    parser.add_argument("--load", default="")  # such a folder: go on where it was saved
    options, sys.argv[1:] = parser.parse_known_args()
    cfg, device = stage.parse_args(), torch.device("cpu")
    cfg.dtype = cfg.compute = "float32"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    comm = types.SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    log = open(cfg.log_file, "w") if comm.rank == 0 and cfg.log_file else None

    def record(event, **fields):
        if log:
            print(json.dumps({"event": event, **fields}), file=log, flush=True)

    psi = sum(weight.numel() for weight in Model(cfg).parameters())
    record("config", **vars(cfg) | {"world_size": comm.world_size, "psi": psi})
    for way in options.ways.split(","):
        train(way, cfg, options, comm, device, record)
        gc.collect()  # a model must not be the last to hold the group, whose threads would outlive it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
