"""The exercises of notebook 6: twenty files to repair, what checks them, and the picture of the matrix.

The files lie in the folder my_faults beside the notebook. The faults, and what measures a file, are in faults.py.
"""

import difflib
import json
import pathlib
import re
import tempfile

import matplotlib.pyplot as plt
from faults import FAULTS, INSTRUMENTS, OPTIONS, ROOT, compared, planted, shows
from launch import launch

FILES = ROOT / "notebooks/my_faults"
NUMBERED = dict(enumerate(FAULTS, 1))


def file_of(number):
    if number not in NUMBERED:
        raise ValueError(f"there are files 1 to {len(FAULTS)}, and no {number}")
    return FILES / f"{number:02}.py"


def write_files():
    """Writes my_faults/01.py and so on beside the notebook. What is there already stays as it is."""
    FILES.mkdir(exist_ok=True)
    new = [number for number in NUMBERED if not file_of(number).exists()]
    start_again(*new)
    print(f"{len(FAULTS)} files lie in the folder {FILES.name} beside this notebook, {len(new)} of them written now.")


def start_again(*numbers):
    """Writes these files anew, with their faults."""
    for number in numbers:
        file_of(number).write_text(NUMBERED[number].text())


def complaints():
    """The rows of a table: what the user of each file says."""
    return [
        [number, f"`{FILES.name}/{number:02}.py`", fault.file, fault.ranks, fault.micro_batches, fault.complaint]
        for number, fault in NUMBERED.items()
    ]


def readings(number):
    """The rows of a table: what each instrument reads in a run of the stage file, and of the reader's file as it is."""
    mine, right = compared(file_of(number), NUMBERED[number])

    def digits(values):
        return ", ".join("NaN" if value is None else f"{value:.6f}" for value in values)

    def by_rank(values):
        return ", ".join(f"{value:,}" for value in values)

    words = {"ending": str, "loss": digits, "norm": digits, "bytes": by_rank, "peak": by_rank, "volume": "{:,}".format}
    words["hash"] = lambda ends: " to ".join(end[:8] for end in ends)
    return [[name, *(words[name](run[name]) if name in run else "" for run in (right, mine))] for name in INSTRUMENTS]


def check_matrix(answers):
    """Compares rows {number: "loss norm"} with what is measured. Returns whether all are right."""
    if not isinstance(answers, dict):
        print('matrix: not yet. It is a dict of rows such as 3: "loss norm"')
        return False
    filled = {number: row for number, row in answers.items() if row is not None and row is not ...}
    if not filled:
        print("matrix: not solved yet")
        return False
    right = 0
    for number, row in filled.items():
        named = set(re.findall(r"\w+", str(row).lower()))
        if number not in NUMBERED:
            print(f"fault {number}: not yet. They are called 1 to {len(FAULTS)}")
        elif unknown := sorted(named - {*INSTRUMENTS}):
            print(f"fault {number}: not yet. No instrument is called {' or '.join(unknown)}: {', '.join(INSTRUMENTS)}")
        else:
            truth = set(shows(*planted(NUMBERED[number])))
            right += named == truth
            if named != truth:
                vain, missed = len(named - truth), len(truth - named)
                print(f"fault {number}: not yet. {vain} of what you name shows nothing, {missed} more would show it")
    print(f"matrix: {'right' if right == len(FAULTS) else 'not yet'}, {right} of {len(FAULTS)} rows")
    return right == len(FAULTS)


def check_instruments(answer, measured, most=4):
    """Do these instruments see every fault of the measured matrix, and are they at most so many?"""
    if answer is None or answer is ...:
        print("exercise 2: not solved yet")
        return False
    named = set(re.findall(r"\w+", str(answer).lower())) & {*INSTRUMENTS}
    blind = [number for number, row in measured.items() if not named & set(row)]
    if blind:
        print(f"exercise 2: not yet. {len(blind)} faults show in none of {sorted(named)}, for example {blind[0]}")
    elif len(named) > most:
        print(f"exercise 2: not yet. They see all faults, but they are {len(named)}")
    else:
        print("exercise 2: right")
    return not blind and len(named) <= most


def check_repairs(*numbers):
    """Runs the reader's files that are changed. Returns whether all of them measure as the stage files do."""
    right = 0
    for number in numbers:
        path = file_of(number)
        if not path.exists() or path.read_text() == NUMBERED[number].text():
            print(f"fault {number}: not solved yet")
            continue
        mine, wanted = compared(path, NUMBERED[number])
        seen = shows(mine, wanted)
        what = mine["ending"] if seen == ["ending"] else f"It shows in: {', '.join(seen)}"
        print(f"fault {number}: not yet. {what}" if seen else f"fault {number}: right")
        right += not seen
    return right == len(numbers)


def solution(*numbers):
    """Writes these files without their faults. Returns what was wrong, as Markdown."""
    parts = []
    for number in numbers:
        fault = NUMBERED[number]
        wrong, right = fault.text(), (ROOT / fault.file).read_text()
        file_of(number).write_text(right)
        diff = list(difflib.unified_diff(wrong.splitlines(), right.splitlines(), n=1, lineterm=""))[2:]
        parts += [f"**{number}. {fault.name}.** {fault.why}", "\n".join(["```diff", *diff, "```"])]
    return "\n\n".join(parts)


def hanging_on_layers(fault):
    """What hangs on a layer and is none of the model states, in a run with a fault: {where: bytes} of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "planted.py")
        script.write_text(fault.text())
        options = [*OPTIONS, "--micro-batches", fault.micro_batches]
        run = launch("notebooks/watch.py", folder, script, *options, ranks=fault.ranks)
        if run.status:
            raise RuntimeError(run.err)
        records = json.loads(pathlib.Path(folder, "0.json").read_text())
    return {record["where"]: record["bytes"] for record in records if record["event"] == "found"}


def plot_matrix(measured, said):
    """{fault: instruments} as dark fields, and what the reader said, {fault: "loss norm"}, as rings."""
    names = list(INSTRUMENTS)
    fig, ax = plt.subplots(figsize=(9, 3.2))
    for number, row in measured.items():
        for y, name in enumerate(names):
            color = "#332288" if name in row else "#EEEEEE"
            ax.add_patch(plt.Rectangle((number - 0.45, y - 0.45), 0.9, 0.9, facecolor=color))
            if name in re.findall(r"\w+", str(said.get(number))):
                ax.plot(number, y, "o", ms=10, mfc="none", mec="#E69F00", mew=2)
    for edge in (2.5, 13.5, 18.5):  # between the four kinds of faults
        ax.axvline(edge, color="black", lw=0.8)
    ax.set_xlim(0.4, len(measured) + 0.6)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xticks(list(measured))
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("fault")
    return fig
