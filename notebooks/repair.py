"""The exercises of notebook 6: twenty files to repair, what checks them, and the picture of the matrix.

The files lie in the folder my_faults beside the notebook. The faults, and what measures a file, are in faults.py.
"""

import ast
import difflib
import json
import pathlib
import re
import tempfile

import matplotlib.pyplot as plt
from exercise import ODD, ODD_RANKS, difference, goal_run, watched
from faults import FAULTS, INSTRUMENTS, OPTIONS, ROOT, compared, planted, shows
from launch import launch

FILES = ROOT / "notebooks/my_faults"
NUMBERED = dict(enumerate(FAULTS, 1))
# What measures and reports. No fault lies here, so a repair leaves it as it is.
MEASURING = ("Meter", "Collectives.count", "checksum", "from_all_ranks", "report", "traffic", "main")


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


def parsed(text, name):
    """The code of a class, a function or a method ("Class.method"), blind to comments; "" if it is not there."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next((each for each in getattr(node, "body", []) if getattr(each, "name", "") == part), None)
    return ast.dump(node) if node else ""


def wrong_with(number):
    """One line on what is wrong with the reader's file, or "". It is measured as the fault is, and then under watch.py
    on another number of ranks, with other micro-batches and sizes that nothing divides. Less memory is no fault."""
    fault, path = NUMBERED[number], file_of(number)
    try:
        texts = path.read_text(), (ROOT / fault.file).read_text()
        altered = [name for name in MEASURING if len({parsed(text, name) for text in texts}) > 1]
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if altered:
        return f"{altered[0]} only measures. The fault is elsewhere: put that back as it was"
    mine, wanted = compared(path, fault)
    seen = shows(mine, wanted)
    if seen == ["ending"]:
        return mine["ending"]
    for name in ("bytes", "peak"):
        if name in seen and all(have <= enough for have, enough in zip(mine[name], wanted[name])):
            seen.remove(name)
    if seen:
        return f"It shows in: {', '.join(seen)}"
    odd = ODD | {"micro_batches": 5 - fault.micro_batches if fault.micro_batches > 1 else 3}
    where = f"On {ODD_RANKS} ranks, with {odd['micro_batches']} micro-batches and odd sizes: "
    try:
        goal = goal_run(fault.file, ODD_RANKS, **odd)
        wrong = difference(watched(path, ODD_RANKS, goal.limit, **odd), goal)
    except RuntimeError as error:
        wrong = str(error)
    return wrong and where + wrong


def check_repairs(*numbers):
    """Runs the reader's files that are changed. Returns whether all of them measure as the stage files do."""
    right = 0
    for number in numbers:
        path = file_of(number)
        if not path.exists() or path.read_text() == NUMBERED[number].text():
            print(f"fault {number}: not solved yet")
            continue
        wrong = wrong_with(number)
        print(f"fault {number}: not yet. {wrong}" if wrong else f"fault {number}: right", flush=True)
        right += not wrong
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
