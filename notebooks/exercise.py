"""Exercises in real files: a copy of a stage file with marked gaps lies beside the notebook and is edited there.

    mine = Exercise("my_stage1.py", "stage0_ddp.py", goal="stage1_os.py", given=["full_master"], gaps=[...], steps=3)

writes notebooks/my_stage1.py, unless it is there already. `mine.check()` runs it twice, the second time on another
number of ranks with sizes that nothing divides, and prints one line. `mine.start_again()` writes it anew.
`mine.fill(a="...", b="...")` puts a text into each gap: that is how a solution is written down. What the file was
before these two is kept as my_stage1.before.py.
"""

import ast
import functools
import pathlib
import re
import shutil
import textwrap
import time
from itertools import zip_longest

import lesson
from places import code_of, place, replaced

FOLDER = pathlib.Path(__file__).resolve().parent
LIMIT = 20  # seconds after which a run counts as one that hangs; on a busy machine, five times what the goal takes
# What is right for the sizes of a notebook only is not right here.
ODD = dict(layers=2, width=35, heads=5, vocab=257, context=16, batch=2, micro_batches=3, steps=2)
ODD_RANKS = 5
SLACK = 2**16  # bytes by which equal runs may differ in what is no tensor; of 90 pairs one did by 34,960


class Exercise:
    """file     the student's file, in the folder of the notebooks
    source   the script it is a copy of
    goal     the script (or a path) that a right copy has to equal; or None, and `check` takes a `judge`
    given    names of functions and classes (or "Class.method") that are taken over from `goal`
    changes  [(old, new), ...] further changes of the copy; each old code occurs once
    gaps     [(letter, first, task), ...] or [(letter, first, task, last), ...]: the gap goes from the line in which the
             code `first` begins to the one in which it ends, or in which the code `last` ends, the next one from there
    hints    {what: sentence} to add to a line of the check; what: "losses", "volume", "whole", or a category of memory
    options  of the script, for the first run of the check
    """

    def __init__(self, file, source, goal=None, given=(), changes=(), gaps=(), hints=None, ranks=2, **options):
        self.path, self.source, self.goal_script = FOLDER / file, source, goal
        self.hints, self.ranks, self.options = hints or {}, ranks, options
        self.last = None
        text = (lesson.ROOT / source).read_text()
        for name in given:
            text = text.replace(definition(text, name), definition((lesson.ROOT / goal).read_text(), name))
        for old, new in changes:
            text = replaced(text, old, new, source)
        for gap in gaps:
            text = marked(text, source, *gap)
        self.template = f"# A copy of {source} to work on. Your parts lie between '# >>>' and '# <<<'.\n" + text
        if not self.path.exists():
            self.path.write_text(self.template)
        self.where()

    def where(self):
        lines = enumerate(self.path.read_text().splitlines(), 1)
        places = [f"{m[1]} in line {at}" for at, line in lines if (m := re.match(r" *# >>> (\w+)\.", line))]
        print(f"Open {self.path.name}, beside this notebook" + (": " + ", ".join(places) if places else ""))

    def write(self, text):
        if self.path.exists() and self.path.read_text() not in (self.template, text):
            shutil.copy(self.path, self.path.with_suffix(".before.py"))
        self.path.write_text(text)

    def start_again(self):
        """Writes the file as it was at first."""
        self.write(self.template)
        self.where()

    def fill(self, **parts):
        """Writes the file with these texts in its gaps, each indented as its gap is."""
        text = self.template
        for letter, part in parts.items():
            gap = re.search(rf"^( *)# >>> {letter}\. .*\n(?: *#  .*\n)*((?:.*\n)*?) *# <<< {letter}\n", text, re.M)
            part = textwrap.indent(textwrap.dedent(part).strip("\n"), gap[1])
            text = text[: gap.start(2)] + (part + "\n" if part else "") + text[gap.end(2) :]
        self.write(text)

    def altered(self):
        """What is wrong with the file before it runs: it has to be Python, and that of the template outside its gaps.
        Comments may be others."""
        text = self.path.read_text()
        try:
            compile(text, self.path.name, "exec")
        except SyntaxError as error:
            return f"{type(error).__name__}: {error.msg} ({self.path.name}, line {error.lineno})"
        except ValueError as error:
            return f"{self.path.name} is not a text: {error}"
        for letter in re.findall(r"# >>> (\w+)\.", self.template):
            if not re.search(rf"^ *# >>> {letter}\..*\n(.*\n)*? *# <<< {letter}$", text, re.M):
                return f"The marks of gap {letter} are gone: start_again() writes the file anew."
        mine, wanted = (code_of(outside(each)) for each in (text, self.template))
        for have, want in zip_longest(mine[0].splitlines(), wanted[0].splitlines(), fillvalue=""):
            if have != want:
                return f"Outside of the gaps the file shall stay as it is: '{want.strip()}', and not '{have.strip()}'."
        return ""

    def run(self, ranks=None, **options):
        """A run of the file under watch.py. An error of the file is a RuntimeError of one line."""
        if wrong := self.altered():
            raise RuntimeError(wrong)
        limit = 5 * LIMIT  # of a run that is judged, and compared with no other
        if self.goal_script:
            limit = goal_run(self.goal_script, self.ranks, **self.options).limit
        return watched(self.path, ranks or self.ranks, limit, **self.options | options)

    def check(self, judge=None):
        """Runs the file and prints one line. `judge(run)` says what is wrong with a run, or "" if nothing is; without
        it the run is compared with one of `goal`. Returns whether the file is right."""
        if not self.path.exists() or self.path.read_text() == self.template:
            print(f"{self.path.name}: not solved yet")
            return False
        good, where = "right", ""
        try:
            self.last = self.run()
            if judge:
                wrong = judge(self.last)
            else:
                wrong = difference(self.last, goal_run(self.goal_script, self.ranks, **self.options), self.hints)
                good += (
                    f": {pathlib.Path(self.goal_script).name} has the same losses, norms, weights and volume, and at "
                )
                good += f"{len(self.last.of('moment', 0))} moments and between them this needs no more memory"
                if not wrong:
                    where = f"On {ODD_RANKS} ranks, with {ODD['micro_batches']} micro-batches and odd sizes: "
                    goal = goal_run(self.goal_script, ODD_RANKS, **ODD)
                    wrong = difference(watched(self.path, ODD_RANKS, goal.limit, **ODD), goal, self.hints)
                    wrong = wrong and where + wrong
        except RuntimeError as error:
            wrong = where + str(error)
        print(f"{self.path.name}: " + (f"not yet. {wrong}" if wrong else good))
        return not wrong


