"""What the notebooks share: run a script and read its records, draw them, check an answer.

Nothing here computes a loss or counts a byte. The numbers come from the scripts in the folder above: run() starts one
with torchrun, simulate() runs its main() in this process as rank 0 of any number of ranks, on tensors without memory.
"""

import contextlib
import difflib
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt
import watch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = os.environ.get("ZERO_SMALL", "") not in ("", "0")  # tiny sizes: the tests of this project run the notebooks so
STAGES = ("stage0_ddp.py", "stage1_os.py", "stage2_grad.py", "stage3_param.py")
NAMES = {"stage0_ddp.py": "DP", "stage1_os.py": "P_os", "stage2_grad.py": "P_os+g", "stage3_param.py": "P_os+g+p"}

# One colour per category in all notebooks. Safe for colour-blind readers, and each of its own lightness, so that the
# order dark to light survives a print in black and white.
COLORS = {
    "optimizer": "#332288",
    "parameters": "#0065A0",
    "gradients": "#D55E00",
    "activations": "#56B4E9",
    "buffers": "#F0E442",
    "host": "#9A9A9A",
}
# What a rank does, and what travels meanwhile: (colour, hatch, colour of the hatch).
SPANS = {
    "forward": ("#CCCCCC", "", "white"),
    "backward": ("#777777", "", "white"),
    "adam": ("#332288", "", "white"),
    "waits": ("#FFFFFF", "xxxx", "#CC3311"),
    "all_gather": ("#009E73", "", "white"),
    "reduce_scatter": ("#E3A8C9", "////", "#7A3B60"),
    "all_reduce": ("#000000", "", "white"),
}
GRAY = "#777777"

plt.rcParams |= {
    "figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6,
    "axes.axisbelow": True, "figure.constrained_layout.use": True,
}  # fmt: skip


# ---- Running the scripts ---------------------------------------------------------------------------------------


class Run:
    """The records of one run: `of(event)` gives all of a kind, `one(event)` the first."""

    def __init__(self, command, records, out=""):
        self.command, self.records, self.out = command, records, out
        self.config = self.one("config")
        self.psi, self.ranks = self.config["psi"], self.config["world_size"]

    def of(self, event, rank=None):
        return [r for r in self.records if r["event"] == event and rank in (None, r.get("rank"))]

    def one(self, event, rank=None):
        return self.of(event, rank)[0]

    @property
    def losses(self):
        return [record["loss"] for record in self.of("step")]

    @property
    def norms(self):
        return [record["norm"] for record in self.of("step")]

    @property
    def weights(self):
        """sha256 of all fp32 weights after the last step."""
        return self.of("weights")[-1]["sha256"]

    def tables(self):
        """What the script printed after its last step."""
        return self.out[self.out.find("\nMemory of each rank") :].strip("\n")


def size(normal, small):
    """The value for this session: `small` with ZERO_SMALL=1, else `normal`."""
    return small if SMALL else normal


def flags(options):
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(script, ranks=2, quiet=False, watch=False, limit=600, forked=SMALL, **options):
    """Starts a script of this project (or the path of a copy) with torchrun on this machine's CPU, and waits for it, at
    most `limit` seconds. With `watch` it runs under watch.py, whose records are added. An error is one line. With
    `forked` the ranks are forked from one process that has imported torch: that saves most of the time of a small run,
    and the tests do so."""
    command = f"torchrun --standalone --nproc-per-node {ranks} {pathlib.Path(script).name} {' '.join(flags(options))}"
    if not quiet:
        print("$ " + command)
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.jsonl")
        program = [ROOT / "notebooks/watch.py", folder] if watch else []
        program += [ROOT / script, *flags({"device": "cpu"} | options), "--log-file", log]
        status, out, errors = start(program, ranks, limit, forked)
        if status:
            raise RuntimeError(what_failed(errors, pathlib.Path(script).name))
        records = read(log)
        for path in sorted(pathlib.Path(folder).glob("*.json")):
            records += json.loads(path.read_text())
        return Run(command, records, out)


def start(program, ranks, limit, forked):
    """(status, output, errors) of a program under torchrun, or forked."""
    began = time.monotonic()
    if forked:
        sys.path[:] = [*dict.fromkeys([*sys.path, str(ROOT / "tests")])]
        import launch

        ended = launch.launch(*program, ranks=ranks, timeout=limit, log=False)
        status, out, errors = ended.status, ended.out, ended.err
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
            process.communicate()
        except KeyboardInterrupt:  # the notebook's stop button
            os.killpg(process.pid, signal.SIGKILL)
            raise
        status = process.returncode
    if time.monotonic() - began > limit:
        raise RuntimeError(f"no end after {limit} seconds: does a rank wait for a collective that no other starts?")
    return status, out, errors


