"""ZeRO-R: the residual states (§6), on top of stage 3, on data x tensor parallel ranks.

`--mp M` makes every M neighbouring ranks one replica, whose blocks are cut M ways as Megatron cuts them; ZeRO-DP works
among the N ranks that hold the same part, and Ψ counts one part. ZeRO-R then shrinks the rest of the memory:

    P_a  --pa on  §6.1  of a layer input that all M ranks of a replica keep, each keeps 1/M (--pa cpu: in host memory)
    C_B  --cb on  §6.2  fused buffers have a constant size (--buffer-elements), not one that grows with the model
    M_D  --md on  §6.3  what lives long (kept inputs, gradients) is copied into two buffers allocated once

    --config  C1 P_os, C_B, M_D | C2 = C1 + P_a | C3 P_os+g, C_B, M_D | C4 = C3 + P_a | C5 = C3 + P_a+cpu   (Table 3)
              full P_os+g+p, P_a+cpu, C_B, M_D | none P_os+g+p alone

    torchrun --standalone --nproc-per-node 4 zero_r.py --mp 2 --config C4
    python zero_r.py --simulate-ranks 400 --mp 16 --layers 125 --width 8192 --heads 64 --buffer-elements 67108864
"""

# ---- 1. Imports ------------------------------------------------------------------------------------------------

import argparse
import bisect
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
    mp: int = 1  # tensor-parallel ranks M of one replica; divides the ranks, the heads and the width
    config: Literal["none", "C1", "C2", "C3", "C4", "C5", "full"] = "full"  # what is on: Table 3, all, or no ZeRO-R
    partition: Literal["auto", "os", "os+g", "os+g+p"] = "auto"  # what ZeRO-DP partitions; auto: as --config says
    pa: Literal["auto", "off", "on", "cpu"] = "auto"  # P_a, and P_a+cpu; auto: as --config says
    cb: Literal["auto", "off", "on"] = "auto"  # C_B; auto: as --config says
    md: Literal["auto", "off", "on"] = "auto"  # M_D; auto: as --config says
    buffer_elements: int = 2**18  # elements of a fused buffer with C_B; a multiple of 16


CONFIGS = {  # Table 3: partition, P_a, C_B, M_D
    "none": ("os+g+p", "off", "off", "off"),
    "C1": ("os", "off", "on", "on"),
    "C2": ("os", "on", "on", "on"),
    "C3": ("os+g", "off", "on", "on"),
    "C4": ("os+g", "on", "on", "on"),
    "C5": ("os+g", "cpu", "on", "on"),
    "full": ("os+g+p", "cpu", "on", "on"),
}


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
    ranks = cfg.simulate_ranks or int(os.environ.get("WORLD_SIZE", 1))
    for what, number in (("ranks", ranks), ("--heads", cfg.heads), ("--width", cfg.width)):
        if cfg.mp < 1 or number % cfg.mp:
            fail(f"--mp {cfg.mp} must divide {what} {number}: each tensor-parallel rank takes an equal part")
    if cfg.buffer_elements % 16 or cfg.buffer_elements < 16 * ranks // cfg.mp:
        fail(f"--buffer-elements {cfg.buffer_elements} must be a multiple of 16, and {16 * ranks // cfg.mp} or more")
    for name, value in zip(("partition", "pa", "cb", "md"), CONFIGS[cfg.config]):
        if getattr(cfg, name) == "auto":
            setattr(cfg, name, value)
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


# Megatron's tensor parallelism. Each of the M ranks of a replica has 1/M of the heads and of the hidden units of the
# MLP, so it goes from qkv to attention_proj, and from mlp_up to mlp_proj, by itself. Norms and the projections' biases
# are replicated, as are embedding and head. The number is the dimension of the weight that is cut.
CUT = {"qkv.weight": 0, "qkv.bias": 0, "mlp_up.weight": 0, "mlp_up.bias": 0}  # by outputs
CUT |= {"attention_proj.weight": 1, "mlp_proj.weight": 1}  # by inputs


class Spread(torch.autograd.Function):
    """Megatron's f, into the layers that are cut: the identity. Backward sums the gradients of the replica's ranks."""

    @staticmethod
    def forward(ctx, x, replica):
        ctx.replica = replica
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.replica.all_reduce(dx), None  # in place: the linear layer has made dx for this alone


