"""The paper's tables and figures about memory, by running the stage files as rank 0 of many.

simulate() runs a stage file with `--simulate-ranks`: the very code of the training step, on tensors that have shapes
and no memory. So the numbers below are counts of tensors that lived in a step, and no formulas. What is scaled or
extrapolated says so. GB is 10^9 bytes; section, table and figure numbers are those of arXiv 1910.02054 v3.
"""

import functools
import types

import lesson
import torch
from lesson import STAGES
from torch._subclasses.fake_tensor import FakeTensorMode

GB = 1e9
USUAL = {"context": 1024, "compute": "bfloat16"}  # of the paper's runs, 16-bit arithmetic included
CONFIGS = ("C1", "C2", "C3", "C4", "C5")
# §3.2 wants fused buffers "of constant size, large enough": of 64 Mi elements, 0.27 GB in fp32, for models of billions.
LARGE = {"buffer_elements": 2**26}


# ---- Running ---------------------------------------------------------------------------------------------------


def simulate(script, ranks, **options):
    """Runs a file as rank 0 of so many ranks. Returns its record "memory" (states, activations, buffers, peak, at_peak,
    ..., in bytes), with psi, communication and the timeline. A run with the same options is done once."""
    return run_once(script, ranks, tuple(sorted(options.items())))


@functools.cache
def run_once(script, ranks, options):
    # 16-bit arithmetic, as the paper's GPUs do it: what a CPU without 16-bit units would widen is none of its bytes.
    run = lesson.simulate(script, ranks, **{"compute": "bfloat16"} | dict(options))
    return run.one("memory") | {"psi": run.psi, "timeline": run.of("timeline"), "sent": run.one("communication")}


def line(x, y, at):
    """The straight line through two points, at a third place."""
    (x0, x1), (y0, y1) = x, y
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def solve(x, y, limit):
    """Where the straight line through two points reaches a limit."""
    (x0, x1), (y0, y1) = x, y
    return x0 + (limit - y0) * (x1 - x0) / (y1 - y0)


# ---- Figure 1 and Table 1: states ------------------------------------------------------------------------------

# Four wide layers: states don't depend on the shape, and so a run takes seconds. Within 0.5 % of the size in the name.
MODELS = {
    "7.5B": {"layers": 4, "width": 12496, "heads": 8},
    "128B": {"layers": 4, "width": 51632, "heads": 8},
    "1T": {"layers": 4, "width": 144336, "heads": 8},
}
PSI = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
TABLE_1 = {  # N_d -> GB for 7.5B, 128B and 1T, each P_os, P_os+g and P_os+g+p, as printed
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}
FIGURE_1 = (120, 31.4, 16.6, 1.9)  # GB at 7.5B and 64 ranks, for DP, P_os, P_os+g, P_os+g+p


def printed(N, model, stage):
    """A cell of Table 1: GB, and one unit of its last printed digit, since some are rounded and some are cut off."""
    text = TABLE_1[N].split()[3 * list(MODELS).index(model) + stage - 1]
    return float(text), 10.0 ** -len(text.partition(".")[2])


def states(model, stage, N):
    """GB of model states of a rank just before the optimizer step: counted, then scaled from our Ψ to the exact one."""
    run = simulate(STAGES[stage], N, batch=1, context=16, **MODELS[model])
    return run["states"] / GB * PSI[model] / run["psi"]


def figure_1():
    """[(stage, paper's GB, our GB)]"""
    return [(STAGES[stage], paper, states("7.5B", stage, 64)) for stage, paper in enumerate(FIGURE_1)]


# ---- Table 2: the largest model on 32 GB -----------------------------------------------------------------------

COLUMNS = {"baseline": ("os", 1), "P_os": ("os", 64), "P_os+g": ("os+g", 64), "P_os+g+p": ("os+g+p", 64)}
TABLE_2 = {  # MP -> billions of parameters in the order of COLUMNS (states only), then as measured: baseline, P_os
    1: (2, 7.6, 14.4, 128, 1.3, 6.2),
    2: (4, 15.2, 28.8, 256, 2.5, 12.5),
    4: (8, 30.4, 57.6, 500, 5, 25),
    8: (16, 60.8, 115.2, 1000, 10, 50),
    16: (32, 121.6, 230.4, 2000, 20, 100),
}


