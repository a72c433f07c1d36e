"""Measures what the pages show: python tests/measure.py prints it, with --write it also puts it into the pages.

Memory and traffic of the default model, as each run's own meter and counter report them, beside the paper's formulas;
the end of what the README's first command prints; the size of each step of the ladder. Nothing in it depends on the
speed of the machine or on the version of the text, so a test compares it word for word.
"""

import re
import sys

from launch import ROOT, STAGES, launch, progress
from test_diffs import diff

PAGES = ("README.md", "tests/README.md")
FILES = (*STAGES, "zero_r.py")
RANKS = (2, 4)
CONFIGS = ("none", "C1", "C2", "C3", "C4", "C5", "full")
OPTIONS = ("--steps", 1, "--device", "cpu")
COLUMNS = (
    "file", "N", "parameters", "gradients", "optimizer", "states", "formula", "activations at peak", "buffers at peak",
    "peak", "sent", "sent, formula",
)  # fmt: skip


def run(script, N):
    progress(f"{script} on {N} ranks")
    return launch(script, *OPTIONS, ranks=N, timeout=300)


def memory(script, N):
    """The record `memory` of each rank."""
    return run(script, N).of("memory")


def row(script, N):
    most = max(memory(script, N), key=lambda rank: rank["peak"])
    (sent,) = run(script, N).of("communication")
    sizes = [most[column] for column in ("parameters", "gradients", "optimizer", "states", "formula")]
    sizes += [most["at_peak"]["activations"], most["at_peak"]["buffers"], most["peak"]]
    volumes = [sent["elements"], sent["formula"]]
    megabytes, multiples = [f"{size / 1e6:.2f}" for size in sizes], [f"{x / sent['psi']:.3f} Ψ" for x in volumes]
    return line(f"`{script}`", N, *megabytes, *multiples)


ZERO_R_COLUMNS = (
    "`--config`", "ZeRO-DP", "ZeRO-R", "states", "kept inputs", "on the host", "activations at peak", "buffers at peak",
    "peak", "sent", "within the replica",
)  # fmt: skip


def zero_r_row(config):
    """Of rank 0 of 2 x 2 simulated ranks, which counts the same bytes as a real one (test_zero_r.py)."""
    progress(f"zero_r.py --config {config}")
    run = launch("zero_r.py", *OPTIONS, "--collectives", "gloo", "--simulate-ranks", 4, "--mp", 2, "--config", config)
    ((rank,), (sent,), (cfg,)) = (run.of(event) for event in ("memory", "communication", "config"))
    sizes = [rank[column] for column in ("states", "kept", "kept_host")]
    sizes += [rank["at_peak"]["activations"], rank["at_peak"]["buffers"], rank["peak"]]
    volumes = [sent["elements"], sent["tensor"]["elements"]]
    megabytes, multiples = [f"{size / 1e6:.2f}" for size in sizes], [f"{x / sent['psi']:.3f} Ψ" for x in volumes]
    on = {"P_a": cfg["pa"] == "on", "P_a+cpu": cfg["pa"] == "cpu", "C_B": cfg["cb"] == "on", "M_D": cfg["md"] == "on"}
    parts = ", ".join(part for part in on if on[part])
    return line(config, "P_" + cfg["partition"], parts, *megabytes, *multiples)


def line(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def table():
    rows = [row(script, N) for script in STAGES for N in RANKS]
    return "\n".join([line(*COLUMNS), line("---", *["--:"] * len(COLUMNS[1:])), *rows])


def zero_r_table():
    rows = [zero_r_row(config) for config in CONFIGS]
    return "\n".join([line(*ZERO_R_COLUMNS), line(*["---"] * 3, *["--:"] * len(ZERO_R_COLUMNS[3:])), *rows])


def output():
    """Of the end of the README's first command the columns and lines that have a formula beside them. In one step it
    keeps and sends what it does in fifty."""
    shown = []
    for line in run(STAGES[1], 2).out.partition("Just before the optimizer step:")[2].splitlines():
        if line.startswith("At the peak"):
            break
        shown.append(line[: 4 + 5 * 13])
    for line in run(STAGES[1], 2).out.splitlines():
        if re.match("Sent by| +calls|reduce_scatter|all_gather|paper:", line):
            shown += ["", line] if line.startswith("Sent by") else [line]
    return "\n".join("    " + line if line else "" for line in shown[1:])


def lines_changed(k):
    """Added and removed, from one file to the next."""
    added, removed, _ = diff(FILES[k], FILES[k + 1], "--numstat").split(maxsplit=2)
    return str(int(added) + int(removed))


def shown(name):
    """What a page shows of it: between <!-- name --> and <!-- /name -->."""
    (text,) = re.findall(f"<!-- {name} -->(.*?)<!-- /{name} -->", "".join(map(read, PAGES)), re.DOTALL)
    return text.strip("\n")


def read(page):
    return (ROOT / page).read_text()


def write(name, text):
    for page in PAGES:
        parts = re.split(f"(<!-- /?{name} -->)", read(page))
        if len(parts) == 5:
            (ROOT / page).write_text("".join([*parts[:2], text, *parts[3:]]))


if __name__ == "__main__":
    sizes = {f"diff {k}": lines_changed(k) for k in range(len(FILES) - 1)}
    blocks = {"output": output(), "measured": table(), "zero_r": zero_r_table()}
    print(*[f"{name}: {size} lines changed" for name, size in sizes.items()], sep="\n")
    print("", *blocks.values(), sep="\n\n")
    if sys.argv[1:] == ["--write"]:
        for name, text in (sizes | {name: f"\n{text}\n" for name, text in blocks.items()}).items():
            write(name, text)
