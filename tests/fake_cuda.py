"""Runs stage files on a CUDA device that computes nothing, as the ranks of a cluster would, one rank at a time.

fake_cuda.cpp is the device, race.py watches the run. A stage file takes the path that it takes on GPUs: torchrun's
variables are set, it asks for NCCL and gets a group of PyTorch's own for tests ("fake"), which is of any size and
returns at once. So a run shows operands on two devices, calls that CUDA or NCCL would refuse, races, and what the meter
counts there. It can't show numbers.

    python tests/fake_cuda.py              reads cases, a JSON object a line, and answers each with another
    python tests/fake_cuda.py --peaks      how the peaks differ on a GPU, by the meter
    python tests/fake_cuda.py --kernels    how many kernels a step starts, and sum_of_squares of them

A case is {"script", "args", "rank", "ranks"}; `ranks` 0 is python without torchrun. One process runs many of them,
since importing torch takes longer than a run. test_cuda.py has the cases.
"""

import contextlib
import ctypes
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = 8  # as fake_cuda.cpp has


def build(folder):
    """Compiles the device and returns the library. Takes four seconds, and a C++ compiler."""
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    library = pathlib.Path(folder, "fake_cuda.so")
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-o", library, ROOT / "tests/fake_cuda.cpp"]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return library


def load(library):
    """Before torch is imported: it looks once for a device's hooks."""
    assert "torch" not in sys.modules
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    for name in (f"{torch_folder}/lib/libc10.so", f"{torch_folder}/lib/libtorch_cpu.so"):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Event:
    """In place of torch.cuda.Event. Nothing is queued, so the CPU's clock will do."""

    def __init__(self, **_):
        self.seconds = None

    def record(self, *_):
        self.seconds = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.seconds - self.seconds)


class Runs:
    """What stays from run to run: the device, and the answers of torch.cuda."""

    def __init__(self, device):
        global torch, dist, race, FakeTensorMode
        import race
        import torch
        import torch.distributed as dist
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.device, self.current, self.was_set = device, 0, False
        self.real_init = dist.init_process_group
        properties = types.SimpleNamespace(major=8, minor=0, name="fake")  # an A100, which has bfloat16
        answers = {
            "Event": Event,
            "is_available": lambda: True,
            "device_count": lambda: DEVICES,
            "set_device": self.set_device,
            "current_device": lambda: self.current,
            "get_device_properties": lambda *_: properties,
            "get_device_capability": lambda *_: (properties.major, properties.minor),
            "reset_peak_memory_stats": lambda *_: None,
            "max_memory_allocated": lambda *_: 0,
            "max_memory_reserved": lambda *_: 0,
        }
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)

    def set_device(self, device):
        self.current, self.was_set = torch.device(device).index, True
        self.device.set_fake_device(self.current)

    def init_process_group(self, case):
        def init(backend, rank=None, world_size=None, device_id=None, timeout=None):
            if case["ranks"]:
                assert self.was_set, "NCCL would put all ranks on the first GPU"
                assert backend == "nccl" and device_id == torch.device("cuda", self.current)
                rank, world_size = case["rank"], case["ranks"]
            self.real_init("fake", rank=rank, world_size=world_size)

        return init

    def all_gather_object(self, everyone, mine, group=None):
        """NCCL sends objects as tensors, on the device that is current."""
        assert self.was_set, "NCCL would put all ranks' objects on the first GPU"
        everyone[:] = [mine] * len(everyone)

    def run(self, case):
        """One rank of a case: what race.py found, the records of the log, and the error that ended it, if one did."""
        path = ROOT / case["script"]
        spec = importlib.util.spec_from_file_location("stage", path)
        stage = sys.modules["stage"] = importlib.util.module_from_spec(spec)
        environment = dict(os.environ)
        if case["ranks"]:
            place = {"RANK": case["rank"], "LOCAL_RANK": case["rank"]}
            place |= {"WORLD_SIZE": case["ranks"], "LOCAL_WORLD_SIZE": case["ranks"]}
            os.environ |= {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_RUN_ID": "fake"}
        sys.argv = [str(path), "--device", "cuda", *map(str, case["args"])]
        log, out, found = io.StringIO(), io.StringIO(), {"error": None}
        self.set_device("cuda:0")
        self.was_set = False
        try:
            spec.loader.exec_module(stage)
            stage.gc = types.SimpleNamespace(collect=lambda: None)  # would walk through torch: half the time of a run
            dist.init_process_group, dist.all_gather_object = self.init_process_group(case), self.all_gather_object
            real_run, choose_device = stage.run, stage.choose_device

            def run(cfg, data, device, _):
                watch = race.Watch(path, device)
                try:
                    with FakeTensorMode(allow_non_fake_inputs=True), watch.watching(stage):
                        real_run(cfg, data, device, log)
                finally:
                    found.update(watch.found(), device=str(device), compute=cfg.compute)

            def choose(cfg):
                """A simulation chooses the CPU. Here it gets the arithmetic of a GPU, too."""
                simulated, cfg.simulate_ranks = cfg.simulate_ranks, 0
                device = choose_device(cfg)
                cfg.simulate_ranks = simulated
                return device

            stage.run, stage.choose_device = run, choose
            stage.check_layers = lambda *args: None  # it compares numbers, and these tensors have none
            with contextlib.redirect_stdout(out):
                stage.main()
        except BaseException:
            found["error"] = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment)
        found["records"] = [json.loads(line) for line in log.getvalue().splitlines()]
        return found


