"""Runs a stage file, or a copy of one, and writes down what its own log leaves out:

    torchrun --standalone --nproc-per-node 2 notebooks/watch.py FOLDER SCRIPT [options of the script]

Rank r writes FOLDER/r.json, a list of records:

    moment  a mark of the metered step: live bytes by category `at` that mark, and the `most` since the mark before, and
            what the process has `besides` these tensors: arrays of numpy, bytes, lists
    whole   the `most` gathered layers at a time, and one (`stale`) that was used and still there at a later gather;
            and the bytes of the largest fp32 `slice` that a rank has of a layer
    found   a tensor that hangs on a layer and is none of the model states: `where`, and its `bytes`
    traffic what this rank sends in a `step`, whoever starts it: `elements` and `bytes`, and apart from these the
            elements in transfers of a `few` each

The script's meter sees a storage when an operation touches it. Here every tensor that Python knows is shown to it, at
the start of the step and at each mark, so that memory which nothing touches is counted too. What a process
has allocated is known on Linux only. A file or another process is out of sight.
"""

import ctypes
import gc
import importlib.util
import json
import os
import pathlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMED = {"flat": "parameters", "shard": "parameters", "grad": "gradients", "master": "optimizer"}  # attributes of Layer


def load(path):
    """A script as a fresh module."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


# Operation of torch.distributed -> which of its arguments is sent, and how often, on rank r of N. A rank that receives
# a broadcast sends nothing. What isn't named here counts with all its tensors.
SENT = {
    "allreduce_": (0, lambda r, N, args: 2 * (N - 1) / N),
    "broadcast_": (0, lambda r, N, args: (N - 1) * (args[2] == r)),
    "reduce_": (0, lambda r, N, args: (N - 1) / N),
    "allgather_": (1, lambda r, N, args: N - 1),
    "_allgather_base_": (1, lambda r, N, args: N - 1),
    "allgather_into_tensor_coalesced_": (1, lambda r, N, args: N - 1),
    "reduce_scatter_": (1, lambda r, N, args: (N - 1) / N),
    "_reduce_scatter_base_": (1, lambda r, N, args: (N - 1) / N),
    "reduce_scatter_tensor_coalesced_": (1, lambda r, N, args: (N - 1) / N),
    "alltoall_": (1, lambda r, N, args: (N - 1) / N),
    "alltoall_base_": (1, lambda r, N, args: (N - 1) / N),
    "gather_": (1, lambda r, N, args: (N - 1) / N),
    "scatter_": (1, lambda r, N, args: (N - 1) / N),
    "recv_": (0, lambda r, N, args: 0),
    "recv_any_source_": (0, lambda r, N, args: 0),
    "barrier": (0, lambda r, N, args: 0),
}
FEW = 16  # elements: a transfer of no more is one of scalars, such as the loss and the norm


class Traffic(TorchDispatchMode):
    """Counts what this rank sends, at torch.distributed itself."""

    def __init__(self, step):
        super().__init__()
        self.record = {"event": "traffic", "step": step, "elements": 0, "bytes": 0, "few": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            N, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            position, times = SENT.get(function._opname, (slice(None), lambda r, N, args: 1))
            times = times(rank, N, args)
            for tensor in torch.utils._pytree.tree_leaves(args[position]):
                if isinstance(tensor, torch.Tensor) and tensor.numel() <= FEW:
                    self.record["few"] += tensor.numel()
                elif isinstance(tensor, torch.Tensor):
                    self.record["elements"] += times * tensor.numel()
                    self.record["bytes"] += times * tensor.nbytes
        return function(*args, **(kwargs or {}))


class MallInfo(ctypes.Structure):  # of glibc's malloc.h
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]


def allocated():
    """The bytes that this process has from malloc() and has not freed: of PyTorch on a CPU, of Python, of any library.
    0 where the system has another malloc()."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    count.restype = MallInfo
    info = count()
    return info.field_4 + info.field_7  # hblkhd: mapped by themselves; uordblks: in use of all else


