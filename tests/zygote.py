"""torchrun minus the import time: a process that has imported torch and forks the ranks of one run after another.

Started by launch.py, which writes one JSON object a line: {"script", "args", "ranks", "env", "folder", "timeout",
"whole_exit"}. The answer is one line too, the folder and the exit statuses of the ranks. A rank's output goes to files
in the folder. Nothing here may start a thread before the fork (no arithmetic, no process group): it wouldn't survive
it.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time

import numpy  # noqa: F401  what a stage file or PyTorch on its way imports
import torch
import torch._dynamo
import torch._subclasses.fake_tensor
import torch.distributed
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.func
import torch.nn.parallel
import torch.optim
import torch.profiler
import torch.testing._internal.distributed.fake_pg  # noqa: F401


def serve():
    """Answers commands until there are no more. Returns in the children only: the command."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt ends the ranks of a run, not this process
    gc.collect()
    gc.freeze()  # a rank's gc.collect() need not walk through all of torch's modules
    for line in sys.stdin:
        command = json.loads(line)
        ranks, folder, children = command["ranks"], command["folder"], {}
        for rank in range(max(1, ranks)):
            pid = os.fork()
            if not pid:
                answers.detach()  # the parent's pipe: neither written nor closed here
                become_rank(rank, command["env"], ranks, folder)
                return command
            children[pid] = rank
        print(json.dumps([folder, wait(children, command["timeout"])]), file=answers, flush=True)
    sys.exit()


def become_rank(rank, env, ranks, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(env)
    if ranks:  # as torchrun sets them; without it none of these
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    for descriptor, path in ((0, os.devnull), (1, f"{folder}/out{rank}"), (2, f"{folder}/err{rank}")):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


def wait(children, timeout):
    """Waits for {pid: rank}. When one fails, or time is up, the others are ended, as torchrun does."""
    statuses, deadline, ending = [None] * len(children), time.monotonic() + timeout, False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline or (pid and status and not ending):
            for other in children:
                os.kill(other, signal.SIGKILL if ending else signal.SIGTERM)
            ending, deadline = True, time.monotonic() + 5
        if not pid:
            time.sleep(0.005)
    return statuses


command, status = serve(), 1
sys.argv = [command["script"], *command["args"]]
sys.path[0] = os.path.dirname(command["script"])
if command["whole_exit"]:
    runpy.run_path(command["script"], run_name="__main__")
    sys.exit()
# Taking down all of torch's modules costs as much as a tiny run, so most runs end without.
try:
    runpy.run_path(command["script"], run_name="__main__")
    status = 0
except SystemExit as exit:
    status = exit.code or 0
except BaseException:
    sys.excepthook(*sys.exc_info())
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(status if isinstance(status, int) else 1)
