"""The pieces of a stage file by themselves, and a run in which a gradient is spoiled."""

import importlib
import os
import sys
import types

import pytest
import torch
from launch import ROOT, STAGES, TINY, found, hashes, launch, losses, norms, tiny

sys.path.insert(0, str(ROOT))
stages = [importlib.import_module(stage.removesuffix(".py")) for stage in STAGES]
config = stages[0].Config(
    layers=2, width=35, heads=5, vocab=257, context=16, batch=2, dtype="float32", compute="float32"
)


def make_layers(stage, rank, world_size):
    comm = types.SimpleNamespace(rank=rank, world_size=world_size)
    return stage.make_layers(config, comm, torch.device("cpu"))


@pytest.mark.parametrize("stage", stages)
def test_a_layer_smaller_than_16_elements_a_rank(stage):
    """With 1024 ranks each owns 16 elements of every layer, and the last ones own padding."""
    plain, N = make_layers(stages[0], 0, 1), 1024
    for rank in (0, 500, N - 1):
        for layer, whole in zip(make_layers(stage, rank, N), plain, strict=True):
            assert layer.psi == whole.psi < layer.padded == 16 * N
            assert (layer.own.start, layer.own.stop) == (16 * rank, 16 * rank + 16)
            full = torch.cat([whole.master[: whole.psi], torch.zeros(layer.padded - layer.psi)])
            assert torch.equal(layer.master, full if stage is stages[0] else full[layer.own])


def test_padding_has_no_effect_and_no_gradient():
    x, y = torch.ones(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64)
    for layer, padded in zip(make_layers(stages[0], 0, 1), make_layers(stages[0], 0, 1024), strict=True):
        flat = padded.flat.requires_grad_()
        out = padded(flat, x, y)
        assert torch.equal(out, layer(layer.flat, x, y))
        (gradient,) = torch.autograd.grad(out.sum(), flat)
        assert gradient[: layer.psi].any() and not gradient[layer.psi :].any()
        x = out.detach() if out.dim() else x


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_hold_the_same_weights_and_zeros_behind_them(stage):
    ranks = found(launch("tests/drive.py", "weights", stage, *TINY, ranks=3))
    for moment in (ranks[::2], ranks[1::2]):  # each rank told twice, at the start and at the end
        assert len(moment) == 3 and len({tuple(rank["hashes"]) for rank in moment}) == 1
    assert not set(ranks[0]["hashes"]) & set(ranks[1]["hashes"])  # every layer learned something
    assert min(ranks[0]["sizes"]) > 0 and {rank["padding"] for rank in ranks} == {0}


def test_the_seed_decides_the_weights():
    assert hashes(tiny(STAGES[1], seed=1))[0] != hashes(tiny(STAGES[1]))[0]


def windows(data, seed, step, rank, world_size, micro_batches=1):
    """The sequences that a rank reads in a step, as bytes, x and the last of y."""
    cfg = stages[0].Config(context=16, batch=2, micro_batches=micro_batches, seed=seed)
    comm = types.SimpleNamespace(rank=rank, world_size=world_size)
    batches = stages[0].load_batches(data, step, cfg, comm, torch.device("cpu"))
    assert len(batches) == micro_batches and all(x.shape == y.shape == (2, 16) for x, y in batches)
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in batches)
    return [bytes(row.tolist()) + bytes(last[-1:].tolist()) for x, y in batches for row, last in zip(x, y)]


def test_ranks_read_slices_of_one_global_batch():
    data = os.urandom(1_000_000)  # so that a sequence tells where it is from
    mine = [windows(data, 0, 0, rank, 4) for rank in range(4)]
    assert sum(mine, []) == windows(data, 0, 0, 0, 1, micro_batches=4)
    assert len(set(sum(mine, []))) == 8 and all(data.find(window) >= 0 for window in sum(mine, []))


def test_no_two_steps_of_any_seeds_read_the_same():
    data = os.urandom(1_000_000)
    pairs = [(seed, step) for seed in (0, 1, 2, 10, 11, -1) for step in (0, 1, 2, 3, 10, 11, 110)]
    first = {windows(data, seed, step, 0, 1)[0] for seed, step in pairs}
    assert len(first) == len(pairs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_on_one_rank(stage):
    """All ranks skip the step and keep everything as it was, and go on."""
    run = launch("tests/drive.py", "spoil", stage, *TINY, "--steps", 5, ranks=2, env={"SPOILED": "2"})
    steps = run.of("step")
    assert [step["skipped"] for step in steps] == [False, False, True, False, False]
    assert steps[2]["norm"] is None and None not in losses(run) and None not in norms(run)[:2] + norms(run)[3:]
    assert {(told["step"], told["changed"]) for told in found(run)} == {(i, i != 2) for i in range(5)}  # on both ranks


def test_ten_such_steps_in_a_row_end_the_run():
    steps = " ".join(map(str, [0, *range(2, 20)]))
    run = launch("tests/drive.py", "spoil", STAGES[1], *TINY, "--steps", 30, ranks=2, env={"SPOILED": steps})
    assert run.status != 0
    (line,) = run.err.splitlines()
    assert "not finite in ten steps" in line and "--lr" in line
    steps = [record for record in run.records if record["event"] == "step"]
    assert [step["skipped"] for step in steps] == [True, False] + [True] * 10
