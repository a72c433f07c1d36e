"""Ten ways to get ZeRO wrong by one line, what a user would see of each, and the test of this suite that sees it.

Eight of the ten train: nothing crashes, the loss falls, and so nobody looks. That is why the other tests compare bits,
bytes and hashes rather than curves. Here each is given a copy of a stage file with the fault in it, and has to fail.
"""

import sys
from functools import partial

import pytest
import test_losses
import test_memory
import test_volume
from launch import ROOT, STAGES

same_bits = partial(test_losses.test_stages_are_bit_identical, 2, "bfloat16", "gloo")  # losses, norms, weights
same_with_micro_batches = partial(test_losses.test_stages_with_micro_batches, 3, "float32")
two_whole_gradients = partial(test_memory.test_at_most_two_layers_are_whole, 2, 1)
two_whole_layers = partial(test_memory.test_at_most_two_layers_are_whole, 3, 1)
volume = partial(test_volume.test_elements_are_those_of_the_formula, 1, 2, 1)

FAULTS = [  # (name, file, what stands there, what stands there by mistake, the test that fails, what a user sees)
    (
        "no averaging", "stage1_os.py",
        "return total.div_(self.world_size)",
        "return total",
        same_bits,
        "The same losses, to the last digit while N is a power of two, for Adam divides the gradient's scale out. But "
        "the norm is N times too large, so where --clip begins to act depends on the number of ranks.",
    ),
    (
        "a wait() dropped", "stage3_param.py",
        "works.pop(0).wait()",
        "works.pop(0)",
        same_bits,
        "Layers compute with what was in the buffer before, and how much of it depends on the speed of the network: "
        "NaN in most steps, another loss in every run. In the metered step, which is slower, it may be gone.",
    ),
    (
        "norm from the own shard only", "stage2_grad.py",
        "loss, squares = comm.all_reduce_scalars(torch.stack([loss, squares]))",
        "loss = comm.all_reduce_scalars(loss)",
        same_bits,
        "The norm is too small, by about sqrt(N), and another one on every rank, so each clips its slice by a factor "
        "of its own. The losses differ in the third digit.",
    ),
    (
        "shard overwritten, not accumulated", "stage2_grad.py",
        "layer.grad = average if layer.grad is None else layer.grad.add_(average)",
        "layer.grad = average",
        same_with_micro_batches,
        "It trains on the last of m micro-batches and throws the others' work away: the loss falls as with one.",
    ),
    (
        "full gradient kept alive", "stage2_grad.py",
        "            del flat_grad\n",
        "            layer.flat_grad = flat_grad\n",
        two_whole_gradients,
        "Every digit is right, and 2Ψ of gradients are back: a name somewhere still holds what was reduced.",
    ),
    (
        "parameters not released", "stage3_param.py",
        "            del flat  # §5.3",
        "            layer.flat = flat  # §5.3",
        two_whole_layers,
        "Every digit is right, and the model that should fit doesn't: after the forward pass all of it is there.",
    ),
    (
        "gather after the step forgotten", "stage1_os.py",
        "for wait in [comm.all_gather(layer.flat, layer.name) for layer in layers]:",
        "for wait in []:",
        volume,
        "Half the traffic, a faster step! Each rank keeps the initial weights outside its slice, and N different "
        "models train on the mean of their gradients. Even so the loss falls: to 4.1 where 3.0 is right.",
    ),
    (
        "wrong slice offset", "stage1_os.py",
        "self.own = slice(comm.rank * part, (comm.rank + 1) * part)",
        "self.own = slice(self.padded - (comm.rank + 1) * part, self.padded - comm.rank * part)",
        same_bits,
        "Each rank updates one slice and hands out another, the old one: the loss stays where it began.",
    ),
    (
        "masters rebuilt from the 16-bit parameters", "stage1_os.py",
        "layer.shard.copy_(layer.master)",
        "layer.master.copy_(layer.shard.copy_(layer.master))",
        same_bits,
        "Updates below 1/512 of a weight are rounded away, step after step. LayerNorm's weights stay exactly 1.0, and "
        "the loss falls less the smaller the learning rate gets.",
    ),
    (
        "seed depends on the rank", "stage1_os.py",
        'f"{cfg.seed}/{self.name}"',
        'f"{cfg.seed + dist.get_rank()}/{self.name}"',
        same_bits,
        "N models in the first step, then one that is pieced together from slices of all of them, and trains as well. "
        "In stage 0 there would be N to the end. No curve tells; the hash of the initial weights does.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "old", "new", "test", "symptom"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_fault_is_caught(name, file, old, new, test, symptom, tmp_path, monkeypatch):
    test()  # passes with the files as they are
    source = (ROOT / file).read_text()
    assert source.count(old) == 1
    broken = tmp_path / file
    broken.write_text(source.replace(old, new))
    stages = [str(broken) if stage == file else stage for stage in STAGES]
    monkeypatch.setattr(sys.modules[test.func.__module__], "STAGES", stages)
    with pytest.raises((AssertionError, KeyError)) as failure:  # KeyError: there is no count of what was never called
        test()
    # It ran to its end: the test sees what it did, not a typing error.
    assert not any(word in str(failure.value) for word in ("exit status", "Traceback"))
