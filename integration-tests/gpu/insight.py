"""The leak finder on the GPU of this host. See README.md in this folder."""

import functools
import json
import signal
import subprocess
import time

import bed
import record
from bed import MIB, cuda_worker, time_worker
from record import claim, quick
from turns import CPUS, in_turns, quickest

POLICY = '[tenant.t]\ncgroup = "@/t"\n'
# A worker answers before the daemon has read the last of its calls.
SETTLE = 0.5


class Look:
    """The leak finder, as long as the block lasts; `found` is what it found."""

    def __init__(self, host, target, *arguments):
        self.host = host
        self.command = [bed.BIN / "gpuquotactl", "--bus", host.bus, "leaks", str(target), "--for", "1h", "--json", *arguments]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not self.so_far().get("processes"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the leak finder does not start: " + self.process.communicate()[1])
            time.sleep(0.05)
        return self

    def so_far(self):
        told = self.host.ctl("leaks", self.command[4], "--so-far", "--json", check=False)
        report = json.loads(told.stdout) if told.returncode == 0 else {}
        ready = report.get("running") and all(process["files"] for process in report["processes"])
        return report if ready else {}

    def __exit__(self, *_):
        time.sleep(SETTLE)
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        if self.process.returncode != 0:
            raise RuntimeError(f"the leak finder ended with {self.process.returncode}: {err}")
        self.found = json.loads(out)


def names(site):
    return [frame.get("function") or frame["file"].rsplit("/", 1)[-1] for frame in site["frames"]]


def live(found):
    return sum(site["live_bytes"] for site in found["sites"])


def described(site):
    return f"{site['live_bytes'] // MIB} MiB in {site['live']} by {site['call']} < " + " < ".join(names(site)[:6])


def calls(host):
    """A program that calls the driver itself: what it keeps is live, what it frees is not."""
    one = cuda_worker(host, "t")
    one.tell("context")
    read_code = functools.partial(one.tell, "code cuMemAlloc_v2")
    before = read_code()["code"]
    with Look(host, "t") as look:
        during = read_code()["code"]
        one.tell("fill cuMemAlloc 2 64")
        one.tell("allocations 100")
    after = read_code()["code"]
    found = look.found
    claim("64 MiB that are kept are live, 200 MiB that are freed are not",
          live(found) == 64 * MIB and found["gaps"]["lost"] == 0,
          "; ".join(described(site) for site in found["sites"] if site["live"]) + f"; {found['gaps']['lost']} calls lost",
          key="leaks/calls", live=live(found))
    allocations = sum(site["allocations"] for site in found["sites"])
    claim("every allocation is followed", allocations == 132, f"{allocations} of 132", key="leaks/all")
    whole = [site for site in found["sites"] if not site["cut"] and len(site["frames"]) > 3]
    claim("stacks are followed to where the thread begins", len(whole) == len(found["sites"]),
          f"{len(whole)} of {len(found['sites'])}; functions are not named by {', '.join(found['gaps']['unnamed']) or 'no file'}",
          key="leaks/stacks")
    claim("a breakpoint is in cuMemAlloc while somebody looks, and none before and after",
          before == after and during[:2] == "cc" != before[:2], f"{before[:16]}…, {during[:16]}…, {after[:16]}…", key="leaks/nothing-left")
    one.close()


def with_torch(host):
    """PyTorch that keeps tensors: the segments that its allocator asked for are live, and the stack leads to it."""
    one = time_worker(host, "t")
    one.tell("context")
    profile, flames = host.dir / "heap.pb", host.dir / "heap.txt"
    with Look(host, "t", "--pprof", profile, "--folded", flames) as look:
        for _ in range(8):
            one.tell("hold 64")
            time.sleep(0.3)
    found = look.found
    largest = found["sites"][0] if found["sites"] else None
    stack = names(largest) if largest else []
    claim("8 tensors of 64 MiB that are kept are found, and the stack names PyTorch",
          live(found) >= 512 * MIB and any("c10::" in name or "at::" in name for name in stack),
          described(largest) if largest else "nothing", key="leaks/torch", live=live(found))
    claim("it grows", bool(largest) and (largest["growth"] or 0) > 0, f"{(largest or {}).get('growth') or 0:.0f} bytes/s", key="leaks/growth")
    claim("a profile and folded stacks are written", profile.stat().st_size > 0 and flames.read_text().strip() != "",
          f"{profile.stat().st_size} bytes; {len(flames.read_text().splitlines())} stacks", key="leaks/export")
    one.close()
    # Without PyTorch's own cache every tensor is an allocation of the driver's.
    one = time_worker(host, "t", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    one.tell("context")
    with Look(host, "t") as look:
        for _ in range(5):
            one.tell("hold 3")
    held = [site for site in look.found["sites"] if site["live_bytes"] == 15 * MIB]
    claim("without PyTorch's cache 5 tensors of 3 MiB are 15 MiB of one call site", len(held) == 1,
          "; ".join(described(site) for site in look.found["sites"][:3]), key="leaks/torch-uncached")
    one.close()


def compare(host, what, unit, ask, most=None):
    """Measures with and without a look, in turns."""

    def followed():
        with Look(host, "t"):
            return ask()

    found = in_turns(what, {"without": ask, "with": followed}, quick(5, 9))
    best = quickest(found)
    without, with_look = best["without"], best["with"]
    ratio = with_look / without
    claim(f"{what}, its allocations followed" + (f": at most {most} times" if most else ""), None if most is None else ratio <= most,
          f"{without:.4g} {unit} without, {with_look:.4g} {unit} with, times {ratio:.3f} by the quickest of {len(found['with'])} turns",
          key=f"leaks/overhead/{what}", without=without, followed=with_look, ratio=ratio)


def cost_of_calls(host):
    one = cuda_worker(host, "t", cpus=CPUS)
    one.tell("context")
    one.tell("allocations 50")
    compare(host, "cuMemAlloc and cuMemFree of 2 MiB", "us", lambda: one.tell("allocations 300")["ns"] / 1000)
    one.close()


def cost_of_steps(host):
    one = time_worker(host, "t", cpus=CPUS)
    one.tell("context")
    one.tell("step resnet50 0.3")
    length = quick(0.8, 5)
    compare(host, "ResNet-50 training step, batch 32", "ms", lambda: one.tell(f"step resnet50 {length}")["p50"], 1.01)
    one.close()


PARTS = {"calls": calls, "torch": with_torch, "cost": cost_of_calls, "steps": cost_of_steps}

if __name__ == "__main__":
    host = bed.Bed(POLICY)
    record.run("insight", {name: functools.partial(part, host) for name, part in PARTS.items()})
