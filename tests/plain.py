"""The training of a stage file in plain PyTorch: its modules called as modules, autograd on the whole model, Adam,
clip_grad_norm_, in one process that takes the sequences of all ranks in turn.

    python tests/plain.py N [options of the stage files] --dtype float32 --log-file FILE

Model, initial weights, data and command line are those of the stage0_ddp.py beside this file, or else of the
repository's: test_edits.py puts an edited copy of each into one folder. So what a stage file makes of an edit can be
compared with what PyTorch makes of it.
"""

import json
import pathlib
import random
import sys
import types

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import stage0_ddp as stage  # noqa: E402


def make_modules(cfg):
    """{name of a layer: its module}, with the weights that a Layer draws."""
    kinds = {"embedding": stage.Embedding}
    kinds |= {f"block {i}": stage.Block for i in range(cfg.layers)}
    kinds |= {"head": stage.Head}
    modules = {}
    for name, kind in kinds.items():
        torch.manual_seed(random.Random(f"{cfg.seed}/{name}").getrandbits(63))
        modules[name] = kind(cfg)
    return modules


def main():
    ranks = int(sys.argv.pop(1))
    cfg, device = stage.parse_args(), torch.device("cpu")
    data, modules = stage.load_data(cfg), make_modules(cfg)
    weights = [weight for module in modules.values() for weight in module.parameters()]
    adam = torch.optim.Adam(weights, lr=cfg.lr)
    with open(cfg.log_file, "w") as log:
        for step in range(cfg.steps):
            adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / max(1, cfg.warmup))
            adam.zero_grad()
            mean = 0.0
            for rank in range(ranks):
                comm = types.SimpleNamespace(rank=rank, world_size=ranks)
                batches = stage.load_batches(data, step, cfg, comm, device)
                for micro, (tokens, y) in enumerate(batches):
                    x = tokens
                    for name, module in modules.items():
                        layer = types.SimpleNamespace(name=name)  # what it draws is drawn alike
                        stage.Layer.seed_random(layer, cfg.seed, step, micro, rank)
                        x = module(x, y)
                    loss = x / (ranks * len(batches))
                    loss.backward()
                    mean += loss.item()
            for weight in weights:
                if (
                    weight.grad is None
                ):  # not used in this step. In a layer's flat vector that is a zero, not an absence
                    weight.grad = torch.zeros_like(weight)
            norm = torch.nn.utils.clip_grad_norm_(weights, cfg.clip)
            adam.step()
            print(json.dumps({"event": "step", "loss": mean, "norm": norm.item()}), file=log, flush=True)


if __name__ == "__main__":
    main()
