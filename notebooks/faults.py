"""Twenty ways to get ZeRO wrong, each by a line or a few of a stage file. Notebook 6 gives them to the reader as files
to repair, and tests/test_planted_faults.py plants them to see that the tests notice.

They come in this order: a run that does not end well, a wrong number, a right number with wrong bytes or volume, and
what is right on two ranks and wrong on three. `shows` is the row of the matrix: the instruments that tell this run from
one of the stage file itself. A test measures all of it.
"""

import dataclasses
import functools
import pathlib
import re
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from launch import hashes, launch, losses, norms  # noqa: E402  forks the ranks: half a second a run, not torchrun's ten
from places import replaced  # noqa: E402

# Divisible by two ranks, and not by three. Three micro-batches are the fewest whose sum is rounded more than once.
OPTIONS = "--layers 3 --width 64 --heads 4 --context 16 --batch 2 --steps 4 --lr 1e-3 --device cpu".split()
LIMIT = 8  # seconds after which a run counts as one that hangs, or ten times as long as the stage file needs

# instrument -> what it compares with a run of the stage file itself
INSTRUMENTS = {
    "ending": "does the run end, and without an error?",
    "loss": "the losses of all steps, to the last digit",
    "norm": "the norms of the gradient, to the last digit",
    "bytes": "the model states of each rank before the optimizer step",
    "peak": "the peak of each rank, to one percent",
    "volume": "the elements that a rank sends in a step",
    "hash": "sha256 of the fp32 weights, at the start and at the end",
}


@dataclasses.dataclass(eq=False)
class Fault:
    name: str
    file: str
    changes: list  # (the code that stands there, without comments; the code that stands there by mistake)
    shows: str  # the instruments that see it
    complaint: str  # what a user comes with
    why: str  # what happens
    ranks: int = 2
    micro_batches: int = 1

    def text(self):
        """The stage file with the fault in it."""
        text = (ROOT / self.file).read_text()
        for right, wrong in self.changes:
            text = replaced(text, right, wrong, self.file)
        return text


