"""Latency of a service with requests at random moments (open loop), beside a neighbour that wants the whole GPU. See README.md in this folder."""

import time

import record
from bed import BEFORE, Bed, beside, time_worker, together
from gputime import EXCLUSIVE, KERNEL_US, Mps, policy
from record import claim, quick, sample

LOADS = (0.2, 0.6)
WEIGHTS = '[tenant.a]\ncgroup = "@/a.slice"\ntime.weight = 95\n[tenant.b]\ncgroup = "@/b.slice"\ntime.weight = 5\n'


def measure(system, load, rate, victim, neighbour, spin, length, seed):
    times = beside(victim, f"serve {rate * load} {length} {seed}", neighbour, f"saturate {spin} {length + 2 * BEFORE}")
    for at, ms in enumerate(times):
        sample(f"{system}/{load}", at, ms)
    return times


def service():
    host = Bed(WEIGHTS)
    with Mps() as mps:
        pairs = {
            "default time slicing": (time_worker(host, None), time_worker(host, None)),
            "weights 95:5": (time_worker(host, "a"), time_worker(host, "b")),
        }
        if mps:
            pairs["MPS 70:30 %"] = tuple(time_worker(host, None, mps.share(part)) for part in (70, 30))
        for pair in pairs.values():
            together(pair, "context")
        victim = pairs["default time slicing"][0]
        spin = victim.tell(f"calibrate {KERNEL_US}")["rounds"]
        for first, _ in pairs.values():
            first.tell("graph 0.2")
        alone = victim.tell("graph 1")["ms"]
        gpu = victim.tell("serve 50 0.2 1")["gpu_ms"]
        solo = record.median(alone)
        claim("the service waits for the GPU, not for the CPU: GPU time at least 90 % of a request", gpu >= 0.9 * solo,
              f"{gpu:.2f} of {solo:.2f} ms", key="tail/bound")
        rate = 1000 / solo
        pairs["exclusive class"] = pairs["weights 95:5"]
        for load in LOADS:
            found = {}
            for repeat in range(5):
                for system in ("alone", *pairs):
                    if system in ("weights 95:5", "exclusive class"):
                        host.write_policy(WEIGHTS if system.startswith("weights") else policy("b", EXCLUSIVE))
                        host.ctl("reload")
                        time.sleep(0.3)
                    victim, neighbour = (pairs["default time slicing"][0], None) if system == "alone" else pairs[system]
                    found.setdefault(system, []).extend(
                        measure(system, load, rate, victim, neighbour, spin, quick(1, 20), repeat))
            base = record.at(found["alone"], 0.99)
            for system, times in found.items():
                p50, p95, p99 = (record.at(times, share) for share in (0.5, 0.95, 0.99))
                claim(f"service at {load:.0%} of its peak, {system}", None,
                      f"p50 {p50:.2f}, p95 {p95:.2f}, p99 {p99:.2f} ms, p99 {p99 / base:.2f} times alone, {len(times)} requests",
                      key=f"tail/{load}/{system}", p50=p50, p95=p95, p99=p99, ratio=p99 / base)
        pairs.pop("exclusive class")
        for pair in pairs.values():
            for worker in pair:
                worker.close()
    host.close()


if __name__ == "__main__":
    record.run("tail", {"service": service})
