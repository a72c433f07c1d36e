"""Carries a change of a shared line from stage0_ddp.py into the other four files: python tests/carry.py

First it merges, as git does: what has changed in stage0_ddp.py since a file was last committed is changed in that file
too. It does not matter whether stage0_ddp.py itself is committed. Where a file differs from stage0_ddp.py on purpose
there may be no place for a change: the file stays as it is, the change is printed, and the exit status is 1. Then
stages 1 to 3 get a copy of every section and function that test_diffs.py wants to be equal, whatever git says.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from itertools import permutations

from launch import ROOT, STAGES
from test_diffs import DIFFERENT, definitions, sections

CONFLICT = re.compile(
    r"^<<<<<<< .*\n((?:.*\n)*?)\|\|\|\|\|\|\| .*\n((?:.*\n)*?)=======\n((?:.*\n)*?)>>>>>>> .*\n", re.MULTILINE
)


def git(folder, *command):
    return subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, encoding="utf-8").stdout


def merge(folder, file):
    """The file with the changes of stage 0 since the file's last commit, and [(where, before, after)] of the rest."""
    text = (folder / file).read_text()
    commit = git(folder, "log", "-1", "--format=%H", "--", file).strip()
    if not commit:
        print(f"{file}: not in git, so nothing tells what has changed; only what all stages share is copied")
        return text, []
    with tempfile.TemporaryDirectory() as temporary:
        base = pathlib.Path(temporary, "base")
        base.write_text(git(folder, "show", f"{commit}:./{STAGES[0]}"))
        merged = git(folder, "merge-file", "-p", "--diff3", file, str(base), STAGES[0])
    left = []
    for conflict in CONFLICT.finditer(merged):
        above = re.findall(r"^(?:def|class) (\w+)", "def docstring\n" + merged[: conflict.start()], re.MULTILINE)
        left.append((above[-1], conflict[2], conflict[3]))
    return CONFLICT.sub(r"\1", merged), left


def copy_shared(folder, file):
    """A stage with the sections and functions of stage 0 that are the same in all stages."""
    first, other = sections(folder / STAGES[0]), sections(folder / file)
    for heading in other.keys() & first.keys():
        if re.search(" [45]. ", heading):
            one, two = definitions(first[heading])[0], definitions(other[heading])[0]
            for name in (one.keys() & two.keys()) - DIFFERENT:
                other[heading] = other[heading].replace(two[name], one[name])
        elif heading != "docstring":
            other[heading] = first[heading]
    docstring = other.pop("docstring")
    return docstring + "".join(heading + text for heading, text in other.items())


def carry(folder):
    """Returns what it could not place: [(file, where, before, after)]."""
    left = []
    for file in (*STAGES[1:], "zero_r.py"):
        before = (folder / file).read_text()
        text, conflicts = merge(folder, file)
        (folder / file).write_text(text)
        if file in STAGES:
            (folder / file).write_text(copy_shared(folder, file))
        text = (folder / file).read_text()
        print(f"{file}: {'changed' if text != before else 'as it was'}")
        for where, old, new in conflicts:
            if new and new in text:
                continue  # a line of a shared section, which has been copied
            gone, added = ([x for x in a if x not in b] for a, b in permutations([old.splitlines(), new.splitlines()]))
            print(f"  not carried, since {file} differs here, in {where}:")
            print(*[f"    -{line}" for line in gone], *[f"    +{line}" for line in added], sep="\n")
            left.append((file, where, gone, added))
    return left


if __name__ == "__main__":
    sys.exit(1 if carry(ROOT) else 0)