FAULTS = [
    # ---- A run that does not end well --------------------------------------------------------------------------
    Fault(
        "the last reduction is not finished", "stage2_grad.py",
        [(
            "    finish_reduction(reducing)\n    meter.mark(\"before the optimizer step\")",
            "    meter.mark(\"before the optimizer step\")",
        )],
        "ending",
        "It worked as long as I used micro-batches. Now I switched them off.",
        "The reduction that began last, the embedding's, is still in `reducing`, so its layer has no gradient yet. "
        "With several micro-batches it has one, without the last of them: no error, and a wrong number in one layer.",
    ),
    Fault(
        "collectives in another order on one rank", "stage3_param.py",
        [
            (
                "            if i > 0:\n"
                "                arriving = gather(layers[i - 1])\n",
                "            if i > 0 and comm.rank == 0:\n"
                "                arriving = gather(layers[i - 1])\n",
            ),
            (
                "            reducing = comm.reduce_scatter(flat_grad, layer)\n",
                "            reducing = comm.reduce_scatter(flat_grad, layer)\n"
                "            if i > 0 and comm.rank != 0:\n"
                "                arriving = gather(layers[i - 1])\n",
            ),
        ],
        "ending",
        "It hangs in the first step, and no rank says why.",
        "A collective has no name: a rank's third call meets the third call of the others. Here rank 0 gathers the "
        "next layer before it reduces the last, the others after, and each waits for what the other will not send. "
        "Where both calls are of one kind and size there is no hang, but a layer filled with another one's numbers.",
    ),
    # ---- A wrong number ----------------------------------------------------------------------------------------
    Fault(
        "gather after the step forgotten", "stage1_os.py",
        [(
            "gathers = [comm.all_gather(layer.flat, layer) for layer in layers]",
            "gathers = []",
        )],
        "loss norm volume hash",
        "I made the step faster. The loss still falls, though not as far as it did.",
        "Half the traffic! Each rank keeps the initial weights outside its slice, and N different models train on the "
        "mean of their gradients. Even so the loss falls.",
    ),
    Fault(
        "wrong slice offset", "stage1_os.py",
        [(
            "self.shard = self.flat[self.own]",
            "self.shard = self.flat[self.padded - (comm.rank + 1) * part : self.padded - comm.rank * part]",
        )],
        "loss norm hash",
        "The loss stays where it began.",
        "Each rank updates one slice and hands out another, the old one.",
    ),
    Fault(
        "a wait() dropped", "stage3_param.py",
        [(
            "average = reducing.wait().to(grad_dtype)",
            "average = comm.average(reducing.result).to(grad_dtype)",
        )],
        "loss norm bytes hash",
        "The same command gives other numbers every time, and sometimes NaN.",
        "Gradients are read while they still arrive: the embedding's in any case, since nothing is computed in the "
        "meantime. How much of one is there depends on the speed of the network. A step that is slower, because "
        "something measures it, may even be right. And wait() lets go of the buffers, so one more gradient is whole.",
    ),
    Fault(
        "optimizer built before sharding", "stage1_os.py",
        [
            (
                "        self.master = full[self.own].clone()\n",
                "        self.whole = full\n"
                "        self.master = full[self.own].clone()\n",
            ),
            (
                "torch.optim.Adam([layer.master for layer in layers]",
                "torch.optim.Adam([layer.whole for layer in layers]",
            ),
            (
                "state = adam.state[layer.master]",
                "state = adam.state[layer.whole]",
            ),
            ("given != sum(layer.master.numel() for layer in layers) or not adam", "not adam"),
        ],
        "loss norm bytes peak hash",
        "The loss stays where it began, and the memory of the optimizer did not shrink.",
        "Adam holds the tensors that it was given: the whole ones, of which it makes whole moments. The slices came "
        "later and got the gradients, but nothing updates them. (The scripts stop at this; here that check is taken "
        "out.) In FSDP the same happens to an optimizer that is made before `fully_shard`.",
    ),
    Fault(
        "shard overwritten, not accumulated", "stage2_grad.py",
        [(
            "        if layer.grad is None:\n"
            "            layer.grad = meter.name(average, \"gradients\", layer)\n"
            "        else:\n"
            "            layer.grad += average\n",
            "        layer.grad = meter.name(average, \"gradients\", layer)\n",
        )],
        "loss norm hash",
        "With three micro-batches it learns as with one.",
        "It trains on the last of m micro-batches and throws the others' work away.",
        micro_batches=3,
    ),
    Fault(
        "norm from the own shard only", "stage2_grad.py",
        [(
            "loss, squares = comm.all_reduce(torch.stack([loss, squares]))",
            "loss = comm.all_reduce(loss)",
        )],
        "loss norm hash",
        "The norm in the log is smaller than it was before I sharded the gradient.",
        "It is too small by about sqrt(N), and another one on every rank, so each clips its slice by a factor of its "
        "own.",
    ),
    Fault(
        "a clip by the local norm", "stage3_param.py",
        [
            (
                "loss, squares = comm.all_reduce(torch.stack([loss, squares]))",
                "mine, (loss, squares) = squares, comm.all_reduce(torch.stack([loss, squares]))",
            ),
            (
                "adam.grad_scale = scale * (norm / cfg.clip)",
                "adam.grad_scale = scale * (mine.sqrt().float() / cfg.clip)",
            ),
        ],
        "loss norm hash",
        "The norm of the first step is right, and from then on everything is off a little.",
        "What is printed is the global norm, what clips is the own slice's. Ranks clip by different factors: the "
        "direction of the update changes, not just its length. `torch.nn.utils.clip_grad_norm_` does this to "
        "parameters that are cut by hand.",
    ),
    Fault(
        "masters rebuilt from the 16-bit parameters", "stage1_os.py",
        [(
            "layer.shard.copy_(layer.master)",
            "layer.master.copy_(layer.shard.copy_(layer.master))",
        )],
        "loss norm hash",
        "It is hardly worse than before. But with a small learning rate it no longer learns.",
        "Updates below 1/512 of a weight are rounded away, step after step: LayerNorm's weights stay exactly 1.0. With "
        "--lr 1e-5 the loss falls by a third of what is right.",
    ),
    Fault(
        "gradients summed in 16 bits", "stage1_os.py",
        [(
            "    grad_dtype = dtype\n"
            "    if len(batches) > 1:\n"
            "        grad_dtype = torch.float32\n",
            "    grad_dtype = dtype\n",
        )],
        "loss norm bytes peak hash",
        "I saved 2Ψ bytes with one line!",
        "What is smaller than 1/512 of a bfloat16 sum vanishes in it. With two micro-batches not a bit changes, "
        "because the sum is rounded to 16 bits anyway when it is sent. With three the last digits do, and the more "
        "there are the more of the gradient is lost.",
        micro_batches=3,
    ),
    Fault(
        "seed depends on the number of ranks", "stage1_os.py",
        [(
            'f"{cfg.seed}/{name}"',
            'f"{cfg.seed + comm.world_size}/{name}"',
        )],
        "loss norm hash",
        "Nothing. It trains as well as before; only the numbers of an earlier run don't come back.",
        "Another model for every number of ranks, so no run on two can be compared with one on four. No curve tells; "
        "the hash of the initial weights does. (With the rank itself in the seed there would be N models in one run: "
        "`check_layers` in section 8 looks for that.)",
    ),
    Fault(
        "no averaging", "stage1_os.py",
        [(
            "return total.div_(self.world_size)",
            "return total",
        )],
        "norm",
        "The losses are right to the last digit. But how hard it clips depends on how many ranks I take.",
        "The norm is N times too large. Adam divides the gradient's scale out, and clipping to the same length does so "
        "too: with N a power of two not one bit of the weights changes.",
    ),
    # ---- Right numbers, wrong memory or volume -----------------------------------------------------------------
    Fault(
        "an all-reduce and then an all-gather", "stage1_os.py",
        [(
            "        layer.grad[layer.own] = reducing.wait().to(dtype)\n",
            "        layer.grad[layer.own] = reducing.wait().to(dtype)\n"
            "        comm.all_gather(layer.grad, layer).wait()\n",
        )],
        "volume",
        "Stage 1 is slower than stage 0 on my network.",
        "The gradients are made whole on every rank, as in stage 0, where only the owner's slice is used: 3Ψ in place "
        "of 2Ψ. Some systems do this.",
    ),
    Fault(
        "full gradient kept alive", "stage2_grad.py",
        [(
            "            del flat_grad\n",
            "            layer.flat_grad = flat_grad\n",
        )],
        "bytes peak",
        "Stage 2 needs no less than stage 1.",
        "Every digit is right, and 2Ψ of gradients are back: a name somewhere still holds what was reduced.",
    ),
    Fault(
        "parameters not released", "stage3_param.py",
        [(
            "            del flat\n",
            "            layer.flat = flat\n",
        )],
        "bytes peak",
        "The model that should fit doesn't.",
        "Every digit is right, but after the forward pass all of the model is there.",
    ),
    Fault(
        "a view keeps the whole copy alive", "stage1_os.py",
        [(
            "self.master = full[self.own].clone()",
            "self.master = full[self.own]",
        )],
        "bytes peak",
        "`master.numel()` is a share. The memory is not.",
        "A slice of a tensor is a view: it owns nothing, and keeps all of what it looks at. So there are 4Ψ of fp32 "
        "weights on every rank.",
    ),
    Fault(
        "reductions finished at the end only", "stage2_grad.py",
        [
            (
                "    reducing = None\n",
                "    reducing = []\n",
            ),
            (
                "            if reducing is not None:\n"
                "                finish_reduction(reducing)\n"
                "            reducing = comm.reduce_scatter(flat_grad, layer)\n",
                "            reducing.append(comm.reduce_scatter(flat_grad, layer))\n",
            ),
            (
                "    finish_reduction(reducing)\n    meter.mark(\"before the optimizer step\")",
                "    for transfer in reducing:\n"
                "        finish_reduction(transfer)\n"
                "    meter.mark(\"before the optimizer step\")",
            ),
        ],
        "peak",
        "Before the optimizer step the bytes are those of the formula. It runs out of memory all the same.",
        "Each reduction holds what it sends and what it receives until its wait, and none waits before the end of the "
        "backward pass: 4Ψ at that moment. A mark before the optimizer step comes too late to see it.",
    ),
    # ---- Right on two ranks, wrong on three --------------------------------------------------------------------
    Fault(
        "the rank within a node picks the batch", "stage0_ddp.py",
        [(
            "for i in range(comm.rank * count, (comm.rank + 1) * count):",
            "for i in range(comm.rank % 2 * count, (comm.rank % 2 + 1) * count):",  # with two ranks a node
        )],
        "loss norm hash",
        "On one node with two ranks all is well. A third rank on a second node does not make the batch larger.",
        "Ranks 0 and 2 read the same sequences, so the third rank's work is wasted. No time and no byte tells. "
        "`LOCAL_RANK` in a sampler does this.",
        ranks=3,
    ),
    Fault(
        "padded to 16, not to 16 for each rank", "stage2_grad.py",
        [(
            "unit = 16 * comm.world_size",
            "unit = 16",
        )],
        "ending",
        "It runs on 1, 2, 4 and 8 ranks. On 3 it doesn't.",
        "The vector can no longer be cut into equal slices. Sizes of models are powers of two more often than not: a "
        "test needs a size that nothing divides.",
        ranks=3,
    ),
]  # fmt: skip