def what_failed(errors, script):
    """One line from what torchrun and its ranks wrote: the first error, and the last line of the script before it."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in errors.splitlines()]
    own = [line for line in lines if line.startswith(script + ": ")]
    if own:
        return own[0].removeprefix(script + ": ")
    place = ""
    for line in lines:
        if match := re.match(rf' +File ".*{re.escape(script)}", line (\d+), in (\S+)', line):
            place = f" ({script}, line {match[1]}, in {match[2]})"
        if "Timed out waiting" in line:
            return "A rank waited for a collective that another one never started" + place
        if re.match(r"\S*(Error|Exception)\b", line) and not re.search("ChildFailed|Connection (closed|reset)", line):
            return line + place
    return lines[-1] if lines else "it ended without a word"


def load(script):
    """A script of this project as a fresh module."""
    return watch.load(ROOT / script)


telling = {"cell": None}


def tell(what):
    """A cell of a notebook that simulates for more than three seconds says in one line what it is at."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        return
    if telling["cell"] != get_ipython().execution_count:
        telling.update(cell=get_ipython().execution_count, runs=0, since=time.monotonic(), line=None)
    telling["runs"] += 1
    if time.monotonic() - telling["since"] > 3:
        text = {"text/plain": f"simulation {telling['runs']}: {what}"}
        if telling["line"]:
            telling["line"].update(text, raw=True)
        else:
            telling["line"] = display(text, raw=True, display_id=True)


def simulate(script, ranks=1, trace=False, **options):
    """The same as `python SCRIPT --simulate-ranks RANKS ...`, without the seconds that a new process needs to import
    torch. With `trace` the result has `.meter` too, the script's own meter with every allocation of the step."""
    if ranks < 1:
        raise RuntimeError(f"a simulation has 1 rank or more, and not {ranks}")
    module, meters = load(script), []

    class Kept(module.Meter):
        def __init__(self, device):
            super().__init__(device)
            meters.append(self)

        def replay(self):
            self.step = list(self.trace)  # what dies when the script ends is no part of the step
            return super().replay()

    if trace:
        module.Meter = Kept
    arguments = [script, *flags({"simulate_ranks": ranks} | options)]
    tell(" ".join(arguments))
    argv, out = sys.argv, io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.jsonl")
        try:
            sys.argv = [*arguments, "--log-file", str(log)]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                module.main()
        except SystemExit:
            raise RuntimeError(out.getvalue().strip()) from None
        finally:
            sys.argv = argv
        result = Run("python " + " ".join(arguments), read(log), out.getvalue())
    result.meter = meters[0] if trace else None
    return result


# ---- Text ------------------------------------------------------------------------------------------------------


def show(text):
    """Displays Markdown."""
    from IPython.display import Markdown, display

    display(Markdown(text))


def table(head, rows):
    """Displays a table; numbers stand to the right."""
    align = ["---" if isinstance(cell, str) and not cell[:1].isdigit() else "---:" for cell in rows[0]]
    lines = [head, align, *rows]
    show("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines))


def number(value, unit=1e6, digits=2):
    return f"{value / unit:,.{digits}f}"


def show_diff(old, new):
    """Displays the lines that differ between two stage files where they differ: from the layer to the train step."""
    texts = []
    for name in (old, new):
        text = (ROOT / name).read_text()
        texts.append(text[text.index("# ---- 4.") : text.index("# ====")].splitlines())
    diff = list(difflib.unified_diff(*texts, f"a/{old}", f"b/{new}", n=2, lineterm=""))
    changed = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)
    show("```diff\n" + "\n".join(diff) + "\n```")
    print(f"{changed} lines added or removed in sections 4 and 5, the layer and the train step")


# ---- Exercises -------------------------------------------------------------------------------------------------


def is_missing(answer):
    """None and ... stand for an answer not given yet; so does a tuple of them."""
    return answer is None or answer is ... or isinstance(answer, (tuple, list)) and all(map(is_missing, answer))


def as_number(answer):
    """The answer as a float, or None if it is none."""
    if isinstance(answer, (bool, str)):
        return None
    try:
        return float(answer)
    except (TypeError, ValueError):
        return None


def compared(answer, measured, tolerance=0.0, usual=None, rounded=False):
    """ "" if the answer is right, else one sentence on how it differs. Numbers may differ by `tolerance`, relatively,
    and with `rounded` be the nearest whole number. `usual` is {wrong answer: which mistake that is}."""
    if isinstance(measured, (int, float)) and not isinstance(measured, bool):
        value = as_number(answer)
        if value is None:
            return f"{answer!r} is not a number"
        if math.isclose(value, measured, rel_tol=tolerance, abs_tol=1e-9) or rounded and value == round(measured):
            return ""
        for wrong, words in (usual or {}).items():
            if math.isclose(value, wrong, rel_tol=max(tolerance, 1e-3)):
                return f"{answer:,}: {words}"
        if not measured:
            return f"{answer:,} is not what was measured"
        return f"{answer:,} is {value / measured:.3g} times what was measured"
    if isinstance(measured, list) and isinstance(answer, (tuple, set)):
        answer = list(answer)
    if type(answer) is type(measured) and answer == measured:
        return ""
    for wrong, words in (usual or {}).items():
        if answer == wrong:
            return f"{answer!r}: {words}"
    return f"{answer!r} is not what was measured"


def check(answer, measured, what="", tolerance=0.0, usual=None, rounded=False):
    """Says in one line whether an answer is right, and returns it. `usual` is {wrong answer: which mistake that is}."""
    if is_missing(answer):
        print(f"{what}: not solved yet")
        return False
    wrong = compared(answer, measured, tolerance, usual, rounded)
    print(f"{what}: {'not yet. ' + wrong if wrong else 'right'}")
    return not wrong


