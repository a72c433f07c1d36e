"""ZeRO-R: the residual states (§6), on top of stages 1 to 3, on data x tensor parallel ranks.

`--mp M` makes every M neighbouring ranks one replica, whose blocks are cut M ways as Megatron cuts them; ZeRO-DP works
among the N ranks that hold the same part, and Ψ counts one part. Stages 1 and 2 are options here (--partition). ZeRO-R
then shrinks the rest of the memory; each of its three parts has a heading in section 5:

    P_a  --pa on  §6.1  of a layer input that all M ranks of a replica keep, each keeps 1/M (--pa cpu: in host memory)
    C_B  --cb on  §6.2  fused buffers have a constant size (--buffer-elements), not one that grows with the model
    M_D  --md on  §6.3  what lives long (kept inputs, gradients) is copied into two buffers allocated once

    --config  C1 P_os, C_B, M_D | C2 = C1 + P_a | C3 P_os+g, C_B, M_D | C4 = C3 + P_a | C5 = C3 + P_a+cpu   (Table 3)
              full P_os+g+p, P_a+cpu, C_B, M_D | none P_os+g+p alone

    torchrun --standalone --nproc-per-node 4 zero_r.py --mp 2 --config C4
    python zero_r.py --simulate-ranks 400 --mp 16 --layers 125 --width 8192 --heads 64 --buffer-elements 67108864

Ψ counts one part, N the ranks that hold it, § is a section of the paper, arXiv 1910.02054 v3. Sections 3 to 6 of
this file are the subject: a model, two collectives, a layer and its state, the train step.
"""

# ---- 1. Imports ------------------------------------------------------------------------------------------------

import argparse
import bisect
import collections
import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import pydoc_data.topics
import random
import signal
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but torch.optim imports it later, and then it would keep the group of that moment
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode  # simulated ranks: tensors with shapes and no memory
from torch.utils._python_dispatch import TorchDispatchMode  # the meter: sees every tensor that is made

# ---- 2. Configuration ------------------------------------------------------------------------------------------


def option(default, text, *others, least=1, most=10**6):
    """A field of Config: its default, its help, and what else it may be: one of `others`, or a number within limits."""
    return dataclasses.field(default=default, metadata={"text": text, "others": others, "limits": (least, most)})


@dataclasses.dataclass
class Config:
    """Every field is an option of the command line: --micro-batches sets micro_batches."""

    layers: int = option(8, "transformer blocks", most=10**4)
    width: int = option(384, "size C of the hidden state")
    heads: int = option(6, "attention heads; must divide the width")
    context: int = option(64, "tokens T in a sequence")
    vocab: int = option(256, "size of the vocabulary; a token is a byte, so at least 256", least=256)
    batch: int = option(4, "sequences B per rank and micro-batch")
    micro_batches: int = option(1, "micro-batches per step; their gradients are summed in fp32", most=10**4)
    steps: int = option(50, "optimizer steps; the last one is metered and not timed", most=10**9)
    lr: float = option(5e-4, "learning rate after the warm-up", least=1e-12)
    warmup: int = option(10, "steps in which the learning rate rises to that", least=0)
    clip: float = option(1.0, "largest global norm of the gradient", least=1e-12)
    loss_scale: float = option(2.0**16, "in float16: the loss is multiplied by this at first", most=2**64)
    loss_scale_window: int = option(2000, "in float16: after so many good steps by twice as much", most=10**9)
    seed: int = option(0, "decides the initial weights and the order of the data", least=-(2**63), most=2**63)
    dtype: str = option("bfloat16", "of stored parameters, gradients and layer inputs", "float16", "float32")
    compute: str = option("auto", "arithmetic; auto: float32, on most GPUs as stored", "bfloat16", "float16", "float32")
    device: str = option("auto", "auto: cuda if this machine has a GPU for each of its ranks", "cpu", "cuda")
    collectives: str = option(
        "auto", "gloo: as written out here; native: the library's; auto: native, except on gloo", "gloo", "native"
    )
    overlap: str = option("on", "off: wait for a collective where it starts, to see what overlap hides", "off")
    data: str = option("", "train on the bytes of this file (default: Python's own language reference)")
    log_file: str = option("", "write records to this file, replacing it, one JSON object a line")
    simulate_ranks: int = option(0, "run one step as rank 0 of this many ranks, on tensors without memory", least=0)
    mp: int = option(1, "tensor-parallel ranks M of one replica; divides the ranks, the heads and the width")
    config: str = option("full", "what is on: Table 3, all, or no ZeRO-R", "none", "C1", "C2", "C3", "C4", "C5")
    partition: str = option("auto", "what ZeRO-DP partitions; auto: as --config says", "os", "os+g", "os+g+p")
    pa: str = option("auto", "P_a, and P_a+cpu; auto: as --config says", "off", "on", "cpu")
    cb: str = option("auto", "C_B; auto: as --config says", "off", "on")
    md: str = option("auto", "M_D; auto: as --config says", "off", "on")
    buffer_elements: int = option(2**18, "elements of a fused buffer with C_B; a multiple of 16", least=16, most=2**40)


CONFIGS = {  # Table 3: partition (§5), P_a (§6.1), C_B (§6.2), M_D (§6.3)
    "none": ("os+g+p", "off", "off", "off"),
    "C1": ("os", "off", "on", "on"),
    "C2": ("os", "on", "on", "on"),
    "C3": ("os+g", "off", "on", "on"),
    "C4": ("os+g", "on", "on", "on"),
    "C5": ("os+g", "cpu", "on", "on"),
    "full": ("os+g+p", "cpu", "on", "on"),
}


# ---- 3. The model ----------------------------------------------------------------------------------------------
# GPT-2 with pre-LayerNorm and learned positions; the head is not tied to the embedding. All layers take (x, y) and
# only the head reads the targets y, so that one loop serves all layers.


def initialize(module, cfg):
    """GPT-2's initial weights; those that add to the residual stream are scaled down. Norms stay at PyTorch's own."""
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * cfg.layers) if name.endswith("proj.weight") else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)


