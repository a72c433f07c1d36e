"""Draws the picture of the README, notebooks/memory.png: python notebooks/picture.py

Left the paper's Figure 1, counted by running the stage files as rank 0 of 64, beside the numbers that it prints. In the
middle four real ranks: what each stage keeps and needs at its peak, beside the formula. Right what the parts of ZeRO-R
do to a deep model on 16 x 4 simulated ranks, by the configurations of Table 3. It takes a few minutes.
"""

import sys

import matplotlib

matplotlib.use("Agg")

import paper  # noqa: E402
from lesson import COLORS, NAMES, ROOT, STAGES, plt, run, style  # noqa: E402

DEEP = {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "batch": 8}
RANKS, MP = 64, 4
CONFIGS = {
    "C1": "P_os", "C2": "P_os\nP_a", "C3": "P_os+g", "C4": "P_os+g\nP_a", "C5": "P_os+g\nP_a+cpu",
    "full": "P_os+g+p\nP_a+cpu",
}  # fmt: skip
LIVES = [category for category in COLORS if category != "host"]  # on the device


def progress(what):
    """A line where someone waits for it: on a terminal."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


def stacked(ax, at, values, unit, width=0.7):
    """A bar of {category: bytes}. Returns its height."""
    bottom = 0
    for category in LIVES:
        ax.bar(at, values.get(category, 0) / unit, width, bottom, **style(category))
        bottom += values.get(category, 0) / unit
    return bottom


def figure_1(ax):
    """States of a model of 7.5 billion parameters on 64 ranks, and what the paper prints over each bar."""
    for at, (stage, printed) in enumerate(zip(STAGES, paper.FIGURE_1)):
        progress(f"{stage} as rank 0 of 64")
        found = paper.simulate(stage, 64, batch=1, context=16, **paper.MODELS["7.5B"])
        scale = paper.PSI["7.5B"] / found["psi"]
        height = stacked(ax, at, {name: scale * found[name] for name in LIVES[:3]}, 1e9)
        ax.plot([at - 0.45, at + 0.45], [printed] * 2, color="black", lw=1.6)
        ax.text(at, max(height, printed) + 1.5, f"{height:.4g}\n({printed:g})", ha="center", va="bottom", fontsize=9)
    ax.plot([], [], color="black", lw=1.6, label="in brackets and as a line: the paper's")
    ax.set_xticks(range(4), [NAMES[stage] for stage in STAGES])
    ax.set_ylabel("GB of model states on a rank")
    ax.set_title("Figure 1, counted: Ψ = 7.5 billion, N = 64", fontsize=10)
    ax.set_ylim(0, 140)


def four_ranks(ax):
    """States and peak of the default model on four ranks of this machine."""
    for at, stage in enumerate(STAGES):
        progress(f"{stage} on four ranks")
        most = max(run(stage, 4, quiet=True, steps=1).of("memory"), key=lambda record: record["peak"])
        states = stacked(ax, at - 0.21, {name: most[name] for name in LIVES[:3]}, 1e6, 0.36)
        peak = stacked(ax, at + 0.21, most["at_peak"], 1e6, 0.36)
        ax.plot([at - 0.41, at - 0.01], [most["formula"] / 1e6] * 2, color="black", lw=1.6)
        for x, height in ((at - 0.21, states), (at + 0.21, peak)):
            ax.text(x, height + 3, f"{height:.0f}", ha="center", va="bottom", fontsize=9)
    ax.plot([], [], color="black", lw=1.6, label="the formula")
    ax.set_xticks(range(4), [f"states peak\n{NAMES[stage]}" for stage in STAGES], fontsize=8)
    ax.set_ylabel("MB on a rank")
    ax.set_title("Four real ranks: the default model, Ψ = 14.4 million", fontsize=10)
    ax.set_ylim(0, 310)


def zero_r(ax):
    """The peak of a deep model for each configuration."""
    for at, config in enumerate(CONFIGS):
        progress(f"zero_r.py --config {config} as rank 0 of {RANKS}")
        found = paper.simulate("zero_r.py", RANKS, mp=MP, config=config, buffer_elements=2**24, **DEEP)
        height = stacked(ax, at, found["at_peak"], 1e9)
        ax.text(at, height + 0.01, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(CONFIGS)), [f"{config}\n{words}" for config, words in CONFIGS.items()], fontsize=8)
    ax.set_ylabel("GB on a rank at the peak")
    ax.set_title(f"ZeRO-R: {DEEP['layers']} layers, M = {MP}, N = {RANKS // MP}, simulated", fontsize=10)


def draw():
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), dpi=120)
    for ax, panel in zip(axes, (figure_1, four_ranks, zero_r)):
        panel(ax)
    axes[0].legend(frameon=False, loc="upper right", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, label=name, **style(name)) for name in LIVES[::-1]]
    axes[1].legend(
        handles=[*axes[1].get_legend_handles_labels()[0], *handles], frameon=False, loc="upper right", fontsize=9
    )
    figure.savefig(ROOT / "notebooks/memory.png")


if __name__ == "__main__":
    draw()
