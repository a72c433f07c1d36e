"""Finds races: memory that is touched while a transfer still reads or writes it.

A collective is under way from its start to its wait(), and what is copied on a side stream until the current stream
waits for that stream. Meanwhile

- nobody may write what it reads, nor read or write what it writes;
- memory that a side stream uses must not be freed: the allocator would hand it to the next tensor. (A collective's
  handle keeps its tensors until wait(). So somebody has to call that, and may not drop the handle.)

And a side stream knows nothing of what the current stream has queued. It has to wait for it before it touches the same
memory, also to write to memory that is new, which may be what an unfinished kernel has used before.

In a run such a fault shows now and then, as a wrong loss, on the machine whose network is slow enough. `Watch` finds it
on any machine by the order of the calls alone: it sees every operation as the meter does, and every collective. It
serves fake tensors on a fake CUDA device (fake_cuda.py) and, without streams, a real run on gloo:

    race.py STAGE [options of the stage]     as drive.py runs it, and every rank tells what it has found

What else can be seen from here is noted as well: each collective and whether NCCL would take it, what makes Python wait
for the device, and in which function how many kernels start.
"""

import collections
import contextlib
import dataclasses
import importlib
import os
import pathlib
import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They make a tensor and leave open what is in it.
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# They need a number or a shape from the device, so Python waits until it has computed that.
WAITING = {
    "_local_scalar_dense",
    "allclose",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
}
NCCL_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


@dataclasses.dataclass(eq=False)
class Flight:
    """A transfer under way."""

    what: str
    where: str  # in the stage file it was started
    reads: list  # spans
    writes: list
    stream: object = None  # the side stream of a copy


class Stream:
    """In place of torch.cuda.Stream, and of the current stream where `side` is False."""

    def __init__(self, watch, side=True):
        self.watch = watch
        self.side = side
        self.unseen = []  # (what, span, whether it writes) that the current stream did and this one hasn't waited for
        if side:
            watch.side_streams.append(self)

    def wait_stream(self, other):
        if self.side:
            self.unseen.clear()
        else:
            self.watch.flights = [flight for flight in self.watch.flights if flight.stream is not other]


class Work:
    """In place of a collective's handle. It keeps the tensors, as NCCL's does."""

    def __init__(self, watch, work, flight, tensors):
        self.watch, self.work, self.flight, self.tensors = watch, work, flight, tensors

    def wait(self, *args):
        if self.flight in self.watch.flights:
            self.watch.flights.remove(self.flight)
        self.tensors = None
        return self.work.wait(*args)

    def __del__(self):
        if self.flight in self.watch.flights:
            self.watch.fault(self.flight.what, "its handle is dropped before wait()", self.flight)


