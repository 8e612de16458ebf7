"""The control plane: from a change to its effect, what the daemon uses, a daemon that is away, many starts at once. See README.md in this folder."""

import statistics
import time

import record
from bed import Bed, GIB, MIB, cpu_ms, cuda_worker, nvml_bytes, together
from record import claim, quick, sample


def changes():
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "1GiB"\n')
    worker = cuda_worker(host, "t")
    worker.tell("context")
    worker.tell("fill cuMemAlloc 64 1024")
    worker.tell("fill cuMemAlloc 2 1024")
    times, wrong = [], 0
    for at in range(quick(10, 50)):
        size = 2 if at % 2 == 0 else 1
        start = time.monotonic()
        host.ctl("set-property", "t", f"memory.max={size}GiB", "--runtime")
        times.append(time.monotonic() - start)
        # One block more, which fits only while the budget is the larger one.
        fits = worker.tell("fill cuMemAlloc 2 2")["code"] == 0
        wrong += fits != (size == 2)
        sample("change, ms", at, 1000 * times[-1])
    claim("a changed budget holds for the first allocation after the command has returned", wrong == 0,
          f"{len(times)} changes; the command takes {1000 * statistics.median(times):.1f} ms, {1000 * max(times):.1f} ms at most", key="control/change",
          p50=1000 * statistics.median(times))
    worker.close()
    host.close()


def cpu():
    for count in (1, 8, 64):
        text = "".join(f'[tenant.t{at}]\ncgroup = "@/t{at}"\nmemory.max = "8GiB"\n' for at in range(count))
        host = Bed(text)
        time.sleep(1)
        length = quick(3, 30)
        before = cpu_ms(host.daemon.pid)
        time.sleep(length)
        used = (cpu_ms(host.daemon.pid) - before) / (length * 10)
        claim(f"the daemon with {count} idle tenants", None, f"{used:.2f} % of a core", key=f"control/cpu/{count}", percent=used)
        host.close()


def outage():
    """What a tenant may do while the daemon is dead: what it has stays, more is refused after listener-timeout."""
    away = quick(5, 60)
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "2GiB"\n', '[enforcement]\nlistener-timeout = "2s"\n')
    worker = cuda_worker(host, "t")
    pid = worker.tell("context")["pid"]
    worker.tell("fill cuMemAlloc 64 1024")
    host.kill()
    start, refused, granted = time.monotonic(), 0, 0
    while time.monotonic() - start < away:
        if worker.tell("fill cuMemAlloc 64 64")["code"] == 0:
            granted += 1
        else:
            refused += 1
            time.sleep(0.1)
    above = nvml_bytes().get(pid, 0)
    host.start()
    time.sleep(1)
    code = worker.tell("fill cuMemAlloc 64 64")["code"]
    claim(f"daemon dead for {away} s: nobody gets above the budget, and it is served again after", granted == 0 and above <= 2 * GIB and code == 0,
          f"{refused} allocations refused, {granted} granted; NVML {above // MIB} MiB of 2,048", key="control/outage")
    worker.close()
    host.close()


def starts():
    """Many processes that make a context at once, in a tenant and in none."""
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "100GiB"\n')
    for count in (1, 4, 16, 64):
        found = {}
        for tenant in (None, "t"):
            workers = [cuda_worker(host, tenant) for _ in range(count)]
            # All interpreters are up before the first one is asked.
            together(workers, "nothing")
            times = sorted(answer["seconds"] for answer in together(workers, "timed-context"))
            found[tenant] = times
            for worker in workers:
                worker.process.stdin.close()
            for worker in workers:
                worker.process.wait(60)
        p50, p99 = ({tenant: record.at(times, share) for tenant, times in found.items()} for share in (0.5, 0.99))
        claim(f"cuInit and a context, {count} at once", None,
              f"p50 {1000 * p50[None]:.0f} ms in no tenant, {1000 * p50['t']:.0f} ms in one; p99 {1000 * p99[None]:.0f} and {1000 * p99['t']:.0f} ms",
              key=f"start/{count}", ratio=p50["t"] / p50[None])
    host.close()


if __name__ == "__main__":
    record.run("control", {"changes": changes, "cpu": cpu, "outage": outage, "starts": starts})
