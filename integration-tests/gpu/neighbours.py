"""Bad neighbours: one that uses up memory bandwidth, one whose kernels fault. See README.md in this folder."""

import time

import record
from bed import Bed, beside, time_worker, together
from gputime import KERNEL_US, SHORT_US, policy
from record import claim, median, quick


def hog():
    """Time is divided, memory bandwidth is not: whoever runs has all of it, but finds the caches cold."""
    host = Bed(policy("ab"))
    victim, neighbour = time_worker(host, "a"), time_worker(host, "b")
    together([victim, neighbour], "context")
    spin, short = (victim.tell(f"calibrate {length}")["rounds"] for length in (KERNEL_US, SHORT_US))
    length = quick(1.5, 10)
    for what, line in (("20 short kernels", f"burst 20 {short} {length}"), ("a graph that reads 4 GB", f"graph {length}")):
        victim.tell(line)
        alone = median(beside(victim, line))
        arithmetic = median(beside(victim, line, neighbour, f"saturate {spin} {length + 1.5}"))
        copies = median(beside(victim, line, neighbour, f"copy {length + 1.5}"))
        claim(f"{what} beside a neighbour of equal weight", None,
              f"p50 {alone:.2f} ms alone, {arithmetic:.2f} beside arithmetic, {copies:.2f} beside copies: copies cost "
              f"{copies / arithmetic:.2f} times what arithmetic does", key=f"hog/{what}", ratio=copies / arithmetic)
    for worker in (victim, neighbour):
        worker.close()
    host.close()


def faults():
    host = Bed(policy("ab"))
    bystander, culprit = time_worker(host, "a"), time_worker(host, "b")
    together([bystander, culprit], "context")
    spin = bystander.tell(f"calibrate {KERNEL_US}")["rounds"]
    bystander.order(f"saturate {spin} 3")
    time.sleep(1)
    error = culprit.tell("fault")["fault"]
    answer = bystander.answer()
    after = bystander.tell(f"saturate {spin} 1")
    claim("a neighbour's illegal address is its own: the bystander's work goes on", bool(error and answer["bins"] and after["bins"]),
          f"the neighbour's error: {error}", key="fault/address")
    culprit.close()
    bystander.close()
    left = host.usage("b")["memory_used"]
    claim("and nothing of it stays charged", left == 0, f"{left} bytes", key="fault/left")
    host.close()


if __name__ == "__main__":
    record.run("neighbours", {"hog": hog, "faults": faults})
