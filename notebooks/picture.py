"""Draws the picture of the README, notebooks/memory.png: python notebooks/picture.py

The measured peak of the rank that needs most, by category, for the four stages and ZeRO-R on four ranks.
"""

import matplotlib

matplotlib.use("Agg")

from lesson import COLORS, ROOT, STAGES, plt, run  # noqa: E402

OPTIONS = {"steps": 1}
RUNS = [(script, script, {}) for script in STAGES]
RUNS += [("zero_r.py --mp 1\n--config full", "zero_r.py", {"mp": 1, "config": "full"})]
RUNS += [("zero_r.py --mp 2\n--config full", "zero_r.py", {"mp": 2, "config": "full"})]


def draw():
    figure, axes = plt.subplots(figsize=(8.5, 3.6), dpi=120)
    for at, (label, script, options) in enumerate(RUNS):
        records = run(script, 4, quiet=True, **OPTIONS, **options).of("memory")
        most, bottom = max(records, key=lambda record: record["peak"]), 0
        for category in [name for name in COLORS if name != "host"]:
            height = most["at_peak"][category] / 1e6
            axes.bar(at, height, bottom=bottom, color=COLORS[category], label=category if at == 0 else None, width=0.7)
            bottom += height
        axes.text(at, bottom, f"{bottom:.0f}", ha="center", va="bottom")
    axes.set_xticks(range(len(RUNS)), [label for label, _, _ in RUNS], fontsize=8)
    axes.set_ylabel("MB at the peak of a step")
    axes.set_title("Memory of one of four ranks, measured: default model, 14.4 million parameters", fontsize=10)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(ROOT / "notebooks/memory.png")


if __name__ == "__main__":
    draw()