# And one that no instrument sees: the meter counts a storage when an operation touches it, and nothing touches this.
SILENT = Fault(
    "the whole copy kept under another name", "stage1_os.py",
    [(
        "self.master = full[self.own].clone()",
        "self.spare, self.master = full, full[self.own].clone()",
    )],
    "",
    "The tables are those of stage 1. The operating system says otherwise.",
    "4Ψ of fp32 weights on every rank that nothing ever reads.",
)  # fmt: skip


# ---- Measuring -------------------------------------------------------------------------------------------------


def measure(script, ranks, micro_batches, limit):
    """Runs a script for at most `limit` seconds: instrument -> what it shows."""
    run = launch(script, *OPTIONS, "--micro-batches", micro_batches, ranks=ranks, timeout=limit)
    if run.status:
        error = [line for line in run.err.splitlines() if re.search(r"\w*(Error|Exception): ", line)]
        how = re.sub(r"^\[rank\d+\]: |\[/\S*\] ?|/\S*/", "", error[0]) if error else f"no end after {limit:.0f} seconds"
        return {"ending": how.strip()}
    (volume,) = (record["elements"] for record in run.of("communication"))
    memory = run.of("memory")
    return {
        "ending": "well",
        "loss": losses(run),
        "norm": norms(run),
        "bytes": [record["states"] for record in memory],
        "peak": [record["peak"] for record in memory],
        "volume": volume,
        "hash": hashes(run),
    }