def tried(script, options, **fixed):
    """A simulation with a reader's options besides fixed ones: (run, ""), or (None, one line on why there is none)."""
    if not isinstance(options, dict):
        return None, f"{options!r} is no dict of options"
    fixed_names = {*fixed, "simulate_ranks", "device", "log_file", "data"}
    if both := sorted(fixed_names & {str(name).replace("-", "_") for name in options}):
        return None, f"{', '.join(both)} shall stay as it is"
    try:
        return simulate(script, **fixed, **options), ""
    except RuntimeError as error:
        return None, str(error)


def predicted(prediction, measured, unit="", tolerance=0.02):
    """Judges a prediction, and tells what was measured."""
    shown = f"{measured:,}" if as_number(measured) is not None else repr(measured)
    if is_missing(prediction):
        print(f"Measured: {shown}{unit}. You wrote down no prediction.")
        return
    wrong = compared(prediction, measured, tolerance)
    print(f"Measured: {shown}{unit}. Your prediction: {'not so, ' + wrong if wrong else 'right'}.")


def check_function(function, cases, what="", tolerance=0.0, usual=None):
    """The same for a function: `cases` is a list of (arguments, measured), and `usual` is {factor: which mistake it is
    if the answer is so many times what was measured}."""
    if not cases:
        print(f"{what}: nothing was measured: run the cells above first")
        return False
    for arguments, measured in cases:
        shown = ", ".join(f"{a:,}" if as_number(a) is not None else repr(a) for a in arguments)
        try:
            answer = function(*arguments)
            if is_missing(answer):
                print(f"{what}: not solved yet")
                return False
            wrong = compared(answer, measured, tolerance)
        except Exception as error:  # a student's mistake is an answer too
            print(f"{what}: not yet. For ({shown}) it ends with {type(error).__name__}: {error}")
            return False
        if wrong:
            value = as_number(answer)
            known = []
            if value and measured:  # a factor of nothing is none
                known = [words for f, words in (usual or {}).items() if not compared(value / measured, f, 0.02)]
            print(f"{what}: not yet. For ({shown}) {wrong}. " + " ".join(known))
            return False
    print(f"{what}: right in {len(cases)} cases")
    return True


def check_smallest(answer, holds, what="", usual=None):
    """Whether a whole number is the smallest for which `holds` is true. `usual` is {wrong answer: which mistake}."""
    if is_missing(answer):
        print(f"{what}: not solved yet")
        return False
    value, usual = as_number(answer), usual or {}
    try:
        if value is None or not value.is_integer() or value < 1:
            wrong = f"{answer!r} is not a whole number from 1 on"
        elif not holds(int(value)):
            wrong = f"{answer} is too few" + (f": {usual[value]}" if value in usual else "")
        elif value > 1 and holds(int(value) - 1):
            wrong = f"{answer} is too many" + (f": {usual[value]}" if value in usual else "")
        else:
            wrong = ""
    except RuntimeError as error:
        wrong = f"with {answer} the script ends: {error}"
    print(f"{what}: {'not yet. ' + wrong if wrong else 'right'}")
    return not wrong


# ---- Pictures --------------------------------------------------------------------------------------------------


def legend_right(ax, **more):
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, **more)


def style(category):
    """How a category is filled: yellow needs a dark edge, and host memory, which is elsewhere, is hatched."""
    edge = {"buffers": "#6B6100"}.get(category, "white")
    return {"facecolor": COLORS[category], "edgecolor": edge, "lw": 0.6, "hatch": "///" if category == "host" else ""}


def stack(ax, at, values, unit, width=0.8, scale=0.03):
    """One bar of stacked categories, {category: bytes}. Returns its height, and in words the parts that are too thin to
    see: thinner than `scale` times the axis."""
    floor, small, high = 0.0, [], ax.get_ylim()[1]
    for category in COLORS:
        value = values.get(category, 0) / unit
        if value:
            ax.bar(at, value, width, floor, **style(category))
            floor += value
            if value < scale * high:
                small.append(f"{category} {value:.2g}")
    return floor, small


def legend_of(ax, categories, handles=()):
    """A legend of these categories, in the order in which they are stacked, top first, and of other handles."""
    patches = [plt.Rectangle((0, 0), 1, 1, label=name, **style(name)) for name in COLORS if name in categories]
    legend_right(ax, handles=[*patches[::-1], *handles])