class Embedding(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.token = nn.Embedding(cfg.vocab, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width)
        initialize(self, cfg)

    def forward(self, x, y):  # x (B, T) int64 -> (B, T, C)
        return self.token(x) + self.position.weight[: x.shape[1]]


# §8: Megatron's tensor parallelism. Each of the M ranks of a replica has 1/M of the heads and of the hidden units of
# the MLP, so it goes from qkv to attention_proj, and from mlp_up to mlp_proj, by itself. Norms and the projections'
# biases are replicated, as are embedding and head. The number is the dimension of the weight that is cut.
CUT = {"qkv.weight": 0, "qkv.bias": 0, "mlp_up.weight": 0, "mlp_up.bias": 0}  # by outputs
CUT |= {"attention_proj.weight": 1, "mlp_proj.weight": 1}  # by inputs


class SumOverReplica(torch.autograd.Function):
    """At one end of what is cut, in `backward` or in `forward`, the ranks of a replica sum; else it is the identity.
    Where the cut part begins (Megatron's f) that is the gradient, where it ends (Megatron's g) the output."""

    @staticmethod
    def forward(ctx, x, replica, where):
        ctx.replica, ctx.where = replica, where
        if where == "backward":
            return x.view_as(x)
        ctx.mark_dirty(x)
        return replica.all_reduce(x, "all_reduce")

    @staticmethod
    def backward(ctx, dx):  # in place: the linear layer has made dx for this alone
        return ctx.replica.all_reduce(dx, "all_reduce") if ctx.where == "backward" else dx, None, None


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads // cfg.mp
        self.attention_norm = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.attention_proj = nn.Linear(cfg.width, cfg.width)
        self.mlp_norm = nn.LayerNorm(cfg.width)
        self.mlp_up = nn.Linear(cfg.width, 4 * cfg.width)
        self.mlp_proj = nn.Linear(4 * cfg.width, cfg.width)
        initialize(self, cfg)

    def spread(self, x):
        return SumOverReplica.apply(x, self.replica, "backward")  # §8: two all-reduces a block in backward

    def project(self, linear, x):
        """The part of a projection that this rank has the inputs for, summed over ranks; the bias enters once."""
        return SumOverReplica.apply(F.linear(x, linear.weight), self.replica, "forward") + linear.bias

    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.spread(self.attention_norm(x)))
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(self.attention_proj, heads.transpose(1, 2).reshape(B, T, -1))
        return x + self.project(self.mlp_proj, F.gelu(self.mlp_up(self.spread(self.mlp_norm(x)))))


class Head(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.width)
        self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)
        initialize(self, cfg)

    def forward(self, x, y):  # x (B, T, C), y (B, T) int64 -> the mean loss, 0-d fp32
        return F.cross_entropy(self.logits(self.norm(x)).float().flatten(0, 1), y.flatten())


# ---- 4. Collectives --------------------------------------------------------------------------------------------


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
        self.sent = {}  # collective -> calls, and the elements and bytes that a rank sends in it by §7.1's count

    def reduce_scatter(self, full, layer):
        """Averages a vector over the ranks. full (n,) -> wait() -> (n/N,): this rank's slice of the average.

        The paper's picture of P_g (§5.2): everyone mails slice r to rank r, and rank r adds them up. So it is written
        out for gloo: the sum is fp32, in the order of the ranks, so every run gives the same bits, and takes n elements
        to receive. Natively the library sums, in its order and in the dtype of `full`.
        """
        if self.native:
            shard = full.new_empty(full.numel() // self.world_size)
            works = [dist.reduce_scatter_single(shard, full, op=dist.ReduceOp.AVG, group=self.group, async_op=True)]
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
            works = [dist.all_gather_single(full, slices[0], group=self.group, async_op=True)]
        else:  # each owner broadcasts its slice, as §5.3 words it
            slices = full.chunk(self.world_size)
            works = [dist.broadcast(s, group=self.group, group_src=r, async_op=True) for r, s in enumerate(slices)]
        return self.started("all_gather", layer, full, works, slices, lambda: full)

    def started(self, name, layer, full, works, tensors, result, halves=1):
        """Counts a collective over `full` and returns its wait(). Each half sends n(N-1)/N elements (§7.1)."""
        elements = halves * full.numel() * (self.world_size - 1) // self.world_size
        sent = self.sent.setdefault(name, collections.Counter())
        sent.update(calls=1, elements=elements, bytes=elements * full.element_size())
        start = self.meter.running and self.meter.now()

        def wait():
            stood = self.meter.now()
            while works:
                works.pop(0).wait()
            self.meter.spans.append((name, layer, start, stood, self.meter.now()))
            self.meter.settle(tensors)
            return result()

        if self.overlap:
            return wait
        value = wait()
        return lambda: value

    def all_reduce(self, x, name="scalars"):
        """Sums a tensor over the ranks, in place, and waits for it. Scalars are no part of the volume of the model."""
        flat = x.view(-1)
        works = [dist.all_reduce(flat, group=self.group, async_op=True)]
        return self.started(name, "", flat, works, [flat], lambda: x, halves=2)()


# ---- 5. The layer and its state --------------------------------------------------------------------------------


class Layer:
    """A layer as a function of one flat vector of its parameters: `layer(flat, x, y)`.

    Differentiating with respect to `flat` gives the layer's gradient as one flat vector too. So all of ZeRO is the
    answer to three questions: where does the flat vector live, where does its gradient go, who owns its fp32 copy.
    """

    def __init__(self, name, kind, cfg, comm, device):
        self.name, self.dtype, self.compute = name, getattr(torch, cfg.dtype), getattr(torch, cfg.compute)
        with torch.device("meta"):
            self.module = kind(cfg)  # names and forward(); it never holds a weight
        self.module.replica = comm.replica  # §8: the ranks that all-reduce within a block
        torch.manual_seed(random.Random(f"{cfg.seed}/{name}").getrandbits(63))
        initial = kind(cfg)  # the weights, drawn alike on every rank and for every device
        # Drawn whole and then cut: the same weights for every M. What is cut comes first in the flat vector, and what
        # all M ranks hold at its end: the norm of the gradient counts the latter once, not M times.
        weights = {name: cut(name, weight, comm.replica) for name, weight in initial.named_parameters()}
        weights = {name: weights[name] for name in sorted(weights, key=lambda name: name not in CUT)}
        self.cut = sum(weight.numel() for name, weight in weights.items() if name in CUT)
        self.constants = {name: constant.to(device) for name, constant in initial.named_buffers()}
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.psi = sum(shape.numel() for shape in self.shapes.values())
        # N ranks cut the vector into N equal slices, each a multiple of 16: fused Adam computes the last few elements
        # of a vector with other instructions and other last bits, and so no cut moves an element there.
        self.padded = math.ceil(self.psi / (16 * comm.world_size)) * 16 * comm.world_size
        self.sizes = [shape.numel() for shape in self.shapes.values()] + [self.padded - self.psi]
        part = self.padded // comm.world_size
        self.own = slice(comm.rank * part, (comm.rank + 1) * part)  # this rank's slice
        # The padding begins at zero and stays there, for nothing uses it and so its gradient is zero.
        padding = torch.zeros(self.padded - self.psi)
        full = torch.cat([*(weight.detach().flatten() for weight in weights.values()), padding]).to(device)
        self.flat = full.to(self.dtype, copy=True) if cfg.partition != "os+g+p" else None  # never released
        self.shard = full[self.own].to(self.dtype, copy=True) if self.flat is None else self.flat[self.own]
        self.master = full[self.own].clone()  # §5.1: fp32, what Adam updates (padded/N,): 4Ψ/N, with its moments 12Ψ/N
        self.whole_grad = cfg.partition == "os"  # §5.1: and not just this rank's slice
        self.grad = None  # made in the backward pass, handed to Adam in fp32
        self.grad_slot = self.input_slot = None  # §6.3, M_D: their places in the contiguous buffers

    @property
    def own_grad(self):
        return self.grad[self.own] if self.whole_grad else self.grad

    def __call__(self, flat, x, y):
        """flat (padded,), x the layer's input -> its output in the stored dtype, or the loss in fp32.

        A CPU without units for 16 bits multiplies such matrices 30 to 100 times slower than fp32 ones, so what is
        stored in 16 bits may be widened here for the arithmetic. Such a copy lives as long as the layer computes.
        """
        pieces = flat.to(self.compute).split(self.sizes)  # the last piece is the padding, which nothing uses
        weights = {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces)}
        x = x.to(self.compute) if x.is_floating_point() else x
        out = torch.func.functional_call(self.module, weights | self.constants, (x, y))
        return out.to(self.dtype) if out.dim() else out


