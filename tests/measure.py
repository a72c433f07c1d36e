"""Prints the README's table of what the stages keep and send: python tests/measure.py

Memory and traffic of the default model, as each run's own meter and counter report them, beside the paper's formulas.
Nothing in it depends on the speed of the machine or on the version of the text, so a test compares it word for word.
"""

from launch import STAGES, launch

RANKS = (1, 2, 4)
# The metered step is the last; arithmetic in fp32 whatever this machine is faster with, for it decides the activations.
OPTIONS = ("--steps", 2, "--compute", "float32", "--device", "cpu")
COLUMNS = (
    "file", "N", "parameters", "gradients", "optimizer", "states", "formula", "activations at peak", "buffers at peak",
    "peak", "sent", "paper",
)  # fmt: skip


def run(script, N):
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


def line(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def table():
    rows = [row(script, N) for script in STAGES for N in RANKS]
    return "\n".join([line(*COLUMNS), line("---", *["--:"] * len(COLUMNS[1:])), *rows])


if __name__ == "__main__":
    print(table())
