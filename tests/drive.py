"""Runs a stage file with something watched or spoiled: drive.py WHAT STAGE [options of the stage].

WHAT is a function of this file. It replaces names in the stage's module; every rank prints what it found, one JSON
object a line.
"""

import collections
import contextlib
import datetime
import gc
import hashlib
import importlib
import json
import os
import pathlib
import signal
import socket
import stat
import sys

import torch

rank = int(os.environ.get("RANK", 0))


def tell(**found):
    print("found", json.dumps({"rank": rank, **found}), file=sys.__stdout__, flush=True)  # as sys.stdout rank 0 speaks


def trace(stage):
    """The most bytes of each category at any time of the metered step, and the most gathered vectors at a time."""

    class Meter(stage.Meter):
        def start(self, named):
            super().start(named)
            self.residents = len(self.storages)

        def replay(self):
            live, most, gathered = collections.Counter(), collections.Counter(), set()
            for key, value in self.trace:
                if isinstance(key, str):
                    continue
                live[self.storages[key]["category"]] += value
                if self.storages[key]["category"] == "parameters" and key >= self.residents:
                    gathered ^= {key}  # born, died
                live["gathered"] = len(gathered)
                most |= live  # the maximum of each
            tell(most=most)
            return super().replay()

    stage.Meter = Meter


def profile(stage):
    """The most bytes that PyTorch's allocator had given out in the last step, by its profiler. That watches from the
    start, since it misses the end of what it hasn't seen begin, and what gloo's thread is the last to let go of."""
    main, train_step = stage.main, stage.train_step

    class Meter(stage.Meter):
        def settle(self, tensors):
            running, self.running = self.running, True  # otherwise it waits for gloo's thread in the last step only
            super().settle(tensors)
            self.running = running

    def named_step(*args):
        with torch.profiler.record_function("step"):
            return train_step(*args)

    def profiled_main():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            main()
        live = peak = 0
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        last = [event for event in events if event.name() == "step"][-1]
        for event in events:
            if event.name() == "[memory]" and event.start_ns() < last.end_ns():
                live += event.nbytes()
                peak = max(peak, live) if event.start_ns() > last.start_ns() else live
        tell(peak=peak)

    stage.Meter, stage.main, stage.train_step = Meter, profiled_main, named_step


def wire(stage):
    """The bytes that the kernel sent for this process in each step (Linux)."""
    train_step = stage.train_step

    def counted_step(*args):
        stage.dist.barrier()
        before = bytes_sent()
        result = train_step(*args)
        stage.dist.barrier()
        tell(sent=bytes_sent() - before)
        return result

    stage.train_step = counted_step


