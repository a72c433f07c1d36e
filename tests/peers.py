"""The stages beside what PyTorch ships: python tests/peers.py prints tables, --ranks 2 one of them (Linux).

DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard (as notebooks/peers.py sets them up), one rank that
communicates with nobody, and our stages: the same modules, initial weights, data, clipping and fused Adam, fp32, each
block recomputed in the backward pass, one thread a rank. All of them live in the same processes and take turns, step by
step and each round in another order, so that whatever else the machine does hits all alike. Then a last, metered step.

The recomputation of torch.utils.checkpoint stops early: it leaves out a block's last product, whose result the backward
pass does not need. That is 1/12 of all products, and our stages do compute it. It is off here, but in `alone_early`,
which shows what it is worth; `--early-stop` leaves it on in all. `--sizes`, `--ranks` and `--rounds` run a part.

Times are ratios within a round: their median, and their quartiles. Bytes sent are the kernel's count. Our stages keep
an fp32 master copy besides the stored parameters, as §3.1 does for 16 bits: stored in fp32 that is 4Ψ bytes more than a
peer needs, 4Ψ/N from stage 1 on, and is in their peak. All but `alone`, which trains on a rank's own data, must end at
the same loss.
"""

import argparse
import functools
import gc
import importlib
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time
import types
import weakref

import torch
import torch.distributed as dist
from drive import bytes_sent
from launch import progress
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT)]
import peers  # noqa: E402  notebooks/peers.py

SIZES = {
    "3.3M": {"layers": 4, "width": 256, "heads": 8, "context": 128, "batch": 8},
    "25.5M": {"layers": 8, "width": 512, "heads": 8, "context": 128, "batch": 4},
}
# Each of our stages is compared with the peer that partitions the same.
PEERS = {
    "stage0_ddp": "ddp",
    "stage1_os": "zero_redundancy",
    "stage2_grad": "no_reshard",
    "stage3_param": "fully_shard",
}
WAYS = ("alone", "alone_early", *PEERS.values(), *PEERS)
ROUNDS = {2: 4, 4: 3}
CPU = torch.device("cpu")


class Live(TorchDispatchMode):
    """The most bytes of tensors that are alive at a time, counted after every operation while `looking`.

    It asks every storage for its size each time, because fully_shard empties storages and keeps them.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.looking, self.most = weakref.WeakValueDictionary(), False, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # look below: at the operation on its local part
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":  # those have no memory
                self.storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
        if self.looking:
            self.most = max(self.most, sum(storage.nbytes() for storage in self.storages.values()))
        return result


def peer(way, cfg):
    """A function that does a step and returns the loss of this rank's batch."""
    model = peers.initial_model(cfg, CPU)
    if way.startswith("alone"):
        adam = torch.optim.Adam(model.parameters(), fused=True)
    else:
        model, adam = peers.wrap(way, model)

    def step(batches, lr, metered):
        with set_checkpoint_early_stop(cfg.early_stop or way == "alone_early"):
            return peers.train_step(model, adam, batches, lr, cfg.clip)[0]

    return step


def ours(name, cfg):
    """The same for a stage file. It returns the mean loss over the ranks."""
    stage = importlib.import_module(name)
    meter = stage.Meter(CPU)
    comm = stage.Collectives(cfg, meter, dist.group.WORLD)
    layers = stage.make_layers(cfg, comm, CPU)
    adam = torch.optim.Adam([layer.master for layer in layers], fused=True)

    def step(batches, lr, metered):
        adam.param_groups[0]["lr"] = lr
        comm.sent, meter.spans = {}, []
        if metered:
            meter.start([])  # what it counts is not read, but while it runs gloo's thread is waited for
        loss, _ = stage.train_step(layers, adam, batches, 1.0, cfg, comm, meter)
        meter.running = False
        return loss

    return step


def mean(value):
    """Over the ranks."""
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(cfg, rounds):
    """{way: (seconds of each round, bytes sent in a step, most live bytes, loss of the last step)}"""
    comm = types.SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    data = peers.stage.load_data(cfg)
    load = functools.cache(lambda step: peers.stage.load_batches(data, step, cfg, comm, CPU))
    steps, meters, seconds, last = {}, {way: Live() for way in WAYS}, {way: [] for way in WAYS}, {}

    def turn(way, step, metered=False):
        batches, lr = load(step), cfg.lr * min(1, (step + 1) / cfg.warmup)
        dist.barrier()
        start, sent = time.perf_counter(), bytes_sent() if metered else 0
        loss = steps[way](batches, lr, metered)
        dist.barrier()
        return time.perf_counter() - start, bytes_sent() - sent if metered else 0, loss

    for way in WAYS:
        with meters[way]:  # what stays is born here: parameters, and in the first steps moments and DDP's buckets
            steps[way] = ours(way, cfg) if way in PEERS else peer(way, cfg)
            turn(way, 0), turn(way, 1)
    for step in range(2, rounds + 2):
        if dist.get_rank() == 0:
            progress(
                f"N = {dist.get_world_size()}, {cfg.layers} layers of width {cfg.width}: round {step - 1} of {rounds}"
            )
        for way in random.Random(step).sample(WAYS, len(WAYS)):
            seconds[way].append(turn(way, step)[0])
    for way in WAYS:
        gc.collect()
        with meters[way] as live:
            live.looking = True
            _, sent, loss = turn(way, rounds + 2, metered=True)
        last[way] = mean(sent), mean(live.most), mean(loss)
    return {way: (seconds[way], *last[way]) for way in WAYS}


def ratio(mine, other):
    """The median of the ratios, round by round, and their quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other)], n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def worker(options):
    """On each rank: the table of one size."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for size in options.sizes:
        cfg = peers.stage.Config(**SIZES[size], dtype="float32", compute="float32", device="cpu")
        cfg.early_stop = options.early_stop
        psi = sum(weight.numel() for weight in peers.Model(cfg).parameters())
        found = compare(cfg, options.rounds or ROUNDS[dist.get_world_size()])
        gc.collect()  # a model must not be the last to hold the group, whose threads would outlive it
        if dist.get_rank() == 0:
            for way, (seconds, sent, live, loss) in found.items():
                assert way.startswith("alone") or math.isclose(loss, found["ddp"][3], rel_tol=1e-4), (way, loss)
                against = ratio(seconds, found[PEERS[way]][0]) if way in PEERS else ""
                cells = [ratio(seconds, found["alone"][0]), against, f"{sent / psi / 4:.2f} Ψ", f"{live / 1e6:.0f}"]
                ms = 1e3 * statistics.median(seconds)
                print(json.dumps({"way": way, "size": size, "ms": ms, "cells": cells}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(ROUNDS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--early-stop", action="store_true")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 2:
        parser.error("--rounds must be at least 2: the table has quartiles")
    if dist.is_torchelastic_launched():
        return worker(options)
    for ranks in options.ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        ended = subprocess.run([*launcher, __file__, *sys.argv[1:]], check=True, stdout=subprocess.PIPE, text=True)
        head, rows = [f"N = {ranks}"], {way: [f"`{way}`"] for way in WAYS}
        for record in map(json.loads, ended.stdout.splitlines()):
            if record["way"] == "alone":
                head += [f"{record['size']}: × `alone` ({record['ms']:.0f} ms)", "× its peer", "sent", "peak, MB"]
            rows[record["way"]] += record["cells"]
        for cells in (head, ["---", *["--:"] * (len(head) - 1)], *rows.values()):
            print("| " + " | ".join(cells) + " |", flush=True)
        print()


if __name__ == "__main__":
    main()
