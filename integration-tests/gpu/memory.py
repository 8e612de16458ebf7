"""Memory budgets on a real GPU with PyTorch. See README.md in this folder."""

import os
import signal
import time

import record
from bed import Bed, GIB, MIB, nvml_bytes
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


if __name__ == "__main__":
    record.run("memory", {"oom": out_of_memory_free_and_raise, "limits": limits, "allocators": allocators, "life": life_and_death})