def watched(script, ranks, limit, **options):
    return lesson.run(script, ranks=ranks, quiet=True, watch=True, limit=limit, forked=True, **options)


@functools.cache
def goal_run(script, ranks, **options):
    """A run to compare with, and the `limit` of seconds that another may take."""
    began = time.monotonic()
    run = watched(script, ranks, 600, **options)
    run.limit = max(LIMIT, round(5 * (time.monotonic() - began)))
    return run


def outside(text):
    """A file without what lies in its gaps."""
    return re.sub(r"^( *# >>> (\w+)\..*\n)(?:.*\n)*? *# <<< \2$", r"\1", text, flags=re.M)


def difference(mine, goal, hints=None):
    """One line on the first thing in which a watched run falls behind another, or "". Losses, norms, weights and what
    is sent are compared exactly. Memory may be less, at each moment and between them, and one layer's fp32 slice
    more."""
    hints = hints or {}

    def line(what, text):
        return f"{text} {hints[what]}" if what in hints else text

    for step in range(len(goal.losses)):
        for what, have, want in (("loss", mine.losses, goal.losses), ("norm", mine.norms, goal.norms)):
            if have[step] != want[step]:
                text = f"The {what} of step {step} is {have[step]}, and {want[step]} is wanted, to the last bit."
                return line("losses" if what == "loss" else "norms", text)
    if mine.weights != goal.weights:
        return line("losses", "The losses are right, but the weights after the last step are not.")
    for have, want in zip(mine.of("traffic"), goal.of("traffic")):
        for what, name, per in (("elements", "Ψ elements", goal.psi), ("bytes", "bytes", 1)):
            if abs(have[what] - want[what]) > 0.5:
                text = f"A rank sends {have[what] / per:,.3f} {name} in a step, and {want[what] / per:,.3f} are wanted."
                return line("volume", text)
        if have["few"] > 20 * want["few"]:
            return line("volume", f"{have['few']} elements of a step are sent a few at a time: what for?")
    for rank in range(goal.ranks):
        have, want = mine.one("whole", rank), goal.one("whole", rank)
        if have["stale"]:
            text = f"{have['stale']} has been used and is still whole when a later layer is gathered: release it first."
            return line("whole", text)
        if have["most"] > want["most"]:
            return line("whole", f"{have['most']} gathered layers are whole at a time, and {want['most']} are enough.")
        pairs = list(zip(mine.of("moment", rank), goal.of("moment", rank)))
        labels = [[moment["label"] for moment in run.of("moment", rank)] for run in (mine, goal)]
        if labels[0] != labels[1]:
            return "The marks of the step are others: leave the lines with meter.mark and meter.computing as they were."
        for key, words in (("at", "At '{}' there are"), ("most", "Before '{}' there are up to")):
            for have, want in pairs:
                for category, value in have[key].items():
                    enough = want[key].get(category, 0)
                    if value > enough + goal.one("whole", rank)["slice"]:
                        what = {"optimizer": "optimizer states", "total": "all kinds"}.get(category, category)
                        text = f"{words.format(have['label'])} {value:,} bytes of {what}, and {enough:,} are enough."
                        return line(category, text + culprit(mine, goal, rank))
        for have, want in pairs:
            if (more := have["besides"] - want["besides"]) > SLACK:
                return f"At '{have['label']}' there are {more:,} bytes in something that is no tensor: what are they?"
    return ""


def culprit(mine, goal, rank):
    """The largest tensor that hangs on a layer of one run and not of the other, in words."""
    known = {found["where"] for found in goal.of("found", rank)}
    found = [found for found in mine.of("found", rank) if found["where"] not in known]
    most = max(found, key=lambda found: found["bytes"], default=None)
    return f" {most['where']} keeps {most['bytes']:,} bytes alive." if most else ""


def definition(text, name):
    """The source of a function, a class or a method of a script."""
    nodes = ast.parse(text).body
    for part in name.split("."):
        node = next(node for node in nodes if getattr(node, "name", "") == part)
        nodes = getattr(node, "body", [])
    lines = text.splitlines(keepends=True)
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(lines[start - 1 : node.end_lineno])


def marked(text, source, letter, first, task, last=""):
    """The text with the marks of one gap around its lines."""
    start, end = place(text, first, source)
    if last:
        _, end = place(text, last, source, after=end)
    start, end = text.rfind("\n", 0, start) + 1, text.index("\n", end - 1) + 1
    indent = re.match(" *", text[start:])[0]
    words = textwrap.wrap(task, 112 - len(indent))
    head = f"{indent}# >>> {letter}. " + f"\n{indent}#  ".join(words) + "\n"
    return text[:start] + head + text[start:end] + f"{indent}# <<< {letter}\n" + text[end:]
