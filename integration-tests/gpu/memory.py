"""Memory budgets on a real GPU with PyTorch. See README.md in this folder."""

import json
import os
import select
import signal
import subprocess
import time

import record
from bed import Bed, GIB, MIB, cuda_worker, nvml_bytes, together
from record import claim as check, sample


def near(a, b, tolerance=0.01):
    return abs(a - b) <= tolerance * max(a, b, 1)


def out_of_memory_free_and_raise():
    bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "8GiB"\n')
    worker = bed.worker("t")
    pid = worker.tell("context")["pid"]
    context = {"ledger": bed.usage("t")["memory_used"], "nvml": nvml_bytes()[pid]}
    filled = worker.tell("fill 256 20000")
    usage = bed.usage("t")
    check("8 GiB: PyTorch raises OutOfMemoryError at the budget", filled["error"] == "OutOfMemoryError",
          f"after {filled['mib']} MiB in blocks of 256; ledger {usage['memory_used'] // MIB} MiB of 8192", key="memory/oom")
    check("never above the budget", usage["memory_peak"] <= 8 * GIB and usage["breaches"] == 0)
    check("at least 95 % of it was to be had", usage["memory_used"] + 256 * MIB > 8 * GIB)
    nvml = nvml_bytes()[pid]
    ledger_grown, nvml_grown = usage["memory_used"] - context["ledger"], nvml - context["nvml"]
    check("the ledger is within 1 % of NVML's figure, context apart", near(ledger_grown, nvml_grown),
          f"ledger +{ledger_grown // MIB} MiB, NVML +{nvml_grown // MIB} MiB; "
          f"context: ledger {context['ledger'] // MIB}, NVML {context['nvml'] // MIB}", key="memory/ledger")
    check("the process goes on", worker.tell("compute")["sum"] == 2.0 * (1 << 20))
    worker.tell("keep 8")
    check("after freeing, what fits is granted (cache flush and retry)", worker.tell("alloc 5000")["error"] is None)
    check("and what does not is refused", worker.tell("alloc 5000")["error"] == "OutOfMemoryError")
    bed.ctl("set-property", "t", "memory.max=16GiB")
    check("raised to 16 GiB while it runs, the same allocation fits", worker.tell("alloc 5000")["error"] is None)
    worker.close()
    check("nothing is left when it has ended", bed.usage("t")["memory_used"] == 0)
    bed.close()


def limits():
    """Obtained memory against the limit, for several limits, with one and with four processes."""
    for limit in (3, 8, 20, 70):
        bed = Bed(f'[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "{limit}GiB"\n')
        worker = bed.worker("t")
        worker.tell("context")
        worker.tell("fill 256 200000")
        filled = worker.tell("fill 2 200000")
        used = bed.usage("t")
        share = used["memory_used"] / (limit * GIB)
        sample("usable", limit, 100 * share)
        check(f"{limit} GiB: at least 99 % usable, never more", 0.99 <= share <= 1 and used["breaches"] == 0,
              f"{share:.2%}, {filled['error']}", key=f"limit/{limit}", share=share)
        worker.close()
        bed.close()
    bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "10GiB"\n')
    workers = [bed.worker("t") for _ in range(4)]
    for worker in workers:
        worker.tell("context")
    for worker in workers:
        worker.tell("fill 64 200000")
    used = bed.usage("t")
    check("4 processes share one budget of 10 GiB", used["memory_peak"] <= 10 * GIB and used["breaches"] == 0,
          f"{used['memory_used'] / (10 * GIB):.2%} in {len(used['processes'])} processes", key="limit/four")
    for worker in workers:
        worker.close()
    bed.close()


