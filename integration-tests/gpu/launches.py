"""Launch budgets on the GPU of this host. See README.md in this folder."""

import collections
import functools
import pathlib
import statistics
import time

import bed
import record
from bed import cpu_ms, cuda_worker as worker, together
from record import claim, quick, sample

RATES = (2_000, 20_000, 100_000)
PROCESSES = (1, 4, 16)
SECONDS = 3
HERE = pathlib.Path(__file__).resolve().parent


def policy(rate, pace="signal", extra=""):
    return (
        f'[tenant.t]\ncgroup = "@/t"\nlaunch.max = "{rate}/s"\nlaunch.pace = "{pace}"\n{extra}\n'
        '[tenant.counted]\ncgroup = "@/counted"\nlaunch.max = "1G/s"\nlaunch.burst = 1000000000\n'
        '[tenant.free]\ncgroup = "@/free"\n'
    )


def burst(rate):
    return max(16, rate // 100)


def measure(host, workers, rate, seconds=SECONDS, command="launch"):
    """Launches a second without the burst, and the worst tenth of a second against the budget."""
    before = cpu_ms(host.daemon.pid)
    answers = together(workers, f"{command} {seconds}")
    cpu = cpu_ms(host.daemon.pid) - before
    start, end = min(a["start"] for a in answers), max(a["end"] for a in answers)
    got = (sum(a["launches"] for a in answers) - burst(rate)) / (end - start)
    bins = collections.Counter()
    for answer in answers:
        for at, count in answer["bins"].items():
            bins[int(at)] += count
    # Whole windows in which all were at work, without the one of the burst.
    first = int(max(a["start"] for a in answers) * 10) + 2
    last = int(min(a["end"] for a in answers) * 10)
    windows = [bins[at] * 10 / rate - 1 for at in range(first, last)]
    return got, windows, cpu


def row(pace, rate, count, got, windows, cpu, able=None, key="rate", of=""):
    """`able`: launches a second of the same processes in their slowest tenth of a second when nothing holds them."""
    off, worst = (got / rate - 1) * 100, max(windows, key=abs) * 100
    # Freezing is coarse, and docs/launch.md says so.
    within, within_window = (5, 50) if pace == "freeze" else (1, 10)
    claim(
        f"{of}{pace}, {rate}/s, {count} processes: within {within} %, each 100 ms within {within_window} %",
        None if able is not None and able < rate else abs(off) <= within and abs(worst) <= within_window,
        f"{got:.0f}/s ({off:+.2f} %), worst 100 ms {worst:+.1f} %, daemon {cpu} ms of CPU"
        + (f"; the program by itself is as slow as {able:.0f}/s in between" if able is not None and able < 1.2 * rate else ""),
        key=f"{key}/{pace}/{rate}/{count}", got=got, off=off, worst=worst, cpu_ms=cpu,
    )
    for at, window in enumerate(windows):
        sample(f"{of}{pace}/{rate}/{count}", at, window)


def change(host, *arguments, **keywords):
    host.write_policy(policy(*arguments, **keywords))
    host.ctl("reload")
    # Probes follow at once; this is for processes that get other ones.
    time.sleep(0.5)


def start_workers(host, count, tenant="t", first="context"):
    workers = [worker(host, tenant) for _ in range(count)]
    together(workers, first)
    time.sleep(0.5)
    return workers


def held(host, workers, command, able_key, able_of, **names):
    """Every rate with every number of these processes, and what one of them does by itself."""
    change(host, 1_000_000_000)
    _, windows, _ = measure(host, workers[:1], 1, command=command)
    able = 1 + min(windows)
    claim(f"{able_of}, counted, with a budget that it can't reach, launches/s in its slowest 100 ms", None, f"{able:.0f}",
          key=able_key, got=able)
    for rate in RATES:
        change(host, rate)
        for count in PROCESSES:
            row("signal", rate, count, *measure(host, workers[:count], rate, command=command), able * count, **names)


def rates(host):
    workers = start_workers(host, max(PROCESSES))
    held(host, workers, "launch", "rate/able", "one process")
    for each in workers:
        each.close()


def paces(host):
    workers = start_workers(host, 4)
    for pace, some in (("spin", RATES), ("freeze", RATES[:2])):
        for rate in some:
            change(host, rate, pace)
            for count in (1, 4):
                row(pace, rate, count, *measure(host, workers[:count], rate, quick(1.5, 3)))
    for each in workers:
        each.close()


def cost(host):
    change(host, 1_000_000)
    free, counted = (start_workers(host, 1, tenant)[0] for tenant in ("free", "counted"))
    found = {"free": [], "counted": []}
    for _ in range(7):
        for name, who in (("free", free), ("counted", counted)):
            found[name].append(who.tell("cost 100000")["ns"])
    without, with_probe = (statistics.median(found[name]) for name in ("free", "counted"))
    for name, all_ in found.items():
        for at, ns in enumerate(all_):
            sample(f"launch ns, {name}", at, ns)
    claim(
        "a counted launch costs less than 2 us more", with_probe - without < 2000,
        f"{without:.0f} ns without a budget, {with_probe:.0f} ns counted: +{with_probe - without:.0f} ns, "
        f"times {with_probe / without:.2f}", key="cost/launch", without=without, counted=with_probe,
    )
    of_free, of_counted = free.tell("code")["code"], counted.tell("code")["code"]
    different = [at for at in range(32) if of_free[2 * at:2 * at + 2] != of_counted[2 * at:2 * at + 2]]
    claim(
        "cuLaunchKernel of a process without a budget has no breakpoint, of one with a budget it has one",
        len(different) == 1 and of_counted[2 * different[0]:2 * different[0] + 2] == "cc",
        f"{of_free[:16]}…, {of_counted[:16]}…", key="cost/untouched",
    )
    free.close()
    counted.close()


def crash(host):
    change(host, 2_000)
    workers = start_workers(host, 4)
    pids = [int(pathlib.Path(f"/proc/{each.process.pid}/stat").read_text().split()[0]) for each in workers]
    for each in workers:
        each.order("launch 8")
    time.sleep(2)
    killed = time.monotonic()
    host.kill()
    held = killed
    while time.monotonic() < killed + 2:
        if any(stopped(pid) for pid in descendants(pids)):
            held = time.monotonic()
        time.sleep(0.002)
    claim("daemon killed while processes are stopped: all run within 1 s", held - killed < 1,
          f"the last one stood still {held - killed:.3f} s after it", key="crash/released", seconds=held - killed)
    host.start()
    back = time.monotonic()
    answers = [each.answer() for each in workers]
    bins = collections.Counter()
    for answer in answers:
        for at, count in answer["bins"].items():
            bins[int(at)] += count
    late = [bins[at] * 10 for at in range(int(back * 10) + 10, int(min(a["end"] for a in answers) * 10))]
    claim(
        "pacing is back within a second of the daemon's start", bool(late) and all(rate < 2_600 for rate in late),
        f"{min(late, default=0)} to {max(late, default=0)}/s from then on, budget 2,000/s", key="crash/paced",
    )
    for each in workers:
        each.close()


def descendants(pids):
    """The processes and all below them: the runner's child is the one that launches."""
    found, parents = set(pids), collections.defaultdict(list)
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" ", 1)
            parents[int(rest.rsplit(")", 1)[1].split()[1])].append(int(pid))
        except (OSError, ValueError, IndexError):
            continue
    open_ = list(pids)
    while open_:
        for child in parents[open_.pop()]:
            if child not in found:
                found.add(child)
                open_.append(child)
    return found


