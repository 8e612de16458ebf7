"""Who pays when processes end in every way they can. See README.md in this folder."""

import json
import os
import pathlib
import re
import signal
import time

import record
from bed import GIB, REPO, Bed, cuda_worker, together
from record import claim, quick, sample


def emptied(host, tenant="t", patience=10):
    """Seconds until the tenant holds nothing, and what it holds then."""
    start = time.monotonic()
    while (used := host.usage(tenant)["memory_used"]) and time.monotonic() - start < patience:
        time.sleep(0.005)
    return time.monotonic() - start, used


def ends():
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "8GiB"\n')
    repeats, times, left = quick(10, 100), [], 0
    for _ in range(repeats):
        worker = cuda_worker(host, "t")
        pid = worker.tell("context")["pid"]
        worker.tell("fill cuMemAlloc 64 1024")
        os.kill(pid, signal.SIGKILL)
        took, used = emptied(host)
        worker.process.wait()
        times.append(took)
        left += used
    for at, took in enumerate(times):
        sample("released after SIGKILL, s", at, took)
    claim(f"{repeats} times SIGKILL of a process with 1 GiB: nothing left", left == 0,
          f"released after {1000 * record.median(times):.0f} ms in the median, {1000 * max(times):.0f} ms at most", key="life/sigkill")
    worker = cuda_worker(host, "t")
    worker.tell("context")
    worker.tell("fill cuMemAlloc 64 1024")
    worker.close()
    took, used = emptied(host)
    claim("an orderly end leaves nothing", used == 0, f"{1000 * took:.0f} ms", key="life/exit")
    host.close()


def cgroups():
    """A cgroup that is removed and made again is the same tenant, and empty."""
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "2GiB"\n')
    for _ in range(quick(2, 10)):
        worker = cuda_worker(host, "t")
        worker.tell("context")
        answer = worker.tell("fill cuMemAlloc 64 3072")
        claim("budget holds in a cgroup that was made again", answer["code"] == 2 and host.usage("t")["memory_peak"] <= 2 * GIB, f"{answer['mib']} MiB")
        worker.close()
        emptied(host)
        pathlib.Path(f"{host.cgroups}{host.top}/t").rmdir()
    host.close()


def restarts():
    """The daemon is killed and started again while tenants allocate and end."""
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "8GiB"\n')
    for _ in range(quick(2, 10)):
        workers = [cuda_worker(host, "t") for _ in range(3)]
        pids = [answer["pid"] for answer in together(workers, "context")]
        together(workers, "fill cuMemAlloc 64 1024")
        each = host.usage("t")["memory_used"] / 3
        host.kill()
        # One ends while nobody looks.
        os.kill(pids[0], signal.SIGKILL)
        workers[0].process.wait()
        time.sleep(0.5)
        host.start()
        deadline = time.monotonic() + 5
        while (used := host.usage("t")["memory_used"]) > 2.02 * each and time.monotonic() < deadline:
            time.sleep(0.05)
        claim("who ended while the daemon was dead is not charged, who lived is", abs(used - 2 * each) <= 0.02 * each,
              f"{used / GIB:.2f} GiB of two processes, {3 * each / GIB:.2f} of three before", key="life/outage")
        for worker in workers[1:]:
            worker.close()
        took, used = emptied(host)
        claim("and nothing is left in the end", used == 0, f"{used} bytes")
    host.close()


def names():
    """What the daemon asks the driver after an end that it has not seen (docs/internals.md): only this answer releases a charge."""
    worker = cuda_worker(None, None)
    status = worker.tell("handle-info 0xcafe0042")["status"]
    worker.close()
    claim("the driver answers OBJECT_NOT_FOUND (0x57) when asked for an object that is not there", status == 0x57, f"{status:#x}",
          key="life/not-found")


def capabilities():
    """The daemon with what its unit leaves it, on the real driver."""
    unit = (REPO / "systemd" / "gpuquotad.service").read_text()
    kept = re.search(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)[1].lower().replace("cap_", "").split()
    setpriv = ("setpriv", "--no-new-privs", "--bounding-set", ",".join(["-all", *(f"+{name}" for name in kept)]))
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "2GiB"\nlaunch.max = "2000/s"\nlaunch.burst = 20\n', under=setpriv)
    worker = cuda_worker(host, "t")
    worker.tell("context")
    filled = worker.tell("fill cuMemAlloc 64 3072")
    launched = worker.tell("launch 1")
    acts = [host.ctl(verb, "t", check=False).returncode for verb in ("freeze", "thaw")]
    controls = json.loads(host.ctl("dump-state").stdout).get("time", {}).get("freeze", {}).get("count", 0)
    rate = launched["launches"] / (launched["end"] - launched["start"])
    claim("with the capabilities of its unit alone the daemon refuses memory, paces launches, freezes and thaws",
          filled["code"] == 2 and rate <= 2100 and not any(acts) and controls > 0,
          f"{len(kept)} capabilities; {filled['mib']} MiB of 2,048, error {filled['code']}; {rate:.0f} launches/s of 2,000; {controls} controls to freeze", key="life/capabilities")
    worker.close()
    host.close()


if __name__ == "__main__":
    record.run("lifecycle", {"ends": ends, "cgroups": cgroups, "restarts": restarts, "names": names, "capabilities": capabilities})
