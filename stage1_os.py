"""Stage 1: optimizer state partitioning, P_os (§5.1).

A rank is one process with one device. torchrun starts N of them; all run this whole file, and each has its
number, 0 to N-1. Together they train one model; Ψ is its number of parameters. § is a section of the paper,
arXiv 1910.02054 v3; "part 3" is a part of this file. In every stage a rank works on its share of the batch:

    forward, backward    on its own sequences                   N different gradients
    reduce               averages the gradients of all ranks
    Adam                 updates the parameters                 N equal models again

Who holds what, in bytes. For N = 3 a box is a third of every layer:

                          rank 0       rank 1       rank 2
    parameters  2Ψ       [0][1][2]    [0][1][2]    [0][1][2]    16-bit
    gradients   2Ψ       [0][1][2]    [0][1][2]    [0][1][2]    16-bit
    optimizer  12Ψ/N     [0]             [1]             [2]    fp32 parameters, momentum, variance: 4Ψ/N each

In stage 0 all ranks compute the same update. Here each computes its slice of it: after the reduce-scatter it
has the average gradient of this slice, and that is enough. So Adam moves *between* the two halves of the
all-reduce, and the all-gather collects new parameters instead of gradients. The volume stays 2Ψ(N-1)/N.

    torchrun --standalone --nproc-per-node 2 stage1_os.py       # N = 2; without torchrun, N = 1
    python stage1_os.py --simulate-ranks 1024 --layers 72 --width 2944 --heads 23 --context 1024 --batch 1
    git diff --no-index stage1_os.py stage2_grad.py             # what §5.2 adds

The first command trains: on GPUs, where the library NCCL carries data between ranks, or on the CPU, where
gloo does. The second simulates rank 0 of 1024 with the paper's 7.5-billion-parameter model: its tensors have
shapes but no data, and it counts the memory and the traffic of one step. Read each file down to the line
"All below is the same in every stage". Above it are the model, the collectives, the layers, the train step.
"""

# ---- 1. Imports --------------------------------------------------------------------------------------------

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import pydoc_data.topics  # Python's help texts, which we train on
import random
import re
import signal
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # not used here; but if Adam is the first to import it, Python may crash on exit
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors with shapes but no data, to simulate ranks
from torch.utils._python_dispatch import TorchDispatchMode  # lets the meter (part 6) see every new tensor

# ---- 2. The model ------------------------------------------------------------------------------------------
# A small GPT-2: LayerNorm before attention and MLP, learned positions. Unlike GPT-2's, the head has a
# weight of its own and doesn't share the embedding's, so that no parameter belongs to two layers.
#
# The model is a plain list of layers: [Embedding, Block, ..., Block, Head]. Each is called with (x, y): x
# is the output of the layer before it, or the tokens for the embedding. Only the head reads y, the tokens
# to predict, and returns the loss. So all layers are called in the same way.
#
# `cfg` is the command line (part 7). The model reads from it the sizes: layers, width C, heads, context T,
# vocab. A rank's share of the batch may be cut into micro-batches, whose gradients are added up. B is the
# number of sequences in one of them.


def initialize(module, cfg):
    """GPT-2's initial weights. LayerNorm keeps PyTorch's own: weight 1, bias 0."""
    for name, weight in module.named_parameters():
        if name.endswith("proj.weight"):
            # Two of these in each block add to x: the deeper the model, the smaller they start.
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * cfg.layers))
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)


# Turns each token and its position into vectors of C numbers, and adds them.
class Embedding(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.token = nn.Embedding(cfg.vocab, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width)
        initialize(self, cfg)

    def forward(self, x, y):  # x (B, T) int64, the tokens -> (B, T, C)
        return self.token(x) + self.position.weight[: x.shape[1]]


# Attention lets each token look at the ones before it; the MLP treats each by itself. Both add to x.
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
        initialize(self, cfg)

    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.attention_norm(x))  # (B, T, 3C): queries, keys and values, side by side
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, heads, T, C/heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # causal: no token sees a later one
        x = x + self.attention_proj(heads.transpose(1, 2).reshape(B, T, -1))  # heads side by side again
        return x + self.mlp_proj(F.gelu(self.mlp_up(self.mlp_norm(x))))


# Scores every token of the vocabulary as the next one, and returns how wrong that was.
class Head(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.width)
        self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)
        initialize(self, cfg)

    def forward(self, x, y):  # x (B, T, C), y (B, T) int64, the next tokens -> the mean loss, 0-d fp32
        logits = self.logits(self.norm(x)).float()  # the softmax's sum over the vocabulary needs fp32
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# ---- 3. Collectives ----------------------------------------------------------------------------------------
# A collective is a function that all ranks call together. Two of them are enough for ZeRO-DP. Say N = 2, and
# each rank has a vector of four numbers:
#
#                        rank 0         rank 1
#     before            a b c d        e f g h
#     reduce-scatter    A B            C D            A = (a + e) / 2, ...: each rank averages its own slice
#     all-gather        A B C D        A B C D        each rank sends its slice to all the others
#
# One after the other they make an all-reduce (§7.1): every rank has the whole average. Why not call
# all_reduce, then? Because stage 1 puts Adam between the halves, and stages 2 and 3 use each half alone.
#
# What do they cost? A slice is 1/N of a vector of n elements. In the reduce-scatter a rank sends away every
# slice but its own, in the all-gather it sends its own slice to N-1 others. Either way it sends N-1 slices,
# n(N-1)/N elements. (A library may pass them on from rank to rank, in a ring: the count is the same.)
#
# `meter` (part 6) measures memory and time and changes no result: skip its lines when you read.
# meter.name(t, ...) says what t holds and returns t itself; meter.device is the device.


class Transfer:
    """A collective under way. Compute something else in the meantime, then call wait() to get its result."""

    def __init__(self, comm, name, layer, works, buffers, result, finish=None):
        self.comm = comm
        self.name = name
        self.layer = layer  # the layer whose vector it is
        # PyTorch's handles, one or several: with async_op=True a collective returns at once, and the handle's
        # wait() waits for its end.
        self.works = works
        # The tensors that it reads or writes until wait(), held so that their memory is not given away. They
        # and the result may not be written before that.
        self.buffers = buffers
        self.result = result
        self.finish = finish  # a function that turns what was received into the result, or None
        self.started_at = comm.meter.now()
        if not comm.overlap:  # --overlap off: wait for it here already, to see what is lost
            self.complete()

    def wait(self):
        """Returns the result; call it only once. On a GPU Python doesn't stop here: the GPU's queue of work,
        its stream, waits for the data."""
        self.complete()
        result = self.result
        self.result = None  # a second reference would keep it in memory for longer than the caller needs it
        return result

    def complete(self):
        if not self.works:  # complete already
            return
        meter = self.comm.meter
        waiting_since = meter.now()
        while self.works:
            self.works.pop(0).wait()  # taken off the list, since a handle keeps the buffers in memory
        layer = self.layer.name if self.layer else ""
        meter.spans.append((self.name, layer, self.started_at, waiting_since, meter.now()))
        meter.settle(self.buffers)
        if self.finish is not None:
            self.result = self.finish(self.result)
        self.buffers = None


