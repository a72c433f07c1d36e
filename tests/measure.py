"""Prints the README's output of a run and tables of what the stages and ZeRO-R keep and send: python tests/measure.py

Memory and traffic of the default model, as each run's own meter and counter report them, beside the paper's formulas.
Nothing in it depends on the speed of the machine or on the version of the text, so a test compares it word for word.
"""

from launch import STAGES, launch

RANKS = (2, 4)
CONFIGS = ("none", "C1", "C2", "C3", "C4", "C5", "full")
OPTIONS = ("--steps", 1, "--device", "cpu")
COLUMNS = (
    "file", "N", "parameters", "gradients", "optimizer", "states", "formula", "activations at peak", "buffers at peak",
    "peak", "sent", "sent, formula",
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


ZERO_R_COLUMNS = (
    "`--config`", "ZeRO-DP", "ZeRO-R", "states", "kept inputs", "on the host", "activations at peak", "buffers at peak",
    "peak", "sent", "within the replica",
)  # fmt: skip


def zero_r_row(config):
    """Of rank 0 of 2 x 2 simulated ranks, which counts the same bytes as a real one (test_zero_r.py)."""
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
    """The end of the README's first command, from its memory on, without the time of a step. In one step it keeps and
    sends what it does in fifty."""
    _, heading, tables = run(STAGES[1], 2).out.partition("Memory of each rank")
    lines = [line for line in (heading + tables).splitlines() if not line.startswith("A step took")]
    return "\n".join("    " + line for line in lines).replace("    \n", "\n")


if __name__ == "__main__":
    print(output(), table(), zero_r_table(), sep="\n\n")