def peak(run):
    assert run["error"] is None, run["error"]
    (memory,) = (record for record in run["records"] if record["event"] == "memory" and record["rank"] == 0)
    return memory


def print_peaks(runs):
    """The default model on four ranks, rank 0: on the CPU, and on a GPU with either kind of collectives."""
    from launch import STAGES, launch

    print("| file | at the peak | CPU, gloo | GPU, gloo | GPU, NCCL | NCCL / CPU |\n|---|---|--:|--:|--:|--:|")
    for script in STAGES:
        (cpu,) = launch(script, "--simulate-ranks", 4, "--collectives", "gloo", "--device", "cpu").of("memory")
        case = {"script": script, "rank": 0, "ranks": 4}
        gpu = [peak(runs.run(case | {"args": ["--steps", 1, "--collectives", way]})) for way in ("gloo", "native")]
        for name in ("activations", "buffers", "peak"):  # in MB
            sizes = [(memory | memory["at_peak"])[name] / 1e6 for memory in (cpu, *gpu)]
            ratio = f"{sizes[2] / sizes[0]:.3f}" if sizes[0] else ""
            print(f"| `{script}` | {name} | " + " | ".join(f"{size:.2f}" for size in sizes) + f" | {ratio} |")


def print_kernels(runs):
    print("| file | options | kernels | sum_of_squares | share | Adam steps |\n|---|---|--:|--:|--:|--:|")
    cases = [("stage1_os.py", []), ("zero_r.py", ["--config", "none"])]
    cases += [("zero_r.py", ["--config", "full", "--buffer-elements", size]) for size in (2**18, 2**24)]
    for ranks in (1, 4):
        for script, args in cases:
            run = runs.run({"script": script, "args": ["--steps", 1, *args], "rank": 0, "ranks": ranks})
            assert run["error"] is None, run["error"]
            total, squares = sum(run["kernels"].values()), run["kernels"]["sum_of_squares"]
            options, steps = " ".join(map(str, args)), run["operations"]["_fused_adam_"]
            print(f"| `{script}` | N = {ranks} {options} | {total} | {squares} | {squares / total:.1%} | {steps} |")
            print(dict(run["kernels"].most_common(8)), dict(run["operations"].most_common(60)), file=sys.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="zero-fake-cuda-") as folder:
        shown = {"--peaks": print_peaks, "--kernels": print_kernels}.get(sys.argv[1])
        runs = Runs(load(build(folder) if shown else sys.argv[1]))
        if shown:
            shown(runs)
        else:
            for line in sys.stdin:
                print(json.dumps(runs.run(json.loads(line))), flush=True)