def cut_floor(ax, bottom, top, text):
    """Starts the vertical axis at the memory that never changes, and says so in a band below it."""
    band = 0.07 * (top - bottom)
    ax.axhspan(bottom - band, bottom, facecolor="white", edgecolor="#999999", hatch="////", lw=0, zorder=3)
    ax.text(
        0.5, bottom - band / 2, f"below, all the time: {text}", fontsize=8, ha="center", va="center", zorder=4,
        transform=ax.get_yaxis_transform(), bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip
    ax.set_ylim(bottom - band, top + 0.03 * (top - bottom))


def start_at_floor(ax, rows, unit, name):
    """Cuts off what all these rows, {category: bytes}, have in common, and returns it, in units."""
    always = {category: min(row.get(category, 0) for row in rows) / unit for category in COLORS if category != "host"}
    bottom, top = sum(always.values()), max(sum(row.values()) - row.get("host", 0) for row in rows) / unit
    parts = ", ".join(f"{value:.2f} {category}" for category, value in always.items() if value > 0.005 * bottom)
    cut_floor(ax, bottom, top, f"{bottom:.2f} {name} ({parts})")
    return always


def plot_moments(run, rank=0, unit=1e6, name="MB"):
    """Stacked bytes per category at the moments that the script has marked in its last step, and the peak."""
    moments, memory = run.of("timeline", rank), run.one("memory", rank)
    rows = [{category: moment[category] for category in COLORS if category in moment} for moment in moments]
    rows.append(memory["at_peak"])
    fig, ax = plt.subplots(figsize=(10.5, 5.6))
    always = start_at_floor(ax, rows, unit, name)
    at = [*range(len(moments)), len(moments) + 0.8]
    floor = [sum(always.values())] * len(rows)
    for category, low in always.items():
        values = [row.get(category, 0) / unit - low for row in rows]
        ax.bar(at, values, 0.85, floor, **style(category))
        floor = [a + b for a, b in zip(floor, values)]
    ax.set_xticks(at, [moment["label"] for moment in moments] + ["THE PEAK"], rotation=90)
    ax.set_ylabel(f"live memory in {name}")
    ax.set_xlabel("moment of the step")
    legend_of(ax, always)
    return fig


def replay(meter):
    """The trace of a meter as rows (bytes per category), one for each birth or death, and the marks: (row, label)."""
    live, rows, marks = dict.fromkeys(COLORS, 0), [], []
    for key, value in meter.step:
        if isinstance(key, str):
            marks.append((len(rows), key))
        else:
            live[meter.storages[key]["category"]] += value
            rows.append(dict(live))
    return rows, marks


def plot_trace(run, unit=1e6, name="MB"):
    """Stacked bytes per category after every single allocation and release, part by part of the step."""
    rows, marks = replay(run.meter)
    resident = max(row["optimizer"] for row in rows)
    first = next(at for at, row in enumerate(rows) if row["optimizer"] == resident) + 1
    rows, marks = rows[first:], [(at - first, label) for at, label in marks]
    fig, ax = plt.subplots(figsize=(10.5, 4.6))
    always = start_at_floor(ax, rows, unit, name)
    values = [[row[category] / unit - low for row in rows] for category, low in always.items()]
    values[0] = [value + sum(always.values()) for value in values[0]]  # the others are stacked on it
    # Each part of the step has the same width, and those of the optimizer twice that, however often they allocate.
    x, edges = [], []
    for (start, _), (end, label) in zip([(0, ""), *marks], marks):
        width = 1 if label.startswith(("forward", "backward")) else 2
        left = edges[-1] if edges else 0
        x += [left + width * (at - start) / (end - start) for at in range(start, end)]
        edges.append(left + width)
    values = [column[: len(x)] for column in values]
    for category, area in zip(always, ax.stackplot(x, values, step="post")):
        area.set(facecolor=COLORS[category], edgecolor=style(category)["edgecolor"], lw=0.3)
    top = max(sum(row.values()) - row["host"] for row in rows) / unit
    words = {"before the optimizer step": "last reduction", "parameters updated": "new parameters"}
    for start, end, (_, label) in zip([0, *edges], edges, marks):
        ax.axvline(end, color="black", lw=0.4, alpha=0.5)
        ax.annotate(
            words.get(label, label), ((start + end) / 2, 1.02), xycoords=ax.get_xaxis_transform(), rotation=90,
            ha="center", va="bottom", fontsize=8,
        )  # fmt: skip
    ax.set_xlim(0, edges[-1])
    ax.axhline(top, color="black", lw=1, ls=":")
    ax.set_xticks([])
    ax.set_ylabel(f"live memory in {name}")
    ax.set_xlabel("parts of one step, each with all its allocations and releases")
    legend_of(ax, [category for category in always if any(row[category] / unit > always[category] for row in rows)])
    return fig


def plot_stages(runs, unit=1e6, name="MB"):
    """Measured model states of each stage and rank as stacked bars, the paper's formula as a line over each."""
    fig, ax = plt.subplots(figsize=(9, 4))
    categories = ("optimizer", "parameters", "gradients")
    ax.set_ylim(0, 1.12 * max(memory["states"] for run in runs.values() for memory in run.of("memory")) / unit)
    at, ticks, labels = 0, [], []
    for title, run in runs.items():
        start = at
        for memory in run.of("memory"):
            height, _ = stack(ax, at, {category: memory[category] for category in categories}, unit)
            line = memory["formula"] / unit
            (formula,) = ax.plot([at - 0.47, at + 0.47], [line, line], color="black", lw=2, label="formula")
            above = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 9}
            ax.annotate(f"{height:.2f}", (at, max(line, height)), (0, 3), **above)
            ticks.append(at)
            labels.append(f"rank {memory['rank']}")
            at += 1
        middle = (start + at - 1) / 2
        ax.text(middle, -0.17, title, ha="center", va="top", transform=ax.get_xaxis_transform(), fontweight="bold")
        at += 0.6
    ax.set_xticks(ticks, labels)
    ax.set_ylabel(f"model states in {name}")
    legend_of(ax, categories, [formula])
    return fig


def plot_against_ranks(series, unit=1e6, name="MB"):
    """{title: [(ranks, {category: bytes}, formula)]}: one panel per stage, stacked bars measured, a marker for the
    formula."""
    fig, axes = plt.subplots(1, len(series), figsize=(11, 3.6), sharey=True)
    categories = ("optimizer", "parameters", "gradients")
    for ax, (title, points) in zip(axes, series.items()):
        for at, (_, states, formula) in enumerate(points):
            height, _ = stack(ax, at, {category: states[category] for category in categories}, unit)
            (marker,) = ax.plot(at, formula / unit, "D", color="black", mfc="white", ms=5, label="formula")
            above = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
            ax.annotate(f"{height:.3g}", (at, max(height, formula / unit)), (0, 5), **above)
        ax.set_xticks(range(len(points)), [ranks for ranks, _, _ in points])
        ax.set_title(title)
        ax.set_xlabel("ranks N")
    axes[0].set_ylabel(f"model states per rank in {name}")
    axes[0].margins(y=0.12)
    legend_of(axes[-1], categories, [marker])
    return fig