class Watch(TorchDispatchMode):
    """Active for a whole run. `device` is the rank's own."""

    def __init__(self, file, device):
        super().__init__()
        self.file = str(file)
        self.device = device
        self.numbers = {}  # id() of a living storage -> a number that no other ever has
        self.count = 0
        self.flights = []
        self.faults = collections.Counter()
        self.side_streams = []
        self.streams = [Stream(self, side=False)]  # the last one is current
        self.recorded = set()  # numbers of storages with record_stream(), which the allocator keeps for that stream
        self.pinned = set()
        self.inside = False  # a collective, which calls operations of its own
        self.step = False  # train_step runs
        self.collectives = []  # [name, ranks, dtype, elements] of each call
        self.groups = []  # the ranks of each group, in the order in which they are made
        self.refused = []  # what NCCL would refuse
        self.waits = collections.Counter()  # in train_step
        self.kernels = collections.Counter()  # in train_step: function -> operations that start one
        self.operations = collections.Counter()

    def found(self):
        return {
            "races": [f"{race} ({times}x)" for race, times in self.faults.items()],
            "left": [f"{flight.what} started at {flight.where}" for flight in self.flights],
            "collectives": self.collectives,
            "groups": self.groups,
            "refused": self.refused,
            "waits": self.waits,
            "kernels": self.kernels,
            "operations": self.operations,
        }

    # ---- The rule ----

    def fault(self, what, why, other):
        self.faults[f"{what} at {self.where()}: {why} ({other.what} since {other.where})"] += 1

    def where(self):
        """function:line of the stage file that is being run. In backward there is none: autograd has its own thread."""
        frame = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename != self.file or frame.f_code.co_name == "__torch_dispatch__"  # of the meter
        ):
            frame = frame.f_back
        return f"{frame.f_code.co_name}:{frame.f_lineno}" if frame else "backward"

    def span(self, tensor):
        """(storage, first byte, end). Of a strided tensor with what lies between."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
        start, width = tensor.storage_offset(), tensor.element_size()
        return self.number(tensor), start * width, (start + last + 1) * width

    def number(self, tensor):
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.numbers:
            self.numbers[key] = self.count = self.count + 1
            weakref.finalize(storage, self.freed, key)
        return self.numbers[key]

    def freed(self, key):
        number = self.numbers.pop(key)
        for flight in self.flights:
            if flight.stream and number not in self.recorded:
                if any(span[0] == number for span in flight.reads + flight.writes):
                    self.fault("the end of a tensor", "it frees what a side stream uses", flight)

    def touch(self, what, reads, writes, stream=None):
        """An operation, or the start of a transfer, on a side stream or the current one: does it meet another?"""
        for flight in self.flights:
            if flight.stream and flight.stream is stream:
                continue  # one after the other
            if meet(writes, flight.reads):
                self.fault(what, "it writes what is being read", flight)
            if meet(reads, flight.writes):
                self.fault(what, "it reads what is being written", flight)
            if meet(writes, flight.writes):
                self.fault(what, "it writes what is being written", flight)
        if stream:
            for earlier, span, written in stream.unseen:
                if meet([span], writes) or written and meet([span], reads):
                    where = self.where()
                    self.faults[f"{what} at {where}: the side stream has not waited for {earlier}"] += 1
        else:
            for side in self.side_streams:
                side.unseen += [(what, span, False) for span in reads] + [(what, span, True) for span in writes]

    # ---- Operations ----

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, name = function._schema.name.split("::")
        if namespace != "aten" or self.inside:
            return function(*args, **kwargs)
        reads, writes = arguments(function._schema, args, kwargs)
        if self.step and self.waits_for_device(name, args, kwargs, reads + writes):
            self.waits[self.where()] += 1
        if name in ("_local_scalar_dense", "allclose", "equal") and self.device.type == "cuda":
            return 1.0 if name == "_local_scalar_dense" else True  # without numbers any answer will do
        result = function(*args, **kwargs)
        returned = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        view = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        if view:
            return result  # it touches nothing
        if kwargs.get("pin_memory"):
            self.pinned.update(self.number(tensor) for tensor in returned)
        new = returned if not any(value.alias_info for value in function._schema.returns) else []
        if name in ALLOCATING:
            reads, writes = [], []
        elif self.step and any(tensor.device.type == "cuda" for tensor in reads + writes + new):
            self.kernels[self.where().partition(":")[0]] += 1
            self.operations[name] += 1
        reads, writes = [self.span(tensor) for tensor in reads], [self.span(tensor) for tensor in writes + new]
        stream = self.streams[-1] if self.streams[-1].side else None
        self.touch(name, reads, writes, stream)
        if stream:
            self.flights.append(Flight(name, self.where(), reads, writes, stream))
        return result

    def waits_for_device(self, name, args, kwargs, tensors):
        if name in ("index", "index_put", "index_put_"):
            return any(tensor.dtype == torch.bool for tensor in tree_leaves(args[1]) if tensor is not None)
        if name in ("copy_", "_to_copy"):
            to = kwargs.get("device") if name == "_to_copy" else None
            kinds = {tensor.device.type for tensor in tensors} | ({torch.device(to).type} if to else set())
            if kinds == {"cpu", "cuda"}:
                host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
                in_time = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
                return not (in_time and host and all(self.number(tensor) in self.pinned for tensor in host))
        return name in WAITING and any(tensor.device.type == "cuda" for tensor in tensors)

    # ---- Collectives ----

    def collective(self, name, real, args, kwargs):
        """`real` is the function of torch.distributed."""
        group = kwargs.get("group") or dist.group.WORLD
        ranks, size, rank = dist.get_process_group_ranks(group), dist.get_world_size(group), dist.get_rank(group)
        if name == "broadcast":
            (full,) = args
            reads, writes = ([full], []) if kwargs["group_src"] == rank else ([], [full])
            fits = 0 <= kwargs["group_src"] < size
        elif name == "all_reduce":
            (full,) = args
            reads, writes, fits = [full], [full], True
        else:
            full, part = args[0], args[1]
            reads, writes, fits = [part], [full], full.numel() == part.numel() * size
            if name == "reduce_scatter_single":
                full, part = part, full
                fits = full.numel() == part.numel() * size
            elif name == "all_to_all_single":
                fits = full.numel() == part.numel() and full.numel() % size == 0
            elif name == "all_gather_single" and self.number(full) == self.number(part):
                start = part.storage_offset() - full.storage_offset()  # in place: its own part is not written
                fits = fits and start == rank * part.numel()
                writes = [full[:start], full[start + part.numel() :]]
        tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
        call = [name, ranks, str(full.dtype), full.numel()]
        self.collectives.append(call)
        self.refuse(call, tensors, fits, kwargs.get("op"))
        flight = Flight(
            name, self.where(), [self.span(tensor) for tensor in reads], [self.span(tensor) for tensor in writes]
        )
        self.touch(name, flight.reads, flight.writes)
        self.inside = True
        try:
            work = real(*args, **kwargs)
        finally:
            self.inside = False
        if not kwargs.get("async_op"):
            return work
        self.flights.append(flight)
        return Work(self, work, flight, tensors)

    def refuse(self, call, tensors, fits, op):
        """What NCCL asks of a call."""
        wanted = {
            f"on {self.device}": all(tensor.device == self.device for tensor in tensors),
            "contiguous": all(tensor.is_contiguous() for tensor in tensors),
            "of one dtype": len({tensor.dtype for tensor in tensors}) == 1,
            "of a dtype that it has": all(tensor.dtype in NCCL_DTYPES for tensor in tensors),
            "of sizes that divide": fits,
            "floating, for an average": op != dist.ReduceOp.AVG or tensors[0].is_floating_point(),
        }
        self.refused += [f"{call} at {self.where()}: not {want}" for want, given in wanted.items() if not given]

    # ---- Where a stage file finds it ----

    @contextlib.contextmanager
    def watching(self, stage):
        """Until the end of the block the names that `stage` calls are ours."""
        kept = []

        def replace(owner, name, new):
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)

        def watched(name):
            real = getattr(dist, name)
            return lambda *args, **kwargs: self.collective(name, real, args, kwargs)

        def new_group(ranks=None, *args, **kwargs):
            self.groups.append([*ranks])
            return make_group(ranks, *args, **kwargs)

        def train_step(*args):
            self.step = True
            try:
                return real_step(*args)
            finally:
                self.step = False

        @contextlib.contextmanager
        def on_stream(stream):
            self.streams.append(stream or self.streams[-1])
            try:
                yield
            finally:
                self.streams.pop()

        def record_stream(tensor, stream):
            self.recorded.add(self.number(tensor))

        def synchronize(*args):
            self.waits[self.where()] += self.step

        for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast", "all_reduce"):
            replace(dist, name, watched(name))
        make_group, real_step = distributed_c10d.new_group, stage.train_step
        replace(distributed_c10d, "new_group", new_group)
        replace(dist, "new_group", new_group)
        replace(stage, "train_step", train_step)
        if self.device.type == "cuda":
            replace(torch.cuda, "Stream", lambda *args, **kwargs: Stream(self))
            replace(torch.cuda, "current_stream", lambda *args: self.streams[-1])
            replace(torch.cuda, "stream", on_stream)
            replace(torch.cuda, "synchronize", synchronize)
            replace(torch.Tensor, "record_stream", record_stream)
        try:
            with self:
                yield self
        finally:
            for owner, name, real in reversed(kept):
                setattr(owner, name, real)


def meet(spans, others):
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in spans for b in others)


def arguments(schema, args, kwargs):
    """The tensors that an operation reads, and those that it writes."""
    reads, writes = [], []
    named = {argument.name: argument for argument in schema.arguments}
    for argument, value in [*zip(schema.arguments, args), *((named[name], value) for name, value in kwargs.items())]:
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return reads, writes


if __name__ == "__main__":
    from drive import tell

    path = pathlib.Path(__file__).parent.parent / sys.argv[1]  # an absolute one stays what it is
    sys.path.insert(0, str(path.parent))
    sys.argv[:2] = [str(path)]
    if int(os.environ.get("RANK", 0)) > 0:
        sys.stdout = open(os.devnull, "w")
    module = importlib.import_module(path.stem)
    run = module.run

    def watched_run(*args):
        with Watch(path, torch.device("cpu")).watching(module) as watch:
            run(*args)
        tell(**watch.found())

    module.run = watched_run
    module.main()