def cut(name, weight, replica):
    """This rank's part of a whole weight, where Megatron cuts it (§8). Of q, k and v it gets its heads of each."""
    if name not in CUT:
        return weight
    parts = weight.chunk(3) if name.startswith("qkv") else [weight]
    return torch.cat([part.chunk(replica.world_size, CUT[name])[replica.rank] for part in parts])


def make_layers(cfg, comm, device):
    """[embedding, block 0, ..., head], one by one: what a rank keeps nothing of is gone before the next is made."""
    kinds = {"embedding": Embedding} | {f"block {i}": Block for i in range(cfg.layers)} | {"head": Head}
    return [Layer(name, kind, cfg, comm, device) for name, kind in kinds.items()]


def named_states(layers, adam):
    """(tensor, category) of what every step finds and leaves: the model states."""
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
    width = 4 if cfg.dtype == "float32" else 2
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
    recomputation and backward each, which is 12 times BTC(M-1)/M; P_a gathers its input once: 1/12 more."""
    per_block = cfg.batch * cfg.context * cfg.width * (cfg.mp - 1) // cfg.mp
    return cfg.micro_batches * cfg.layers * per_block * (12 + (cfg.pa != "off"))


# -- §6.1, P_a: of a layer's input, which all M ranks of a replica have, each keeps 1/M, with P_a+cpu in host memory --


def empty_inputs(size, dtype, cfg, device):
    """Memory for kept layer inputs. On the host it is pinned if a GPU copies from there, and PyTorch rounds such a
    block up to a power of two."""
    pinned = cfg.pa == "cpu" and device.type == "cuda"
    return torch.empty(size, dtype=dtype, device="cpu" if cfg.pa == "cpu" else device, pin_memory=pinned)


def copy_beside(comm, target, source):
    """Copies to or from the host on a stream of its own, beside what the GPU is given next. Elsewhere: at once."""
    if comm.copying:
        torch.cuda.current_stream().wait_stream(comm.copying)  # the copy before this one has had a layer's time
        comm.copying.wait_stream(torch.cuda.current_stream())  # `source` has to be computed, `target` to be free
        comm.leaving = source  # held until the next copy, so that its memory is not given away under this one
    with torch.cuda.stream(comm.copying):
        target.copy_(source, non_blocking=True)


def at_hand(x):
    """The `fetch` of an input that is whole and here."""
    return lambda: lambda: x


def keep_input(x, layer, cfg, comm, meter):
    """Keeps a block's input (B, T, C) until its backward. Returns `fetch`, which starts to bring it back and returns
    `wait`, which returns it: so that P_a+cpu copies from the host a layer ahead."""
    replica, M = comm.replica, cfg.mp if cfg.pa != "off" else 1
    if M == 1 and cfg.md == "off" and cfg.pa != "cpu":
        return at_hand(meter.keep(x, "activations"))
    shape, size, rank = x.shape, x.numel() // M, replica.rank if M > 1 else 0
    kept = empty_inputs(size, x.dtype, cfg, x.device) if layer.input_slot is None else layer.input_slot
    copy_beside(comm, meter.keep(kept, "host" if cfg.pa == "cpu" else "activations"), x.flatten().chunk(M)[rank])

    def fetch():
        part = kept
        if cfg.pa == "cpu":
            part = meter.name(torch.empty_like(kept, device=meter.device), "activations")
            copy_beside(comm, part, kept)

        def wait():
            if comm.copying:
                torch.cuda.current_stream().wait_stream(comm.copying)
            if M == 1:
                return part.view(shape)
            full = meter.name(torch.empty(size * M, dtype=kept.dtype, device=meter.device), "activations")
            full.chunk(M)[rank].copy_(part)
            return replica.all_gather(full, layer.name)().view(shape)

        return wait

    return fetch


# -- §6.2, C_B: what is fused has a constant size: the pieces of a reduction, of the fp32 gradients, of the norm --


def reduction_pieces(full, cfg, comm):
    """What one reduce-scatter takes of a flat gradient: all of it, or a stretch of every rank's slice."""
    if cfg.cb == "off":
        return [full]
    return full.view(comm.world_size, -1).split(cfg.buffer_elements // comm.world_size, 1)


def master_pieces(layers, cfg):
    """[[(layer, start, piece of its master copy), ...], ...]: what Adam updates, in groups that it updates in one go:
    pieces of constant size, whose fp32 gradients need a buffer of that size, or the whole model."""
    size = cfg.buffer_elements if cfg.cb == "on" else 2**60
    pieces = [(layer, i * size, piece) for layer in layers for i, piece in enumerate(layer.master.split(size))]
    return [[piece] for piece in pieces] if cfg.cb == "on" else [pieces]


def squared_pieces(vector, cfg):
    """Half the elements of a buffer, since the norm widens each to 8 bytes, where a buffer's takes 4."""
    return vector.split(cfg.buffer_elements // 2) if cfg.cb == "on" else vector.chunk(16)


# -- §6.3, M_D: what lives long, gradients and kept inputs, is copied into two contiguous buffers allocated once --


def allocate_once(layers, cfg, device):
    """The two buffers, handed to the layers in slots; returned for the meter. What comes and goes between tensors that
    stay leaves holes too small for what is larger; kept apart, it does not."""
    if cfg.md == "off":
        return []
    grad_dtype = layers[0].dtype if cfg.micro_batches == 1 else torch.float32
    sizes = [layer.padded if layer.whole_grad else layer.shard.numel() for layer in layers]
    grads = torch.empty(sum(sizes), dtype=grad_dtype, device=device)
    for layer, slot in zip(layers, grads.split(sizes)):
        layer.grad_slot = slot
    part = cfg.batch * cfg.context * cfg.width // (cfg.mp if cfg.pa != "off" else 1)
    inputs = empty_inputs(part * cfg.layers, layers[0].dtype, cfg, device)
    for layer, slot in zip(layers[1:-1], inputs.split(part)):
        layer.input_slot = slot
    return [(grads, "gradients"), (inputs, "host" if cfg.pa == "cpu" else "activations")]


def empty_gradient(layer, dtype, meter):
    """The layer's slot in the contiguous buffer, or new memory."""
    size = layer.padded if layer.whole_grad else layer.shard.numel()
    new = torch.empty(size, dtype=dtype, device=meter.device) if layer.grad_slot is None else layer.grad_slot
    return meter.keep(new, "gradients")


# ---- 6. The train step -----------------------------------------------------------------------------------------


def sum_of_squares(layers, cfg):
    """The sum of the squares of all elements, 0-d float64, so precise that rounded to fp32 it hardly ever shows the
    order of the sum. In pieces, because each piece is widened to 8 bytes."""
    total = torch.zeros((), dtype=torch.float64, device=layers[0].master.device)
    for layer in layers:
        end = max(0, layer.cut - layer.own.start)
        # The replica's ranks hold different parts of what is cut, and the same values of the rest: that counts once.
        for vector, copies in ((layer.own_grad[:end], 1), (layer.own_grad[end:], cfg.mp)):
            for piece in squared_pieces(vector, cfg):
                piece = piece.double()
                total += piece.dot(piece) / copies
    return total


@torch.no_grad()
def train_step(layers, adam, batches, scale, cfg, comm, meter, groups):
    """One step: forward and backward of every micro-batch, the reduction of the gradients, Adam.

    batches: list of (x, y); scale: what the loss is multiplied by, 1 except in float16. Returns the loss, the mean over
    ranks and micro-batches, and the global norm of the gradient, both 0-d fp32 and not scaled. Nothing here reads a
    number back from the device, so Python never waits for it and can queue the whole step ahead.
    """
    dtype = layers[0].dtype
    grad_dtype = dtype if len(batches) == 1 else torch.float32  # small terms vanish in a 16-bit sum
    loss = torch.zeros((), dtype=torch.float64, device=meter.device)
    reducing = []  # the reduction under way: (layer, pieces, wait for the first), at most one

    def start_reduction(layer, full):
        pieces = reduction_pieces(full, cfg, comm)  # §6.2, C_B: one starts now, the rest in turn
        reducing.append((layer, pieces, comm.reduce_scatter(pieces[0].flatten(), layer.name)))

    def finish_reduction():
        while reducing:
            layer, pieces, wait = reducing.pop()
            # §5.2: with P_g only this rank's slice of the gradient stays. Slices add up over the micro-batches.
            fresh = layer.grad is None or layer.whole_grad  # P_os: the average takes the place of the own sum
            layer.grad = empty_gradient(layer, grad_dtype, meter) if layer.grad is None else layer.grad
            size = pieces[0].numel() // comm.world_size
            for number, following in enumerate([*pieces[1:], None]):
                average = wait()
                own = layer.own_grad[number * size : (number + 1) * size]
                own.copy_(average) if fresh else own.add_(average)
                average = wait = None  # one pair of buffers: let go of it before the next is made
                if following is not None:
                    wait = comm.reduce_scatter(following.flatten(), layer.name)

    def gather(layer):
        """§5.3: starts to collect a layer's parameters, every slice from its owner. wait() -> (padded,) 16-bit."""
        if layer.flat is not None:  # P_os, P_os+g: it was never released
            return lambda: layer.flat
        full = meter.name(torch.empty(layer.padded, dtype=dtype, device=meter.device), "parameters")
        full[layer.own] = layer.shard
        return comm.all_gather(full, layer.name)

    for micro, (tokens, y) in enumerate(batches):
        # Forward. Only the layers' inputs are kept: activation checkpoints (§3.2). The head can wait for the backward.
        x, inputs = tokens, [at_hand(tokens)]
        wait = gather(layers[0])
        for layer, following in zip(layers, layers[1:]):
            flat = wait()
            wait = gather(following)  # §5.3: it travels while this layer computes
            with meter.computing("forward", layer.name):
                x = layer(flat, x, y)
            # §6.1: a rank keeps its slice. Not of the head's input, which is needed again at once.
            inputs.append(at_hand(x) if following is layers[-1] else keep_input(x, following, cfg, comm, meter))
            del flat  # §5.3: released; with P_p at most two layers are whole as stored

        # Backward, in reverse order: recompute a layer from its input, differentiate, forget. The first dx is the
        # derivative of the step's loss: 1/m, for the mean over m micro-batches, times the scale.
        dx = [torch.full((), scale / len(batches), device=meter.device)]
        wait_input = inputs.pop()()
        for layer, following in zip(layers[::-1], [*layers[-2::-1], None]):
            flat, x = wait(), wait_input()  # §6.1: whole again, one at a time
            wait = gather(following) if following else None  # §5.3: the same in reverse
            wait_input = inputs.pop()() if following else None  # §6.1: on its way from the host, with P_a+cpu
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
            if not layer.whole_grad:
                start_reduction(layer, flat_grad)
            else:  # §5.1: the whole gradient stays, and is reduced once a step
                if layer.grad is None:
                    layer.grad = empty_gradient(layer, grad_dtype, meter).zero_()
                layer.grad.add_(flat_grad)
                if micro == len(batches) - 1:
                    start_reduction(layer, meter.name(layer.grad.to(dtype), "gradients"))
            del flat_grad
    finish_reduction()
    meter.mark("before the optimizer step")

    # Of the average gradient every rank squares its own slice, and the sum over the ranks is the same on all of them.
    loss, squares = comm.all_reduce(torch.stack([loss, sum_of_squares(layers, cfg)]))
    squares = comm.replica.all_reduce(squares)
    norm = (squares.sqrt() / scale).float()
    # Fused Adam divides the gradient by `grad_scale`, and leaves parameters, moments and step count untouched where
    # `found_inf` is 1. The norm is the same on every rank, so all ranks clip alike and skip alike.
    adam.grad_scale = (norm / cfg.clip).clamp(min=1) * scale
    adam.found_inf = (~norm.isfinite()).float()
    meter.mark("norm")
    # Adam wants the gradients of all that it updates in fp32. §6.2, C_B: a group is one piece, else the whole model.
    for group in groups:
        adam.param_groups[0]["params"] = [piece for _, _, piece in group]  # so that Adam doesn't walk through all
        for layer, start, piece in group:
            piece.grad = layer.own_grad[start : start + piece.numel()].float()
        meter.mark("fp32 gradients")
        adam.step()
        adam.zero_grad()
    meter.mark("Adam")
    for layer in layers:
        layer.grad = None
        layer.shard.copy_(layer.master)  # §5.3: with P_p the next forward gathers
    for wait in [comm.all_gather(layer.flat, layer.name) for layer in layers if layer.flat is not None]:
        wait()  # §5.1: P_os and P_os+g hand out the updated slices here
    meter.mark("parameters updated")
    return (loss / comm.world_size).float(), norm


# ==== Below: the stages' instrument and run, with what host memory, replicas and the options above need. ==========

# ---- 7. The memory meter ---------------------------------------------------------------------------------------

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "host")


class Meter(TorchDispatchMode):
    """Counts the live bytes of one step by category, from the storages that really exist.

    While it is on it sees the result of every operation, though not what a kernel makes and frees inside. A storage it
    has not seen is a birth; a finalizer tells of the death. A storage often gets its name only later (a gradient is
    known as one when autograd returns it), so births and deaths are written to a trace first, and counted at the end
    under the final names.
    """

    def __init__(self, device):
        super().__init__()
        self.device, self.running = device, False
        self.default = "buffers"  # what a storage is until it is named
        self.spans = []  # (what, layer, its start, when the step began and when it ceased to wait for it)

    def start(self, named):
        """Begins a trace with the (tensor, category) pairs that are alive already."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # of PyTorch's allocator, so that it too tells of this step alone
        self.running, self.began = True, self.now()
        self.trace = []  # (number, +bytes) for a birth, (number, -bytes) for a death, (label, time) for a mark
        self.category = []  # number of a storage -> its category
        self.number = {}  # id() of a living storage -> its number
        self.kept = set()  # §6.3: numbers of the storages that M_D is about: kept layer inputs and gradients
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
        if id(storage) not in self.number:
            key, number, size = id(storage), len(self.category), storage.nbytes()
            self.number[key] = number
            self.category.append(self.default)
            self.trace.append((number, size))
            weakref.finalize(storage, lambda: self.trace.append((self.number.pop(key), -size)))
        return self.number[id(storage)]

    def name(self, tensor, category):
        """Says what a tensor is, from its birth on. Returns the tensor."""
        if self.running:
            self.category[self.see(tensor)] = category
        return tensor

    def keep(self, tensor, category):
        """Names a tensor as one of those that M_D is about (§6.3)."""
        if self.running:
            self.kept.add(self.see(tensor))
        return self.name(tensor, category)

    def mark(self, label):
        """Notes a moment of the step for the timeline."""
        if self.running:
            self.trace.append((label, self.now()))

    def settle(self, tensors):
        """gloo's thread lets go of a tensor a moment after wait() returns. Give it that moment while the meter is on,
        or the live bytes would differ from run to run."""
        if not self.running or dist.get_backend() != "gloo":
            return
        give_up = time.perf_counter() + 10
        while any(tensor._use_count() > 1 for tensor in tensors):
            assert time.perf_counter() < give_up, "a view or a work holds what was transferred: del it earlier"
            time.sleep(0)
        time.sleep(2e-3)  # the thread's last act is to drop a reference of Python's, and for that it needs the GIL

    @contextlib.contextmanager
    def computing(self, what, layer):
        """The call of a layer or its backward: what is made in here and not named is an activation."""
        self.default, start = "activations", self.running and self.now()
        yield
        self.default = "buffers"
        if self.running:
            self.spans.append((what, layer, start, self.now(), self.now()))  # nothing waits for it
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

    def residual(self):
        """Bytes of kept layer inputs on the device and on the host (§6.1), and fragmentation: the space that a modelled
        heap takes over its peak of live bytes, minus one, for all device memory and for what M_D is about alone."""
        device = {number for number, category in enumerate(self.category) if category != "host"}
        inputs = {name: {n for n in self.kept if self.category[n] == name} for name in ("activations", "host")}
        found = {"kept": first_fit(self.trace, inputs["activations"])[0]}
        found["kept_host"] = first_fit(self.trace, inputs["host"])[0]
        for name, chosen in (("fragmentation", device), ("fragmentation_kept", self.kept & device)):
            live, space, _ = first_fit(self.trace, chosen)
            found[name] = space / live - 1
        return found

    def timed(self):
        """Spans as records: start and end in ms from the start of the trace, and how long the rank stood waiting."""
        for what, layer, start, stood, end in self.spans:
            times = {"start_ms": elapsed_ms(self.began, start), "end_ms": elapsed_ms(self.began, end)}
            yield {"what": what, "layer": layer, **times, "waited_ms": elapsed_ms(stood, end)}


def elapsed_ms(start, end):
    """Milliseconds between two results of Meter.now()."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)


def first_fit(trace, chosen):
    """§6.3: replays the chosen storages of a trace in one address space, each placed in the first gap that holds it.
    Returns the peak of their live bytes, the highest address in use (the excess is fragmentation), all addresses."""
    blocks, placed, live, most, top = [(0, 0)], {}, 0, 0, 0  # blocks: (start, end) of what is placed, in order
    for key, size in trace:
        if isinstance(key, str) or size == 0 or key not in chosen:
            continue
        live += size
        most = max(most, live)
        if size < 0:
            blocks.remove(placed[key])
            continue
        gaps = ((end, start) for (_, end), (start, _) in zip(blocks, blocks[1:] + [(math.inf, math.inf)]))
        start = next(start for start, end in gaps if end - start >= size)
        placed[key] = (start, start + size)
        bisect.insort(blocks, placed[key])
        top = max(top, start + size)
    return most, top, placed


# ---- 8. Command line and data ----------------------------------------------------------------------------------


def fail(message):
    """Ends the run with one line and exit status 2, for what the user can put right: no traceback."""
    if from_torchrun("LOCAL_RANK", 0) > 0:
        time.sleep(10)  # torchrun ends all ranks as soon as one has failed: local rank 0 speaks, unless it is well
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def from_torchrun(name, alone):
    """A number that torchrun puts into the environment; `alone` in a process that it has not started."""
    return int(os.environ[name]) if dist.is_torchelastic_launched() else alone


def parse_args():
    """The command line as a Config; ends the run where a value can't work."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **style)
    parser.error = lambda message: fail(message + " (--help lists the options)")
    fields = {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(Config)}
    for name, field in fields.items():
        text, others = field.metadata["text"], field.metadata["others"]
        kind = {"choices": (field.default, *others)} if others else {"type": field.type, "metavar": field.type.__name__}
        parser.add_argument(name, help=text + f" (default: {field.default})" * (field.default != ""), **kind)
    cfg = parser.parse_args(namespace=Config())

    for name, field in fields.items():
        value, (least, most) = getattr(cfg, field.name), field.metadata["limits"]
        if field.type is not str and not least <= value <= most:
            fail(f"{name} {value} must lie between {least} and {most}")
    if cfg.width % cfg.heads:
        fit = next(heads for heads in range(min(cfg.heads, cfg.width), 0, -1) if cfg.width % heads == 0)
        fail(f"--width {cfg.width} is not a multiple of --heads {cfg.heads}; take --heads {fit}, say")
    if cfg.micro_batches * cfg.batch * cfg.context > 10**9:
        fail("--micro-batches x --batch x --context is more than 10^9 tokens a step; take a smaller one")
    if cfg.simulate_ranks and dist.is_torchelastic_launched():
        fail("--simulate-ranks is for one process: start it with python, without torchrun")
    ranks = cfg.simulate_ranks or from_torchrun("WORLD_SIZE", 1)
    for what, number in (("ranks", ranks), ("--heads", cfg.heads), ("--width", cfg.width)):
        if number % cfg.mp:
            fail(f"--mp {cfg.mp} must divide {what} {number}: each tensor-parallel rank takes an equal part")
    if cfg.buffer_elements % 16 or cfg.buffer_elements < 16 * ranks // cfg.mp:  # §6.2
        fail(f"--buffer-elements {cfg.buffer_elements} must be a multiple of 16, and {16 * ranks // cfg.mp} or more")
    for name, value in zip(("partition", "pa", "cb", "md"), CONFIGS[cfg.config]):
        if getattr(cfg, name) == "auto":
            setattr(cfg, name, value)
    return cfg


def load_data(cfg):
    """The training text as bytes."""
    data = "\n".join(pydoc_data.topics.topics.values()).encode()
    if cfg.data:
        if not os.path.isfile(cfg.data):  # ranks can't share a pipe, and an unwritten one would hang
            fail(f"--data {cfg.data} is not there, or is no regular file")
        if os.path.exists(cfg.log_file) and os.path.samefile(cfg.log_file, cfg.data):
            fail(f"--log-file {cfg.log_file} is the file of --data, and would overwrite it")
        with open(cfg.data, "rb") as file:
            data = file.read()
    if len(data) <= cfg.context:
        text = f"--data {cfg.data}" if cfg.data else "the built-in text"
        fail(f"{text} has {len(data)} bytes, a sequence takes --context {cfg.context} + 1; shorten it or add text")
    return data


def load_batches(data, step, cfg, comm, device):
    """This rank's micro-batches of a step: a list of (x, y), both (B, T) int64, y one byte further than x.

    Seed, step and number decide a sequence of the global batch, whatever the number of ranks: a rank takes its slice
    of it, so no two ranks read the same slice of it and 1 rank x 8 trains on what 4 ranks x 2 train on.
    """
    mine = cfg.micro_batches * cfg.batch
    seeds = [f"{cfg.seed}/{step}/{comm.rank * mine + i}" for i in range(mine)]  # a string is hashed whole: all differ
    starts = [random.Random(seed).randrange(len(data) - cfg.context) for seed in seeds]
    text = bytearray(b"".join(data[start : start + cfg.context + 1] for start in starts))
    tokens = torch.frombuffer(text, dtype=torch.uint8).view(mine, cfg.context + 1).to(device, torch.int64)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(cfg.batch)]


# ---- 9. The run ------------------------------------------------------------------------------------------------


def choose_device(cfg):
    """cuda with one GPU for each rank of this machine, or the cpu with its cores divided among the ranks. Then what
    `--compute auto` is: most CPUs have no units for 16 bits, and a GPU before Ampere has none for bfloat16."""
    ranks_here, gpus = from_torchrun("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if cfg.device == "cuda" and gpus < ranks_here:
        fail(f"--device cuda needs a GPU for each of {ranks_here} ranks, finds {gpus}; start fewer or use --device cpu")
    if cfg.device == "cpu" or cfg.simulate_ranks or gpus < ranks_here:
        device, auto = torch.device("cpu"), "float32"
        # torchrun sets one thread where the user has set nothing; a 1 of the user's own looks the same.
        if dist.is_torchelastic_launched() and os.environ.get("OMP_NUM_THREADS", "1") == "1":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // ranks_here))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        psi = 12 * cfg.layers * cfg.width**2 + 2 * cfg.vocab * cfg.width  # nearly
        needed = ranks_here * paper_states(psi / cfg.mp, from_torchrun("WORLD_SIZE", 1) / cfg.mp, cfg)  # §8
        if needed > memory and not cfg.simulate_ranks:  # before the system ends the process without a word
            fail(f"the states alone take {needed / 1e9:,.0f} of {memory / 1e9:,.0f} GB; take a smaller model")
    else:
        device = torch.device("cuda", from_torchrun("LOCAL_RANK", 0))  # the rank within this machine, not the job
        torch.cuda.set_device(device)
        units = cfg.dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)
        auto = cfg.dtype if units else "float32"
    cfg.compute = auto if cfg.compute == "auto" else cfg.compute
    return device


def check_layers(layers):
    """Ends the run where a module holds what a flat vector, all of which is trained, can't express."""
    owners = {}
    for layer in layers:
        for name, weight in layer.module.named_parameters():
            if owners.setdefault(id(weight), layer) is not layer or not weight.requires_grad:
                fail(f"{name} of {layer.name} is frozen, or another layer's too; a layer trains parameters of its own")
        for part in layer.module.modules():
            if any(isinstance(value, torch.Tensor) for value in vars(part).values()):
                fail(f"{layer.name} holds a tensor that is neither parameter nor buffer; use register_buffer")


def checksum(layers, comm):
    """sha256 of all fp32 master copies without padding: equal weights give equal sums, whatever the stage."""
    digest = hashlib.sha256()
    for layer in layers:
        pieces = dict(zip(layer.shapes, full_master(layer, comm).split(layer.sizes)))
        for name, _ in layer.module.named_parameters():  # stage 3's order; §8: this rank's part, if M > 1
            digest.update(pieces[name].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def from_all_ranks(mine, cfg):
    """[rank 0's object, rank 1's, ...]. Simulated ranks have but one."""
    everyone = [mine] * (1 if cfg.simulate_ranks else dist.get_world_size())
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def agree(cfg, data):
    """Ends the run where ranks differ in an option or in the text: they would train different models, in silence."""
    everyone = from_all_ranks(dataclasses.asdict(cfg) | {"data": hashlib.sha256(data).hexdigest()}, cfg)
    cfg.log_file = everyone[0].pop("log_file")  # rank 0's decides, also on a node where it was not given
    for name, value in everyone[0].items():
        for other in [other[name] for other in everyone if other[name] != value]:
            fail(f"--{name.replace('_', '-')} differs between the ranks: {value} on rank 0, {other} elsewhere")


def run(cfg, data, device, log):
    """Trains and reports. Rank 0 prints, and writes records to the file `log`."""

    def record(event, **fields):  # flushed line by line: a run that is killed leaves whole lines
        print(json.dumps({"event": event, **fields}), file=log, flush=True)

    agree(cfg, data)
    meter = Meter(device)
    # §8: M neighbours are a replica; ranks M apart have the same part of the model, and ZeRO-DP is among them.
    rows = [tuple(range(first, first + cfg.mp)) for first in range(0, dist.get_world_size(), cfg.mp)]
    limit = timedelta(seconds=60)  # the world's; a group's own default is half an hour
    both = (dist.new_subgroups_by_enumeration(ranks, timeout=limit)[0] for ranks in ([*zip(*rows)], rows))
    comm, replica = (Collectives(cfg, meter, group) for group in both)
    comm.replica, comm.copying = replica, torch.cuda.Stream() if device.type == "cuda" and cfg.pa == "cpu" else None
    N, simulated = comm.world_size, cfg.simulate_ranks > 0
    layers = make_layers(cfg, comm, device)
    check_layers(layers)
    groups, stores = master_pieces(layers, cfg), allocate_once(layers, cfg, device)
    adam = torch.optim.Adam([piece for group in groups for _, _, piece in group], lr=cfg.lr, fused=True)
    for master in adam.param_groups[0]["params"]:  # what Adam's first step would make: so all steps begin alike
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        adam.state[master] = {"step": torch.zeros((), device=device), **moments}

    psi, backend = sum(layer.psi for layer in layers), dist.get_backend()
    record("config", **dataclasses.asdict(cfg) | {"world_size": N, "psi": psi, "backend": backend})
    network = "no network" if backend == "fake" else backend
    print(
        f"{N} {'simulated ' * simulated}data-parallel rank{'s' * (N > 1)} on {device.type} ({network}). Ψ = {psi:,} "
        f"parameters in {len(layers)} layers, stored in {cfg.dtype}, arithmetic in {cfg.compute}.\nGlobal batch: {N} x "
        f"{cfg.micro_batches} micro-batches x {cfg.batch} = {N * cfg.micro_batches * cfg.batch} sequences of "
        f"{cfg.context} tokens."
    )
    print(f"A data-parallel rank is a replica of {cfg.mp} tensor-parallel ranks; Ψ is what one of these holds.")
    idle = " (nothing to partition at --mp 1)" if cfg.pa != "off" and cfg.mp == 1 else ""
    print(f"ZeRO: partition {cfg.partition}, P_a {cfg.pa}{idle}, C_B {cfg.cb}, M_D {cfg.md}.")  # §5, §6
    if cfg.log_file and not simulated:
        record("weights", sha256=checksum(layers, comm))

    scaled = "float16" in (cfg.dtype, cfg.compute)  # its exponents are few: what is small vanishes unless scaled up
    scale, good, stuck = cfg.loss_scale if scaled else 1.0, 0, 0  # the last two count steps in a row
    timed = []  # (ms, ms of it spent waiting for communication) of each step without the meter
    for step in range(cfg.steps):
        batches = load_batches(data, step, cfg, comm, device)
        adam.param_groups[0]["lr"] = cfg.lr * min(1, (step + 1) / max(1, cfg.warmup))
        comm.sent, replica.sent, meter.spans = {}, {}, []  # of each step anew
        metered = step == cfg.steps - 1
        if metered:
            meter.start([*named_states(layers, adam), *((part, "activations") for xy in batches for part in xy)])
            for store, category in stores:
                meter.keep(store, category)  # §6.3
        start = time.perf_counter()
        with meter if metered else contextlib.nullcontext():
            loss, norm = train_step(layers, adam, batches, scale, cfg, comm, meter, groups)
        meter.running = False
        if simulated:
            continue
        loss, norm = loss.item(), norm.item()  # this waits for the device, so the clock is read after it
        ms, finite = 1e3 * (time.perf_counter() - start), math.isfinite(norm)
        fields = {"loss": loss if math.isfinite(loss) else None, "norm": norm if finite else None, "loss_scale": scale}
        speed = "metered"  # and so slowed down: its time says nothing
        if not metered:
            timed.append((ms, sum(elapsed_ms(stood, end) for *_, stood, end in meter.spans)))
            fields |= {"ms": ms, "tokens_per_s": 1e3 * N * cfg.micro_batches * cfg.batch * cfg.context / ms}
            speed = f"{ms:7.1f} ms | {fields['tokens_per_s']:9,.0f} tok/s"
        note = "" if finite else f" | skipped: gradient not finite{f', at a loss scale of {scale:g}' * scaled}"
        print(f"step {step:4} | loss {loss:7.4f} | norm {norm:8.4f} | {speed}{note}")
        record("step", step=step, skipped=not finite, **fields)
        good, stuck = (good + 1, 0) if finite else (0, stuck + (scale == 1))
        if stuck == 10:
            fail("the gradient was not finite in ten steps in a row, so nothing is learned; try a lower --lr")
        if scaled:  # dynamic loss scaling: as large as gradients allow, found out by trying
            scale = max(1.0, scale / 2) if not finite else 2 * scale if good % cfg.loss_scale_window == 0 else scale

    timed = timed[2:] or timed or [(0, 0)]  # the first steps of a run warm up
    step_ms, waited_ms = (sum(column) / len(timed) for column in zip(*timed))
    report(meter, layers, comm, cfg, step_ms, waited_ms, record)
    if cfg.log_file and not simulated:
        record("weights", sha256=checksum(layers, comm))


def report(meter, layers, comm, cfg, step_ms, waited_ms, record):
    """The tables at the end: memory of each rank and communication, beside the paper's formulas."""
    N, psi = comm.world_size, sum(layer.psi for layer in layers)
    timeline, peak = meter.replay()
    (mine,) = (moment for moment in timeline if moment["label"] == "before the optimizer step")
    mine = {category: mine[category] for category in CATEGORIES}
    mine["states"], mine["formula"] = sum(mine[key] for key in CATEGORIES[:3]), paper_states(psi, N, cfg)
    mine |= {"peak": sum(peak.values()) - peak["host"], "at_peak": peak} | meter.residual()  # §6.1
    if meter.device.type == "cuda":  # the most that PyTorch's allocator handed out, and took from the GPU for it
        mine |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    events = {"memory": [mine], "timeline": timeline, "span": [*meter.timed()]}
    everyone = from_all_ranks(events, cfg)
    for rank, events in enumerate(everyone):
        for event, fields in ((event, fields) for event, records in events.items() for fields in records):
            record(event, rank=rank, **fields)

    unit, name = (1e6, "MB") if 16 * psi < 1e10 else (1e9, "GB")
    print(f"\nMemory of each rank in {name} ({unit:,.0f} bytes), counted from the live tensors of the last step.")
    before = [*CATEGORIES[:3], "states", "formula", *CATEGORIES[3:], "peak"]
    at_peak = [*CATEGORIES, "peak", *(key for key in ("allocated", "reserved") if key in mine)]
    for title, columns in (("Just before the optimizer step", before), ("At the peak", at_peak)):
        print(f"{title}:\nrank" + "".join(f"{column:>13}" for column in columns))
        for rank, events in enumerate(everyone):
            row = events["memory"][0] | (events["memory"][0]["at_peak"] if columns is at_peak else {})
            print(f"{rank:4}" + "".join(f"{row[column] / unit:13,.2f}" for column in columns))

    print(
        "Rank 0 keeps layer inputs: {kept:,} bytes on the device, {kept_host:,} on the host.\nFragmentation (§6.3) of "
        "a modelled first-fit heap: {fragmentation:.1%} of what lives in it; with kept inputs and gradients alone "
        "{fragmentation_kept:.1%}.".format(**everyone[0]["memory"][0])
    )
    volume = traffic(f"in a step, (N-1)/N = {(N - 1) / N:.4f}", comm, psi, *paper_volume(layers, N, cfg))
    tensor = traffic("within its replica", comm.replica, psi, paper_tensor_volume(cfg), "12BTC(M-1)/M a block, P_a 13")
    record("communication", psi=psi, **volume, waited_ms=waited_ms, tensor=tensor)
    if step_ms:
        print(f"A step took {step_ms:.1f} ms on average, {waited_ms:.1f} ms of them waiting for communication.")


def traffic(where, comm, psi, expected, words):
    """Prints what a rank has sent, beside the paper's formula in elements and in words. Returns a record of it."""
    total = sum((sent for what, sent in comm.sent.items() if what != "scalars"), collections.Counter())
    print(f"\nSent by each rank {where}:\n{'':30}calls{'elements':>20}{'bytes':>20}{'elements / Ψ':>15}")
    for what, sent in [*comm.sent.items(), ("all but scalars", total)]:
        print(f"{what:30}{sent['calls']:5}{sent['elements']:20,}{sent['bytes']:20,}{sent['elements'] / psi:15.4f}")
    print(f"{'paper: ' + words:35}{expected:20,.0f}{'':20}{expected / psi:15.4f}")
    return {"elements": total["elements"], "bytes": total["bytes"], "formula": expected, "collectives": comm.sent}


def main():
    if torch.__version__ < "2.13":  # its group of one process leaves the receiver's memory as it was
        fail(f"this needs torch 2.13 or newer, and finds {torch.__version__}")
    cfg, log_file = parse_args(), os.devnull
    if cfg.log_file and from_torchrun("RANK", 0) == 0:
        log_file = cfg.log_file
    fake = FakeTensorMode(allow_non_fake_inputs=True) if cfg.simulate_ranks else contextlib.nullcontext()
    try:
        data, device = load_data(cfg), choose_device(cfg)
        if dist.is_torchelastic_launched():  # when a rank is gone, the others wait a minute, not ten or thirty
            backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, device_id=device_id, timeout=timedelta(seconds=60))
        else:  # one process needs no network: this group hands it its own data back, and is of any size in a simulation
            dist.init_process_group("fake", rank=0, world_size=cfg.simulate_ranks or 1)
        cfg.steps = 1 if cfg.simulate_ranks else cfg.steps
        with open(log_file, "w") as log, fake:
            run(cfg, data, device, log)
    # What memory, files and the other ranks raise is said in one line. All else is a fault in here.
    except OSError as error:
        fail(f"{error.filename or 'the output or --log-file'}: {error.strerror}; name another file, or make room")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            fail("the memory is too small for this; take a smaller --layers, --width, --vocab, --batch or --context")
        if "Connection closed by peer" in str(error):
            fail("another rank has ended, and its own message says why")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # gloo's threads end with the last reference to the group; at the interpreter's exit is too late


if __name__ == "__main__":
    # Ctrl-C, and `| head` that has read enough, end the process as they end any other; a terminal may lack a Ψ.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    if from_torchrun("RANK", 0) > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all
    main()
