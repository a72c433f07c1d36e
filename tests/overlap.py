"""How much of the communication is hidden behind computation: python tests/overlap.py prints a table.

Linux, as root. On a machine's own loopback there is little to hide: the processor that moves the bytes is the one that
computes. So the ranks of a run meet in a network namespace, whose loopback lets through only so many bits a second.
"""

import contextlib
import subprocess

from launch import ROOT, STAGES, launch, progress

# Many layers, because some of the communication at either end of a pass has nothing to hide behind; and steps of half a
# second, beside which it is little that one rank is late for the other.
OPTIONS = (
    *"--layers 12 --width 192 --heads 4 --context 128 --batch 4".split(),
    *"--steps 10 --compute float32 --device cpu".split(),
)


class Unavailable(Exception):
    """This machine or this user can't have a network namespace with a slow loopback."""


@contextlib.contextmanager
def link(mbit=None):
    """The path of a network namespace with a loopback of so many Mbit/s (None: as fast as it is).

    It belongs to a process that waits for the end of its input and so goes when this process does, however it ends.
    """
    # Small packets and a small bucket: what collects there while the ranks compute would make the next message free.
    slow = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 16kb latency 2s && ip link set lo mtu 1500 &&"
    try:
        owner = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"ip link set lo up && {slow if mbit else ''} echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Unavailable(str(error)) from None
    with owner:  # closes its input and waits for it
        if owner.stdout.readline() != "ready\n":
            raise Unavailable(owner.stderr.read().strip())
        yield f"/proc/{owner.pid}/ns/net"


def time_run(namespace, script, ranks, overlap):
    """(ms of a step, ms of it spent waiting, bytes that all ranks send in it), with one thread a rank."""
    progress(f"{script} on {ranks} ranks, overlap {overlap}")
    options = [*OPTIONS, "--overlap", overlap]
    run = launch("tests/slow_link.py", namespace, ROOT / script, *options, ranks=ranks)
    (sent,) = run.of("communication")
    times = [step["ms"] for step in run.of("step")[2:-1]]  # as the run itself averages waited_ms: no warm-up, no meter
    return sum(times) / len(times), sent["waited_ms"], ranks * sent["bytes"]


def hidden(waited_off, waited_on):
    """The share of the communication that took place while the step computed."""
    return 1 - waited_on / waited_off


def matching_mbit(script, ranks, share):
    """The bandwidth with which communication takes `share` of the time of computation, on this machine as it is now."""
    with link() as namespace:
        ms, waited_ms, sent = time_run(namespace, script, ranks, "off")
    return round(8e-3 * sent / (share * (ms - waited_ms)))


def row(script, ranks, mbit):
    with link(mbit) as namespace:
        (ms_off, waited_off, _), (ms, waited, _) = (time_run(namespace, script, ranks, at) for at in ("off", "on"))
    times = " | ".join(f"{time:.0f}" for time in (ms_off, waited_off, ms, waited))
    rate = f"{mbit} Mbit/s" if mbit else "loopback"
    return f"| `{script}` | {ranks} | {rate} | {times} | {100 * hidden(waited_off, waited):.0f} % |"


def main():
    print("| file | N | link | ms a step, overlap off | of it waiting | ms a step | of it waiting | hidden |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    mbit = matching_mbit(STAGES[3], 2, 0.5)
    for ranks, rate in ((2, mbit), (2, None), (4, None)):
        for script in STAGES:
            print(row(script, ranks, rate), flush=True)


if __name__ == "__main__":
    main()