def table_2_run(column, mp, layers):
    """A model of that many layers, as wide as models of its size are, at batch 1 and sequences of 1024, without C_B."""
    partition, N = COLUMNS[column]
    width = 8192 if mp == 16 or column == "P_os+g+p" else 4096 if mp > 2 else 2048
    return simulate(
        "zero_r.py", N * mp, mp=mp, config="none", partition=partition, layers=layers, width=width,
        heads=width // 128, context=1024, batch=1,
    )  # fmt: skip


def at_the_update(run):
    """Bytes alive when all fp32 gradients are made."""
    moments = [moment for moment in run["timeline"] if moment["label"] == "fp32 gradients"]
    names = [name for name in lesson.COLORS if name != "host"]
    return max(sum(moment[name] for name in names) for moment in moments)


def largest(column, mp, what, limit=32):
    """Billions of parameters, all mp parts together, at which the "states" or the "peak" reach the limit in GB: two
    runs, and the straight line through them. Of the peak two lines: in small models it is in the backward pass, where
    a block's temporaries are, and in large ones it may be at the update, where the fp32 gradients grow with the
    model."""
    runs = [table_2_run(column, mp, layers) for layers in (4, 8)]
    lines = [[run[what] for run in runs]] + ([[at_the_update(run) for run in runs]] if what == "peak" else [])
    return min(mp * solve([run["psi"] for run in runs], line, limit * GB) / 1e9 for line in lines)


# ---- §3.2 and §6.1: activations and buffers --------------------------------------------------------------------

GPT2 = {"width": 1600, "heads": 25, "context": 1024, "vocab": 50257}  # with 48 layers §3.2's model of 1.5B
GPT2_LAYERS, GPT2_BATCH = 48, 32
GPT2_PAPER = {"without checkpoints": 60, "with checkpoints": 8, "fp32 buffer": 6}  # GB