def plot_spans(run, title=""):
    """What each rank does in the metered step, and what travels meanwhile. The upper row of a rank: it computes, or it
    stands waiting. The lower rows: a collective, from its launch to the end of the wait for it."""
    ranks = sorted({record["rank"] for record in run.of("span")})
    fig, ax = plt.subplots(figsize=(11, 0.9 + 1.25 * len(ranks)))
    ticks, labels, y, seen = [], [], 0, []

    def bar(what, start, end, y, height):
        color, hatch, edge = SPANS[what]
        ax.barh(y, end - start, height, start, facecolor=color, hatch=hatch, edgecolor=edge, lw=0.4)
        seen.append(what)

    for rank in ranks:
        spans = sorted(run.of("span", rank), key=lambda span: span["start_ms"])
        travels = [span for span in spans if span["what"] not in ("forward", "backward")]
        for span in spans:
            if span not in travels:
                bar(span["what"], span["start_ms"], span["end_ms"], y, 0.5)
        times = {moment["label"]: moment["ms"] for moment in run.of("timeline", rank)}
        bar("adam", times["fp32 gradients"], times["Adam"], y, 0.5)  # a mark of the step each
        for span in travels:
            bar("waits", span["end_ms"] - span["waited_ms"], span["end_ms"], y, 0.5)
        ticks.append(y)
        labels.append(f"rank {rank} computes, waits")
        y -= 0.55
        for words, kinds in (("gathers", ("all_gather",)), ("reduces", ("reduce_scatter", "all_reduce"))):
            ends = []  # of the last bar on each line
            for span in (span for span in travels if span["what"] in kinds):
                line = next((i for i, end in enumerate(ends) if end <= span["start_ms"] + 1e-3), len(ends))
                ends[line : line + 1] = [span["end_ms"]]
                bar(span["what"], span["start_ms"], span["end_ms"], y - 0.22 * min(line, 2), 0.2)
            if ends:
                ticks.append(y)
                labels.append(f"rank {rank} {words}")
                y -= 0.28 + 0.22 * min(len(ends), 3)
        y -= 0.4
    ax.set_yticks(ticks, labels)
    ax.set_xlabel("time in the metered step in ms (the meter slows it down)")
    ax.set_title(title)
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=color, hatch=hatch, edgecolor=edge, lw=0.4, label=what.replace("_", "-"))
        for what, (color, hatch, edge) in SPANS.items()
        if what in seen
    ]
    legend_right(ax, handles=handles)
    return fig


def place(meter, chosen):
    """Where zero_r.py's first fit puts every chosen allocation of the trace. Returns [(number, address, bytes, born,
    died)] with positions in the trace, the most live bytes, and the top of the space."""
    most, top, placed = load("zero_r.py").first_fit(meter.step, chosen)
    times = {}
    for clock, (key, _) in enumerate(meter.step):
        times.setdefault(key, []).append(clock)  # birth and death of a storage
    ends = {key: [*times[key], len(meter.step)][:2] for key in placed}
    return [(key, start, end - start, *ends[key]) for key, (start, end) in placed.items()], most, top


def on_device(meter):
    """The numbers of all storages that are not in host memory."""
    return {number for number, storage in enumerate(meter.storages) if storage["category"] != "host"}


def first_failure(run, capacity):
    """Where a run with a trace first asks for more than fits, by first fit: (bytes asked for, bytes free, largest hole)
    or None."""
    blocks, _, _ = place(run.meter, on_device(run.meter))
    failed = [block for block in blocks if block[1] + block[2] > capacity]
    if not failed:
        return None
    _, _, asked, moment, _ = min(failed, key=lambda block: block[3])
    taken = sorted((start, start + size) for _, start, size, born, died in blocks if born < moment < died)
    edges = [0, *(edge for block in taken for edge in block), capacity]
    holes = [end - start for start, end in zip(edges[::2], edges[1::2])]
    return asked, sum(holes), max(holes)


