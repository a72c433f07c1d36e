"""Runs a stage file, or a copy of one, and writes down what its own log leaves out:

    torchrun --standalone --nproc-per-node 2 notebooks/watch.py FOLDER SCRIPT [options of the script]

Rank r writes FOLDER/r.json, a list of records:

    moment  a mark of the metered step: live bytes by category `at` that mark, and the `most` since the mark before
    whole   the `most` gathered layers at a time, and one (`stale`) that was used and still there at a later gather;
            and the bytes of the largest fp32 `slice` that a rank has of a layer
    found   a tensor that hangs on a layer and is none of the model states: `where`, and its `bytes`

The script's meter sees a storage when an operation touches it. Here every tensor that Python knows is shown to it, at
the start of the step and at each mark, so that memory which nothing touches is counted too.
"""

import gc
import importlib.util
import json
import os
import pathlib
import sys

import torch

NAMED = {"flat": "parameters", "shard": "parameters", "grad": "gradients", "master": "optimizer"}  # attributes of Layer


def load(path):
    """A script as a fresh module."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


def reachable(thing, where, seen):
    """(where, tensor) of every tensor in a layer: attributes, and what lists, tuples and dicts hold."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield where, thing
        yield from reachable(thing.grad, where + ".grad", seen)
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
    make_layers = module.make_layers

    class Meter(module.Meter):
        def start(self, named):
            gc.collect()
            super().start(named)
            self.mark("the start of the step")

        def mark(self, label):
            if self.running:
                self.show_all()
            super().mark(label)

        def show_all(self):
            for layer in layers:
                for where, tensor in reachable(layer, "self", set()):
                    attribute = where.removeprefix("self.")
                    if attribute in NAMED:
                        if self.category[self.see(tensor)] != "host":  # an exercise moves it there
                            self.name(tensor, NAMED[attribute])
                    elif attribute != "master.grad":
                        found[f"{where} of {layer.name}"] = tensor.untyped_storage().nbytes()
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
                    self.see(thing)

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

    module.Meter, module.Collectives, module.make_layers = Meter, Collectives, remembered
    return records


def moments(meter):
    """Live bytes by category at each mark, and the most since the mark before."""
    live = dict.fromkeys([*meter.category, "total"], 0)
    most, records = dict(live), []
    for key, value in meter.trace:
        if isinstance(key, str):
            records.append({"event": "moment", "label": key, "at": dict(live), "most": most})
            most = dict(live)
            continue
        for category in (meter.category[key], "total"):
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
