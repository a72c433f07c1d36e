"""ZeRO-R (§6, §8) on data x tensor parallel ranks: what it must not change, and what it must save."""

import contextlib
import importlib
import types

import formulas
import pytest
import torch
from launch import ROOT, STAGES, complaints, found, hashes, launch, losses, norms, torchrun, with_all
from test_diffs import diff

SIZES = tuple(
    "--vocab 257 --width 40 --heads 4 --layers 3 --context 16 --steps 3 --compute float32 --collectives gloo".split()
)  # fmt: skip
BUFFER = ("--buffer-elements", 4096)  # each block needs it several times over
CONFIGS = ("none", "C1", "C2", "C3", "C4", "C5", "full")
SWITCHES = (  # each part alone, and each taken away
    ("none", "--partition", "os"), ("none", "--partition", "os+g"), ("none", "--pa", "on"), ("none", "--pa", "cpu"),
    ("none", "--cb", "on"), ("none", "--md", "on"), ("C1", "--md", "off"), ("full", "--md", "off"),
)  # fmt: skip
PIECE = 2**17  # for the test of buffers: smaller than a rank's share of any block there
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]  # data x tensor parallel ranks


def stage3(ranks=1, dtype="float32"):
    return launch(STAGES[3], *SIZES, "--batch", 4 // ranks, "--dtype", dtype, ranks=ranks)


def zero_r(config, *switches, shape=(2, 2), dtype="bfloat16", micro_batches=1, simulate=False):
    """A run on a global batch of four sequences, however it is divided."""
    (N, M), options = shape, ["--simulate-ranks", shape[0] * shape[1]] if simulate else []
    options += ["--batch", 4 // N // micro_batches, "--micro-batches", micro_batches, "--mp", M, "--dtype", dtype]
    return launch("zero_r.py", *SIZES, *BUFFER, *options, "--config", config, *switches, ranks=1 if simulate else N * M)


def layer_sizes(config):
    """Parameters of the embedding, the blocks and the head on one of M tensor-parallel ranks, without padding."""
    C, M, (embedding, *_, head) = config["width"], config["mp"], formulas.layer_sizes(config)
    return [embedding, *[(12 * C * C + 7 * C) // M + 6 * C] * config["layers"], head]


# ---- What must not change ----


@pytest.mark.parametrize(
    "config", [*SWITCHES, ("C5",), ("full",), *with_all(*(((config,),) for config in CONFIGS[1:5]))], ids=" ".join
)
def test_configurations_are_bit_identical(config):
    run, none = zero_r(*config), zero_r("none")
    assert losses(run) == losses(none) and norms(run) == norms(none) and hashes(run) == hashes(none)


@pytest.mark.parametrize("config", ["full", *with_all(("C1",), ("C4",))])
def test_configurations_are_bit_identical_in_fp32(config):
    run, none = zero_r(config, dtype="float32"), zero_r("none", dtype="float32")
    assert losses(run) == losses(none) and norms(run) == norms(none) and hashes(run) == hashes(none)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", ("full",))
def test_equal_to_stage_3(config, shape):
    run, expected = zero_r(config, shape=shape, dtype="float32"), stage3()
    assert max(losses(run)) < 7 and losses(run) == pytest.approx(losses(expected), rel=1e-5)
    assert norms(run)[0] == pytest.approx(norms(expected)[0], rel=1e-6)  # of the same weights
    assert norms(run) == pytest.approx(norms(expected), rel=1e-5)


@pytest.mark.parametrize("N", (1, 2, 4))
@pytest.mark.parametrize("dtype", ("float32",))
def test_weights_are_stage_3s_without_tensor_parallelism(dtype, N):
    assert hashes(zero_r("full", shape=(N, 1), dtype=dtype)) == hashes(stage3(N, dtype))


@pytest.mark.parametrize("config", ["C1", "full", *with_all(("C4",))])
def test_micro_batches(config):
    run, whole = (zero_r(config, dtype="float32", micro_batches=m) for m in (2, 1))
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert norms(run) == pytest.approx(norms(whole), rel=1e-5)


# ---- What it saves ----


@pytest.mark.parametrize("shape", [(2, 2)])
def test_kept_layer_inputs(shape):
    """P_a divides them by M, P_a+cpu moves them to the host."""
    off, on, cpu = (zero_r("none", "--pa", pa, shape=shape, simulate=True) for pa in ("off", "on", "cpu"))
    (config,) = off.of("config")
    whole = config["layers"] * config["batch"] * config["context"] * config["width"] * 2  # of the blocks
    assert {(record["kept"], record["kept_host"]) for record in off.of("memory")} == {(whole, 0)}
    assert {(record["kept"], record["kept_host"]) for record in on.of("memory")} == {(whole / shape[1], 0)}
    assert {(record["kept"], record["kept_host"]) for record in cpu.of("memory")} == {(0, whole / shape[1])}
    for record in cpu.of("memory"):  # the host's memory is no part of the device's
        assert record["peak"] == sum(record["at_peak"].values()) - record["at_peak"]["host"]


def buffers(layers, width, *switches):
    """The most bytes of the category at any time of the step, without the 4 bytes of Adam's counter for each piece."""
    options = f"--layers {layers} --width {width} --heads 4 --context 16 --batch 1 --simulate-ranks 4 --mp 2".split()
    run = launch("tests/drive.py", "trace", "zero_r.py", *options, "--buffer-elements", PIECE, *switches)
    ((config,), (rank,)) = run.of("config"), found(run)
    own = [-(-size // (16 * 2)) * 16 for size in layer_sizes(config)]  # padded to a multiple of 16·N, over N = 2
    assert config["psi"] == sum(layer_sizes(config))
    return rank["most"]["buffers"] - 4 * sum(-(-size // PIECE) if config["cb"] == "on" else 1 for size in own)


@pytest.mark.parametrize("config", ["full", *with_all(("C1",))])
def test_buffers_do_not_grow_with_the_model(config):
    small, deeper, wider = (buffers(*shape, "--config", config) for shape in ((2, 256), (4, 256), (2, 512)))
    assert small == deeper == wider <= 4 * 4 * PIECE + 256


def test_buffers_grow_without_cb():
    sizes = ((2, 256), (4, 256), (2, 512))
    small, deeper, wider = (buffers(layers, width, "--config", "full", "--cb", "off") for layers, width in sizes)
    assert deeper > 1.5 * small and wider > 3 * small


@pytest.mark.parametrize("config", ["full", *with_all(("C2",))])
def test_fragmentation(config):
    """§6.3: of a model whose layers' temporaries are of the size of what is kept, in 16 bits as that."""
    options = "--layers 8 --width 512 --heads 8 --context 128 --batch 2 --simulate-ranks 8 --mp 2".split()
    options += ["--compute", "bfloat16"]
    (without,), (with_md,) = (
        launch("zero_r.py", *options, "--config", config, "--md", md).of("memory") for md in ("off", "on")
    )
    assert with_md["states"] == without["states"]  # each gradient is in its slot, and not beside it
    assert with_md["at_peak"]["host"] == with_md["kept_host"]  # and so is each kept input
    assert 0 <= with_md["fragmentation"] < without["fragmentation"]
    assert 0 <= with_md["fragmentation_kept"] <= 0.02


@pytest.fixture(scope="module")
def module():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("zero_r")


def test_first_fit(module):
    """A hand-made trace: births, deaths, a mark, and a storage that isn't asked for."""
    a, b, c, d, e, other = range(6)
    trace = [(a, 10), (b, 20), (c, 5), (other, 99), (b, -20), ("mark", 0.0), (d, 8), (other, -99), (e, 15)]
    assert module.first_fit(trace, {a, b, c}) == (35, 35, {a: (0, 10), b: (10, 30), c: (30, 35)})
    # d takes the first 8 of b's 20; e finds only 12 there, and goes on top of c.
    assert module.first_fit(trace, {a, b, c, d, e})[:2] == (38, 50)
    # The gaps that a, d and the rest of b leave are one of 30: a storage of that size fits.
    trace += [(a, -10), (d, -8), (other, 30), (c, -5), (other, -30), (e, -15), (a, 50)]
    trace[3] = trace[7] = (other, 0)
    assert module.first_fit(trace, {a, b, c, d, e, other})[:2] == (50, 50)


def test_copies_run_beside_what_a_gpu_computes(module, monkeypatch):
    """P_a+cpu, with streams that only write down who waits for whom: no GPU is needed to see the order."""
    said = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def in_stream(stream):
        said.append(f"{stream.name} copies")
        yield

    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda: Stream("computing"))
    monkeypatch.setattr(module.torch.cuda, "stream", in_stream)
    meter = module.Meter(torch.device("cpu"))
    comm = types.SimpleNamespace(copying=Stream("copying"), replica=None, meter=meter)
    layer = types.SimpleNamespace(name="block 0", input_slot=None)
    cfg, x = module.Config(mp=1, pa="cpu", md="off"), torch.randn(2, 3, 4)
    kept = module.KeptInput(x, layer, cfg, comm, meter).fetch()
    assert said == 2 * ["computing waits for copying", "copying waits for computing", "copying copies"]
    assert torch.equal(kept.wait(), x) and said[6:] == ["computing waits for copying"]
    assert [span[:2] for span in meter.spans] == [("to_host", "block 0"), ("from_host", "block 0")]


@pytest.mark.slow
def test_order_of_figure_7():
    """Where gradients weigh more than what a layer computes with, and kept inputs as well."""
    options = "--layers 8 --width 1024 --heads 16 --context 256 --batch 8 --simulate-ranks 64 --mp 4".split()
    peaks = [launch("zero_r.py", *options, "--config", config).of("memory")[0]["peak"] for config in CONFIGS[1:-1]]
    C1, C2, C3, C4, C5 = peaks
    assert C1 > C3 > C4 >= C5 and C1 > C2 > C4


# ---- What it sends ----


@pytest.mark.parametrize("config", ("C1", "C4", "full"))
@pytest.mark.parametrize(("shape", "micro_batches"), [((2, 2), 1), ((2, 2), 2)])
def test_volume_within_the_replica(config, shape, micro_batches):
    """§8: 6 all-reduces of B x T x C a block, each 2(M-1)/M of it; P_a gathers it once, which is 1/12 of that."""
    run, (_, M) = zero_r(config, shape=shape, dtype="float32", micro_batches=micro_batches, simulate=True), shape
    (cfg,), (record,) = run.of("config"), run.of("communication")
    tensor, reduced = record["tensor"], record["tensor"]["collectives"]["all_reduce"]
    one = micro_batches * cfg["layers"] * cfg["batch"] * cfg["context"] * cfg["width"] * (M - 1) // M
    assert reduced["elements"] == 12 * one and reduced["calls"] == 6 * micro_batches * cfg["layers"]
    gathered = tensor["collectives"].get("all_gather", {"elements": 0})["elements"]
    assert gathered == (0 if config == "C1" else reduced["elements"] / 12)
    assert tensor["elements"] == tensor["formula"] == reduced["elements"] + gathered
    assert tensor["bytes"] == 4 * tensor["elements"]


@pytest.mark.parametrize("config", ("C1", "C4", "full"))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_volume_between_the_replicas(config, micro_batches):
    run = zero_r(config, dtype="float32", micro_batches=micro_batches, simulate=True)
    (cfg,), (record,) = run.of("config"), run.of("communication")
    stage = {"os": 1, "os+g": 2, "os+g+p": 3}[cfg["partition"]]
    padded = [-(-size // 32) * 32 for size in layer_sizes(cfg)]
    sent = record["collectives"]
    assert (sent["reduce_scatter"]["elements"], sent["all_gather"]["elements"]) == formulas.elements(stage, cfg, padded)
    assert record["formula"] == pytest.approx(sum(formulas.elements(stage, cfg, layer_sizes(cfg))))


# ---- How it behaves ----


@pytest.mark.parametrize(("config", "shape"), [("none", (2, 2)), ("C2", (2, 2)), ("full", (2, 2)), ("C5", (1, 2))])
def test_a_simulation_measures_what_a_run_does(config, shape):
    real, simulated = zero_r(config, shape=shape), zero_r(config, shape=shape, simulate=True)
    one, other = ({**run.of("memory")[0], "clock_ms": None} for run in (simulated, real))
    assert one == other  # every category at both moments, what is kept, the heap
    (one,), (two,) = real.of("communication"), simulated.of("communication")
    assert one["collectives"] == two["collectives"] and one["tensor"] == two["tensor"]


BAD = [  # (options, what the line must contain)
    ("--simulate-ranks 3 --mp 3", "--mp 3 must divide --heads 4"),
    ("--simulate-ranks 5 --mp 2", "--mp 2 must divide ranks 5"),
    ("--mp 2", "--mp 2 must divide ranks 1"),
    ("--mp 0", "--mp 0"),
    ("--buffer-elements 100", "--buffer-elements 100"),
    ("--buffer-elements 0", "--buffer-elements 0"),
    ("--simulate-ranks 64 --buffer-elements 512", "--buffer-elements 512"),
    ("--config C6", "--config"),
    ("--pa host", "--pa"),
]


@pytest.mark.parametrize(("options", "contains"), BAD)
def test_bad_input(options, contains):
    bad = launch("zero_r.py", *SIZES, *options.split(), log=False)
    (line,) = bad.err.splitlines()
    assert bad.status == 2 and contains in line and "Traceback" not in bad.out + bad.err


def test_pa_without_tensor_parallelism():
    line = "P_a cpu (nothing to partition at --mp 1)"
    assert sum(line in said for said in zero_r("full", shape=(1, 1), dtype="float32").out.splitlines()) == 1
    assert line not in zero_r("full").out and line not in zero_r("none", shape=(1, 1), simulate=True).out


def test_diff_is_small():
    added, removed, _ = diff(STAGES[3], "zero_r.py", "--numstat").split(maxsplit=2)
    assert 0 < int(added) + int(removed) <= 500


@pytest.mark.slow
def test_main_command():
    """The real torchrun, which itself has a word to say about OMP_NUM_THREADS."""
    run = torchrun("zero_r.py", *SIZES, *BUFFER, "--mp", 2, "--config", "C4", ranks=4)
    assert run.status == 0 and not complaints(run)
    assert losses(run)[-1] < losses(run)[0] and len(run.of("memory")) == 4