def plot_heaps(runs, capacity, unit=1e6, name="MB"):
    """{title: run with a trace of zero_r.py}: each heap at one moment, addresses to the right. Of a run that fails on a
    device of `capacity` bytes it is the moment before, with the request below its heap, else that of its highest
    address. What M_D is about, kept layer inputs and gradients, has its colour, and a mark where it is thin; white is
    free."""
    fig, axes = plt.subplots(len(runs), 1, figsize=(11, 1.9 * len(runs)), sharex=True)
    seen = set()
    for ax, (title, run) in zip(axes, runs.items()):
        meter = run.meter
        kept = meter.kept & on_device(meter)
        blocks, live, space = place(meter, on_device(meter))
        fragmentation = space / live - 1
        assert abs(fragmentation - run.one("memory")["fragmentation"]) < 1e-9, "the script places differently"
        failed = [block for block in blocks if block[1] + block[2] > capacity]
        if failed:
            _, _, asked, moment, _ = min(failed, key=lambda block: block[3])
            request = {"facecolor": "white", "edgecolor": "#CC3311", "hatch": "xxxx", "lw": 1}
            ax.add_patch(plt.Rectangle((0, -0.9), asked / unit, 0.6, **request))
            words = f"{asked / unit:.2f} {name} are asked for, and no gap up to the capacity is as long"
            ax.text(asked / unit + 0.4, -0.6, words, va="center", fontsize=9)
        else:
            moment = next(born for _, start, size, born, _ in blocks if start + size == space) + 0.5
        for number, start, length, born, died in blocks:
            if born < moment < died:
                box = (
                    style(meter.storages[number]["category"])
                    if number in kept
                    else {"facecolor": "#BBBBBB", "edgecolor": "white"}
                )
                ax.add_patch(plt.Rectangle((start / unit, 0), length / unit, 1, **box | {"lw": 0.5}))
                seen |= {meter.storages[number]["category"]} if number in kept else set()
                if number in kept and length < 0.01 * capacity:  # a line, and the end of a hole all the same
                    color = COLORS[meter.storages[number]["category"]]
                    ax.plot((start + length / 2) / unit, 1.1, "v", color=color, ms=6, clip_on=False)
        ax.add_patch(plt.Rectangle((0, 0), capacity / unit, 1, fill=False, edgecolor="black", lw=1))
        line = ax.axvline(capacity / unit, color="#CC3311", ls="--", lw=1.5, label=f"capacity {capacity / unit:.2f}")
        ax.set(ylim=(-1.1, 1.25), yticks=[], xlim=(0, 1.02 * max(space, capacity) / unit))
        words = "the moment before it fails" if failed else "at its highest address"
        ax.set_title(f"{title}, {words} ({fragmentation:.1%} fragmentation in the whole step)", fontsize=10)
    axes[-1].set_xlabel(f"address in {name}")
    rest = plt.Rectangle((0, 0), 1, 1, fc="#BBBBBB", ec="white", label="all else")
    legend_of(axes[0], seen, [rest, line])
    return fig


def plot_stacks(
    bars,
    unit=1e6,
    name="MB",
    label="",
    lines=None,
    lines_are="formula",
    neutral=False,
    capacity=None,
    capacity_is="",
    top=None,
):
    """{title: {category: bytes}} as stacked bars, `lines` {title: bytes} as a black line over each. `neutral`: one gray
    for totals that belong to no category. `capacity` in bytes: a dashed line across. `top` in bytes: where
    the axis ends; what is higher is cut off and says so."""
    fig, ax = plt.subplots(figsize=(9, 3.8))
    most = top or max([*(sum(bar.values()) for bar in bars.values()), *(lines or {}).values(), capacity or 0])
    high = 1.2 * most / unit
    ax.set_ylim(0, high)
    handles = []
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}  # a label is read across a line too
    for at, (title, bar) in enumerate(bars.items()):
        bar = {category: bar.get(category, 0) for category in COLORS}
        if neutral:
            height, small = sum(bar.values()) / unit, []
            ax.bar(at, height, 0.75, color=GRAY)
        else:
            height, small = stack(ax, at, bar, unit, 0.75)
        seen = len(small) < sum(map(bool, bar.values()))  # of a bar that is too thin as a whole, its height will do
        text = "\n".join([*small, f"{height:,.2f}"]) if seen else f"{height:,.2g}"
        if height > high:
            ax.text(at, 0.97 * high, f"up to\n{height:,.1f}", ha="center", va="top", fontsize=9, bbox=white, zorder=5)
        else:
            ax.text(at, height + 0.01 * high, text, ha="center", va="bottom", fontsize=9, bbox=white, zorder=5)
        if lines and title in lines:
            style_of_line = {"color": "black", "lw": 2, "label": lines_are}
            handles = ax.plot([at - 0.45, at + 0.45], [lines[title] / unit] * 2, **style_of_line)
    if capacity:
        words = capacity_is or f"{capacity / unit:,.0f} {name}"
        handles.append(ax.axhline(capacity / unit, color="#CC3311", ls="--", lw=1.5, label=words))
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set_ylabel(f"{label} in {name}")
    used = {category for bar in bars.values() for category, value in bar.items() if value}
    if not neutral:
        legend_of(ax, used, handles)
    elif handles:
        legend_right(ax, handles=handles)
    return fig


def plot_lines(series, xlabel, ylabel):
    """{title: [(x, y), ...]} as lines with markers."""
    fig, ax = plt.subplots(figsize=(7.5, 3.6))
    for (title, points), (style, color) in zip(
        series.items(), (("o-", "#332288"), ("s--", "#D55E00"), ("^:", "#56B4E9"), ("D-.", "#777777"))
    ):
        ax.plot(*zip(*points), style, color=color, label=title, lw=2, ms=7)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_ylim(bottom=0)
    legend_right(ax)
    return fig


def plot_beside(groups, label, capacity=None, capacity_is=""):
    """{title: {series: value}}: the bars of each title beside each other. `capacity`: a dashed line across."""
    fig, ax = plt.subplots(figsize=(9, 3.8))
    styles = ({"color": GRAY}, {"color": "white", "edgecolor": "black", "hatch": "///"})
    names = list(next(iter(groups.values())))
    for number, (name, look) in enumerate(zip(names, styles, strict=True)):
        at = [place + 0.4 * number - 0.2 for place in range(len(groups))]
        bars = ax.bar(at, [group[name] for group in groups.values()], 0.38, label=name, **look)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        ax.bar_label(bars, fmt="%.1f", fontsize=9, padding=2, bbox=white, zorder=5)
    if capacity:
        ax.axhline(capacity, color="#CC3311", ls="--", lw=1.5, label=capacity_is)
    ax.set_xticks(range(len(groups)), list(groups))
    ax.set_ylabel(label)
    legend_right(ax)
    return fig