def bytes_sent():
    """Sum over the sockets of this process of `tcpi_bytes_sent`, bytes 200 to 208 of struct tcp_info."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a TCP socket, or the listing's own descriptor
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                    total += int.from_bytes(info[200:208], sys.byteorder)
    return total


def weights(stage):
    """At the start and the end: hashes of the whole masters and parameters, and the largest number in the padding."""
    make_layers, report = stage.make_layers, stage.report

    def look(layers, comm):
        masters = [stage.full_master(layer, comm) for layer in layers]
        flats = [layer.flat for layer in layers if hasattr(layer, "flat")]
        padding = [full[layer.psi :] for full, layer in zip(masters + flats, 2 * layers)]
        tell(
            hashes=[hashlib.sha256(full.detach().float().numpy().tobytes()).hexdigest() for full in masters + flats],
            sizes=[len(part) for part in padding],
            padding=max(part.abs().max().item() for part in padding if len(part)),
        )

    def watched_make_layers(cfg, comm, device):
        layers = make_layers(cfg, comm, device)
        look(layers, comm)
        return layers

    def watched_report(meter, layers, comm, *rest):
        look(layers, comm)
        report(meter, layers, comm, *rest)

    stage.make_layers, stage.report = watched_make_layers, watched_report


def threads(stage):
    """The names of this process's threads when all is done (Linux)."""
    main = stage.main

    def watched_main():
        main()
        tell(threads=[path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")])

    stage.main = watched_main


def soak(stage):
    """Bytes of all tensors and of the process, at step 10 and every hundredth."""
    main, train_step, steps, live, rss = stage.main, stage.train_step, 0, [], []

    def watched_step(*args):
        nonlocal steps
        result = train_step(*args)
        if steps == 10 or steps and steps % 100 == 0:
            tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
            storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
            live.append(sum(storages.values()))
            rss.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        steps += 1
        return result

    def watched_main():
        main()
        tell(live=live, rss=rss)

    stage.main, stage.train_step = watched_main, watched_step


def stopped(stage):
    """The last rank stops itself in step 2, as by Ctrl-Z; the others wait 5 s for it and not 60."""
    train_step, steps = stage.train_step, 0

    def step_or_stop(*args):
        nonlocal steps
        if steps == 2 and rank == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        steps += 1
        return train_step(*args)

    stage.train_step, stage.timedelta = step_or_stop, lambda seconds: datetime.timedelta(seconds=seconds / 12)


def differing(stage):
    """The rank $ON alone has the options $ALONE, as on a node that was started with another command."""
    if rank == int(os.environ["ON"]):
        sys.argv += os.environ["ALONE"].split()


class Through(torch.autograd.Function):
    """The identity, with the gradient changed on its way back."""

    @staticmethod
    def forward(context, x, change):
        context.change = change
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return context.change(gradient), None


def spoil(stage):
    """In the steps listed in $SPOILED the last rank's gradient of one layer is infinite; the loss stays finite."""
    train_step, spoiled, steps = stage.train_step, set(map(int, os.environ["SPOILED"].split())), 0

    class Layer(stage.Layer):
        def __call__(self, flat, x, y):
            if steps in spoiled and self.name == "block 1" and rank == int(os.environ["WORLD_SIZE"]) - 1:
                flat = Through.apply(flat, lambda gradient: gradient * torch.inf)
            return super().__call__(flat, x, y)

    def watched_step(layers, adam, batches, scale, *rest):
        nonlocal steps
        before = state(layers, adam)
        result = train_step(layers, adam, batches, scale, *rest)
        tell(step=steps, scale=scale, changed=state(layers, adam) != before)
        steps += 1
        return result

    def state(layers, adam):
        """A hash of all that a step may change."""
        moments = [tensor for state in adam.state.values() for tensor in state.values()]
        names = ("flat", "shard", "master")
        kept = [getattr(layer, name, None) for layer in layers for name in names]
        kept = [tensor for tensor in kept if tensor is not None] + moments
        return hashlib.sha256(b"".join(tensor.detach().float().numpy().tobytes() for tensor in kept)).digest()

    stage.Layer, stage.train_step = Layer, watched_step


def change_gradients(stage, change):
    """All gradients, of parameters and inputs, pass through `change(gradient, scale)` while they are in fp32."""
    train_step, scale = stage.train_step, 1.0  # and so in the check before the first step

    class Layer(stage.Layer):
        def __call__(self, flat, x, y):
            flat, x = (Through.apply(t.float(), change_now) if t.is_floating_point() else t for t in (flat, x))
            return super().__call__(flat, x, y)

    def change_now(gradient):
        return change(gradient, scale)

    def step_at(layers, adam, batches, this_scale, *rest):
        nonlocal scale
        scale = this_scale
        return train_step(layers, adam, batches, this_scale, *rest)

    stage.Layer, stage.train_step = Layer, step_at


def coarse(stage):
    """Gradients are multiples of float16's smallest normal number, so that none loses bits by being small."""
    change_gradients(stage, lambda gradient, scale: (gradient / scale * 2**14).round() / 2**14 * scale)


def faint(stage):
    """The largest element of each gradient is 1e-8: in float16 that is zero."""
    change_gradients(stage, lambda gradient, scale: gradient * (1e-8 * scale / gradient.abs().max().clamp(min=1e-30)))


if __name__ == "__main__":
    what, path = sys.argv[1], pathlib.Path(__file__).parent.parent / sys.argv[2]
    sys.path.insert(0, str(path.parent))
    sys.argv[:3] = [str(path)]
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # as the stage files do when they are run
    module = importlib.import_module(path.stem)
    globals()[what](module)
    module.main()