def stopped(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def with_torch(host):
    """One addition in place after the other: each is one launch of the CUDA runtime."""
    change(host, 1_000_000_000)
    workers = start_workers(host, max(PROCESSES), first="torch 0")
    before = host.tenant("t")["launch"]["launches"]
    answer = workers[0].tell("torch 1")
    counted = host.tenant("t")["launch"]["launches"] - before
    claim("each addition in place is one counted launch", abs(counted - answer["launches"]) <= 2,
          f"{answer['launches']} additions, {counted} launches", key="torch/counted")
    held(host, workers, "torch", "torch/able", "PyTorch in one process", key="torch", of="PyTorch, ")
    for each in workers:
        each.close()


def graphs(host):
    for kind, replays in (("one", 1_000), ("nodes", 10)):
        change(host, 1_000, extra=f'launch.graph-cost = "{kind}"')
        one = worker(host, "t")
        one.tell("torch 0")
        time.sleep(0.5)
        one.tell("graph 0.5 100")
        answer = one.tell("graph 3 100")
        rate = answer["launches"] / (answer["end"] - answer["start"])
        claim(f'graph of 100 kernels under 1,000/s, graph-cost "{kind}": {replays}/s within 5 %',
              abs(rate / replays - 1) < 0.05, f"{rate:.1f} replays/s", key=f"graph/{kind}", got=rate)
        one.close()


PARTS = {
    "rates": rates, "paces": paces, "cost": cost, "crash": crash, "torch": with_torch, "graphs": graphs,
}

if __name__ == "__main__":
    host = bed.Bed(policy(2_000))
    record.run("launches", {name: functools.partial(part, host) for name, part in PARTS.items()})
