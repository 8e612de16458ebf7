"""HAMi-core beside the product, where HAMI_CORE names a build of it (libvgpu.so). See README.md in this folder.

It is a library that is preloaded into each program and limits it from inside: memory by what the program asks for, GPU time by how
often it launches.
"""

import functools
import hashlib
import itertools
import os
import pathlib
import tempfile

import record
from bed import Bed, GIB, MIB, cuda_worker, nvml_bytes, time_worker, together, worker
from gputime import KERNEL_US, compete, judge
from paths import DEVICE, bed_of, filled
from record import claim, quick, skip
from turns import CPUS, in_turns, quickest

LIBRARY = os.environ.get("HAMI_CORE")
# It lets a program launch so many blocks before it holds it that saturating kernels of half a millisecond run for 8 s first.
SETTLED = 15
POLICY = '[tenant.a]\ncgroup = "@/a"\ntime.weight = 30\n[tenant.b]\ncgroup = "@/b"\ntime.weight = 70\n[tenant.memory]\ncgroup = "@/memory"\nmemory.max = "8GiB"\n'


class Preloaded:
    """Environments of programs with the library in them."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="gpuquota-hami-")
        self.numbers = itertools.count()

    def limits(self, memory, cores=0):
        """`memory` as the library wants it, such as "8g"; `cores` in percent, 0 for no limit. Who shares an environment shares its limits."""
        return {
            "LD_PRELOAD": LIBRARY, "CUDA_REDIRECT": LIBRARY, "CUDA_DEVICE_MEMORY_LIMIT_0": memory, "CUDA_DEVICE_SM_LIMIT": str(cores),
            "GPU_CORE_UTILIZATION_POLICY": "force", "LIBCUDA_LOG_LEVEL": "0",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{self.folder.name}/{next(self.numbers)}",
        }


def which(_):
    digest = hashlib.sha256(pathlib.Path(LIBRARY).read_bytes()).hexdigest()
    claim("the build that was compared", None, f"{os.environ.get('HAMI_CORE_VERSION', 'version not told')}, sha256 {digest[:16]}", key="hami/build")


def memory(preloaded):
    """How much of 8 GiB PyTorch gets, as NVML tells it."""
    host = Bed(POLICY)
    for system, one in (("HAMi-core", worker(None, None, "torch_worker.py", preloaded.limits("8g"))), ("gpuquota", host.worker("memory"))):
        pid = one.tell("context")["pid"]
        try:
            one.tell("fill 256 20000")
            error = one.tell("fill 2 20000")["error"]
        except RuntimeError as ended:
            error = str(ended)
        used = nvml_bytes().get(pid, 0)
        claim(f"8 GiB under {system}: what NVML tells of a PyTorch program that takes all it gets" + (": 8 GiB at most" if system == "gpuquota" else ""),
              used <= 8 * GIB if system == "gpuquota" else None, f"{used / MIB:.0f} MiB of 8192, {error}", key=f"hami/memory/{system}", used=used)
        one.close()
    host.close()


def ways(preloaded):
    """Every way to allocate, filled past 2 GiB."""
    host = bed_of()
    for way in DEVICE:
        one = cuda_worker(None, None, environment=preloaded.limits("2g"))
        pid = one.tell("context")["pid"]
        answer = one.tell(f"fill {way.replace(' ', '_')} 64 3072")
        used = nvml_bytes().get(pid, 0)
        one.close()
        ours, *_ = filled(host, way)
        told = lambda answer: f"{answer['mib']} MiB" + (f", then error {answer['code']}" if answer["code"] else ", no limit met")
        claim(f"{way}, 3 GiB under a limit of 2 GiB", None,
              f"HAMi-core: {told(answer)} (NVML {used // MIB} MiB); gpuquota: {told(ours)}", key=f"hami/way/{way}", hami=answer["mib"], ours=ours["mib"])
    host.close()


def dropped(preloaded):
    """A program that starts itself anew without the library."""
    host = Bed(POLICY)
    for system, one in (("HAMi-core", cuda_worker(None, None, environment=preloaded.limits("8g"))), ("gpuquota", cuda_worker(host, "memory"))):
        one.tell("without-preload")
        one.tell("context")
        answer = one.tell("fill cuMemAlloc 256 16384")
        holds = answer["code"] == 2 and answer["mib"] < 8192
        claim(f"a program under {system} that unsets LD_PRELOAD and starts itself anew" + (": held all the same" if system == "gpuquota" else ""),
              holds if system == "gpuquota" else None, f"{answer['mib']} MiB under a limit of 8192, error {answer['code']}", key=f"hami/dropped/{system}")
        one.close()
    host.close()


def shares(preloaded):
    """Saturating kernels at 30 : 70, in turns."""
    host = Bed(POLICY)
    pairs = {"HAMi-core, 30 and 70 % of the cores": [time_worker(None, None, preloaded.limits("70g", cores)) for cores in (30, 70)],
             "gpuquota, weights 30:70": [time_worker(host, tenant) for tenant in "ab"]}
    # The library finds out its own process id from what NVML shows before and after: one at a time.
    for pair in pairs.values():
        for one in pair:
            one.tell("context")
    rounds = pairs["gpuquota, weights 30:70"][0].tell(f"calibrate {KERNEL_US}")["rounds"]
    seconds, found = quick(10, 30), {system: [] for system in pairs}
    alone = [sum(counts) for counts in compete("gpuquota, one alone", pairs["gpuquota, weights 30:70"][:1], [f"saturate {rounds} 4.5"], 3)]
    for run in range(quick(1, 3)):
        for system, pair in pairs.items():
            found[system].append(compete(system, pair, [f"saturate {rounds} {SETTLED + seconds + 1.5}"] * 2, seconds, SETTLED, run))
    for system, runs in found.items():
        key = system.split(",")[0]
        rates = judge(system, runs, (30, 70) if key == "gpuquota" else None, key=f"hami/share/{key}")
        firsts = [100 * first / ((first + second) or 1) for counts in runs for first, second in counts]
        claim(f"{system}: share of the first in single seconds, and the sum of both / alone", None,
              f"{min(firsts):.1f} to {max(firsts):.1f} %; {sum(rates) / record.median(alone):.1%}", key=f"hami/swing/{key}")
    for pair in pairs.values():
        for one in pair:
            one.close()
    host.close()


def cost(preloaded):
    """What a memory limit costs calls and a step, in turns."""
    host = Bed(POLICY)
    systems = {"nothing": (None, None), "HAMi-core": (None, preloaded.limits("70g")), "gpuquota": ("memory", None)}
    calls = {system: cuda_worker(host, tenant, environment=environment, cpus=CPUS) for system, (tenant, environment) in systems.items()}
    steps = {system: time_worker(host, tenant, environment, cpus=CPUS) for system, (tenant, environment) in systems.items()}
    for one in (*calls.values(), *steps.values()):
        one.tell("context")
    together(list(steps.values()), "step decode 0.3")
    least = lambda one, line: min(one.tell(line)["ns"] for _ in range(3))
    for what, unit, workers, ask in (
        ("empty launch", "ns", calls, lambda one: least(one, "cost 50000")),
        ("cuMemAlloc and cuMemFree of 2 MiB", "us", calls, lambda one: least(one, "allocations 300") / 1000),
        ("decoder step, eager", "ms", steps, lambda one: one.tell(f"step decode {quick(0.3, 1)}")["p50"]),
    ):
        best = quickest(in_turns(f"hami {what}", {system: functools.partial(ask, one) for system, one in workers.items()}, quick(5, 9)))
        told = (f"{system} {value:.4g} {unit}, times {value / best['nothing']:.3f}" for system, value in best.items() if system != "nothing")
        claim(f"{what} under a memory limit", None, f"without {best['nothing']:.4g} {unit}; " + "; ".join(told), key=f"hami/cost/{what}", **best)
    for one in (*calls.values(), *steps.values()):
        one.close()
    host.close()


PARTS = {"build": which, "memory": memory, "ways": ways, "dropped": dropped, "shares": shares, "cost": cost}


def absent():
    skip("HAMi-core", "HAMI_CORE names no build of it")


if __name__ == "__main__":
    if LIBRARY is None:
        record.run("hami", {"build": absent})
    if not os.access(LIBRARY, os.R_OK):
        raise SystemExit(f"error: HAMI_CORE: {LIBRARY} can't be read; it should be the path of libvgpu.so")
    preloaded = Preloaded()
    record.run("hami", {name: functools.partial(part, preloaded) for name, part in PARTS.items()})