def allocators():
    """The other allocators of PyTorch under the same limit."""
    for name, setting in (("expandable_segments", "expandable_segments:True"),
                          ("cudaMallocAsync", "backend:cudaMallocAsync")):
        bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "8GiB"\n')
        worker = bed.worker("t", {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting})
        worker.tell("context")
        filled = worker.tell("fill 256 20000")
        used = bed.usage("t")
        check(f"{name}: OutOfMemoryError at the budget", filled["error"] == "OutOfMemoryError"
              and used["memory_peak"] <= 8 * GIB and used["breaches"] == 0,
              f"after {filled['mib']} MiB, ledger {used['memory_used'] // MIB} MiB", key=f"allocator/{name}")
        worker.tell("keep 4")
        check(f"{name}: usable after", worker.tell("alloc 2000")["error"] is None)
        worker.close()
        bed.close()


def life_and_death():
    bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "8GiB"\n')
    worker = bed.worker("t")
    pid = worker.tell("context")["pid"]
    worker.tell("fill 256 2000")
    before = bed.usage("t")["memory_used"]
    bed.kill()
    bed.start()
    check("a killed daemon leaves the ledger to the next", bed.usage("t")["memory_used"] == before)
    check("and the budget holds on", worker.tell("fill 256 20000")["error"] == "OutOfMemoryError")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while bed.usage("t")["memory_used"] and time.monotonic() - killed < 10:
        time.sleep(0.01)
    took = time.monotonic() - killed
    check("a killed process leaves nothing within a second", took < 1.0, f"{took * 1000:.0f} ms", key="memory/sigkill")
    bed.close()


def reclaim():
    """Managed memory above memory.high is moved to the host while its program goes on."""
    bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "24GiB"\nmemory.high = "5GiB"\nmemory.on-high = "reclaim"\n')
    worker = cuda_worker(bed, "t")
    worker.tell("context")
    first = worker.tell("managed 4096")
    there = worker.tell("touch 2")
    monitor = subprocess.Popen(bed.command("monitor", "--json"), stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    began = time.monotonic()
    worker.tell("fill cuMemAlloc 4096 4096")
    moved, took = 0, 0.0
    while moved < 2 * GIB and select.select([monitor.stdout], [], [], began + 10 - time.monotonic())[0]:
        event = json.loads(monitor.stdout.readline())
        if event.get("event") == "reclaimed":
            moved, took = moved + event["moved"], time.monotonic() - began
    monitor.kill()
    back = worker.tell("touch 3")
    check("managed memory above memory.high is moved to the host, and comes back when the program uses it, with what it held",
          moved >= 2 * GIB and back["held"] == 2, f"{moved // MIB} MiB within {took:.2f} s; 4 GiB written by the GPU in {first['ms']:.0f} ms at first, "
          f"{there['ms']:.0f} ms where they were, {back['ms']:.0f} ms after", key="memory/reclaim")
    worker.close()
    bed.close()


def waiting():
    """With on-max = "wait" an allocation blocks until there is room, and is refused when that takes too long."""
    bed = Bed('[tenant.t]\ncgroup = "@/t.slice"\nmemory.max = "8GiB"\nmemory.on-max = "wait"\nmemory.wait-timeout = "4s"\n')
    first, second = workers = [cuda_worker(bed, "t") for _ in range(2)]
    together(workers, "context")
    first.tell("fill cuMemAlloc 1024 6144")
    second.order("allocate 4096")
    time.sleep(2)
    first.close()
    granted = second.answer()
    check("an allocation over the budget waits, and is granted once there is room", granted["code"] == 0 and 1.5 <= granted["s"] <= 3.5,
          f"after {granted['s']:.2f} s; room was made after 2", key="memory/wait")
    refused = second.tell("allocate 8000")
    check("and is refused as out of memory after wait-timeout", refused["code"] == 2 and 3.5 <= refused["s"] <= 6,
          f"after {refused['s']:.2f} s of 4", key="memory/wait-timeout")
    second.close()
    bed.close()


if __name__ == "__main__":
    record.run("memory", {"oom": out_of_memory_free_and_raise, "limits": limits, "allocators": allocators, "life": life_and_death,
                          "reclaim": reclaim, "waiting": waiting})
