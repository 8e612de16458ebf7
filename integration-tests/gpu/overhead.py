"""What governed programs pay, beside programs in no tenant, measured in turns. See README.md in this folder."""

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
SYSTEMS = (None, "memory", "everything")


def in_turns(what, unit, workers, ask, claims):
    """Measures each in turns; compares the medians with those of the program in no tenant."""
    found = {name: [] for name in SYSTEMS}
    for at in range(quick(3, 7)):
        for name in SYSTEMS:
            found[name].append(ask(workers[name]))
            sample(f"{what}/{name or 'nothing'}", at, found[name][-1])
    medians = {name: record.median(values) for name, values in found.items()}
    for name in SYSTEMS[1:]:
        ratio = medians[name] / medians[None]
        most = claims.get(name)
        claim(f"{what}, {'a memory budget' if name == 'memory' else 'memory, time and launch budgets'}" + (f": at most {most} times" if most else ""),
              None if most is None else ratio <= most,
              f"{medians[None]:.4g} {unit} without, {medians[name]:.4g} {unit} with, times {ratio:.3f}",
              key=f"overhead/{what}/{name}", without=medians[None], governed=medians[name], ratio=ratio)


def calls():
    host = Bed(POLICY)
    workers = {name: cuda_worker(host, name) for name in SYSTEMS}
    for worker in workers.values():
        worker.tell("context")
        worker.tell("fill cuMemAlloc 2 64")
    in_turns("cuMemAlloc and cuMemFree of 2 MiB", "us", workers, lambda worker: worker.tell("allocations 300")["ns"] / 1000, {})
    in_turns("empty launch", "ns", workers, lambda worker: worker.tell("cost 50000")["ns"], {"memory": 1.05})
    for worker in workers.values():
        worker.tell("torch 0")
    in_turns("launch of a graph of 100 kernels", "us", workers, lambda worker: worker.tell("graph-cost 500 100")["ns"] / 1000, {"memory": 1.1})
    for worker in workers.values():
        worker.close()
    host.close()


def steps():
    host = Bed(POLICY)
    workers = {name: time_worker(host, name) for name in SYSTEMS}
    for worker in workers.values():
        worker.tell("context")
    length = quick(0.8, 5)
    for what, kind in (("ResNet-50 training step, batch 32", "resnet50"), ("decoder step, eager", "decode"), ("decoder step, graph", "decode-graph")):
        for worker in workers.values():
            worker.tell(f"step {kind} 0.3")
        in_turns(what, "ms", workers, lambda worker, kind=kind: worker.tell(f"step {kind} {length}")["p50"], {"memory": 1.03})
    for worker in workers.values():
        worker.close()
    host.close()


if __name__ == "__main__":
    record.run("overhead", {"calls": calls, "steps": steps})
