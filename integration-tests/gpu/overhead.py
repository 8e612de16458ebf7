"""What governed programs pay, beside programs in no tenant, measured in turns. See README.md in this folder."""

import record
from bed import Bed, cuda_worker, time_worker, together
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


def measure(what, workers, ask, turns):
    return in_turns(what, {name: lambda worker=worker: ask(worker) for name, worker in workers.items()}, turns)


def compare(what, unit, found, claims):
    """Compares each with the program in no tenant."""
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
    turns = quick(9, 15)
    for what, unit, ask, claims in (
        ("cuMemAlloc and cuMemFree of 2 MiB", "us", lambda worker: best(worker, "allocations 300", 5) / 1000, {}),
        ("empty launch", "ns", lambda worker: best(worker, "cost 50000", 3), {"memory": 1.05}),
    ):
        compare(what, unit, measure(what, workers, ask, turns), claims)
    for worker in workers.values():
        worker.tell("torch 0")
    what = "launch of a graph of 100 kernels"
    compare(what, "us", measure(what, workers, lambda worker: worker.tell("graph-cost 500 100")["ns"] / 1000, turns), {"memory": 1.1})
    for worker in workers.values():
        worker.close()
    host.close()


def steps():
    """A step is as fast as its program happens to have been started (6 or 9 ms for one and the same): so all are started several times."""
    host = Bed(POLICY)
    length, found = quick(0.3, 2), {}
    kinds = {"ResNet-50 training step, batch 32": "resnet50", "decoder step, eager": "decode", "decoder step, graph": "decode-graph"}
    for _ in range(quick(3, 7)):
        workers = start(host, time_worker)
        together(list(workers.values()), "context")
        for what, kind in kinds.items():
            for worker in workers.values():
                worker.tell(f"step {kind} 0.2")
            ask = lambda worker, kind=kind: worker.tell(f"step {kind} {length}")["p50"]
            for name, values in measure(what, workers, ask, 3).items():
                found.setdefault(what, {}).setdefault(name, []).extend(values)
        for worker in workers.values():
            worker.close()
    host.close()
    for what in kinds:
        compare(what, "ms", found[what], {"memory": 1.03})


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
