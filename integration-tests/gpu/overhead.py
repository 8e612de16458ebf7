"""What governed programs pay, beside programs in no tenant, measured in turns. See README.md in this folder."""

import os

import record
from bed import Bed, cuda_worker, time_worker
from record import claim, quick, sample

POLICY = """
[tenant.memory]
cgroup = "@/memory"
memory.max = "100GiB"
[tenant.everything]
cgroup = "@/everything"
memory.max = "100GiB"
time.weight = 200
launch.max = "1G/s"
launch.burst = 1000000000
"""
# Two programs in no tenant: what differs between them is the host's noise, and no cost below it can be told.
SYSTEMS = {"nothing": "no tenant", "again": "no tenant, once more", "memory": "a memory budget", "everything": "memory, time and launch budgets"}


# One takes its turn while the others wait; on CPUs of their own each would be as fast as its CPU happens to be.
CPUS = set(sorted(os.sched_getaffinity(0))[:4])


def start(host, worker):
    return {name: worker(host, name if name in ("memory", "everything") else None, cpus=CPUS) for name in SYSTEMS}


def best(worker, line, times):
    """The least of some measurements in nanoseconds."""
    return min(worker.tell(line)["ns"] for _ in range(times))


def in_turns(what, unit, workers, ask, claims):
    """Measures each in turns, and compares it with the program in no tenant."""
    found = {name: [] for name in SYSTEMS}
    for at in range(quick(9, 15)):
        for name in SYSTEMS:
            found[name].append(ask(workers[name]))
            sample(f"{what}/{name}", at, found[name][-1])
    compare(what, unit, found, claims)


def compare(what, unit, found, claims):
    """By the quickest turn of each: what else the host does makes a turn slower, never quicker."""
    quickest = {name: min(values) for name, values in found.items()}
    without = quickest["nothing"]
    noise = abs(quickest["again"] / without - 1)
    for name, title in list(SYSTEMS.items())[1:]:
        governed, most = quickest[name], claims.get(name)
        ratio = governed / without
        claim(f"{what}, {title}" + (f": at most {most} times, or within the noise" if most else ""),
              None if most is None else ratio <= max(most, 1 + noise),
              f"{without:.4g} {unit} without, {governed:.4g} {unit} with, times {ratio:.3f} by the quickest of {len(found[name])} turns",
              key=f"overhead/{what}/{name}", without=without, governed=governed, ratio=ratio)


def calls():
    host = Bed(POLICY)
    workers = start(host, cuda_worker)
    for worker in workers.values():
        worker.tell("context")
        worker.tell("fill cuMemAlloc 2 64")
    in_turns("cuMemAlloc and cuMemFree of 2 MiB", "us", workers, lambda worker: best(worker, "allocations 300", 5) / 1000, {})
    in_turns("empty launch", "ns", workers, lambda worker: best(worker, "cost 50000", 3), {"memory": 1.05})
    for worker in workers.values():
        worker.tell("torch 0")
    in_turns("launch of a graph of 100 kernels", "us", workers, lambda worker: worker.tell("graph-cost 500 100")["ns"] / 1000, {"memory": 1.1})
    for worker in workers.values():
        worker.close()
    host.close()


def steps():
    host = Bed(POLICY)
    workers = start(host, time_worker)
    for worker in workers.values():
        worker.tell("context")
    length = quick(0.3, 3)
    for what, kind in (("ResNet-50 training step, batch 32", "resnet50"), ("decoder step, eager", "decode"), ("decoder step, graph", "decode-graph")):
        for worker in workers.values():
            worker.tell(f"step {kind} 0.3")
        in_turns(what, "ms", workers, lambda worker, kind=kind: worker.tell(f"step {kind} {length}")["p50"], {"memory": 1.03})
    for worker in workers.values():
        worker.close()
    host.close()


def ungoverned():
    """What a program in no tenant pays for being seen: with the daemon and without any program of ours, in turns."""
    host = Bed(POLICY)
    worker = cuda_worker(host, None, cpus=CPUS)
    worker.tell("context")
    worker.tell("fill cuMemAlloc 2 64")
    calls = {
        "a cheap control of the driver's": lambda: worker.tell("controls 2000")["ns"],
        "an ioctl on a file that is no GPU's": lambda: worker.tell("controls 2000")["elsewhere_ns"],
        "cuMemAlloc and cuMemFree of 2 MiB": lambda: best(worker, "allocations 100", 5),
    }
    found = {what: {"with": [], "without": []} for what in calls}

    def measure(side):
        for what, ask in calls.items():
            found[what][side].append(ask())
            sample(f"ungoverned {what}/{side}", len(found[what][side]) - 1, found[what][side][-1])

    for _ in range(10):
        measure("with")
        host.detach()
        measure("without")
        host.start()
    worker.close()
    host.close()
    for what, sides in found.items():
        governed, without = min(sides["with"]), min(sides["without"])
        ratio = governed / without
        claim(f"{what}, in no tenant, beside the daemon: at most 1.03 times", ratio <= 1.03,
              f"{without:.0f} ns without any program of ours, {governed:.0f} ns with, times {ratio:.3f} by the quickest of 10 turns",
              key=f"overhead/ungoverned/{what}", without=without, governed=governed, ratio=ratio)


if __name__ == "__main__":
    record.run("overhead", {"calls": calls, "steps": steps, "ungoverned": ungoverned})
