"""Stage 0: plain data parallelism, the baseline that ZeRO starts from (§3.1, §7.1).

Every rank holds everything. With Ψ parameters in the mixed precision of §3.1, a rank keeps

    parameters  2Ψ bytes    16-bit
    gradients   2Ψ bytes    16-bit
    optimizer  12Ψ bytes    fp32 master copy, momentum and variance of Adam: K = 12

that is 16Ψ bytes on each of N ranks, N times the same. Gradients are averaged by an all-reduce, written here as
the two halves that §7.1 takes it apart into: a reduce-scatter, then an all-gather. Each moves Ψ(N-1)/N elements
in and out of a rank, together 2Ψ(N-1)/N. The next file changes what happens between the two halves.

    torchrun --standalone --nproc-per-node 2 stage0_ddp.py      # two processes: NCCL on GPUs, else gloo on CPU
    python stage0_ddp.py --simulate-ranks 1024 --layers 72 --width 2944 --heads 23 --context 1024 --batch 1
    git diff --no-index stage0_ddp.py stage1_os.py              # what §5.1 adds
"""

# ---- 1. Imports ------------------------------------------------------------------------------------------------

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import inspect
import json
import math
import mmap
import os
import pydoc_data.topics
import random
import re
import sys
import time
import timeit
import typing
import weakref
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but torch.optim imports it later, and then it would keep the group of that moment
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode  # simulated ranks: tensors with shapes and no memory
from torch.utils._python_dispatch import TorchDispatchMode  # the meter: sees every tensor that is made

# ---- 2. Configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """Every field is an option of the command line, and its comment is the option's help."""

    layers: int = 4  # transformer blocks
    width: int = 256  # size C of the hidden state
    heads: int = 8  # attention heads; must divide the width
    context: int = 128  # tokens T in a sequence
    vocab: int = 256  # size of the vocabulary; a token is a byte, so at least 256
    batch: int = 8  # sequences B per rank and micro-batch
    micro_batches: int = 1  # micro-batches per step; their gradients are summed in fp32
    steps: int = 50  # optimizer steps; the last one is metered and not timed
    lr: float = 1e-3  # learning rate after the warm-up
    warmup: int = 10  # steps in which the learning rate rises to that
    clip: float = 1.0  # largest global norm of the gradient
    seed: int = 0  # decides the initial weights and the order of the data
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of stored parameters, gradients and layer inputs
    compute: Literal["auto", "bfloat16", "float32"] = "auto"  # arithmetic inside a layer; auto: the faster one here
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if this machine has a GPU for each of its ranks
    collectives: Literal["auto", "gloo", "native"] = "auto"  # native: the library's own; auto: native, except on gloo
    overlap: Literal["on", "off"] = "on"  # off: wait for a collective where it starts, to see what overlap hides
    data: str = ""  # train on the bytes of this file (default: Python's own language reference)
    log: str = ""  # write records to this file, one JSON object a line
    simulate_ranks: int = 0  # run one step as rank 0 of this many ranks, on tensors without memory