# ---- Tensor parallelism, drawn ---------------------------------------------------------------------------------

RANK_COLORS = (("#332288", "white"), ("#56B4E9", "black"))  # a colour for what rank 0 has, and rank 1, and text upon it


def plot_cut():
    """How two ranks cut an MLP: the first matrix by its outputs, the second by its inputs."""
    fig, ax = plt.subplots(figsize=(11, 3.6))

    def matrix(x, y, width, height, text, rank=None):
        color, ink = RANK_COLORS[rank] if rank is not None else ("#DDDDDD", "black")
        ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="black", lw=0.8))
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=9)

    def word(x, y, text, size=10):
        ax.text(x, y, text, ha="center", va="center", fontsize=size)

    for rank, y in ((0, 3.0), (1, 0.2)):
        word(-0.7, y + 0.8, f"rank {rank}")
        matrix(0, y + 0.4, 1, 0.8, "x")
        word(1.3, y + 0.8, "·")
        matrix(1.6, y + 0.3, 2, 1, "columns of A", rank)
        word(4.0, y + 0.8, "→ GELU →", 8)
        matrix(4.45, y + 0.4, 1.95, 0.8, f"h{rank}: own hidden units", rank)
        word(6.7, y + 0.8, "·")
        matrix(7.0, y - 0.2, 1, 2, "rows\nof B", rank)
        word(8.3, y + 0.8, "=")
        matrix(8.6, y + 0.4, 1, 0.8, f"y{rank}", rank)
    ax.annotate("", (10.6, 2.3), (9.7, 3.7), arrowprops={"arrowstyle": "->"})
    ax.annotate("", (10.6, 1.9), (9.7, 1.1), arrowprops={"arrowstyle": "->"})
    word(10.1, 2.1, "all-\nreduce", 8)
    matrix(10.7, 1.7, 1, 0.8, "y0 + y1")
    word(0.5, 5.2, "both have it whole", 8)
    word(2.6, 5.2, "cut by outputs", 8)
    word(5.4, 5.2, "GELU acts on each unit alone", 8)
    word(7.5, 5.2, "cut by inputs", 8)
    word(9.1, 5.2, "a part of each sum", 8)
    word(11.2, 2.8, "whole again", 8)
    ax.set(xlim=(-1.2, 11.9), ylim=(-0.2, 5.5))
    ax.axis("off")
    return fig


