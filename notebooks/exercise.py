"""Exercises in real files: a copy of a stage file with marked gaps lies beside the notebook and is edited there.

    mine = Exercise("my_stage1.py", "stage0_ddp.py", goal="stage1_os.py", given=["full_master"], gaps=[...], steps=3)

writes notebooks/my_stage1.py, unless it is there already. `mine.check()` runs it and prints one line,
`mine.start_again()` writes it anew, `mine.fill(a="...", b="...")` puts a text into each gap: that is how a solution
is written down. What the file was before these two is kept as my_stage1.before.py.
"""

import ast
import pathlib
import re
import shutil
import textwrap

import lesson

FOLDER = pathlib.Path(__file__).resolve().parent


class Exercise:
    """file     the student's file, in the folder of the notebooks
    source   the script it is a copy of
    goal     the script (or a path) that a right copy has to equal; or None, and `check` takes a `judge`
    given    names of functions and classes (or "Class.method") that are taken over from `goal`
    changes  [(old, new), ...] further changes of the copy; each old text occurs once
    gaps     [(letter, first, task), ...] or [(letter, first, task, last), ...]: the gap goes from the line in which the
             text `first` begins to the one in which it ends, or in which the text `last` ends, the next one from there
    hints    {what: sentence} to add to a line of the check; what: "losses", "volume", "whole", or a category of memory
    options  of the script, for the runs of the check
    """

    def __init__(self, file, source, goal=None, given=(), changes=(), gaps=(), hints=None, ranks=2, **options):
        self.path, self.source, self.goal_script = FOLDER / file, source, goal
        self.hints, self.ranks, self.options = hints or {}, ranks, options
        self.goal_run, self.last = None, None
        text = (lesson.ROOT / source).read_text()
        for name in given:
            text = replaced(text, definition(text, name), definition((lesson.ROOT / goal).read_text(), name), source)
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

    def run(self, limit=120, **options):
        """A run of the file under watch.py. An error of the file is a RuntimeError of one line."""
        try:
            compile(self.path.read_text(), self.path.name, "exec")
        except SyntaxError as error:
            raise RuntimeError(f"{type(error).__name__}: {error.msg} ({self.path.name}, line {error.lineno})") from None
        options = self.options | options
        self.last = lesson.run(self.path, ranks=self.ranks, quiet=True, watch=True, limit=limit, **options)
        return self.last

    def check(self, judge=None):
        """Runs the file and prints one line. `judge(run)` says what is wrong with a run, or "" if nothing is; without
        it the run is compared with one of `goal`. Returns whether the file is right."""
        if not self.path.exists() or self.path.read_text() == self.template:
            print(f"{self.path.name}: not solved yet")
            return False
        try:
            mine = self.run()
        except RuntimeError as error:
            print(f"{self.path.name}: not yet. {error}")
            return False
        if judge is None and self.goal_run is None:
            self.goal_run = lesson.run(self.goal_script, ranks=self.ranks, quiet=True, watch=True, **self.options)
        wrong = judge(mine) if judge else difference(mine, self.goal_run, self.hints)
        good = f"right: {pathlib.Path(self.goal_script or '').name or 'all'} has the same losses, weights and volume"
        good = good if not judge else "right"
        if not judge:
            good += f", and at {len(mine.of('moment', 0))} moments and between them this needs no more memory"
        print(f"{self.path.name}: " + (f"not yet. {wrong}" if wrong else good))
        return not wrong


def difference(mine, goal, hints=None):
    """One line on the first thing in which a watched run falls behind another, or "". Losses, weights and what is sent
    are compared exactly. Memory may be less, at each moment and between them, and one layer's fp32 slice more."""
    hints = hints or {}

    def line(what, text):
        return f"{text} {hints[what]}" if what in hints else text

    for step, (have, want) in enumerate(zip(mine.losses, goal.losses)):
        if have != want:
            return line("losses", f"The loss of step {step} is {have}, and {want} is wanted, to the last bit.")
    if mine.weights != goal.weights:
        return line("losses", "The losses are right, but the weights after the last step are not.")
    have, want = (run.one("communication")["elements"] for run in (mine, goal))
    if have != want:
        text = f"A rank sends {have / goal.psi:.3f} Ψ elements in a step, and {want / goal.psi:.3f} Ψ are wanted."
        return line("volume", text)
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


def replaced(text, old, new, source):
    if text.count(old) != 1:
        raise ValueError(f"this occurs {text.count(old)} times in {source} and should occur once:\n{old}")
    return text.replace(old, new)


def marked(text, source, letter, first, task, last=""):
    """The text with the marks of one gap around its lines."""
    if text.count(first) != 1:
        raise ValueError(f"this occurs {text.count(first)} times in {source} and should occur once:\n{first}")
    at = text.index(first)
    start, end = text.rfind("\n", 0, at) + 1, at + len(first.rstrip("\n"))
    end = text.index(last, at) + len(last.rstrip("\n")) if last else end
    end = text.index("\n", end) + 1
    indent = re.match(" *", text[start:])[0]
    words = textwrap.wrap(task, 112 - len(indent))
    head = f"{indent}# >>> {letter}. " + f"\n{indent}#  ".join(words) + "\n"
    return text[:start] + head + text[start:end] + f"{indent}# <<< {letter}\n" + text[end:]