def fail(message):
    """Ends the run with one line and exit status 2, for what the user can put right: no traceback."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(10)  # torchrun ends all ranks as soon as one has failed: local rank 0 speaks, unless it is well
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message + " (--help lists the options)")


def parse_args():
    """The command line as a Config; ends the run where a value can't work."""
    comments = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(Config), re.MULTILINE))
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for field in dataclasses.fields(Config):
        choices = typing.get_args(field.type) or None
        kind = {"choices": choices} if choices else {"type": field.type, "metavar": field.type.__name__.upper()}
        default = f" (default: {field.default})" if field.default != "" else ""
        names = ["--" + field.name.replace("_", "-")]
        if field.name == "log":  # torchrun before Python 3.12.7 takes --log for one of its own options
            names.append("--log-file")
        parser.add_argument(*names, default=field.default, help=comments[field.name] + default, **kind)
    cfg = Config(**vars(parser.parse_args()))

    for name in ("layers", "width", "heads", "context", "batch", "micro_batches", "steps", "lr", "clip"):
        if not 0 < getattr(cfg, name) < math.inf:
            fail(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be positive and finite")
    if cfg.vocab < 256:
        fail(f"--vocab {cfg.vocab} must be at least 256: a token is a byte")
    if cfg.width % cfg.heads:
        near = math.ceil(cfg.width / cfg.heads) * cfg.heads
        fail(f"--width {cfg.width} is not a multiple of --heads {cfg.heads}; take --width {near}, say")
    if cfg.warmup < 0 or cfg.simulate_ranks < 0:
        fail("--warmup and --simulate-ranks must not be negative")
    if cfg.simulate_ranks and "RANK" in os.environ:
        fail("--simulate-ranks is for one process: start it with python, without torchrun")
    if cfg.log and os.path.exists(cfg.log) and cfg.data and os.path.samefile(cfg.log, cfg.data):
        fail(f"--log {cfg.log} is the file of --data, and would overwrite it")
    return cfg


# ---- 3. Data ---------------------------------------------------------------------------------------------------


def load_data(cfg):
    """The training text as bytes. A file is mapped, not read, so it may be larger than memory."""
    data = "\n".join(pydoc_data.topics.topics.values()).encode()
    if cfg.data:
        try:
            with open(cfg.data, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(cfg.data) else b""
        except OSError as error:
            fail(f"--data {cfg.data}: {error.strerror}")
    if len(data) <= cfg.context:
        text = f"--data {cfg.data}" if cfg.data else "the built-in text"
        fail(f"{text} has {len(data)} bytes, and a sequence takes --context {cfg.context} + 1; shorten the context")
    return data


def load_batches(data, step, cfg, comm, device):
    """This rank's micro-batches of a step: a list of (x, y), both (B, T) int64, y one byte further than x.

    The seed and the step decide one global batch, whatever the number of ranks: a rank takes its slice of it, so
    no two ranks read the same slice of it and 1 rank x 8 trains on what 4 ranks x 2 train on.
    """
    draw = random.Random(f"{cfg.seed}/{step}")  # a string is hashed whole: no two (seed, step) share a stream
    mine = cfg.micro_batches * cfg.batch
    starts = [draw.randrange(len(data) - cfg.context) for _ in range(comm.world_size * mine)]
    starts = starts[comm.rank * mine : (comm.rank + 1) * mine]
    text = bytearray(b"".join(data[start : start + cfg.context + 1] for start in starts))
    tokens = torch.frombuffer(text, dtype=torch.uint8).view(mine, cfg.context + 1).to(device, torch.int64)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(cfg.batch)]


# ---- 4. The model ----------------------------------------------------------------------------------------------
# GPT-2 with pre-LayerNorm and learned positions; the head is not tied to the embedding. All layers take (x, y) and
# only the head reads the targets y, so that one loop serves all layers. They are made on the meta device: a module
# gives names and shapes here and never holds a weight.


class Embedding(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.token = nn.Embedding(cfg.vocab, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width)

    def forward(self, x, y):  # x (B, T) int64 -> (B, T, C)
        return self.token(x) + self.position.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.attention_norm = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.attention_proj = nn.Linear(cfg.width, cfg.width)
        self.mlp_norm = nn.LayerNorm(cfg.width)
        self.mlp_up = nn.Linear(cfg.width, 4 * cfg.width)
        self.mlp_proj = nn.Linear(4 * cfg.width, cfg.width)

    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_proj(heads.transpose(1, 2).reshape(B, T, -1))
        return x + self.mlp_proj(F.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.width)
        self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, x, y):  # x (B, T, C), y (B, T) int64 -> the mean loss, 0-d fp32
        return F.cross_entropy(self.logits(self.norm(x)).float().flatten(0, 1), y.flatten())


# ---- 5. Collectives --------------------------------------------------------------------------------------------


class Collectives:
    """reduce_scatter and all_gather of one flat vector, and the count of what a rank sends.

    Both start the transfer and return `wait`, a function that ends it and returns the result; what is computed
    between the two hides the transfer. All ranks must start them in the same order: the order of the layers, never
    the order in which gradients happen to arrive.
    """

    def __init__(self, cfg, meter, group):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        # gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes; its all-gather takes twice the
        # time of broadcasts. NCCL's are right, and 1024 broadcasts a layer would make a simulation slow.
        self.native = cfg.collectives == "native" or cfg.collectives == "auto" and dist.get_backend() != "gloo"
        self.overlap, self.meter = cfg.overlap == "on", meter
        self.start_step()

    def start_step(self):
        """Sets the counters to zero."""
        self.sent = {}  # collective -> calls, elements and bytes that this rank has sent
        self.waits = []  # (start, end) of each time the step stood waiting

    def reduce_scatter(self, full, layer):
        """Averages a vector over the ranks. full (n,) -> wait() -> (n/N,): this rank's slice of the average.

        The paper's picture of P_g (§5.2): everyone mails slice r to rank r, and rank r adds them up. On gloo the sum
        is taken in fp32 and in the order of the ranks, so every run gives the same bits; it takes n/N elements of fp32.
        Natively the library sums, in its order and in the dtype of `full`.
        """
        if self.native:
            shard = full.new_empty(full.numel() // self.world_size)
            works = [reduce_scatter_single(shard, full, op=dist.ReduceOp.AVG, group=self.group, async_op=True)]
            return self.started("reduce_scatter", layer, full, works, [full, shard], lambda: shard)
        received = torch.empty_like(full)
        works = [dist.all_to_all_single(received, full, group=self.group, async_op=True)]

        def average():
            total = torch.zeros(full.numel() // self.world_size, dtype=torch.float32, device=full.device)
            for part in received.chunk(self.world_size):
                total += part
            return total.div_(self.world_size)

        return self.started("reduce_scatter", layer, full, works, [full, received], average)

    def all_gather(self, full, layer):
        """Completes a vector of which every rank has its own slice. full (n,), filled in place -> wait() -> full."""
        if self.native:
            part = full.numel() // self.world_size
            slices = [full[self.rank * part : (self.rank + 1) * part]]
            works = [all_gather_single(full, slices[0], group=self.group, async_op=True)]
        else:  # each owner broadcasts its slice, as §5.3 words it
            slices = full.chunk(self.world_size)
            works = [dist.broadcast(s, group=self.group, group_src=r, async_op=True) for r, s in enumerate(slices)]
        return self.started("all_gather", layer, full, works, slices, lambda: full)

    def started(self, name, layer, full, works, tensors, result):
        """Counts a collective over `full` and returns its wait(). Either half sends n(N-1)/N elements (§7.1)."""
        self.count(name, full.numel() // self.world_size * (self.world_size - 1), full.element_size())
        start = self.meter.now()

        def wait():
            stood = self.meter.now()
            while works:
                works.pop(0).wait()
            end = self.meter.now()
            self.meter.settle(tensors)
            self.waits.append((stood, end))
            self.meter.span(name, layer, start, end)
            return result()

        if self.overlap:
            return wait
        value = wait()
        return lambda: value

    def all_reduce_scalars(self, scalars):
        """Sums a handful of numbers over the ranks, in place. Listed apart from the volume of the model."""
        self.count("scalars", scalars.numel(), scalars.element_size())
        start = self.meter.now()
        dist.all_reduce(scalars, group=self.group)
        self.meter.settle([scalars])
        self.waits.append((start, self.meter.now()))
        return scalars

    def count(self, name, elements, element_size):
        entry = self.sent.setdefault(name, {"calls": 0, "elements": 0, "bytes": 0})
        entry["calls"] += 1
        entry["elements"] += elements
        entry["bytes"] += elements * element_size

    def waited_ms(self):
        return sum(elapsed_ms(start, end) for start, end in self.waits)


# torch 2.13 gave these two new names; 2.11 and older have only the old ones.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- 6. The memory meter ---------------------------------------------------------------------------------------

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")


class Meter(TorchDispatchMode):
    """Counts the live bytes of one step by category, from the storages that really exist.

    While it is on it sees the result of every operation. A storage it has not seen is a birth; a weak reference
    tells of the death. A storage often gets its name only later (a gradient is known as one when autograd returns
    it), so births and deaths are written to a trace first, and counted at the end under the final names.
    """

    def __init__(self, device):
        super().__init__()
        self.device, self.running = device, False
        self.default = "buffers"  # what a storage is until it is named

    def start(self, named):
        """Begins a trace with the (tensor, category) pairs that are alive already."""
        self.running, self.began = True, self.now()
        self.trace = []  # (number, +bytes) for a birth, (number, -bytes) for a death, (label, time) for a mark
        self.category = []  # number of a storage -> its category
        self.alive = {}  # address of a living storage -> (number, weak reference)
        self.spans = []  # (what, layer, start, end)
        for tensor, category in named:
            self.name(tensor, category)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor):
        """Gives the tensor's storage a number at first sight, and notes its birth and, when it comes, its death."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.alive and tensor.device.type != "meta":  # a meta module has shapes, no memory
            number, size = len(self.category), storage.nbytes()

            def died(_):
                del self.alive[address]
                self.trace.append((number, -size))

            self.alive[address] = number, weakref.ref(storage, died)
            self.category.append(self.default)
            self.trace.append((number, size))

    def name(self, tensor, category):
        """Says what a tensor is, from its birth on. Returns the tensor."""
        if self.running:
            self.see(tensor)
            self.category[self.alive[tensor.untyped_storage()._cdata][0]] = category
        return tensor

    def mark(self, label):
        """Notes a moment of the step for the timeline."""
        if self.running:
            self.trace.append((label, self.now()))

    def span(self, what, layer, start, end):
        if self.running:
            self.spans.append((what, layer, start, end))

    def settle(self, tensors):
        """gloo's thread lets go of a tensor a moment after wait() returns. Give it that moment while the meter is on,
        or the live bytes would differ from run to run."""
        if not self.running or dist.get_backend() != "gloo":
            return
        deadline = time.perf_counter() + 10
        while any(tensor._use_count() > 1 for tensor in tensors):
            if time.perf_counter() > deadline:
                raise RuntimeError("a view or a work still holds a tensor whose transfer is over: del it earlier")
            time.sleep(0)
        time.sleep(2e-3)  # the thread's last act is to drop a reference of Python's, and for that it needs the GIL

    @contextlib.contextmanager
    def computing(self, what, layer):
        """The call of a layer or its backward: what is made in here and not named is an activation."""
        self.default, start = "activations", self.now()
        yield
        self.default = "buffers"
        self.span(what, layer, start, self.now())
        self.mark(f"{what} {layer}")

    def now(self):
        """The time, as the device's queue reaches this point: a CUDA event, or seconds of the CPU's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def replay(self):
        """Counts the trace: a list of moments {label, ms, category: bytes}, and the moment of the peak."""
        live, total, most, peak, timeline = dict.fromkeys(CATEGORIES, 0), 0, 0, {}, []
        for key, value in self.trace:
            if isinstance(key, str):
                timeline.append({"label": key, "ms": elapsed_ms(self.began, value), **live})
                continue
            live[self.category[key]] += value
            total += value
            if total > most:
                most, peak = total, dict(live)
        return timeline, peak

    def timed_spans(self):
        spans = [(what, layer, *(elapsed_ms(self.began, at) for at in ends)) for what, layer, *ends in self.spans]
        return [dict(zip(("what", "layer", "start_ms", "end_ms"), span)) for span in spans]


def elapsed_ms(start, end):
    """Milliseconds between two results of Meter.now()."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)


# ---- 7. The layer, its state, and the train step ---------------------------------------------------------------


class Layer:
    """A layer as a function of one flat vector of its parameters: `layer(flat, x, y)`.

    Differentiating with respect to `flat` gives the layer's gradient as one flat vector too. So all of ZeRO is the
    answer to three questions: where does the flat vector live, where does its gradient go, who owns its fp32 copy.
    """

    def __init__(self, name, module, cfg, comm, device, compute):
        self.name, self.module, self.compute = name, module, compute
        self.dtype = getattr(torch, cfg.dtype)
        self.shapes = {name: weight.shape for name, weight in module.named_parameters()}
        self.psi = sum(shape.numel() for shape in self.shapes.values())
        # N ranks cut the vector into N equal slices. 16 more in the multiple, because fused Adam computes the last
        # few elements of a vector with other instructions and other last bits: now no cut moves an element there.
        self.padded = math.ceil(self.psi / (16 * comm.world_size)) * 16 * comm.world_size
        self.sizes = [shape.numel() for shape in self.shapes.values()] + [self.padded - self.psi]
        part = self.padded // comm.world_size
        self.own = slice(comm.rank * part, (comm.rank + 1) * part)  # this rank's slice
        full = self.initial_weights(cfg).to(device)
        self.flat = full.to(self.dtype, copy=True)  # parameters (padded,) 16-bit: 2Ψ
        self.master = full  # fp32, what Adam updates (padded,): 4Ψ, with its moments 12Ψ
        self.grad = None  # from backward to the end of the step

    def initial_weights(self, cfg):
        """GPT-2's initial weights (padded,) fp32, drawn alike on every rank and device. The padding must be zero."""
        seed = random.Random(f"{cfg.seed}/{self.name}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        full = torch.zeros(self.padded)
        for name, piece in zip(self.shapes, full.split(self.sizes)):
            if len(self.shapes[name]) == 2:  # a matrix; those that add to the residual stream are scaled down
                std = 0.02 / math.sqrt(2 * cfg.layers) if name.endswith("proj.weight") else 0.02
                piece.normal_(0, std, generator=generator)
            elif name.endswith("norm.weight"):
                piece.fill_(1)
        return full

    def __call__(self, flat, x, y):
        """flat (padded,), x the layer's input -> its output in the stored dtype, or the loss in fp32.

        A CPU without bf16 units multiplies bf16 matrices 30 to 100 times slower than fp32 ones, so what is stored in
        16 bits may be widened here for the arithmetic. Such a copy lives as long as the layer computes.
        """
        pieces = flat.to(self.compute).split(self.sizes)  # the last piece is the padding, which nothing uses
        weights = {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces)}
        x = x.to(self.compute) if x.is_floating_point() else x
        out = torch.func.functional_call(self.module, weights, (x, y))
        return out.to(self.dtype) if out.dim() else out


def make_layers(cfg, comm, device, compute):
    """[embedding, block 0, ..., head]. One layer's fp32 weights are gone before the next layer's are made."""
    with torch.device("meta"):
        modules = {"embedding": Embedding(cfg)}
        modules |= {f"block {i}": Block(cfg) for i in range(cfg.layers)}
        modules |= {"head": Head(cfg)}
    return [Layer(name, module, cfg, comm, device, compute) for name, module in modules.items()]


def named_states(layers, adam):
    """(tensor, category) of all that lives from one step to the next."""
    for layer in layers:
        yield layer.flat, "parameters"
        yield layer.master, "optimizer"
    for state in adam.state.values():
        yield state["exp_avg"], "optimizer"
        yield state["exp_avg_sq"], "optimizer"
        yield state["step"], "buffers"


def full_master(layer, comm):
    """A layer's whole fp32 master copy (padded,), for the checksum of the weights."""
    return layer.master


def paper_states(psi, world_size, cfg):
    """Bytes of model states per rank: parameters + gradients + optimizer states."""
    width = 2 if cfg.dtype == "bfloat16" else 4
    grad_width = width if cfg.micro_batches == 1 else 4  # sums over micro-batches are kept in fp32
    return width * psi + grad_width * psi + 12 * psi  # §3.1: 2Ψ + 2Ψ + KΨ, K = 12


def paper_volume(layers, world_size, cfg):
    """Elements that a rank sends in a step, and the formula in words."""
    psi = sum(layer.psi for layer in layers)
    return 2 * psi * (world_size - 1) / world_size, "2Ψ(N-1)/N"  # §7.1: reduce-scatter Ψ + all-gather Ψ


def sum_of_squares(vectors):
    """The sum of the squares of all elements, 0-d float64, so that its rounding to fp32 forgets the order of the sum
    and every stage gets the same norm to the last bit. In pieces, because each piece is widened to 8 bytes."""
    total = torch.zeros((), dtype=torch.float64, device=vectors[0].device)
    for vector in vectors:
        for piece in vector.chunk(4):
            total += piece.double().square_().sum()
    return total


@torch.no_grad()
def train_step(layers, adam, batches, cfg, comm, meter):
    """One step: forward and backward of every micro-batch, the reduction of the gradients, Adam.

    batches: list of (x, y). Returns the loss, the mean over ranks and micro-batches, and the global norm of the
    gradient, both 0-d fp32. Nothing here reads a number back from the device, so the device never waits for Python.
    """
    dtype = layers[0].dtype
    grad_dtype = dtype if len(batches) == 1 else torch.float32  # small terms vanish in a 16-bit sum
    loss = torch.zeros((), dtype=torch.float64, device=meter.device)
    reducing, gathering = [], []  # the reduce-scatter and the all-gather under way: (layer, wait), at most one each

    def finish_reduction():
        for layer, wait in reducing:
            layer.grad[layer.own] = wait().to(dtype)  # the rounding of what is sent
            # §7.1: the second half of the all-reduce gives every rank the whole average.
            finish_gather()
            full = meter.name(layer.grad.to(dtype), "gradients")
            gathering.append((layer, comm.all_gather(full, layer.name)))
        reducing.clear()

    def finish_gather():
        for layer, wait in gathering:
            layer.grad.copy_(wait())  # with one micro-batch it was gathered in place, and this does nothing
        gathering.clear()

    for micro, (tokens, y) in enumerate(batches):
        # Forward. Only the layers' inputs are kept: activation checkpoints (§3.2). The head can wait for the backward.
        x, inputs = tokens, [tokens]
        for layer in layers[:-1]:
            flat = layer.flat
            with meter.computing("forward", layer.name):
                x = layer(flat, x, y)
            inputs.append(x)

        # Backward, in reverse order: recompute a layer from its input, differentiate, forget.
        dx = [torch.full((), 1 / len(batches), device=meter.device)]  # the loss is the mean over the micro-batches
        for layer in reversed(layers):
            flat, x = layer.flat, inputs.pop()
            with meter.computing("backward", layer.name):
                wanted = [tensor.requires_grad_() for tensor in (flat, x) if tensor.is_floating_point()]
                with torch.enable_grad():
                    out = layer(flat, x, y)
                flat_grad, *dx = torch.autograd.grad(out, wanted, dx)
                meter.name(flat_grad, "gradients")
                if layer is layers[-1]:
                    loss += out.detach() / len(batches)
                # The graph behind `out` keeps the parameters and activations it was made from: let go of all of it.
                del flat, x, wanted, out
            layer.grad = flat_grad.to(grad_dtype) if layer.grad is None else layer.grad.add_(flat_grad)
            meter.name(layer.grad, "gradients")
            del flat_grad
            # Reduce once a step, after the last micro-batch, and while the next layer computes. First finish the
            # reduction before it: two at once would hold two pairs of send and receive buffers.
            if micro == len(batches) - 1:
                finish_reduction()
                full = meter.name(layer.grad.to(dtype), "gradients")
                reducing.append((layer, comm.reduce_scatter(full, layer.name)))
                del full
    finish_reduction()
    finish_gather()
    meter.mark("before the optimizer step")

    squares = sum_of_squares([layer.grad for layer in layers])
    loss = comm.all_reduce_scalars(loss)
    norm = squares.sqrt().float()
    # Fused Adam divides the gradient by `grad_scale`, and leaves parameters, moments and step count untouched where
    # `found_inf` is 1. The norm is the same on every rank, so all ranks clip alike and skip alike.
    adam.grad_scale = (norm / cfg.clip).clamp(min=1)
    adam.found_inf = (~norm.isfinite()).float()
    meter.mark("norm")
    # Adam wants the gradients of all that it updates in fp32. Together they are as large as §3.2's fused buffer.
    for layer in layers:
        layer.master.grad = layer.grad.float()
    meter.mark("fp32 gradients")
    adam.step()
    meter.mark("Adam")
    for layer in layers:
        layer.grad = layer.master.grad = None
        layer.flat.copy_(layer.master)
    meter.mark("parameters updated")
    return (loss / comm.world_size).float(), norm


# ---- 8. The run ------------------------------------------------------------------------------------------------


def choose_device(cfg):
    """cuda with one GPU for each rank of this machine, or the cpu with its cores divided among the ranks."""
    ranks_here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if cfg.device == "cuda" and gpus < ranks_here:
        fail(f"--device cuda needs a GPU for each of {ranks_here} ranks, finds {gpus}; start fewer or use --device cpu")
    torch.set_num_threads(max(1, os.cpu_count() // ranks_here))
    if cfg.device == "cpu" or cfg.simulate_ranks or gpus < ranks_here:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # the rank within this machine, not the job
    torch.cuda.set_device(device)
    return device


def choose_compute(cfg, device):
    """The dtype of the arithmetic in a layer. On a CPU, rank 0 times a small product in either and decides for all."""
    if cfg.compute != "auto":
        return getattr(torch, cfg.compute)
    if cfg.dtype == "float32" or cfg.simulate_ranks or device.type == "cuda":
        return getattr(torch, cfg.dtype)
    a, b = torch.ones(256, 256), torch.ones(256, 256, dtype=torch.bfloat16)
    fp32, bf16 = (min(timeit.repeat(lambda: x @ x, number=1, repeat=5)) for x in (a, b))
    choice = torch.tensor([float(bf16 < fp32)])
    dist.broadcast(choice, 0)
    return torch.bfloat16 if choice.item() else torch.float32


def checksum(layers, comm):
    """sha256 of all fp32 master copies without padding: equal weights give equal sums, whatever the stage."""
    digest = hashlib.sha256()
    for layer in layers:
        digest.update(full_master(layer, comm)[: layer.psi].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def run(cfg, data, device, log):
    """Trains and reports. Rank 0 prints, and writes to `log` if that is an open file."""
    meter = Meter(device)
    comm = Collectives(cfg, meter, dist.group.WORLD)
    N, simulated = comm.world_size, cfg.simulate_ranks > 0
    compute = choose_compute(cfg, device)
    layers = make_layers(cfg, comm, device, compute)
    adam = torch.optim.Adam([layer.master for layer in layers], lr=cfg.lr, fused=True)
    for master in adam.param_groups[0]["params"]:  # what Adam's first step would make: so all steps begin alike
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        adam.state[master] = {"step": torch.zeros((), device=device), **moments}

    def record(event, **fields):
        if log:  # unbuffered, one write a line: a run that is killed leaves whole lines
            try:
                log.write(json.dumps({"event": event, **fields}).encode() + b"\n")
            except OSError as error:
                fail(f"--log {cfg.log}: {error.strerror}")

    def say(line):
        if dist.get_rank() == 0:
            print(line, flush=True)

    psi, backend, compute = sum(layer.psi for layer in layers), dist.get_backend(), str(compute).removeprefix("torch.")
    record("config", **dataclasses.asdict(cfg) | {"world_size": N, "psi": psi, "backend": backend, "compute": compute})
    say(
        f"{N} {'simulated ' if simulated else ''}rank{'s' if N > 1 else ''} on {device.type} "
        f"({'no network' if backend == 'fake' else backend}). Ψ = {psi:,} parameters in {len(layers)} layers, "
        f"stored in {cfg.dtype}, arithmetic in {compute}.\nGlobal batch: {N} ranks x {cfg.micro_batches} micro-batches "
        f"x {cfg.batch} = {N * cfg.micro_batches * cfg.batch} sequences of {cfg.context} tokens."
    )
    if cfg.log and not simulated:
        record("weights", sha256=checksum(layers, comm))

    skipped, timed = 0, []  # timed: (ms, ms of it spent waiting for communication) of each step without the meter
    for step in range(cfg.steps):
        batches = load_batches(data, step, cfg, comm, device)
        adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / max(1, cfg.warmup))
        comm.start_step()
        metered = step == cfg.steps - 1
        if metered:
            meter.start([*named_states(layers, adam), *((part, "activations") for xy in batches for part in xy)])
        start = time.perf_counter()
        with meter if metered else contextlib.nullcontext():
            loss, norm = train_step(layers, adam, batches, cfg, comm, meter)
        meter.running = False
        if simulated:
            continue
        loss, norm = loss.item(), norm.item()  # this waits for the device, so the clock is read after it
        ms = 1e3 * (time.perf_counter() - start)
        tokens_per_s = 1e3 * N * cfg.micro_batches * cfg.batch * cfg.context / ms
        speed = f"{ms:7.1f} ms | {tokens_per_s:9,.0f} tok/s"
        if metered:  # the meter slows this step down: its time says nothing
            ms, tokens_per_s, speed = None, None, "metered"
        else:
            timed.append((ms, comm.waited_ms()))
        skipped = 0 if math.isfinite(norm) else skipped + 1
        note = " | skipped: gradient not finite" if skipped else ""
        say(f"step {step:4} | loss {loss:7.4f} | norm {norm:8.4f} | {speed}{note}")
        fields = {"loss": loss if math.isfinite(loss) else None, "norm": None if skipped else norm}  # JSON has no inf
        record("step", step=step, **fields, ms=ms, tokens_per_s=tokens_per_s, **{"skipped": True} if skipped else {})
        if skipped == 10:
            fail("the gradient was not finite in ten steps in a row, so nothing is learned; try a lower --lr")

    timeline, peak = meter.replay()
    mine = {"timeline": timeline, "peak": peak, "spans": meter.timed_spans()}
    if device.type == "cuda":  # the most that PyTorch's allocator handed out, and the most it took from the GPU for it
        mine |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    everyone = [mine] * (1 if simulated else dist.get_world_size())
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    timed = timed[2:] or timed or [(0, 0)]  # the first steps of a run warm up
    step_ms, waited_ms = (sum(column) / len(timed) for column in zip(*timed))
    report(everyone, layers, comm, cfg, step_ms, waited_ms, record, say)
    if cfg.log and not simulated:
        record("weights", sha256=checksum(layers, comm))


def report(everyone, layers, comm, cfg, step_ms, waited_ms, record, say):
    """The tables at the end: memory of each rank and communication, beside the paper's formulas."""
    N, psi = comm.world_size, sum(layer.psi for layer in layers)
    unit, name = (1e6, "MB") if 16 * psi < 1e10 else (1e9, "GB")
    rows = []
    for rank, mine in enumerate(everyone):
        (before,) = (moment for moment in mine["timeline"] if moment["label"] == "before the optimizer step")
        before = {category: before[category] for category in CATEGORIES}
        before["states"] = before["parameters"] + before["gradients"] + before["optimizer"]
        before |= {"formula": paper_states(psi, N, cfg), "peak": sum(mine["peak"].values())}
        allocator = {key: mine[key] for key in ("allocated", "reserved") if key in mine}
        record("memory", rank=rank, **before, at_peak=mine["peak"], **allocator)
        for event in ("timeline", "span"):
            for fields in mine[event if event == "timeline" else "spans"]:
                record(event, rank=rank, **fields)
        rows.append((rank, before, {**mine["peak"], "total": before["peak"], **allocator}))

    say(f"\nMemory of each rank in {name} ({unit:,.0f} bytes), counted from the live tensors of the last step.")
    before = [*CATEGORIES[:3], "states", "formula", *CATEGORIES[3:], "peak"]
    for title, which, columns in (("Just before the optimizer step", 1, before), ("At the peak", 2, list(rows[0][2]))):
        say(f"{title}:\nrank" + "".join(f"{column:>13}" for column in columns))
        for row in rows:
            say(f"{row[0]:4}" + "".join(f"{row[which][column] / unit:13,.2f}" for column in columns))

    model = [sent for what, sent in comm.sent.items() if what != "scalars"]
    total = {key: sum(sent[key] for sent in model) for key in ("calls", "elements", "bytes")}
    expected, words = paper_volume(layers, N, cfg)
    record(
        "communication", psi=psi, elements=total["elements"], bytes=total["bytes"], collectives=comm.sent,
        formula=expected, waited_ms=waited_ms,
    )  # fmt: skip
    say(f"\nSent by each rank in a step:\n{'':30}calls{'elements':>20}{'bytes':>20}{'elements / Ψ':>15}")
    for what, sent in [*comm.sent.items(), ("all but scalars", total)]:
        say(f"{what:30}{sent['calls']:5}{sent['elements']:20,}{sent['bytes']:20,}{sent['elements'] / psi:15.4f}")
    say(f"{'paper: ' + words:35}{expected:20,.0f}{'':20}{expected / psi:15.4f}   with (N-1)/N = {(N - 1) / N:.4f}")
    if step_ms:
        say(f"A step took {step_ms:.1f} ms on average, {waited_ms:.1f} ms of them waiting for communication.")


def main():
    cfg = parse_args()
    data, device, log = load_data(cfg), choose_device(cfg), None
    if cfg.log and int(os.environ.get("RANK", 0)) == 0:
        try:
            log = open(cfg.log, "wb", buffering=0)
        except OSError as error:
            fail(f"--log {cfg.log}: {error.strerror}")
    if "RANK" in os.environ:  # started by torchrun. When a rank is gone, the others wait a minute, not the default ten
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=device_id, timeout=timedelta(seconds=60))
    else:  # one process needs no network: this group hands it its own data back, and is of any size in a simulation
        dist.init_process_group("fake", rank=0, world_size=cfg.simulate_ranks or 1)
    if cfg.simulate_ranks:
        cfg.steps = 1
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) if cfg.simulate_ranks else contextlib.nullcontext():
            run(cfg, data, device, log)
    except RuntimeError as error:  # on a GPU OutOfMemoryError, on a CPU just this text
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            fail("the memory is too small for this; take a smaller --layers, --width, --vocab, --batch or --context")
        raise
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo's threads end with the last reference to the group; at the interpreter's exit is too late


if __name__ == "__main__":
    main()
