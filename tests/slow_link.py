"""Runs a stage file in another network namespace: slow_link.py /proc/PID/ns/net STAGE [options of the stage].

The ranks of a run enter the namespace one by one, before they start any thread, and meet there at a store of their
own. Each computes with one thread.
"""

import ctypes
import os
import runpy
import sys

CLONE_NEWNET = 0x40000000

libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
with open(sys.argv[1]) as namespace:
    if libc.setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {sys.argv[1]}")
os.environ |= {
    "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_PORT": "29500",  # nobody else is here
    "LOCAL_WORLD_SIZE": str(os.cpu_count()),  # the ranks divide the cores by this: one thread each
}  # fmt: skip
del sys.argv[:2]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