def reachable(thing, where, seen):
    """(where, tensor) of every tensor in a layer: attributes, and what lists, tuples and dicts hold."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield where, thing
        yield from reachable(thing.grad, where + ".grad", seen)
    elif hasattr(thing, "__array_interface__"):  # of numpy, perhaps with the memory of a tensor
        yield where, torch.from_numpy(thing)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from reachable(value, f"{where}[{key!r}]", seen)
    elif isinstance(thing, (list, tuple, set)):
        for at, value in enumerate(thing):
            yield from reachable(value, f"{where}[{at}]", seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, torch.nn.Module)):
        for key, value in vars(thing).items():
            yield from reachable(value, f"{where}.{key}", seen)


def watch(module):
    """Replaces the module's Meter and Collectives by such that look more closely. Returns the list of records, which
    is filled when the script counts its trace."""
    records, layers, gathered, found = [], [], {}, {}
    make_layers, train_step, steps = module.make_layers, module.train_step, []

    class Meter(module.Meter):
        def start(self, named):
            gc.collect()
            self.process = []  # what the process has allocated at each mark
            super().start(named)
            self.mark("the start of the step")

        def mark(self, label):
            if self.running:
                self.show_all()
                self.process.append(allocated())
            super().mark(label)

        def show_all(self):
            for layer in layers:
                for where, tensor in reachable(layer, "self", set()):
                    attribute = where.removeprefix("self.")
                    if attribute in NAMED:
                        if self.storages[self.see(tensor)]["category"] != "host":  # an exercise moves it there
                            self.name(tensor, NAMED[attribute])
                    elif attribute != "master.grad":
                        found[f"{where} of {layer.name}"] = tensor.untyped_storage().nbytes()
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
                    self.see(thing)
                elif type(thing) is torch.UntypedStorage and thing.device.type != "meta":
                    self.see(torch.empty(0, dtype=torch.uint8, device=thing.device).set_(thing))

        def replay(self):
            records.extend(moments(self))
            part = max(4 * (layer.own.stop - layer.own.start) for layer in layers)
            records.append(whole_layers(self, gathered) | {"slice": part})
            records.extend({"event": "found", "where": where, "bytes": size} for where, size in found.items())
            return super().replay()

    class Collectives(module.Collectives):
        def all_gather(self, full, layer):
            if self.meter.running:
                gathered[self.meter.see(full)] = layer.name
            return super().all_gather(full, layer)

    def remembered(*arguments):
        layers[:] = make_layers(*arguments)
        return layers

    def counted(*arguments):
        with Traffic(len(steps)) as traffic:
            steps.append(traffic)
            result = train_step(*arguments)
        records.append(traffic.record)
        return result

    module.Meter, module.Collectives = Meter, Collectives
    module.make_layers, module.train_step = remembered, counted
    return records


def moments(meter):
    """Live bytes by category at each mark, and the most since the mark before."""
    live = dict.fromkeys([*(storage["category"] for storage in meter.storages), "total"], 0)
    most, records, process = dict(live), [], iter(meter.process)
    for key, value in meter.trace:
        if isinstance(key, str):
            besides = next(process) - live["total"]
            records.append({"event": "moment", "label": key, "at": dict(live), "most": most, "besides": besides})
            most = dict(live)
            continue
        for category in (meter.storages[key]["category"], "total"):
            live[category] += value
            most[category] = max(most[category], live[category])
    return records


def whole_layers(meter, gathered):
    """How many gathered layers lived at a time, and one that was used already and still there at a later gather."""
    alive, used, most, stale, started = set(), set(), 0, "", False
    for key, value in meter.trace:
        if isinstance(key, str):
            started = True  # at the first mark; what is older was not gathered for this step
            used |= {number for number in alive if key.endswith(" " + gathered[number])}
        elif value < 0:
            alive.discard(key)
        elif started and key in gathered:
            stale = stale or next((gathered[number] for number in alive & used), "")
            alive.add(key)
            most = max(most, len(alive))
    return {"event": "whole", "most": most, "stale": stale}


if __name__ == "__main__":
    folder, sys.argv = pathlib.Path(sys.argv[1]), sys.argv[2:]
    script = load(sys.argv[0])
    records = watch(script)
    rank = int(os.environ.get("RANK", 0))
    script.main()
    (folder / f"{rank}.json").write_text(json.dumps([{"rank": rank, **record} for record in records]))
