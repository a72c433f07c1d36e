"""The GPU path without a GPU: the five files on a CUDA device that computes nothing (fake_cuda.py), under the eyes of
race.py. Who changes the overlap learns here that something races, and not from a wrong loss on a cluster.

A case runs in one process with all the others, and once. Skipped where there is no C++ compiler.
"""

import ast
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import types

import fake_cuda
import pytest
from launch import ROOT, STAGES, TINY, folders, found, launch, with_all
from measure import shown

FILES = (*STAGES, "zero_r.py")
CONFIGS = ("none", "C1", "C2", "C3", "C4", "C5", "full")
SMALL = "--layers 2 --width 64 --heads 4 --vocab 257 --context 16 --batch 2 --steps 1 --buffer-elements 4096".split()
pytestmark = pytest.mark.xdist_group("cuda")  # one process for all


@functools.cache
def device():
    """The process with the device."""
    if shutil.which("g++") is None:
        pytest.skip("the fake CUDA device needs a C++ compiler, g++")
    command = [sys.executable, ROOT / "tests/fake_cuda.py", fake_cuda.build(folders.name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@functools.cache
def on_cuda(script, *args, rank=0, ranks=4, small=SMALL):
    """What a run came to. It ended without an error."""
    if not str(script).endswith(FILES[4]):
        small = small[:-2]  # a stage has no buffers of --buffer-elements
    case = {"script": str(script), "args": [*small, *args], "rank": rank, "ranks": ranks}
    print(json.dumps(case), file=device().stdin, flush=True)
    run = json.loads(device().stdout.readline())
    assert run["error"] is None, run["error"]
    return run


def assert_sound(run):
    """No race, nothing that NCCL would refuse, nothing that makes Python wait for the device in the step."""
    assert (run["races"], run["left"], run["refused"], run["waits"]) == ([], [], [], {})
    assert run["collectives"]


@functools.cache
def plant(script, *changes):
    """The path of a copy in which lines are replaced, wherever they stand and whatever comment they have."""
    lines = ast.unparse(ast.parse((ROOT / script).read_text())).splitlines()
    for right, wrong in changes:
        assert right in [line.strip() for line in lines], f"no such line in {script} any more: {right}"
        for i, line in enumerate(lines):
            if line.strip() == right:
                indent = line[: -len(right)]
                lines[i] = "\n".join(indent + part for part in wrong.splitlines())
    path = ROOT.joinpath(folders.name, f"planted-{abs(hash(changes))}-{script}")
    path.write_text("\n".join(lines))
    return path


# ---- The five files on the device ----

NARROW = ("--dtype", "float16", "--collectives", "gloo", "--micro-batches", 3)


@pytest.mark.parametrize("script", FILES)
def test_it_runs_on_gpus(script):
    """As rank 0 of 4, in bfloat16 with NCCL's collectives."""
    run = on_cuda(script)
    assert_sound(run)
    assert (run["device"], run["compute"]) == ("cuda:0", "bfloat16")
    assert {name for name, *_ in run["collectives"]} == {"all_gather_single", "reduce_scatter_single", "all_reduce"}
    assert fake_cuda.peak(run)["peak"] > 0


@pytest.mark.parametrize(
    ("script", "options"),
    [(script, NARROW) for script in FILES[2:4]]
    + with_all(
        *((script, NARROW) for script in (*FILES[:2], FILES[4])),
        *((script, (*NARROW, "--steps", 3)) for script in FILES),
        *(
            (script, ("--dtype", dtype, "--overlap", overlap, "--collectives", collectives, "--micro-batches", micro))
            for script in FILES
            for dtype in ("bfloat16", "float16", "float32")
            for overlap in ("on", "off")
            for collectives in ("gloo", "native")
            for micro in (1, 3)
        ),
    ),
    ids=str,
)
def test_with_other_options(script, options):
    run = on_cuda(script, *options, rank=1)
    assert_sound(run)
    assert run["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("config", "options"),
    [("C2", NARROW), ("C4", ()), ("full", ())]
    + with_all(
        *((config, ()) for config in ("none", "C1", "C2", "C3", "C5")),
        *((config, NARROW) for config in CONFIGS if config != "C2"),
        *((config, (*NARROW[2:], "--dtype", dtype)) for config in CONFIGS for dtype in ("bfloat16", "float32")),
        *((config, ("--overlap", "off")) for config in CONFIGS),
        *((config, ("--md", "off")) for config in ("C4", "C5", "full")),
        *((config, ("--cb", "off", "--steps", 3)) for config in ("C1", "C3", "full")),
    ),
    ids=str,
)
def test_zero_r_with_tensor_parallel_ranks(config, options):
    run = on_cuda(FILES[4], "--config", config, "--mp", 2, *options)
    assert_sound(run)
    assert run["groups"] == [[0, 2], [1, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize("script", [FILES[1], *with_all(*((script,) for script in FILES if script != FILES[1]))])
def test_python_alone_takes_the_gpu(script):
    assert_sound(on_cuda(script, ranks=0))


@pytest.mark.slow
@pytest.mark.parametrize("script", FILES)
def test_a_simulation_with_the_arithmetic_of_a_gpu(script):
    """Counts the bytes and the volume that rank 0 of so many counts."""
    simulated, run = on_cuda(script, "--simulate-ranks", 4, ranks=0), on_cuda(script)
    assert simulated["error"] is None and simulated["collectives"] == run["collectives"]
    one, other = fake_cuda.peak(simulated), fake_cuda.peak(run)
    assert {**one, "clock_ms": 0} == {**other, "clock_ms": 0}


# ---- What NCCL demands ----


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (FILES[3], ()),
        (FILES[4], ("--config", "full", "--mp", 2)),
        *with_all(
            *((script, ()) for script in FILES[:3]),
            *((script, NARROW) for script in FILES),
            *((FILES[4], ("--config", config, "--mp", 2)) for config in CONFIGS[:-1]),
        ),
    ],
    ids=str,
)
def test_all_ranks_start_the_same_collectives(script, options):
    """Name, group, dtype and size, in one order. Of ranks 0 and N-1: a fault by `rank == 0` is one of the two. Groups
    have to be made by all ranks in one order, too."""
    first, last = on_cuda(script, *options), on_cuda(script, *options, rank=3)
    assert first["groups"] == last["groups"]
    ours = {0: [[0, 2], [0, 1], [0, 1, 2, 3]], 3: [[1, 3], [2, 3], [0, 1, 2, 3]]}

    def named(run, rank):
        return [[name, ours[rank].index(ranks), *rest] for name, ranks, *rest in run["collectives"]]

    assert named(first, 0) == named(last, 3)


REFUSED = [  # (file, line, what stands there by mistake, what NCCL misses, options)
    (
        FILES[3], "loss, squares = comm.all_reduce(torch.stack([loss, squares]))",
        "loss, squares = comm.all_reduce(torch.stack([loss, squares]).cpu())", "not on cuda:0", (),
    ),
    (
        FILES[2], "shard = full.new_empty(full.numel() // self.world_size)",
        "shard = full.new_empty(full.numel() // self.world_size, dtype=torch.float32)", "not of one dtype", (),
    ),
    (
        FILES[3], "part = full.numel() // self.world_size", "part = full.numel() // self.world_size - 1",
        "not of sizes that divide", (),
    ),
    (
        FILES[4], "received = torch.empty_like(full)",
        "full, received = (torch.stack([full, full], 1)[:, 0], torch.empty_like(full))", "not contiguous",
        ("--collectives", "gloo"),
    ),
    (
        FILES[1], "average = dist.ReduceOp.AVG",
        "average, full, shard = (dist.ReduceOp.AVG, full.int(), shard.int())", "not floating, for an average", (),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("script", "right", "wrong", "said", "options"), [REFUSED[0], *with_all(*REFUSED[1:])])
def test_what_nccl_would_refuse_is_seen(script, right, wrong, said, options):
    refused = on_cuda(plant(script, (right, wrong)), *options)["refused"]
    assert refused and all(line.endswith(said) for line in refused)


@pytest.mark.slow
def test_a_collective_out_of_order_is_seen():
    right = "reducing = comm.reduce_scatter(flat_grad, layer)"
    wrong = f"if comm.rank == 0 and layer is layers[1]:\n    comm.all_reduce(loss.clone())\n{right}"
    with pytest.raises(AssertionError, match="all_reduce"):
        test_all_ranks_start_the_same_collectives(plant(FILES[2], (right, wrong)), ())


@pytest.mark.slow
def test_groups_made_in_another_order_are_seen():
    right = "replicas, _ = dist.new_subgroups_by_enumeration(rows, timeout=limit)"
    wrong = right.replace("rows", "rows[:: 1 - 2 * (dist.get_rank() % 2)]")
    with pytest.raises(AssertionError):
        test_all_ranks_start_the_same_collectives(plant(FILES[4], (right, wrong)), ("--mp", 2))


@pytest.mark.slow
def test_objects_before_the_device_is_set_are_seen():
    """NCCL sends them by way of the current GPU: of all ranks that would be the first."""
    with pytest.raises(AssertionError, match="the first GPU"):
        on_cuda(plant(FILES[1], ("torch.cuda.set_device(device)", "pass")))


# ---- Nothing waits for the device ----

WAITS = [
    ("loss += out.detach() / len(batches)", "loss += out.detach().item() / len(batches)"),
    ("norm = (squares.sqrt() / scale).float()", "norm = (squares.sqrt() / scale).float()\nif norm > 1:\n    norm += 0"),
    (
        "dout = [torch.full((), scale / len(batches), device=meter.device)]",
        "dout = [torch.full((), scale / len(batches)).to(meter.device)]",
    ),
    ("meter.mark('norm')", "norm.cpu()"),
]


@pytest.mark.parametrize(("right", "wrong"), [WAITS[0], *with_all(*WAITS[1:])])
def test_a_wait_is_seen(right, wrong):
    """One in each step. That there is none, assert_sound() says of every run."""
    assert sum(on_cuda(plant(FILES[3], (right, wrong)))["waits"].values()) == 1


@pytest.mark.slow
def test_a_copy_that_is_not_pinned_waits():
    run = on_cuda(plant(FILES[4], (
        "return torch.empty(size, dtype=dtype, device='cpu', pin_memory=device.type == 'cuda')",
        "return torch.empty(size, dtype=dtype, device='cpu')",
    )))  # fmt: skip
    assert run["waits"]


# ---- Races ----

DROPPED = ("self.works.pop(0).wait()", "self.works.pop(0)")
RACES = {  # what is planted -> (file, changes, what is said of it, options)
    "the gradient is cleared while it is being reduced": (
        FILES[2], ("reducing = comm.reduce_scatter(flat_grad, layer)",
        "reducing = comm.reduce_scatter(flat_grad, layer)\nflat_grad.zero_()"),
        "it writes what is being read", (),
    ),
    "a handle is dropped": (FILES[3], DROPPED, "its handle is dropped before wait()", ()),
    "a result is used before it is there": (
        FILES[3], ("self.complete()", "pass"), "it reads what is being written", (),
    ),
    "a slice is filled in after its gather has begun": (
        FILES[3], ("full[layer.own] = layer.shard", "transfer = comm.all_gather(full, layer)\n"
        "full[layer.own] = layer.shard\nreturn transfer"), "it writes what is being read", (),
    ),
    "parameters are cleared while they arrive": (
        FILES[1], ("gathers = [comm.all_gather(layer.flat, layer) for layer in layers]",
        "gathers = [comm.all_gather(layer.flat, layer) for layer in layers]\nlayer.flat.zero_()"),
        "it writes what is being written", (),
    ),
    "what is received is averaged at once": (
        FILES[0], ("return Transfer(self, 'reduce_scatter', layer, works, [full, received], received, self.average)",
        "return Transfer(self, 'reduce_scatter', layer, works, [full, received], self.average(received))"),
        "it reads what is being written", ("--collectives", "gloo"),
    ),
    "two gathers into one buffer": (
        FILES[1], ("gathers = [comm.all_gather(layer.flat, layer) for layer in layers]",
        "gathers = [comm.all_gather(layer.flat, layer) for layer in [*layers, *layers]]"),
        "it writes what is being written", (),
    ),
    "an input is used before it is back from the host": (
        FILES[4], ("torch.cuda.current_stream().wait_stream(self.comm.copying)", "pass"),
        "it reads what is being written", (),
    ),
    "a copy does not wait for what it copies": (
        FILES[4], ("comm.copying.wait_stream(current)", "pass"),
        "the side stream has not waited for", (),
    ),
    "what is being copied is freed": (
        FILES[4], ("comm.leaving = source", "pass"), "it frees what a side stream uses", (),
    ),
    "the copy before is not waited for": (
        FILES[4], ("current.wait_stream(comm.copying)", "pass"),
        "it frees what a side stream uses", (),
    ),
}  # fmt: skip
DEFAULT = [*RACES][0], [*RACES][1], [*RACES][8], [*RACES][9]


@pytest.mark.parametrize("planted", [*DEFAULT, *with_all(*((name,) for name in RACES if name not in DEFAULT))])
def test_a_race_is_found(planted):
    script, change, said, options = RACES[planted]
    races = on_cuda(plant(script, change), *options)["races"]
    assert any(said in race for race in races), races


@pytest.mark.slow
def test_a_wait_stream_by_another_way_is_no_race():
    """record_stream() lets a tensor be freed: the allocator keeps its memory for that stream."""
    run = on_cuda(plant(FILES[4], ("comm.leaving = source", "source.record_stream(comm.copying)")))
    assert run["races"] == []


def on_gloo(script, *options):
    """The races of all ranks of a real run on CPUs, with numbers and without streams."""
    ranks = found(launch("tests/race.py", script, *TINY, "--steps", 2, "--width", 34, "--heads", 2, *options, ranks=2))
    assert len(ranks) == 2 and all(rank["collectives"] for rank in ranks)
    assert [rank["left"] for rank in ranks] == [[], []]
    return [race for rank in ranks for race in rank["races"]]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (FILES[3], ()),
        *with_all(
            *((script, ()) for script in FILES[:3]),
            *((script, ("--collectives", "native", "--micro-batches", 3)) for script in FILES),
            *((FILES[4], ("--mp", 2, "--config", config, "--buffer-elements", 4096)) for config in CONFIGS),
        ),
    ],
    ids=str,
)
def test_no_race_on_gloo(script, options):
    assert on_gloo(script, *options) == []


@pytest.mark.parametrize("planted", [[*RACES][0], *with_all(([*RACES][3],), ([*RACES][4],), ([*RACES][5],))])
def test_a_race_on_gloo_is_found(planted):
    script, change, said, options = RACES[planted]
    races = on_gloo(plant(script, change), *options)
    assert any(said in race for race in races), races


# ---- How many kernels a step starts ----


@pytest.mark.parametrize("script", [FILES[1], *with_all(*((script,) for script in FILES if script != FILES[1]))])
def test_the_norm_takes_few_kernels(script):
    """A kernel takes microseconds to start, whatever it does, and the norm's are short. Of the default model; C_B's
    buffer, which the norm's pieces must fit into, is of the size that tests/README.md names for GPUs."""
    buffer = ("--buffer-elements", 2**24) if script == FILES[4] else ()
    kernels = on_cuda(script, "--steps", 1, *buffer, small=())["kernels"]
    assert kernels["sum_of_squares"] < 0.05 * sum(kernels.values())


# ---- What --compute auto comes to ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ("peaks", "kernels"))
def test_the_tables_of_the_page(name):
    device()  # or it is skipped
    command = [sys.executable, ROOT / "tests/fake_cuda.py", f"--{name}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == shown(name)


@pytest.mark.parametrize("script", FILES)
@pytest.mark.parametrize(("gpu", "major", "minor"), [("T4", 7, 5), ("V100", 7, 0), ("A100", 8, 0)])
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_arithmetic_on_a_gpu(script, gpu, major, minor, dtype, monkeypatch):
    """In the dtype that is stored, but GPUs before Ampere have no units for bfloat16."""
    import torch

    properties = types.SimpleNamespace(major=major, minor=minor, name=gpu)
    chosen = []
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "set_device": chosen.append,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    stage = imported(script)
    cfg = stage.Config(dtype=dtype)
    device = stage.choose_device(cfg)
    assert [device] == chosen == [torch.device("cuda", 0)]
    assert cfg.compute == ("float32" if (gpu, dtype) in (("T4", "bfloat16"), ("V100", "bfloat16")) else dtype)
    asked = dataclasses.replace(cfg, compute="float16")
    stage.choose_device(asked)
    assert asked.compute == "float16"  # it stays as asked for


@functools.cache
def imported(script):
    spec = importlib.util.spec_from_file_location(f"on_gpu_{script[:-3]}", ROOT / script)
    stage = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stage)
    return stage


# ---- How it ends ----


@pytest.mark.parametrize(
    ("script", "how"),
    [(FILES[1], "error"), *with_all(*((script, how) for script in FILES for how in ("error", "fail")))],
)
def test_a_rank_that_fails_ends_though_its_group_does_not(script, how):
    """NCCL may wait for ever for what a crash has left. The reason still reaches stderr, and the process ends."""
    began = time.monotonic()
    run = launch("tests/stuck.py", ROOT / script, *TINY, ranks=2, env={"HOW": how}, timeout=60, log=False)
    assert run.status != 0 and time.monotonic() - began < 50
    assert how == "fail" or "RuntimeError: planted" in run.err
