"""stuck.py SCRIPT [options]: the script, in which destroy_process_group() never returns, as it may after a crash.

On the last rank Adam's first step ends with $HOW: "error", or "fail" for a mistake of the user's.
"""

import os
import runpy
import sys
import threading

import torch
import torch.distributed as dist


def never_returns(*args, **kwargs):
    threading.Event().wait()


def step(*args, **kwargs):
    if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        raise RuntimeError("planted") if os.environ["HOW"] == "error" else SystemExit(2)
    never_returns()


dist.destroy_process_group = never_returns
torch.optim.Adam.step = step
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
