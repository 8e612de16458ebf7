"""What governed programs pay, beside programs in no tenant, measured in turns. See README.md in this folder."""

import record
from bed import Bed, cuda_worker, time_worker
from record import claim, quick, sample
from turns import CPUS, in_turns, quickest

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


def start(host, worker):
    return {name: worker(host, name if name in ("memory", "everything") else None, cpus=CPUS) for name in SYSTEMS}


def best(worker, line, times):
    """The least of some measurements in nanoseconds."""
    return min(worker.tell(line)["ns"] for _ in range(times))


def compare(what, unit, workers, ask, claims):
    """Measures each in turns, and compares it with the program in no tenant."""
    found = in_turns(what, {name: lambda worker=worker: ask(worker) for name, worker in workers.items()}, quick(9, 15))
    best = quickest(found)
    without = best["nothing"]
    noise = abs(best["again"] / without - 1)
    for name, title in list(SYSTEMS.items())[1:]:
        governed, most = best[name], claims.get(name)
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
    compare("cuMemAlloc and cuMemFree of 2 MiB", "us", workers, lambda worker: best(worker, "allocations 300", 5) / 1000, {})
    compare("empty launch", "ns", workers, lambda worker: best(worker, "cost 50000", 3), {"memory": 1.05})
    for worker in workers.values():
        worker.tell("torch 0")
    compare("launch of a graph of 100 kernels", "us", workers, lambda worker: worker.tell("graph-cost 500 100")["ns"] / 1000, {"memory": 1.1})
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
        compare(what, "ms", workers, lambda worker, kind=kind: worker.tell(f"step {kind} {length}")["p50"], {"memory": 1.03})
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
    turns = 10
    found = {"with": [], "without": []}
    for at in range(turns):
        for side, prepare in (("without", host.detach), ("with", host.start)):
            prepare()
            found[side].append({what: ask() for what, ask in calls.items()})
            for what, ns in found[side][-1].items():
                sample(f"ungoverned {what}/{side}", at, ns)
    worker.close()
    host.close()
    for what in calls:
        governed, without = (min(turn[what] for turn in found[side]) for side in ("with", "without"))
        ratio = governed / without
        claim(f"{what}, in no tenant, beside the daemon: at most 1.03 times", ratio <= 1.03,
              f"{without:.0f} ns without any program of ours, {governed:.0f} ns with, times {ratio:.3f} by the quickest of {turns} turns",
              key=f"overhead/ungoverned/{what}", without=without, governed=governed, ratio=ratio)


if __name__ == "__main__":
    record.run("overhead", {"calls": calls, "steps": steps, "ungoverned": ungoverned})