def plot_collectives():
    """Who sends what to whom in a reduce-scatter and in an all-gather of three ranks, sent directly."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 3.4))
    colors = ("#0065A0", "#E69F00", "#A7C957")  # of the slices
    everywhere = [(rank, number) for rank in range(3) for number in range(3)]
    own = [(rank, rank) for rank in range(3)]
    titles = (
        "reduce-scatter: slice r of every rank goes to rank r,\nwhich averages the three",
        "all-gather: each owner sends its slice\nto all the others",
    )
    for ax, title, before, after in zip(axes, titles, (everywhere, own), (own, everywhere)):
        for x, boxes in ((0, before), (6, after)):
            for rank, number in boxes:
                place = (x + number, -1.6 * rank)
                ax.add_patch(plt.Rectangle(place, 0.92, 0.8, facecolor=colors[number], edgecolor="black", lw=0.8))
                ink = "white" if number == 0 else "black"
                ax.text(place[0] + 0.46, place[1] + 0.4, str(number), color=ink, ha="center", va="center")
        for sender, number in before:
            for receiver, same in after:
                if number == same and sender != receiver:
                    start, end = (number + 0.94, 0.4 - 1.6 * sender), (5.97 + number, 0.4 - 1.6 * receiver)
                    arrow = {"arrowstyle": "->", "color": colors[number], "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
                    ax.annotate("", end, start, arrowprops=arrow, zorder=0)
        for rank in range(3):
            ax.text(-0.25, 0.4 - 1.6 * rank, f"rank {rank}", ha="right", va="center")
        ax.text(1.4, 1.1, "before", ha="center", fontsize=9)
        ax.text(7.4, 1.1, "after", ha="center", fontsize=9)
        ax.set(xlim=(-1.8, 9.2), ylim=(-3.5, 1.4))
        ax.set_title(title, fontsize=10)
        ax.axis("off")
    return fig


def plot_block():
    """A block on two ranks, and where its all-reduces are: at g in forward, at f in backward."""
    fig, ax = plt.subplots(figsize=(11, 2.9))
    attention = [("qkv", 1), ("attention of\nhalf the heads", 1), ("attention_\nproj", 1)]
    mlp = [("mlp_up", 1), ("GELU", 1), ("mlp_proj", 1)]
    x = 0.0
    for name, kind in [
        step for cut in (attention, mlp) for step in (("norm", 2), ("f", 0), *cut, ("g", 0), ("+ x", 2))
    ]:
        width = 0.5 if kind == 0 else 0.62 if name in ("norm", "+ x") else 0.95
        if kind == 0:
            style_of_line = {"color": "black", "lw": 3, "ls": "-" if name == "g" else ":"}
            ax.plot([x + width / 2] * 2, [0.1, 2.4], **style_of_line)
            ax.text(x + width / 2, 2.55, name, ha="center", fontsize=12, style="italic")
        else:
            for rank, y in ((0, 1.4), (1, 0.2)):
                color, ink = RANK_COLORS[rank] if kind == 1 else ("#DDDDDD", "black")
                ax.add_patch(plt.Rectangle((x, y), width - 0.08, 0.8, facecolor=color, edgecolor="black", lw=0.8))
                ax.text(x + width / 2 - 0.04, y + 0.4, name, ha="center", va="center", color=ink, fontsize=7.5)
        x += width
    for rank, y in ((0, 1.8), (1, 0.6)):
        ax.text(-0.1, y, f"rank {rank}", ha="right", va="center")
    ax.annotate("", (x, -0.25), (0, -0.25), arrowprops={"arrowstyle": "->"})
    ax.text(x / 2, -0.42, "forward: all-reduce at each g (solid), nothing at f", ha="center", va="top", fontsize=9)
    ax.annotate("", (0, -0.85), (x, -0.85), arrowprops={"arrowstyle": "->"})
    ax.text(x / 2, -1.02, "backward: all-reduce at each f (dotted), nothing at g", ha="center", va="top", fontsize=9)
    ax.set(xlim=(-0.8, x + 0.1), ylim=(-1.4, 2.9))
    ax.axis("off")
    return fig


def plot_live(series, marks, unit=1e6, name="MB"):
    """{title: [live bytes after every operation of a step]} from what all of them have all the time, upwards. `marks`
    {title: [(operations, label)]} end the parts of the step, each of which is stretched to the same width."""
    fig, ax = plt.subplots(figsize=(9, 4))
    looks = (("-", "#332288"), ("--", "#D55E00"), (":", "#000000"))
    for (title, trace), (line, color) in zip(series.items(), looks):
        ends = [0, *(end for end, _ in marks[title])]
        x, y = [], []
        for part, (start, end) in enumerate(zip(ends, ends[1:])):
            x += [part + (at - start) / (end - start) for at in range(start, end)]
            y += [value / unit for value in trace[start:end]]
        ax.plot(x, y, line, color=color, lw=1.6, label=title)
    labels = [label for _, label in marks[title]]
    for part, label in enumerate(labels):
        ax.text(part + 0.5, 1.01, label, transform=ax.get_xaxis_transform(), ha="center", va="bottom")
        ax.axvline(part + 1, color="black", lw=0.6, alpha=0.6)
    low, high = (pick(map(pick, series.values())) / unit for pick in (min, max))
    cut_floor(ax, low, high, f"{low:.1f} {name}")
    ax.set_xlim(0, len(labels))
    ax.set_xlabel("operations of one step, in order")
    ax.set_xticks([])
    ax.set_ylabel(f"live memory in {name}")
    legend_right(ax)
    return fig


# ---- What a GPU's allocator adds -------------------------------------------------------------------------------


def cuda_allocator(meter, until=None):
    """Replays the step's allocations by the default rules of PyTorch's caching allocator for CUDA. Returns the peaks
    (live, allocated, reserved). A block is a multiple of 512 bytes. It is cut from a segment: 2 MiB for blocks up to
    1 MiB, 20 MiB for blocks below 10 MiB, else the block itself, rounded up to 2 MiB. Segments are never given back
    here. With `until` the step ends at that mark."""
    MiB = 2**20
    free = {True: [], False: []}  # small or large pool -> [(size, segment, start)]
    placed, segments = {}, []
    live = allocated = most_live = most_allocated = 0
    for key, change in meter.step:
        if until is not None and key == until:
            break
        if isinstance(key, str) or change == 0:
            continue
        live += change
        if change > 0:
            block = math.ceil(change / 512) * 512
            small = block <= MiB
            fitting = [gap for gap in free[small] if gap[0] >= block]
            if fitting:
                gap = min(fitting)
                free[small].remove(gap)
            else:
                length = 2 * MiB if small else 20 * MiB if block < 10 * MiB else math.ceil(block / (2 * MiB)) * 2 * MiB
                gap = (length, len(segments), 0)
                segments.append(length)
            rest = gap[0] - block
            if rest >= 512 if small else rest > MiB:
                free[small].append((rest, gap[1], gap[2] + block))
                gap = (block, *gap[1:])
            placed[key] = small, gap
            allocated += gap[0]
        else:
            small, (length, segment, start) = placed.pop(key)
            allocated -= length
            for gap in [g for g in free[small] if g[1] == segment and (g[2] == start + length or g[2] + g[0] == start)]:
                free[small].remove(gap)
                length, start = length + gap[0], min(start, gap[2])
            free[small].append((length, segment, start))
        most_live, most_allocated = max(most_live, live), max(most_allocated, allocated)
    return most_live, most_allocated, sum(segments)


def resident_bytes():
    """The memory of this process as the operating system counts it: its resident set size, RSS."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 1024 * int(
            subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True).stdout
        )


def peak_moment(run):
    """The script's mark that follows the peak of the step."""
    rows, marks = replay(run.meter)
    totals = [sum(value for category, value in row.items() if category != "host") for row in rows]
    at = totals.index(max(totals))
    return next((label for position, label in marks if position > at), marks[-1][1])