def block_keeps(script="stage0_ddp.py", batch=GPT2_BATCH, **shape):
    """The bytes of each tensor that one block's forward keeps for its backward, in the order in which they are made,
    counted by the file's own meter. Without checkpoints every block keeps them all at once. The block's input is not
    among them, and its output is: it is the next block's input."""
    stage, shape = lesson.load(script), GPT2 | shape
    cfg = stage.Config(layers=1, batch=batch, compute="bfloat16", **shape)
    meter = stage.Meter(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = stage.Layer("block 0", stage.Block, cfg, types.SimpleNamespace(rank=0, world_size=1), "cpu")
        x = torch.empty(batch, cfg.context, cfg.width, dtype=torch.bfloat16, requires_grad=True)
        flat = layer.flat.requires_grad_()
        meter.start([(x, "activations"), (flat, "parameters")])
        with meter, meter.computing("forward", layer):
            out = layer(flat, x, None)
        alive = {}
        for number, change in meter.trace:
            if not isinstance(number, str):  # a mark
                alive[number] = alive.get(number, 0) + change
        del out
    return [size for number, size in alive.items() if size and meter.storages[number]["category"] == "activations"][1:]


def gpt2_activations():
    """{what: GB} of §3.2 for GPT-2 1.5B, batch 32: kept without checkpoints, and with one a block; the fused fp32
    buffer. Counted on a few layers, times 48 of them."""
    run = simulate("zero_r.py", 1, config="none", layers=2, batch=GPT2_BATCH, **GPT2)
    buffers = []
    for layers in (2, 4):
        timeline = simulate("stage0_ddp.py", 1, layers=layers, batch=1, **GPT2)["timeline"]
        (moment,) = (moment for moment in timeline if moment["label"] == "fp32 gradients")
        buffers.append(moment["buffers"])
    return {
        "without checkpoints": GPT2_LAYERS * sum(block_keeps()) / GB,
        "with checkpoints": GPT2_LAYERS / 2 * run["kept"] / GB,
        "fp32 buffer": line((2, 4), buffers, GPT2_LAYERS) / GB,
    }


PA_PAPER = {"C3": 33, "C4": 2, "C5": 0}  # GB per GPU of kept inputs, as §6.1 prints them


def pa_example():
    """{configuration: (GB on the device, GB on the host)} of kept inputs of §6.1's 100B model: 125 layers, batch 32."""
    runs = {config: zero_r(config, layers=2, batch=32) for config in PA_PAPER}
    return {config: (125 / 2 * run["kept"] / GB, 125 / 2 * run["kept_host"] / GB) for config, run in runs.items()}


# ---- Figures 6, 7 and 8: zero_r.py at MP 16 --------------------------------------------------------------------
# The vocabulary is the default, 256: our embedding and head are not cut over the replica's ranks, Megatron's are.

FIGURE_6 = {"C1": 40, "C2": 60, "C3": 50, "C4": 140, "C5": 150}  # largest model in billions, batch 16, 400 GPUs
FIGURE_7 = {  # (layers, batch) -> GB, 400 GPUs: read off the picture to 0.3, for our eyes only
    (50, 16): {"C1": 29.7, "C2": 24.1, "C3": 25.5, "C4": 19.8, "C5": 19.8},
    (125, 32): {"C4": 29.6, "C5": 26.6},
}
# §10.3's 60B model (75 layers) on so many GPUs: the batch of a replica that it ran with (Table 6).
FIGURE_3 = {64: 16, 128: 48, 256: 48, 400: 64}
KEPT = {"C1": 1, "C2": 1 / 16, "C3": 1, "C4": 1 / 16, "C5": 0}  # of a layer's input, on the device
FIGURE_8 = {"C1": 2, "C2": 4, "C3": 8, "C4": 32, "C5": 32}  # largest batch: 60B = 75 layers, 128 GPUs


def zero_r(config, layers, batch, ranks=400, width=8192, heads=64, mp=16, **more):
    """A run of a shape of Tables 6 to 9, sequences of 1024, with buffers of 64 Mi elements."""
    shape = {"layers": layers, "batch": batch, "width": width, "heads": heads, "context": 1024}
    return simulate("zero_r.py", ranks, config=config, mp=mp, **shape, **LARGE, **more)


def peak(config, layers, batch, ranks=400, **shape):
    """GB at the peak, from four runs: it is affine in the layers and in the batch, once both are large enough that the
    peak is in the backward of a block between two others (below batch 8 it may be in the optimizer step, a few tenths
    of a GB higher)."""
    corners = {at: zero_r(config, *at, ranks, **shape)["peak"] for at in ((3, 8), (5, 8), (3, 16), (5, 16))}
    at_8, at_16 = (line((3, 5), (corners[3, size], corners[5, size]), layers) for size in (8, 16))
    return line((8, 16), (at_8, at_16), batch) / GB


def largest_model(config, batch=16, limit=32, ranks=400):
    """Billions of parameters of the largest model, 8192 wide, on `limit` GB (Figure 6)."""
    layers = solve((10, 100), [peak(config, layers, batch, ranks) for layers in (10, 100)], limit)
    return 12 * layers * 8192**2 / 1e9


def largest_batch(config, layers=75, limit=32, ranks=128):
    """The largest batch of a replica on `limit` GB (Figure 8); 0 or less: not even one sequence."""
    return solve((8, 64), [peak(config, layers, batch, ranks) for batch in (8, 64)], limit)


# What Figure 7's five bars of 40B have in common beyond our runs, if a checkpoint is kept every two layers: see below.
BESIDES = 10.5  # GB


def paper_like_batch(config, layers=75, limit=32, ranks=128):
    """The largest batch if the two things that Figure 7 suggests were so: half of the checkpoints, and BESIDES."""
    batches = (8, 64)
    peaks = [peak(config, layers, b, ranks) + BESIDES - layers / 2 * whole_input(b) * KEPT[config] for b in batches]
    return solve(batches, peaks, limit)


def paper_like_model(config, batch=16, limit=32, ranks=400):
    """The same of the largest model, in billions of parameters."""
    layers = (10, 100)
    peaks = [peak(config, n, batch, ranks) + BESIDES - n / 2 * whole_input(batch) * KEPT[config] for n in layers]
    return 12 * solve(layers, peaks, limit) * 8192**2 / 1e9


def whole_input(batch):
    """GB of a whole layer input (B, T, C) in 16 bits."""
    return batch * 1024 * 8192 * 2 / GB


def differences(layers, batch):
    """{step: (GB by our runs, GB by the argument)} for the steps of Figure 7: P_g frees gradients, 2Ψ/16·(1 - 1/25);
    P_a frees fifteen sixteenths of a checkpoint a layer, and needs one whole input at a time again; P_a+cpu the rest,
    but for the slice on its way back. The figure's 5.6 GB for P_a at 40B instead of our 12.3 fits one checkpoint every
    two layers: half of it, 6.2."""
    gradients = 2 * (12 * layers * 8192**2) / 16 * (1 - 1 / 25) / GB
    one, GBs = whole_input(batch), {config: peak(config, layers, batch) for config in CONFIGS}
    return {
        ("C1", "C3"): (GBs["C1"] - GBs["C3"], gradients),
        ("C1", "C2"): (GBs["C1"] - GBs["C2"], layers * one * 15 / 16 - one),
        ("C3", "C4"): (GBs["C3"] - GBs["C4"], layers * one * 15 / 16 - one),
        ("C4", "C5"): (GBs["C4"] - GBs["C5"], (layers - 1) * one / 16),
    }


def unexplained(layers=50, batch=16, every=1):
    """{configuration: GB of Figure 7's bar that our run does not have}: the implementation's own buffers, and what
    its allocator had cached. Nothing here is tuned to make it smaller. `every` = 2 takes half of the checkpoints away
    from our number, as if every second layer kept one (worked out, not run): then the five bars of 40B have about the
    same rest, 10 to 11 GB; the two of 100B have 7.1 and 6.2."""
    less = {config: (1 - 1 / every) * layers * whole_input(batch) * share for config, share in KEPT.items()}
    return {config: bar - peak(config, layers, batch) + less[config] for config, bar in FIGURE_7[layers, batch].items()}


def step_of_60b(ranks, batch):
    """What one GPU of §10.3's 60B model does in a step: (seconds of computing, seconds of sending among the replicas).
    An estimate: operations at the paper's speed, and the bytes, along the line from 3 and 5 layers, on its network."""
    runs = [zero_r("C4", layers, 8, ranks) for layers in (3, 5)]
    sent, psi = (line((3, 5), values, 75) for values in zip(*((run["sent"]["bytes"], run["psi"]) for run in runs)))
    return operations(psi, batch * 1024) / SPEED, seconds(sent, min(NETWORKS.values()))


# ---- §9 and beyond ---------------------------------------------------------------------------------------------

TRILLION = {"layers": 128, "width": 25600, "heads": 128}  # 1.007e12 parameters
TEN_TRILLION = {"layers": 512, "width": 40320, "heads": 320}  # 0.999e13


def huge(shape, ranks=1024, mp=16, batch=1, config="full"):
    """{states, peak, kept_host, psi, bytes sent} of a rank, on the straight line through 4 and 6 layers: with fewer,
    there are never two whole blocks gathered while a third one's gradient is reduced."""
    runs = [zero_r(config, **shape | {"layers": layers}, batch=batch, ranks=ranks, mp=mp) for layers in (4, 6)]
    at = [run | {"data bytes": run["sent"]["bytes"], "tensor bytes": run["sent"]["tensor"]["bytes"]} for run in runs]
    keys = ("states", "peak", "kept_host", "psi", "data bytes", "tensor bytes")
    return {key: line((4, 6), [run[key] for run in at], shape["layers"]) for key in keys}


# GB/s that one GPU has to the other nodes: the paper's 25 nodes of 16 have 800 Gb/s each (§10.1).
NETWORKS = {"800 Gb/s a node of 16, the paper's": 6.25, "eight times that": 50}
SPEED = 38e12  # operations in a second on one GPU, as the paper reports for 100B (§10.2)


def operations(psi, tokens):
    """Of training a model of psi parameters on so many tokens: a product and a sum for each parameter in forward,
    twice that in backward, and forward once more for activation checkpointing."""
    return 8 * psi * tokens


def seconds(sent, gigabytes_per_s):
    """What sending so many bytes costs, if nothing hides it."""
    return sent / (gigabytes_per_s * GB)