def shows(mine, right):
    """The instruments by which two measurements differ. Where a run didn't end, the others have nothing to read."""
    if mine["ending"] != right["ending"]:
        return ["ending"]
    differ = {name: mine[name] != right[name] for name in INSTRUMENTS}
    differ["peak"] = any(abs(a - b) > b / 100 for a, b in zip(mine["peak"], right["peak"]))
    return [name for name in INSTRUMENTS if differ[name]]


@functools.cache
def stage(file, ranks, micro_batches):
    """Measures a stage file. Returns that, and the seconds it took."""
    began = time.monotonic()
    return measure(file, ranks, micro_batches, limit=120), time.monotonic() - began


def compared(script, fault):
    """Measures a script, and the stage file that the fault is in, with the options of the fault."""
    right, seconds = stage(fault.file, fault.ranks, fault.micro_batches)
    return measure(script, fault.ranks, fault.micro_batches, limit=max(LIMIT, 10 * seconds)), right


@functools.cache
def planted(fault):
    """The same for the fault itself. Where it lets ranks race, it is tried again if the race was won by chance."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "planted.py")
        path.write_text(fault.text())
        for _ in range(5 if "wait()" in fault.name else 1):
            found = compared(path, fault)
            if shows(*found) == fault.shows.split():
                break
        return found