class Join(torch.autograd.Function):
    """Megatron's g, out of them: the sum of the ranks' outputs. Backward is the identity."""

    @staticmethod
    def forward(ctx, x, replica):
        ctx.mark_dirty(x)
        return replica.all_reduce(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class Block(nn.Module):
    def __init__(self, cfg, replica):
        super().__init__()
        self.heads, self.replica = cfg.heads // cfg.mp, replica
        self.attention_norm = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width // cfg.mp)
        self.attention_proj = nn.Linear(cfg.width // cfg.mp, cfg.width)
        self.mlp_norm = nn.LayerNorm(cfg.width)
        self.mlp_up = nn.Linear(cfg.width, 4 * cfg.width // cfg.mp)
        self.mlp_proj = nn.Linear(4 * cfg.width // cfg.mp, cfg.width)

    def project(self, linear, x):
        """The part of a projection that this rank has the inputs for, summed over ranks; the bias enters once."""
        return Join.apply(F.linear(x, linear.weight), self.replica) + linear.bias

    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(Spread.apply(self.attention_norm(x), self.replica))
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(self.attention_proj, heads.transpose(1, 2).reshape(B, T, -1))
        hidden = F.gelu(self.mlp_up(Spread.apply(self.mlp_norm(x), self.replica)), approximate="tanh")
        return x + self.project(self.mlp_proj, hidden)


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

    def all_reduce(self, x):
        """Sums an activation or its gradient over the ranks, in place. The next operation waits for it."""
        flat = x.view(-1)
        works = [dist.all_reduce(flat, group=self.group, async_op=True)]
        return self.started("all_reduce", "", flat, works, [flat], lambda: x, halves=2)()

    def started(self, name, layer, full, works, tensors, result, halves=1):
        """Counts a collective over `full` and returns its wait(). Either half sends n(N-1)/N elements (§7.1)."""
        self.count(name, halves * (full.numel() // self.world_size) * (self.world_size - 1), full.element_size())
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

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "host")


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
        self.kept = set()  # numbers of the long-lived storages that M_D is about: kept layer inputs and gradients
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

    def keep(self, tensor, category):
        """Names a tensor as one of those that M_D is about."""
        self.name(tensor, category)
        if self.running:
            self.kept.add(self.alive[tensor.untyped_storage()._cdata][0])
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
            total += value if self.category[key] != "host" else 0
            if total > most:
                most, peak = total, dict(live)
        return timeline, peak

    def heap(self, chosen):
        """§6.3: replays the chosen storages in one address space, each placed in the first gap that holds it. Returns
        the peak of their live bytes and the highest address in use: the excess is fragmentation."""
        gaps, placed, live, most, top = [(0, math.inf)], {}, 0, 0, 0
        for key, size in self.trace:
            if isinstance(key, str) or size == 0 or key not in chosen:
                continue
            live += size
            most = max(most, live)
            if size > 0:
                at, (start, end) = next((at, gap) for at, gap in enumerate(gaps) if gap[1] - gap[0] >= size)
                placed[key], top = start, max(top, start + size)
                gaps[at : at + 1] = [(start + size, end)] if start + size < end else []
            else:
                start, end = placed[key], placed[key] - size
                at = bisect.bisect(gaps, (start, end))
                if gaps[at][0] == end:  # grows into the gap after it, and into the gap before it
                    end = gaps.pop(at)[1]
                if at and gaps[at - 1][1] == start:
                    at, start = at - 1, gaps.pop(at - 1)[0]
                gaps.insert(at, (start, end))
        return most, top

    def residual(self):
        """Bytes of kept layer inputs on the device and on the host (P_a), and fragmentation: the space that a heap
        takes over its peak of live bytes, minus one, for all device memory and for what M_D is about alone."""
        device = {number for number, category in enumerate(self.category) if category != "host"}
        found = {"kept": self.heap({n for n in self.kept if self.category[n] == "activations"})[0]}
        found["kept_host"] = self.heap({n for n in self.kept if self.category[n] == "host"})[0]
        for name, chosen in (("fragmentation", device), ("fragmentation_kept", self.kept & device)):
            live, space = self.heap(chosen)
            found[name] = space / live - 1
        return found

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
        # What the replica's ranks have cut comes first in the flat vector, what they all hold at its end: the norm of
        # the gradient counts the latter once, not M times.
        self.order = list(self.shapes)
        self.shapes = {name: self.shapes[name] for name in sorted(self.order, key=lambda name: name not in CUT)}
        self.cut = sum(shape.numel() for name, shape in self.shapes.items() if name in CUT)
        self.psi = sum(shape.numel() for shape in self.shapes.values())
        # N ranks cut the vector into N equal slices. 16 more in the multiple, because fused Adam computes the last
        # few elements of a vector with other instructions and other last bits: now no cut moves an element there.
        self.padded = math.ceil(self.psi / (16 * comm.world_size)) * 16 * comm.world_size
        self.sizes = [shape.numel() for shape in self.shapes.values()] + [self.padded - self.psi]
        part = self.padded // comm.world_size
        self.own = slice(comm.rank * part, (comm.rank + 1) * part)  # this rank's slice
        full = self.initial_weights(cfg, comm.replica).to(device)
        self.flat = full.to(self.dtype, copy=True) if cfg.partition != "os+g+p" else None  # never released
        self.shard = self.flat[self.own] if self.flat is not None else full[self.own].to(self.dtype, copy=True)
        self.master = full[self.own].clone()  # §5.1: fp32, what Adam updates (padded/N,): 4Ψ/N, with its moments 12Ψ/N
        self.grad = None  # from backward to the end of the step

    def initial_weights(self, cfg, replica):
        """GPT-2's initial weights (padded,) fp32, drawn alike on every rank and device. The padding must be zero."""
        seed = random.Random(f"{cfg.seed}/{self.name}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        full = torch.zeros(self.padded)
        pieces = dict(zip(self.shapes, full.split(self.sizes)))
        for name in self.order:  # drawn whole and in the order of stage 3, and then cut: the same weights for every M
            shape = list(self.shapes[name])
            if name in CUT:
                shape[CUT[name]] *= replica.world_size
            whole = torch.zeros(shape)
            if len(shape) == 2:  # a matrix; those that add to the residual stream are scaled down
                std = 0.02 / math.sqrt(2 * cfg.layers) if name.endswith("proj.weight") else 0.02
                whole.normal_(0, std, generator=generator)
            elif name.endswith("norm.weight"):
                whole.fill_(1)
            if name in CUT:  # q, k and v each give a rank its heads
                parts = whole.chunk(3) if name.startswith("qkv") else [whole]
                whole = torch.cat([part.chunk(replica.world_size, CUT[name])[replica.rank] for part in parts])
            pieces[name].copy_(whole.flatten())
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
        modules |= {f"block {i}": Block(cfg, comm.replica) for i in range(cfg.layers)}
        modules |= {"head": Head(cfg)}
    return [Layer(name, module, cfg, comm, device, compute) for name, module in modules.items()]


def master_pieces(layers, cfg):
    """[[(layer, start, piece of its master copy), ...], ...]: what Adam updates, in groups that it updates in one go.
    §6.2, C_B: a group is a piece of constant size, and so is its fp32 gradient. Otherwise it is the whole model."""
    size = cfg.buffer_elements if cfg.cb == "on" else 2**60
    pieces = [(layer, i * size, piece) for layer in layers for i, piece in enumerate(layer.master.split(size))]
    return [[piece] for piece in pieces] if cfg.cb == "on" else [pieces]


def allocate_once(layers, cfg, comm, device):
    """§6.3, M_D: two contiguous buffers for what lives long, handed to the layers in slots; returned for the meter.
    What comes and goes between tensors that stay leaves holes too small for what is larger; kept apart, it does not."""
    if cfg.md == "off":
        return []
    grad_dtype = layers[0].dtype if cfg.micro_batches == 1 else torch.float32
    sizes = [layer.padded if cfg.partition == "os" else layer.shard.numel() for layer in layers]
    grads = torch.empty(sum(sizes), dtype=grad_dtype, device=device)
    for layer, slot in zip(layers, grads.split(sizes)):
        layer.grad_slot = slot
    part = cfg.batch * cfg.context * cfg.width // (comm.replica.world_size if cfg.pa != "off" else 1)
    inputs = empty_inputs(part * cfg.layers, layers[0].dtype, cfg, device)
    for layer, slot in zip(layers[1:-1], inputs.split(part)):
        layer.input_slot = slot
    return [(grads, "gradients"), (inputs, "host" if cfg.pa == "cpu" else "activations")]


def empty_inputs(size, dtype, cfg, device):
    """Memory for kept layer inputs: on the device, or with P_a+cpu on the host, pinned if a GPU copies from there."""
    pinned = cfg.pa == "cpu" and device.type == "cuda"
    return torch.empty(size, dtype=dtype, device="cpu" if cfg.pa == "cpu" else device, pin_memory=pinned)


def named_states(layers, adam):
    """(tensor, category) of all that lives from one step to the next."""
    for layer in layers:
        yield layer.shard, "parameters"  # §5.3
        yield layer.master, "optimizer"
    for state in adam.state.values():
        yield state["exp_avg"], "optimizer"
        yield state["exp_avg_sq"], "optimizer"
        yield state["step"], "buffers"


def full_master(layer, comm):
    """A layer's whole fp32 master copy (padded,), for the checksum of the weights."""
    full = torch.empty(layer.padded, device=layer.master.device)  # §5.1: a rank has its slice only
    full[layer.own] = layer.master
    return comm.all_gather(full, layer.name)()


def paper_states(psi, world_size, cfg):
    """Bytes of model states per rank: parameters + gradients + optimizer states."""
    width = 2 if cfg.dtype == "bfloat16" else 4
    grad_width = width if cfg.micro_batches == 1 else 4  # sums over micro-batches are kept in fp32
    part = psi / world_size  # §5.1: 12Ψ/N; §5.2: + 2Ψ/N; §5.3: + 2Ψ/N
    gradients, parameters = (psi if cfg.partition == "os" else part), (part if cfg.partition == "os+g+p" else psi)
    return width * parameters + grad_width * gradients + 12 * part


def paper_volume(layers, world_size, cfg):
    """Elements that a rank sends in a step, and the formula in words."""
    psi = sum(layer.psi for layer in layers)
    m = cfg.micro_batches  # §7.2.2: all-gather Ψ in forward, all-gather Ψ and reduce-scatter Ψ in backward
    if cfg.partition == "os":  # §7.2.1: reduce-scatter Ψ + all-gather Ψ
        return 2 * psi * (world_size - 1) / world_size, "2Ψ(N-1)/N"
    if cfg.partition == "os+g":  # §7.2.1: the same, with a reduce-scatter for each micro-batch
        return (m + 1) * psi * (world_size - 1) / world_size, "(m+1)Ψ(N-1)/N"
    elements = m * (3 * psi - layers[-1].psi) * (world_size - 1) / world_size  # the head is gathered once for both
    return elements, "m(3Ψ-Ψhead)(N-1)/N"


def paper_tensor_volume(cfg):
    """§8: elements that a rank sends in a step within its replica. A block all-reduces B x T x C twice in forward,
    recomputation and backward each, which is 12 times B x T x C; P_a gathers its input once: 1/12 more."""
    per_block = cfg.batch * cfg.context * cfg.width * (cfg.mp - 1) // cfg.mp
    return cfg.micro_batches * cfg.layers * per_block * (12 + (cfg.pa != "off"))


def sum_of_squares(vectors, cfg):
    """The sum of the squares of all elements, 0-d float64, so that its rounding to fp32 forgets the order of the sum
    and every stage gets the same norm to the last bit. In pieces, because each piece is widened to 8 bytes."""
    total = torch.zeros((), dtype=torch.float64, device=vectors[0].device)
    for vector in vectors:
        # §6.2, C_B: half the elements of a buffer, since each takes 8 bytes where a buffer's takes 4.
        for piece in vector.split(cfg.buffer_elements // 2) if cfg.cb == "on" else vector.chunk(4):
            total += piece.double().square_().sum()
    return total


@torch.no_grad()
def train_step(layers, adam, batches, cfg, comm, meter, groups):
    """One step: forward and backward of every micro-batch, the reduction of the gradients, Adam.

    batches: list of (x, y). Returns the loss, the mean over ranks and micro-batches, and the global norm of the
    gradient, both 0-d fp32. Nothing here reads a number back from the device, so the device never waits for Python.
    """
    dtype = layers[0].dtype
    grad_dtype = dtype if len(batches) == 1 else torch.float32  # small terms vanish in a 16-bit sum
    loss = torch.zeros((), dtype=torch.float64, device=meter.device)
    reducing = []  # the reduction under way: (layer, pieces, wait), at most one

    def start_reduction(layer, full):
        """§6.2, C_B: in pieces of a buffer, each a stretch of every rank's slice; one starts now, the rest in turn."""
        each = cfg.buffer_elements // comm.world_size
        pieces = full.view(comm.world_size, -1).split(each, 1) if cfg.cb == "on" else [full]
        reducing.append((layer, pieces, comm.reduce_scatter(pieces[0].flatten(), layer.name)))

    def finish_reduction():
        for layer, pieces, wait in reducing:
            # §5.2: of the gradient, only the slice that this rank updates stays. Slices add up over the micro-batches.
            fresh = layer.grad is None or cfg.partition == "os"  # P_os: the average takes the place of the own sum
            layer.grad = empty_gradient(layer) if layer.grad is None else layer.grad
            start = 0
            for following in [*pieces[1:], None]:
                average = wait()
                end = start + average.numel()
                own_grad(layer)[start:end].copy_(average) if fresh else own_grad(layer)[start:end].add_(average)
                start, average, wait = end, None, None
                if following is not None:
                    wait = comm.reduce_scatter(following.flatten(), layer.name)
        reducing.clear()

    def own_grad(layer):
        return layer.grad[layer.own] if cfg.partition == "os" else layer.grad

    def empty_gradient(layer):
        """§6.3, M_D: the layer's slot in the contiguous buffer, or new memory."""
        size = layer.padded if cfg.partition == "os" else layer.shard.numel()
        new = layer.grad_slot if cfg.md == "on" else torch.empty(size, dtype=grad_dtype, device=meter.device)
        return meter.keep(new, "gradients")

    def keep(x, layer):
        """Keeps a layer's input (B, T, C) until its backward. Returns the function that brings it back.

        §6.1, P_a: of the input, which all ranks of the replica have, a rank keeps its slice, and they gather it again.
        §6.3, M_D: into the layer's slot in the contiguous buffer. The tokens are small and the head's input is needed
        again at once: they stay as they are.
        """
        M = comm.replica.world_size if cfg.pa != "off" else 1
        if layer in (layers[0], layers[-1]):
            return lambda: x
        if M == 1 and cfg.md == "off" and cfg.pa != "cpu":
            return lambda x=meter.keep(x, "activations"): x
        shape, part = x.shape, x.numel() // M
        own = slice(comm.replica.rank % M * part, (comm.replica.rank % M + 1) * part)  # M = 1: all of it
        kept = layer.input_slot if cfg.md == "on" else empty_inputs(part, x.dtype, cfg, x.device)
        meter.keep(kept, "host" if cfg.pa == "cpu" else "activations")
        kept.copy_(x.flatten()[own], non_blocking=True)

        def bring_back():
            if M == 1 and cfg.pa != "cpu":
                return kept.view(shape)
            full = meter.name(torch.empty(part * M, dtype=kept.dtype, device=meter.device), "activations")
            full[own].copy_(kept, non_blocking=True)
            return (comm.replica.all_gather(full, layer.name)() if M > 1 else full).view(shape)

        return bring_back

    def gather(layer):
        """§5.3: starts to collect a layer's parameters, every slice from its owner. wait() -> (padded,) 16-bit."""
        if layer.flat is not None:  # P_os, P_os+g: it was never released
            return lambda: layer.flat
        full = meter.name(torch.empty(layer.padded, dtype=dtype, device=meter.device), "parameters")
        full[layer.own] = layer.shard
        return comm.all_gather(full, layer.name)

    for micro, (tokens, y) in enumerate(batches):
        # Forward. Only the layers' inputs are kept: activation checkpoints (§3.2). The head can wait for the backward.
        x, inputs = tokens, [keep(tokens, layers[0])]
        wait = gather(layers[0])
        for layer, following in zip(layers, layers[1:]):
            flat = wait()
            wait = gather(following)  # §5.3: it travels while this layer computes
            with meter.computing("forward", layer.name):
                x = layer(flat, x, y)
            inputs.append(keep(x, following))
            del flat  # §5.3: released; at most two layers' parameters are ever whole

        # Backward, in reverse order: recompute a layer from its input, differentiate, forget.
        dx = [torch.full((), 1 / len(batches), device=meter.device)]  # the loss is the mean over the micro-batches
        for layer, following in zip(layers[::-1], [*layers[-2::-1], None]):
            flat, x = wait(), inputs.pop()()  # §6.1: whole again, one at a time
            wait = gather(following) if following else None  # §5.3: the same in reverse
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
            # §5.2: reduce right away, in every micro-batch, while the next layer computes. First finish the reduction
            # before it: two at once would hold two pairs of send and receive buffers.
            finish_reduction()
            if cfg.partition != "os":
                start_reduction(layer, flat_grad)
            else:  # §5.1: the whole gradient stays, and is reduced once a step
                if layer.grad is not None:
                    layer.grad.add_(flat_grad)
                elif cfg.md == "on" or grad_dtype != dtype:
                    layer.grad = empty_gradient(layer).copy_(flat_grad)
                else:
                    layer.grad = meter.keep(flat_grad, "gradients")
                if micro == len(batches) - 1:
                    start_reduction(layer, meter.name(layer.grad.to(dtype), "gradients"))
            del flat_grad
    finish_reduction()
    meter.mark("before the optimizer step")

    # The replica's ranks hold different parts of what is cut, and the same values of what is not.
    cut = [own_grad(layer)[: max(0, layer.cut - layer.own.start)] for layer in layers]
    replicated = [own_grad(layer)[max(0, layer.cut - layer.own.start) :] for layer in layers]
    sums = torch.stack([loss, sum_of_squares(cut, cfg), sum_of_squares(replicated, cfg)])
    loss, squares_cut, squares = comm.all_reduce_scalars(sums)  # §5.1: a rank has only its slice
    norm = (comm.replica.all_reduce_scalars(squares_cut) + squares).sqrt().float()
    # Fused Adam divides the gradient by `grad_scale`, and leaves parameters, moments and step count untouched where
    # `found_inf` is 1. The norm is the same on every rank, so all ranks clip alike and skip alike.
    adam.grad_scale = (norm / cfg.clip).clamp(min=1)
    adam.found_inf = (~norm.isfinite()).float()
    meter.mark("norm")
    # Adam wants the gradients of all that it updates in fp32. Together they are as large as §3.2's fused buffer.
    # §6.2: with C_B a group is one piece of constant size.
    for group in groups:
        adam.param_groups[0]["params"] = [piece for _, _, piece in group]  # so that Adam doesn't walk through all
        for layer, start, piece in group:
            piece.grad = own_grad(layer)[start : start + piece.numel()].float()
        meter.mark("fp32 gradients")
        adam.step()
        adam.zero_grad()
    meter.mark("Adam")
    for layer in layers:
        layer.grad = None
        layer.shard.copy_(layer.master)  # §5.3: the next forward gathers what it needs
    for wait in [comm.all_gather(layer.flat, layer.name) for layer in layers if layer.flat is not None]:
        wait()  # §5.1: P_os and P_os+g hand out the updated slices here
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
        pieces = dict(zip(layer.shapes, full_master(layer, comm).split(layer.sizes)))
        for name in layer.order:  # the order of stage 3; with M > 1 this rank's part of the model
            digest.update(pieces[name].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def run(cfg, data, device, log, mesh):
    """Trains and reports. Rank 0 prints, and writes to `log` if that is an open file."""
    meter = Meter(device)
    comm = Collectives(cfg, meter, mesh["data"].get_group())  # ranks with the same part of the model: ZeRO-DP
    comm.replica = Collectives(cfg, meter, mesh["mp"].get_group())  # ranks of one replica: tensor parallelism
    N, simulated = comm.world_size, cfg.simulate_ranks > 0
    compute = choose_compute(cfg, device)
    layers = make_layers(cfg, comm, device, compute)
    groups, stores = master_pieces(layers, cfg), allocate_once(layers, cfg, comm, device)
    adam = torch.optim.Adam([piece for group in groups for _, _, piece in group], lr=cfg.lr, fused=True)
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
        f"{N} x {cfg.mp} {'simulated ' if simulated else ''}ranks (data x tensor parallel) on {device.type} "
        f"({'no network' if backend == 'fake' else backend}). Ψ = {psi:,} parameters a rank in {len(layers)} layers, "
        f"stored in {cfg.dtype}, arithmetic in {compute}.\nGlobal batch: {N} ranks x {cfg.micro_batches} micro-batches "
        f"x {cfg.batch} = {N * cfg.micro_batches * cfg.batch} sequences of {cfg.context} tokens.\n"
        f"ZeRO: partition {cfg.partition}, P_a {cfg.pa}, C_B {cfg.cb}, M_D {cfg.md}."
    )
    if cfg.pa != "off" and cfg.mp == 1:
        say("P_a has nothing to partition at --mp 1: every rank is a replica and keeps whole layer inputs.")
    if cfg.log and not simulated:
        record("weights", sha256=checksum(layers, comm))

    skipped, timed = 0, []  # timed: (ms, ms of it spent waiting for communication) of each step without the meter
    for step in range(cfg.steps):
        batches = load_batches(data, step, cfg, comm, device)
        adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / max(1, cfg.warmup))
        comm.start_step()
        comm.replica.start_step()
        metered = step == cfg.steps - 1
        if metered:
            meter.start([*named_states(layers, adam), *((part, "activations") for xy in batches for part in xy)])
            for store, category in stores:
                meter.keep(store, category)
        start = time.perf_counter()
        with meter if metered else contextlib.nullcontext():
            loss, norm = train_step(layers, adam, batches, cfg, comm, meter, groups)
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
            timed.append((ms, comm.waited_ms() + comm.replica.waited_ms()))
        skipped = 0 if math.isfinite(norm) else skipped + 1
        note = " | skipped: gradient not finite" if skipped else ""
        say(f"step {step:4} | loss {loss:7.4f} | norm {norm:8.4f} | {speed}{note}")
        fields = {"loss": loss if math.isfinite(loss) else None, "norm": None if skipped else norm}  # JSON has no inf
        record("step", step=step, **fields, ms=ms, tokens_per_s=tokens_per_s, **{"skipped": True} if skipped else {})
        if skipped == 10:
            fail("the gradient was not finite in ten steps in a row, so nothing is learned; try a lower --lr")

    timeline, peak = meter.replay()
    mine = {"timeline": timeline, "peak": peak, "spans": meter.timed_spans()}
    mine["residual"] = meter.residual()
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
        before |= {"formula": paper_states(psi, N, cfg), "peak": sum(mine["peak"].values()) - mine["peak"]["host"]}
        before |= mine["residual"]
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

    kept = everyone[0]["residual"]
    say("Rank 0 keeps layer inputs: {kept:,} bytes on the device, {kept_host:,} on the host.".format(**kept))
    say("Fragmentation: {fragmentation:.1%} of all, {fragmentation_kept:.1%} of inputs and gradients.".format(**kept))
    model = [sent for what, sent in comm.sent.items() if what != "scalars"]
    total = {key: sum(sent[key] for sent in model) for key in ("calls", "elements", "bytes")}
    expected, words = paper_volume(layers, N, cfg)
    within = {key: sum(sent[key] for what, sent in comm.replica.sent.items() if what != "scalars") for key in total}
    within |= {"collectives": comm.replica.sent, "formula": paper_tensor_volume(cfg)}
    record(
        "communication", psi=psi, elements=total["elements"], bytes=total["bytes"], collectives=comm.sent,
        formula=expected, waited_ms=waited_ms, tensor=within,
    )  # fmt: skip
    say(f"\nSent by each rank in a step:\n{'':30}calls{'elements':>20}{'bytes':>20}{'elements / Ψ':>15}")
    for what, sent in [*comm.sent.items(), ("all but scalars", total)]:
        say(f"{what:30}{sent['calls']:5}{sent['elements']:20,}{sent['bytes']:20,}{sent['elements'] / psi:15.4f}")
    say(f"{'paper: ' + words:35}{expected:20,.0f}{'':20}{expected / psi:15.4f}   with (N-1)/N = {(N - 1) / N:.4f}")
    for what, sent in [*comm.replica.sent.items(), ("within the replica", within)]:
        say(f"{what:30}{sent['calls']:5}{sent['elements']:20,}{sent['bytes']:20,}")
    say(f"{'paper: 12 BTC, P_a 13 BTC a block':35}{within['formula']:20,}")
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
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size() // cfg.mp, cfg.mp), mesh_dim_names=("data", "mp"))
    if cfg.simulate_ranks:
        cfg.steps = 1
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) if cfg.simulate_ranks else contextlib.nullcontext():
            run(cfg, data, device, log, mesh)
    except RuntimeError as error:  # on a GPU OutOfMemoryError, on a CPU just this text
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            fail("the memory is too small for this; take a smaller --layers, --width, --vocab, --batch or --context")
        raise
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo's threads end with the last reference to the group; at the interpreter's exit is too late


if __name__ == "__main__":
    main()