class Collectives:
    """reduce_scatter and all_gather of one flat vector, and the count of what a rank sends.

    Both start a transfer and return it: what is computed between the start and wait() hides the time it
    takes. All ranks must start the same collectives in the same order. A collective carries no name: the
    third call on one rank is matched with the third call on every other.
    """

    def __init__(self, cfg, meter, group):
        self.group = group  # the ranks that call together, as a process group of PyTorch's
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.meter = meter
        self.overlap = cfg.overlap == "on"
        self.sent = {}  # collective -> calls, and the elements and bytes that this rank sends in them
        # NCCL has both collectives. gloo implements reduce-scatter as an all-reduce, which sends twice the
        # bytes, and its all-gather takes twice as long as broadcasts. So for gloo they are written out
        # below.
        self.native = cfg.collectives == "native"
        if cfg.collectives == "auto":
            self.native = dist.get_backend() != "gloo"

    def reduce_scatter(self, full, layer):
        """Averages `full` (n,) over the ranks. The transfer's wait() returns this rank's slice of the
        average, (n/N,).

        The version for gloo shows P_g (§5.2) directly: every rank sends slice r to rank r, which averages
        the N slices it receives, in fp32 and in the order of the ranks, so that every run gives the same
        bits. NCCL adds in an order of its own, and returns the dtype of `full`.
        """
        self.count("reduce_scatter", full)
        if self.native:  # (PyTorch before 2.13 called these reduce_scatter_tensor and all_gather_into_tensor)
            shard = full.new_empty(full.numel() // self.world_size)
            average = dist.ReduceOp.AVG
            works = [dist.reduce_scatter_single(shard, full, op=average, group=self.group, async_op=True)]
            return Transfer(self, "reduce_scatter", layer, works, [full, shard], shard)
        received = torch.empty_like(full)
        # Slice r of `full` goes to rank r, and slice s of `received` comes from rank s.
        works = [dist.all_to_all_single(received, full, group=self.group, async_op=True)]
        return Transfer(self, "reduce_scatter", layer, works, [full, received], received, self.average)

    def average(self, received):
        """received (n,), a slice from each of N ranks -> their average (n/N,) fp32."""
        total = torch.zeros(received.numel() // self.world_size, dtype=torch.float32, device=received.device)
        for part in received.chunk(self.world_size):
            total += part
        return total.div_(self.world_size)

    def all_gather(self, full, layer):
        """Fills in `full` (n,), of which each rank has its own slice only, in place. wait() returns it."""
        self.count("all_gather", full)
        if self.native:
            part = full.numel() // self.world_size
            mine = full[self.rank * part : (self.rank + 1) * part]
            works = [dist.all_gather_single(full, mine, group=self.group, async_op=True)]
            return Transfer(self, "all_gather", layer, works, [mine], full)
        slices = full.chunk(self.world_size)
        works = []
        for owner in range(self.world_size):  # each owner broadcasts its slice, as §5.3 words it
            works.append(dist.broadcast(slices[owner], group=self.group, group_src=owner, async_op=True))
        return Transfer(self, "all_gather", layer, works, slices, full)

    def all_reduce(self, x, name="scalars"):
        """Sums a tensor over the ranks, in place, and waits for it: a loss, a norm."""
        self.count(name, x, halves=2)
        flat = x.view(-1)
        works = [dist.all_reduce(flat, group=self.group, async_op=True)]
        return Transfer(self, name, None, works, [flat], x).wait()

    def count(self, name, full, halves=1):
        """Counts what this rank sends: n(N-1)/N elements for each half of an all-reduce (§7.1)."""
        elements = halves * full.numel() * (self.world_size - 1) // self.world_size
        sent = self.sent.setdefault(name, collections.Counter())
        sent["calls"] += 1
        sent["elements"] += elements
        sent["bytes"] += elements * full.element_size()


# ---- 4. The layer and its state ----------------------------------------------------------------------------


class Layer:
    """A layer as a function of one flat vector of its parameters: `layer(flat, x, y)`.

    Differentiating with respect to `flat` gives the layer's gradient as one flat vector too. So all of
    ZeRO-DP (§5) is the answer to three questions:

        1. Where does the flat vector live?    2. Where does its gradient go?    3. Who owns its fp32 copy?

    Search for "Answer": 1 and 3 are given in __init__, 2 in train_step.
    """

    def __init__(self, name, kind, cfg, comm, device):
        self.name = name
        self.dtype = getattr(torch, cfg.dtype)  # in which parameters and gradients are stored
        self.compute = getattr(torch, cfg.compute)  # in which the layer computes
        # The weights are drawn on the CPU, alike on every rank, from a seed of each layer's own. (Random()
        # turns a text into the same number everywhere; hash() would not.)
        torch.manual_seed(random.Random(f"{cfg.seed}/{name}").getrandbits(63))
        self.module = kind(cfg)
        weights = dict(self.module.named_parameters())
        assert weights, f"{name} has no parameters; put what has none into another layer"
        # Two things for check_layers() in part 8: whether a weight is in another layer too, and a weighted
        # sum of all weights, which is the same on every rank if they have drawn the same.
        self.shares = any(hasattr(weight, "owner") for weight in weights.values())
        self.fingerprint = 0
        for weight in weights.values():
            weight.owner = name
            self.fingerprint += (weight.detach().flatten() * torch.arange(weight.numel()).cos()).sum()
        self.constants = {}  # the module's buffers; those of this file have none
        for key, constant in self.module.named_buffers():
            dtype = self.compute if constant.is_floating_point() else constant.dtype
            self.constants[key] = constant.to(device, dtype)
        self.shapes = {key: weight.shape for key, weight in weights.items()}
        self.psi = sum(shape.numel() for shape in self.shapes.values())
        # All parameters end to end in one vector, then zeros, so that N ranks can cut it into equal slices:
        #
        #     | qkv.weight | qkv.bias | ...          ... | mlp_proj.bias | 0 0 0 |
        #     | slice of rank 0  | slice of rank 1  | ...  | slice of rank N-1   |
        #
        # A cut may fall within a weight: Adam treats every number by itself. The zeros stay zero, since
        # nothing reads them and so their gradient is zero. A slice is a multiple of 16 elements: fused Adam,
        # which updates a vector in one call, takes the last few elements in another way, and their last bit
        # may differ. Cut elsewhere, stage 1 would not compute the same bits as stage 0.
        # (§5.1 cuts the whole model into N parts instead: the same bytes, but a layer is then on one rank or
        # a few, while here all ranks send and receive equally much for each layer.)
        unit = 16 * comm.world_size
        self.padded = math.ceil(self.psi / unit) * unit
        self.sizes = [shape.numel() for shape in self.shapes.values()] + [self.padded - self.psi]
        part = self.padded // comm.world_size
        self.own = slice(comm.rank * part, (comm.rank + 1) * part)  # this rank's slice
        full = torch.cat([weight.detach().flatten() for weight in weights.values()])
        full = F.pad(full, (0, self.padded - self.psi)).to(device)
        # Answer 1: whole, on every rank. (padded,) 16-bit, 2Ψ bytes.
        self.flat = full.to(self.dtype, copy=True)
        self.shard = self.flat[self.own]  # §5.1: a view of this rank's slice
        # Answer 3, §5.1: each rank its slice. (padded/N,) fp32, 4Ψ/N bytes; with Adam's moments 12Ψ/N. A
        # clone, because a view would keep all of `full` in memory.
        self.master = full[self.own].clone()
        self.grad = None  # made in the backward pass
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.set_()  # now empty: from here on only the module's forward() is used

    def seed_random(self, *numbers):
        """Seeds the random numbers of a call, for layers that draw some, such as dropout; these here don't.
        The forward pass and the recomputation must draw the same, or the gradient is that of another
        function."""
        seed = random.Random(f"{self.name}/{numbers}").getrandbits(63)
        torch.manual_seed(seed)
        random.seed(seed)

    def __call__(self, flat, x, y):
        """flat (padded,), x the layer's input -> the layer's output in the stored dtype, or the loss in fp32.

        A CPU without 16-bit units multiplies 16-bit matrices 30 to 100 times more slowly than fp32 ones. So
        what is stored in 16 bits may be computed in fp32: `.to()` makes a copy, which is freed
        after its use. Where the dtype is the same already, it returns the tensor itself.
        """
        weights = dict(self.constants)
        pieces = flat.to(self.compute).split(self.sizes)  # views; the last one, the padding, goes unused
        for (name, shape), piece in zip(self.shapes.items(), pieces):
            weights[name] = piece.view(shape)
        if x.is_floating_point():  # not the embedding's input, token numbers
            x = x.to(self.compute)
        out = torch.func.functional_call(self.module, weights, (x, y))  # module(x, y), but with these weights
        for name in self.constants:  # where forward() has assigned a new one, functional_call puts it here
            self.constants[name] = weights[name].detach()
        if out.dim() == 0:  # the head's loss
            return out
        return out.to(self.dtype)


def make_layers(cfg, comm, device):
    """[embedding, block 0, ..., head], made one by one, so that what a rank doesn't keep is soon freed."""
    # The names decide the seeds of the weights: these are the same in every stage, for any number of ranks.
    layers = [Layer("embedding", Embedding, cfg, comm, device)]
    for i in range(cfg.layers):
        layers.append(Layer(f"block {i}", Block, cfg, comm, device))
    layers.append(Layer("head", Head, cfg, comm, device))
    return layers


def named_states(layers, adam):
    """(tensor, category, layer) for every tensor that lives from step to step."""
    for layer in layers:
        yield layer.flat, "parameters", layer
        yield layer.master, "optimizer", layer
        state = adam.state[layer.master]
        yield state["exp_avg"], "optimizer", layer  # momentum
        yield state["exp_avg_sq"], "optimizer", layer  # variance
        yield state["step"], "buffers", layer


def full_master(layer, comm):
    """A layer's whole fp32 copy (padded,), for the checksum of the weights."""
    full = torch.empty(layer.padded, device=layer.master.device)  # §5.1: a rank has its slice only
    full[layer.own] = layer.master
    return comm.all_gather(full, layer).wait()


def paper_states(psi, world_size, cfg):
    """Bytes of model states on a rank by the paper's formula, for psi parameters. (The comments at
    the ends of its lines hold for 16 bits and one micro-batch.)"""
    param_bytes = 4 if cfg.dtype == "float32" else 2
    grad_bytes = param_bytes if cfg.micro_batches == 1 else 4  # sums over micro-batches are kept in fp32
    parameters = param_bytes * psi  # 2Ψ
    gradients = grad_bytes * psi  # 2Ψ
    optimizer = 12 * psi / world_size  # KΨ/N, with K = 12 (§5.1)
    return parameters + gradients + optimizer


def paper_volume(layers, world_size, cfg):
    """Elements that a rank sends in a step: the paper's formula, times (N-1)/N and for m micro-batches.
    Returns their number, and the formula as text."""
    psi = sum(layer.psi for layer in layers)
    # §7.1, §7.2.1: a reduce-scatter of Ψ and an all-gather of Ψ
    return 2 * psi * (world_size - 1) / world_size, "2Ψ(N-1)/N"


# ---- 5. The train step -------------------------------------------------------------------------------------
# What happens at the same time in the backward pass of a model of four layers (time goes to the right):
#
#     computes          head       block 1    block 0    embedding
#     reduce-scatter               head       block 1    block 0      embedding
#
# While a layer computes, the gradient of the layer above it is on its way. If the network is fast enough,
# only what comes after the last computation takes extra time.


def sum_of_squares(vectors):
    """The sum of the squares of all elements, 0-d float64. The order of the sum depends on N; in float64
    that hardly ever changes the norm once it is rounded to fp32."""
    total = torch.zeros(1, dtype=torch.float64, device=vectors[0].device)
    for vector in vectors:
        # In pieces, because .double() makes a copy. At most 64, so that a huge simulation doesn't take long.
        for piece in vector.split(max(2**22, vector.numel() // 64)):
            piece = piece.double()
            total.addmv_(piece.view(1, -1), piece)  # adds piece · piece, in one kernel
    return total[0]


@torch.no_grad()  # autograd is on in one place only: for one layer at a time, in the backward pass
def train_step(layers, adam, batches, scale, cfg, comm, meter, step=0):
    """One step of training, under five headings: forward, backward, global norm, Adam, new parameters.

    batches   the micro-batches: a list of (x, y), tokens and next tokens, both (B, T) int64
    scale     what the loss is multiplied by: 1, except in float16, where small gradients would become 0
    step      its number, for the seeds of what layers draw
    returns   the mean loss over ranks and micro-batches, and the norm of the gradient; 0-d fp32, not scaled

    Nothing here reads a number back from the device: on a GPU Python never waits, and queues the whole step
    ahead.
    """
    dtype = layers[0].dtype
    grad_dtype = dtype
    if len(batches) > 1:
        grad_dtype = torch.float32  # several gradients are added up, and small terms vanish in a 16-bit sum
    loss = torch.zeros((), dtype=torch.float64, device=meter.device)
    reducing = None  # the reduce-scatter under way

    # The backward pass calls this when a layer's reduce-scatter is under way.
    def finish_reduction(reducing):
        """Ends a layer's reduce-scatter. Call it before the next one starts: two at once would hold two pairs
        of send and receive buffers."""
        layer = reducing.layer
        # §5.1: no all-gather here; it follows Adam. .to(dtype) matters with several micro-batches, when
        # layer.grad is fp32: stage 0 rounds the average to send it, so round it here, to get the same bits.
        # The rest of layer.grad is this rank's own gradient still, and isn't used any more.
        layer.grad[layer.own] = reducing.wait().to(dtype)

    for micro, (tokens, y) in enumerate(batches):
        # 1. Forward. Keep only the input of each layer, an activation checkpoint (§3.2): whatever is
        # computed from it is computed again in the backward pass. Skip the head: its backward pass comes
        # next, and runs its forward anyway.
        x = tokens
        inputs = [tokens]
        for layer in layers[:-1]:
            flat = layer.flat
            layer.seed_random(cfg.seed, step, micro, comm.rank)
            with meter.computing("forward", layer):
                x = layer(flat, x, y)
            inputs.append(x)

        # 2. Backward, from the head down: compute the layer again from its input, differentiate, forget.
        # `dout` is the gradient of (scale · mean loss over m micro-batches) with respect to the layer's
        # output. The head's output is the loss of one micro-batch, so for the head it is scale/m.
        dout = [torch.full((), scale / len(batches), device=meter.device)]
        for layer in reversed(layers):
            flat = layer.flat
            x = inputs.pop()
            layer.seed_random(cfg.seed, step, micro, comm.rank)
            with meter.computing("backward", layer):
                # detach() shares the memory: autograd tracks this tensor, and the original stays untracked.
                flat = flat.detach().requires_grad_()
                leaves = [flat]
                if layer is not layers[0]:  # the embedding's input is whole numbers
                    x = x.detach().requires_grad_()
                    leaves = [flat, x]
                with torch.enable_grad():
                    out = layer(flat, x, y)
                # The chain rule: from the gradient with respect to `out` to those with respect to `flat`,
                # which we want, and to `x`, the `dout` of the layer before it. (A list of one; empty after
                # the embedding. The gradient of what a layer did not use is filled in as zeros.)
                flat_grad, *dout = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
                meter.name(flat_grad, "gradients", layer)
                if layer is layers[-1]:
                    loss += out.detach() / len(batches)
                # `out` keeps the graph alive, and the graph keeps flat and x: delete every reference to them.
                del flat, x, leaves, out
            # Answer 2: the gradient stays, whole, on every rank. Micro-batches add up.
            if layer.grad is None:
                layer.grad = meter.name(flat_grad.to(grad_dtype), "gradients", layer)
            else:
                layer.grad += flat_grad
            del flat_grad
            # After the last micro-batch, average it over the ranks while the next layer computes.
            if micro == len(batches) - 1:
                if reducing is not None:
                    finish_reduction(reducing)
                full = meter.name(layer.grad.to(dtype), "gradients", layer)
                reducing = comm.reduce_scatter(full, layer)
                del full
    finish_reduction(reducing)
    meter.mark("before the optimizer step")

    # 3. Global norm: the length of the whole model's gradient. Every rank squares its slice of the
    # average, also in stage 0, so that all add in the same order. Then they sum up; the loss travels along.
    squares = sum_of_squares([layer.grad[layer.own] for layer in layers])
    loss, squares = comm.all_reduce(torch.stack([loss, squares]))
    norm = (squares.sqrt() / scale).float()
    meter.mark("norm")

    # 4. Adam. Its parameters are the masters. Clip, and undo the loss scale: every gradient g becomes
    #
    #     g / (scale · max(1, norm / clip))
    #
    # Fused Adam does that itself: it divides by its attribute `grad_scale`, and skips the step if
    # `found_inf` is 1. (Both are made for torch.amp.GradScaler; an optimizer that isn't fused does not read
    # them.) The norm is the same on every rank, so all ranks clip alike and skip the same steps.
    adam.grad_scale = scale * (norm / cfg.clip).clamp(min=1)
    adam.found_inf = (~norm.isfinite()).float()
    # Adam needs fp32 gradients. §5.1: 4Ψ/N bytes for a short time: §3.2's temporary buffers.
    for layer in layers:
        layer.master.grad = layer.grad[layer.own].to(torch.float32, copy=True)  # never a view of it all
        layer.grad = None
    meter.mark("fp32 gradients")
    adam.step()
    adam.zero_grad()
    meter.mark("Adam")

    # 5. New parameters: the fp32 copy, rounded to the stored dtype.
    for layer in layers:
        layer.shard.copy_(layer.master)
    # §5.1: each owner hands out its updated slice. Start all at once: nothing is left to compute meanwhile.
    gathers = [comm.all_gather(layer.flat, layer) for layer in layers]
    for gather in gathers:
        gather.wait()
    meter.mark("parameters updated")
    return (loss / comm.world_size).float(), norm


# ==== All below is the same in every stage: the instrument that measures a step, and the run ================

# ---- 6. The memory meter ---------------------------------------------------------------------------------

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")


class Meter(TorchDispatchMode):
    """Counts the live bytes of one step by category, from the storages that really exist.

    While it is on, PyTorch shows it the result of every operation, though not what a kernel makes and frees
    inside. A new storage is recorded as allocated; a finalizer records when it is freed. What it holds is
    often known only later (a gradient is one when autograd returns it), so the record is counted at the
    end.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.running = False
        self.default = "buffers"  # the category of a storage until it is named
        self.spans = []  # (what, layer, when it began, when waiting for it began, when it ended)
        self.progress = False  # whether to say which layer runs, on the terminal

    def start(self, named):
        """Begins a trace with what exists already, as (tensor, category) or (tensor, category, layer)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # PyTorch's own count, printed beside ours
        self.running, self.began = True, self.now()
        self.clock_ms = 1e3 * time.perf_counter()  # on one machine the same clock for all ranks
        self.trace = []  # (number, +bytes) at birth, (number, -bytes) at the end, (label, time) at a mark
        self.storages = []  # number -> {bytes, shape, operation and part of its birth, category, layer}
        self.part = ""  # of the step: the layer's call that runs, if one does
        self.number = {}  # id() of a living storage -> its number
        for tensor in named:
            self.name(*tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, str(function))
        return result

    def see(self, tensor, operation="before the step"):
        """Numbers the tensor's storage at first sight, and records its birth and, in time, its end."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.number:
            self.number[key] = len(self.storages)
            self.trace.append((self.number[key], size))
            weakref.finalize(storage, lambda: self.trace.append((self.number.pop(key), -size)))
            birth = {"bytes": size, "shape": [*tensor.shape], "operation": operation, "part": self.part}
            self.storages.append(birth | {"category": self.default, "layer": ""})
        return self.number[key]

    def name(self, tensor, category, layer=None):
        """Says what a tensor holds, from its birth on, and of which layer. Returns the tensor."""
        if self.running:
            storage = self.storages[self.see(tensor)]
            storage["category"] = category
            if layer is not None:
                storage["layer"] = layer.name
        return tensor

    def mark(self, label):
        """Ends a part of the step, for the timeline."""
        if self.running:
            self.trace.append((label, self.now()))

    def settle(self, tensors):
        """Waits until gloo's thread has let go of what it carried, a moment after wait() returned. Then equal
        runs count equal bytes, and a test can ask for exactly the formula: that is worth ten lines."""
        if not self.running or dist.get_backend() != "gloo":
            return
        give_up = time.perf_counter() + 10
        while any(tensor._use_count() > 1 for tensor in tensors):
            assert time.perf_counter() < give_up, "a view or a work holds what was carried: del it earlier"
            time.sleep(0)
        time.sleep(2e-3)  # the thread's last act is to drop a reference of Python's, which takes the GIL

    @contextlib.contextmanager
    def computing(self, what, layer):
        """A layer's call or its backward: what is born in here and not named is an activation."""
        start = self.now() if self.running else None
        self.default, self.part = "activations", f"{what} {layer.name}"
        if self.progress:
            print(f"{self.part:30}", end="\r", file=sys.stderr, flush=True)
        yield
        self.default, self.part = "buffers", ""
        if self.running:
            end = self.now()
            self.spans.append((what, layer.name, start, end, end))  # nothing waits for it
            self.mark(f"{what} {layer.name}")

    def now(self):
        """The time at which the device gets here: a CUDA event, or seconds of the CPU's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        """Milliseconds between two results of now()."""
        return start.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - start)

    def replay(self):
        """Counts the trace. Returns the marks [{label, ms, category: bytes, held: {layer: {state:
        bytes}}}], the peak {category: bytes}, the part of the step that it is in (the label of the next
        mark), and what lives there [{bytes, shape, operation, part, category, layer}]."""
        live = dict.fromkeys(CATEGORIES, 0)
        timeline, peak, peak_in, alive, at_peak = [], dict(live), None, set(), 0
        held = collections.defaultdict(collections.Counter)  # layer -> bytes of its states
        for position, (key, value) in enumerate(self.trace):
            if isinstance(key, str):
                states = {layer: dict(+sizes) for layer, sizes in held.items()}
                timeline.append({"label": key, "ms": self.ms(self.began, value), **live, "held": states})
                peak_in = peak_in or key
                continue
            storage = self.storages[key]
            live[storage["category"]] += value
            if storage["layer"]:
                held[storage["layer"]][storage["category"]] += value
            if sum(live.values()) > sum(peak.values()):
                peak, peak_in = dict(live), None  # the next label tells
                at_peak = position
        for key, _ in self.trace[: at_peak + 1]:
            if not isinstance(key, str):
                alive ^= {key}  # born, freed
        return timeline, peak, peak_in, [self.storages[number] for number in sorted(alive)]

    def timed(self):
        """The spans as records, in ms from the start of the trace."""
        for what, layer, *times in self.spans:
            start, waiting_since, end = (self.ms(self.began, time) for time in times)
            waited = end - waiting_since
            yield {"what": what, "layer": layer, "start_ms": start, "end_ms": end, "waited_ms": waited}


# ---- 7. Configuration, the command line, data --------------------------------------------------------------


def option(default, text, *others, least=1):
    """A field of Config: its default, its help, and its other choices or, of a number, the smallest."""
    return dataclasses.field(default=default, metadata={"text": text, "others": others, "least": least})


@dataclasses.dataclass
class Config:
    layers: int = option(8, "transformer blocks")
    width: int = option(384, "size C of the hidden state")
    heads: int = option(6, "attention heads; must divide the width")
    context: int = option(64, "tokens T in a sequence")
    vocab: int = option(256, "size of the vocabulary, 256 or more: a token is a byte", least=256)
    batch: int = option(4, "sequences B per rank and micro-batch")
    micro_batches: int = option(1, "micro-batches per step; their gradients are summed in fp32")
    steps: int = option(50, "optimizer steps; the last one is metered and not timed")
    lr: float = option(5e-4, "learning rate after the warm-up", least=1e-12)
    warmup: int = option(10, "steps over which the learning rate rises to --lr", least=0)
    clip: float = option(1.0, "largest global norm of the gradient", least=1e-12)
    loss_scale: float = option(2.0**16, "float16 only: factor on the loss at the start")
    loss_scale_window: int = option(2000, "float16 only: double it after so many steps without overflow")
    seed: int = option(0, "fixes the initial weights and the order of the data", least=-(2**63))
    dtype: str = option("bfloat16", "type in which parameters and gradients are stored", "float16", "float32")
    compute: str = option("auto", "type of the arithmetic", "bfloat16", "float16", "float32")
    device: str = option(
        "auto", "auto: cuda, where each rank has a GPU (name it for several nodes)", "cpu", "cuda"
    )
    collectives: str = option("auto", "gloo: as written out here; native: the library's", "gloo", "native")
    overlap: str = option("on", "off: wait for each collective at once, to see what overlap saves", "off")
    data: str = option("", "train on the bytes of this file (default: Python's own language reference)")
    log_file: str = option("", "write JSON records to this file, one a line (replaces it)")
    simulate_ranks: int = option(0, "run one step as rank 0 of so many, on tensors without memory", least=0)


def fail(message):
    """Ends the run with one line and exit status 2, for mistakes that the user can fix: no traceback."""
    if from_torchrun("LOCAL_RANK", 0) > 0:
        time.sleep(10)  # torchrun ends all ranks when one fails: local rank 0 speaks, unless it is well
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def from_torchrun(name, alone):
    """A number that torchrun puts into the environment, or `alone` if it has not started this process."""
    return int(os.environ[name]) if dist.is_torchelastic_launched() else alone


def parse_args():
    """The command line as a Config; ends the run where a value can't work."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **style)
    parser.error = lambda message: fail(message + " (--help lists the options)")
    fields = {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(Config)}
    for name, field in fields.items():
        text, others = field.metadata["text"], field.metadata["others"]
        text += f" (default: {field.default})" if field.default != "" else ""
        choices = {"choices": (field.default, *others)} if others else {"type": field.type, "metavar": ""}
        parser.add_argument(name, help=text, **choices)
    cfg = parser.parse_args(namespace=Config())
    for name, field in fields.items():
        value, least = getattr(cfg, field.name), field.metadata["least"]
        if field.type is not str and not least <= value < math.inf:
            fail(f"{name} {value} must be {least} or more")
    if cfg.width % cfg.heads:
        fail(f"--width {cfg.width} is not a multiple of --heads {cfg.heads}")
    if cfg.simulate_ranks and dist.is_torchelastic_launched():
        fail("--simulate-ranks is for one process: start it with python, without torchrun")
    if cfg.micro_batches * cfg.batch * cfg.context > 10**8:
        fail("--micro-batches x --batch x --context is more than 10^8 tokens; take a smaller one")
    return cfg


def load_data(cfg):
    """The training text as bytes."""
    text = "\n".join(pydoc_data.topics.topics.values())
    data = re.sub(r"(\W)\1{3,}", r"\1", text).encode()  # without the rows of spaces and dashes of its tables
    if cfg.data:
        if not os.path.isfile(cfg.data) or os.path.realpath(cfg.data) == os.path.realpath(cfg.log_file):
            fail(f"--data {cfg.data} is no regular file, or is the --log-file, which would overwrite it")
        with open(cfg.data, "rb") as file:
            data = file.read()
    if len(data) <= cfg.context:
        fail(f"the text has {len(data)} bytes, a sequence takes --context {cfg.context} + 1; shorten it")
    return data


def load_batches(data, step, cfg, comm, device):
    """This rank's micro-batches of a step: a list of (x, y), both (B, T) int64, y one byte further than x.

    Seed, step and number decide a sequence of the global batch; each rank takes its slice of it."""
    count = cfg.micro_batches * cfg.batch
    sequences = []
    for i in range(comm.rank * count, (comm.rank + 1) * count):
        start = random.Random(f"{cfg.seed}/{step}/{i}").randrange(len(data) - cfg.context)
        sequences.append(data[start : start + cfg.context + 1])
    tokens = torch.frombuffer(bytearray(b"".join(sequences)), dtype=torch.uint8)
    tokens = tokens.view(count, cfg.context + 1).to(device, torch.int64)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(cfg.batch)]


# ---- 8. The run and the report -----------------------------------------------------------------------------


def choose_device(cfg):
    """A GPU for each rank of this machine, or its CPU with the cores shared out. Also settles --compute auto:
    few CPUs have units for 16-bit arithmetic, and GPUs before Ampere have none for bfloat16."""
    ranks_here, gpus = from_torchrun("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if cfg.device == "cuda" and gpus < ranks_here:
        fail(f"--device cuda needs a GPU for each of {ranks_here} ranks, finds {gpus}; take --device cpu")
    if cfg.device == "cpu" or cfg.simulate_ranks or gpus < ranks_here:
        device, arithmetic = torch.device("cpu"), "float32"
        threads = os.environ.get("OMP_NUM_THREADS", "")  # torchrun makes it 1 where it is not set
        if dist.is_torchelastic_launched() and (threads == "1" or not threads.isdigit()):
            torch.set_num_threads(max(1, os.cpu_count() // ranks_here))
        psi = 12 * cfg.layers * cfg.width**2 + 2 * cfg.vocab * cfg.width  # nearly
        needed = ranks_here * paper_states(psi, from_torchrun("WORLD_SIZE", 1), cfg)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory and not cfg.simulate_ranks:  # or the system ends the process, without a message
            fail(f"the states alone take {needed / 1e9:,.0f} of {memory / 1e9:,.0f} GB; take a smaller model")
    else:
        device = torch.device("cuda", from_torchrun("LOCAL_RANK", 0))  # the rank within this machine
        torch.cuda.set_device(device)
        native = cfg.dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)
        arithmetic = cfg.dtype if native else "float32"
    cfg.compute = arithmetic if cfg.compute == "auto" else cfg.compute
    return device


def check_layers(layers, x, y, cfg, comm):
    """Ends the run where a layer is not a function of its flat vector and its input alone, the same on
    every rank. It must be, since it is called again in the backward pass, and N ranks share its weights.

    x, y: a first micro-batch, of which rank 0's is taken. Each layer is called on it three times: with
    gradients turned on, though none should come out; as in the forward pass; and as in the backward pass.
    """
    for tensor in (x, y):
        dist.broadcast(tensor, group_src=0)
    found = []  # for each layer a number of its weights and one of its output
    for i, layer in enumerate(layers):
        if layer.shares or layer in layers[:i]:
            fail(f"{layer.name} has a weight of another layer, or is used twice; a layer trains its own")
        for name, weight in layer.module.named_parameters():
            if not weight.requires_grad or weight.dtype != torch.float32:
                fail(f"{name} of {layer.name} is frozen or not fp32; a layer trains all its weights in fp32")
        flat = full_master(layer, comm).detach().requires_grad_()
        alone = (flat.detach(), x.detach())
        outs, numbers = [], []
        for inputs, grad in ((alone, True), (alone, False), ((flat, x), True)):
            layer.seed_random(0)
            try:
                with torch.set_grad_enabled(grad):
                    outs.append(layer(*inputs, y))
                if inputs is not alone:
                    leaves = [leaf for leaf in inputs if leaf.requires_grad]
                    torch.autograd.grad(outs[-1].sum(), leaves, materialize_grads=True)
            except (AttributeError, RuntimeError, TypeError) as error:
                reason = str(error).splitlines()[0]
                if "memory" in reason:
                    raise  # main() has a line for it
                fail(f"{layer.name} can't be called, or not differentiated, as it is here: {reason}")
            held = [value for module in layer.module.modules() for value in vars(module).values()]
            numbers.append([value for value in held if isinstance(value, (int, float))])
        first = outs[0]
        if first.requires_grad:
            fail(f"{layer.name} uses a weight or a value of another layer, which would get no gradient")
        same = [torch.allclose(first, out, rtol=1e-2, atol=1e-4) for out in outs]  # the last bits may differ
        if not all(same) or numbers[1] != numbers[2]:
            fail(f"{layer.name} differs if called again: it changes its input or itself, or draws numbers")
        if (first.dim() == 0) != (layer is layers[-1]):
            fail(f"{layer.name} returns the shape {[*first.shape]}; the head returns the loss, a number")
        found.append((layer.fingerprint.item(), first.double().norm().item()))
        x = first.requires_grad_()  # so that what a later layer takes of it, past its own input, is found
    for others in from_all_ranks(found, cfg):
        for layer, mine, other in zip(layers, found, others):
            if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(mine, other)):
                fail(f"{layer.name} is not the same on every rank; draw its numbers by torch, in __init__")


def checksum(layers, comm):
    """sha256 of all fp32 copies without padding: equal weights give equal sums, whatever the stage."""
    digest = hashlib.sha256()
    for layer in layers:
        digest.update(full_master(layer, comm)[: layer.psi].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def from_all_ranks(mine, cfg):
    """[rank 0's object, rank 1's, ...]. A simulation has only one."""
    everyone = [mine] * (1 if cfg.simulate_ranks else dist.get_world_size())
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def agree(cfg, data):
    """Ends the run where ranks differ in an option or in the text: silently they would train other models."""
    everyone = from_all_ranks(dataclasses.asdict(cfg) | {"data": hashlib.sha256(data).hexdigest()}, cfg)
    cfg.log_file = everyone[0].pop("log_file")  # rank 0's decides, also on a node where it was not given
    for name, value in everyone[0].items():
        for other in everyone:
            if other[name] != value:
                name = name.replace("_", "-")
                fail(f"--{name} differs between the ranks: {value} on rank 0, {other[name]} elsewhere")


def run(cfg, data, device, log):
    """Trains and reports. Rank 0 prints, and writes records to the file `log`."""

    def record(event, **fields):  # flushed line by line: a run that is killed leaves whole lines
        print(json.dumps({"event": event, **fields}), file=log, flush=True)

    agree(cfg, data)
    meter = Meter(device)
    comm = Collectives(cfg, meter, dist.group.WORLD)
    N, simulated = comm.world_size, cfg.simulate_ranks > 0
    meter.progress = simulated and sys.stderr.isatty()  # a large model takes a while
    layers = make_layers(cfg, comm, device)
    if not simulated:
        check_layers(layers, *load_batches(data, 0, cfg, comm, device)[0], cfg, comm)
    adam = torch.optim.Adam([layer.master for layer in layers], lr=cfg.lr, fused=True)
    for master in adam.param_groups[0]["params"]:  # as Adam's first step would, so that all steps begin alike
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        adam.state[master] = {"step": torch.zeros((), device=device), **moments}
    given = sum(weight.numel() for group in adam.param_groups for weight in group["params"])
    if given != sum(layer.master.numel() for layer in layers) or not adam.defaults.get("fused"):
        fail("Adam must be fused, to clip by grad_scale, and must be given the master of every layer")

    psi, backend = sum(layer.psi for layer in layers), "simulated" if simulated else dist.get_backend()
    record("config", **dataclasses.asdict(cfg) | {"world_size": N, "psi": psi, "backend": backend})
    sequences = N * cfg.micro_batches * cfg.batch
    print(f"N = {N} ranks on {device.type} ({backend}), Ψ = {psi:,} parameters in {len(layers)} layers.")
    print(f"Stored in {cfg.dtype}, arithmetic in {cfg.compute}. Global batch: {sequences} sequences.")
    if cfg.log_file and not simulated:
        record("weights", sha256=checksum(layers, comm))

    scaled = "float16" in (cfg.dtype, cfg.compute)  # where tiny gradients vanish unless they are scaled up
    scale = cfg.loss_scale if scaled else 1.0
    good = bad = 0  # steps in a row: with a finite gradient, and without, at the lowest scale
    timed = []  # (ms, ms of it spent waiting for communication) of each step without the meter
    for step in range(cfg.steps):
        batches = load_batches(data, step, cfg, comm, device)
        for group in adam.param_groups:
            own = group.setdefault("initial_lr", group["lr"])
            group["lr"] = own * min(1, (step + 1) / max(1, cfg.warmup))
        comm.sent, meter.spans = {}, []  # reset at every step
        metered = step == cfg.steps - 1
        if metered:
            tokens = [(tensor, "activations") for batch in batches for tensor in batch]
            meter.start([*named_states(layers, adam), *tokens])
        start = time.perf_counter()
        with meter if metered else contextlib.nullcontext():
            loss, norm = train_step(layers, adam, batches, scale, cfg, comm, meter, step)
        meter.running = False
        if simulated:
            if meter.progress:
                print(" " * 30, end="\r", file=sys.stderr, flush=True)
            continue
        loss, norm = loss.item(), norm.item()  # this waits for the device, so the clock is read after it
        ms, finite = 1e3 * (time.perf_counter() - start), math.isfinite(norm)
        fields = {"loss": loss if math.isfinite(loss) else None, "norm": norm if finite else None}
        speed = "metered"  # and so slowed down: its time says nothing
        if not metered:
            timed.append((ms, sum(meter.ms(waiting_since, end) for *_, waiting_since, end in meter.spans)))
            fields |= {"ms": ms, "tokens_per_s": 1e3 * sequences * cfg.context / ms}
            speed = f"{ms:7.1f} ms | {fields['tokens_per_s']:9,.0f} tok/s"
        note = "" if finite else f" | skipped: gradient not finite at a loss scale of {scale:g}"
        print(f"step {step:4} | loss {loss:7.4f} | norm {norm:8.4f} | {speed}{note}")
        record("step", step=step, skipped=not finite, loss_scale=scale, **fields)
        good, bad = (good + 1, 0) if finite else (0, bad + (scale == 1))
        if scaled and not finite:  # dynamic loss scaling: as large as gradients allow, found by trying
            scale = max(1.0, scale / 2)
        elif scaled and good % cfg.loss_scale_window == 0:
            scale = 2 * scale
        if bad == 10:
            fail("the gradient was not finite in ten steps in a row, so nothing is learned; try a lower --lr")

    timed = timed[2:] or timed or [(0, 0)]  # the first steps of a run warm up
    step_ms, waited_ms = (sum(column) / len(timed) for column in zip(*timed))
    report(meter, layers, comm, cfg, step_ms, waited_ms, record)
    if cfg.log_file and not simulated:
        record("weights", sha256=checksum(layers, comm))


def report(meter, layers, comm, cfg, step_ms, waited_ms, record):
    """The tables at the end: memory of each rank and communication, beside the paper's formulas."""
    N, psi = comm.world_size, sum(layer.psi for layer in layers)
    timeline, peak, peak_in, alive = meter.replay()
    (before,) = (moment for moment in timeline if moment["label"] == "before the optimizer step")
    memory = {category: before[category] for category in CATEGORIES}
    memory |= {"states": sum(before[key] for key in CATEGORIES[:3]), "formula": paper_states(psi, N, cfg)}
    memory |= {"peak": sum(peak.values()), "at_peak": peak, "peak_in": peak_in}
    if meter.device.type == "cuda":  # what PyTorch's allocator handed out at most, and took from the GPU
        memory["allocated"] = torch.cuda.max_memory_allocated()
        memory["reserved"] = torch.cuda.max_memory_reserved()
    memory["clock_ms"] = meter.clock_ms
    records = {"memory": [memory], "timeline": timeline, "span": [*meter.timed()], "alive": alive}
    everyone = from_all_ranks(records, cfg)
    for rank, events in enumerate(everyone):
        for event, records in events.items():
            for fields in records:
                record(event, rank=rank, **fields)

    unit, name = (1e6, "MB") if 16 * psi < 1e10 else (1e9, "GB")
    print(f"\nMemory of each rank in {name} ({unit:,.0f} bytes), counted from live tensors in the last step.")
    first = [*CATEGORIES[:3], "states", "formula", *CATEGORIES[3:], "peak"]
    second = [*CATEGORIES, "peak", *(key for key in ("allocated", "reserved") if key in memory)]
    rows = [events["memory"][0] for events in everyone]
    tables = {"Just before the optimizer step": (first, rows)}
    tables[f"At the peak (on rank 0: {peak_in})"] = (second, [row | row["at_peak"] for row in rows])
    for title, (columns, rows) in tables.items():
        print(f"{title}:\nrank" + "".join(f"{column:>13}" for column in columns))
        for rank, row in enumerate(rows):
            print(f"{rank:4}" + "".join(f"{row[column] / unit:13,.2f}" for column in columns))

    volume = traffic(f"in a step, (N-1)/N = {(N - 1) / N:.4f}", comm, psi, *paper_volume(layers, N, cfg))
    record("communication", psi=psi, **volume, waited_ms=waited_ms)
    if step_ms:
        print(f"A step took {step_ms:.1f} ms on average; {waited_ms:.1f} ms it waited for communication.")


def traffic(where, comm, psi, expected, words):
    """Prints what a rank has sent, beside the paper's formula in elements and in words. Returns a record."""
    total = sum((sent for what, sent in comm.sent.items() if what != "scalars"), collections.Counter())
    print(f"\nSent by each rank {where}:\n{'':30}calls{'elements':>20}{'bytes':>20}{'elements / Ψ':>15}")
    for what, sent in [*comm.sent.items(), ("all but scalars", total)]:
        calls, elements, sent_bytes = sent["calls"], sent["elements"], sent["bytes"]
        print(f"{what:30}{calls:5}{elements:20,}{sent_bytes:20,}{elements / psi:15.4f}")
    print(f"{'paper: ' + words:35}{expected:20,.0f}{'':20}{expected / psi:15.4f}")
    totals = {"elements": total["elements"], "bytes": total["bytes"]}
    return totals | {"formula": expected, "collectives": comm.sent}


def main():
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # in older ones "fake" groups don't copy
        fail(f"this needs torch 2.13 or newer, and finds {torch.__version__}")
    cfg = parse_args()
    log_file = cfg.log_file if from_torchrun("RANK", 0) == 0 and cfg.log_file else os.devnull
    fake = FakeTensorMode(allow_non_fake_inputs=True) if cfg.simulate_ranks else contextlib.nullcontext()
    try:
        data, device = load_data(cfg), choose_device(cfg)
        if dist.is_torchelastic_launched():  # if a rank is gone, the others wait a minute, not ten or thirty
            backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, device_id=device_id, timeout=timedelta(seconds=60))
        else:  # one process needs no network: this group returns its own data, and can simulate any size
            dist.init_process_group("fake", rank=0, world_size=cfg.simulate_ranks or 1)
        cfg.steps = 1 if cfg.simulate_ranks else cfg.steps
        with open(log_file, "w") as log, fake:
            run(cfg, data, device, log)
    except OSError as error:
        fail(f"{error.filename or 'the output or --log-file'}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            fail("not enough memory; take a smaller --layers, --width, --vocab, --batch or --context")
        if "by peer" in str(error):  # gloo: connection closed, or reset
            fail("another rank has ended, and its own message says why")
        if "waiting for clients" in str(error):
            fail("not all ranks have started within a minute; start them together")
        raise
    dist.destroy_process_group()
    gc.collect()  # gloo's threads end with the last reference to the group; later they may abort the exit


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it as it ends any other program
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # and so does `| head`
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a terminal may lack a Ψ
    if from_torchrun("RANK", 0) > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all
    try:
        main()
    except BaseException as error:
        # Leave at once: after a crash destroy_process_group() may block for ever, and without it the normal
        # exit may abort in gloo's threads.
        if isinstance(error, SystemExit):
            os._exit(error.code)
        sys.excepthook(*sys.exc_info())
        os._exit(1)
