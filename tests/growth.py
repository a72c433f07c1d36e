"""How time, memory and volume of a step grow: python tests/growth.py draws notebooks/growth.png, on an idle machine.

Each column of the picture changes one option of a small model on two ranks. Memory and volume stand beside the formulas
that the runs themselves print: the states (the peak holds activations and buffers besides) and what a rank sends. Time
stands beside the products of a step, 8 operations for each parameter and token, drawn through the column's first
point; ranks that outnumber the cores share them.
"""

import os
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from launch import ROOT, STAGES, launch, progress  # noqa: E402

BASE = {"layers": 4, "width": 256, "heads": 8, "context": 64, "batch": 4, "micro_batches": 1, "ranks": 2}
COLUMNS = {
    "layers": (2, 4, 8, 16),
    "width": (128, 256, 384, 512),
    "ranks": (1, 2, 3, 4),
    "micro_batches": (1, 2, 4, 8),
}
ROWS = {"ms": "ms a step", "peak": "MB of a rank at the peak", "sent": "million elements sent by a rank"}


def measure(stage, option, value):
    """{row: (measured, by the formula)}, the time's formula being 8ΨT without a unit."""
    options = BASE | {option: value}
    ranks = options.pop("ranks")
    progress(f"{stage} with {option} = {value}")
    flags = (part for name, number in options.items() for part in (f"--{name.replace('_', '-')}", number))
    run = launch(stage, *flags, "--steps", 8, "--device", "cpu", ranks=ranks, timeout=600)
    (config,), (sent,) = run.of("config"), run.of("communication")
    most = max(run.of("memory"), key=lambda rank: rank["peak"])
    ms = statistics.median(step["ms"] for step in run.of("step")[2:-1])  # the last is metered
    tokens = config["batch"] * config["context"] * config["micro_batches"]
    work = 8 * config["psi"] * tokens * max(1, ranks / os.cpu_count())
    return {
        "ms": (ms, work),
        "peak": (most["peak"] / 1e6, most["formula"] / 1e6),
        "sent": (sent["elements"] / 1e6, sent["formula"] / 1e6),
    }


def draw():
    figure, axes = plt.subplots(len(ROWS), len(COLUMNS), figsize=(12, 8), dpi=110, sharex="col")
    for column, (option, values) in enumerate(COLUMNS.items()):
        found = {(stage, value): measure(stage, option, value) for value in values for stage in STAGES}
        for row, (quantity, label) in enumerate(ROWS.items()):
            axis = axes[row, column]
            for color, stage in enumerate(STAGES):
                measured, formula = zip(*(found[stage, value][quantity] for value in values))
                if quantity == "ms":
                    formula = [measured[0] * work / formula[0] for work in formula]
                axis.plot(values, measured, f"C{color}o-", label=stage, markersize=9 - 2 * color)  # where they coincide
                axis.plot(values, formula, f"C{color}--", linewidth=1)
            axis.set_xticks(values)
            axis.set_ylim(bottom=0)
            if column == 0:
                axis.set_ylabel(label)
            if row == len(ROWS) - 1:
                axis.set_xlabel("N" if option == "ranks" else option.replace("_", "-"))
    axes[0, 0].plot([], [], "k--", linewidth=1, label="the formula")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle("A step, measured, against one option at a time (4 layers, width 256, N = 2, 1 micro-batch)")
    figure.tight_layout()
    figure.savefig(ROOT / "notebooks/growth.png")


if __name__ == "__main__":
    draw()
