"""Launch budgets on the GPU of this host. Each line is one claim with what was measured; see README.md."""

import collections
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import bed

RATES = (2_000, 20_000, 100_000)
PROCESSES = (1, 4, 16)
SECONDS = 3
HERE = pathlib.Path(__file__).resolve().parent
failed = 0


def claim(holds, text):
    global failed
    failed += not holds
    print(("ok      " if holds else "FAILED  ") + text, flush=True)


def policy(rate, pace="signal", extra=""):
    return (
        f'[tenant.t]\ncgroup = "@/t"\nlaunch.max = "{rate}/s"\nlaunch.pace = "{pace}"\n{extra}\n'
        '[tenant.counted]\ncgroup = "@/counted"\nlaunch.max = "1G/s"\nlaunch.burst = 1000000000\n'
        '[tenant.free]\ncgroup = "@/free"\n'
    )


def burst(rate):
    return max(16, rate // 100)


def worker(host, tenant, python=sys.executable):
    return bed.Worker(host.run(
        tenant, python, HERE / "launch_worker.py", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ))


def together(workers, line):
    """One line to all at once; their answers."""
    import json

    for each in workers:
        each.process.stdin.write(line + "\n")
        each.process.stdin.flush()
    answers = []
    for each in workers:
        text = each.process.stdout.readline()
        if not text:
            sys.exit(f"error: a worker ended at {line!r} with {each.process.wait()}")
        answers.append(json.loads(text))
    for answer in answers:
        if "error" in answer:
            sys.exit(f"error: {line}: {answer['error']}")
    return answers


def cpu_ms(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")


def measure(host, workers, rate, seconds=SECONDS):
    """Launches a second without the burst, and the worst tenth of a second against the budget."""
    before = cpu_ms(host.daemon.pid)
    answers = together(workers, f"launch {seconds}")
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


def row(pace, rate, count, got, windows, cpu):
    off = (got / rate - 1) * 100
    worst = max(windows, key=abs) * 100
    claim(
        abs(off) <= 1 and abs(worst) <= 10,
        f"{pace:6} {rate:7}/s, {count:2} processes: {got:9.0f}/s ({off:+.2f} %), worst 100 ms {worst:+.1f} %, "
        f"daemon {cpu} ms of CPU",
    )


def change(host, *arguments, **keywords):
    host.write_policy(policy(*arguments, **keywords))
    host.ctl("reload")
    # Probes follow at once; this is for processes that get other ones.
    time.sleep(0.5)


def start_workers(host, count, tenant="t"):
    workers = [worker(host, tenant) for _ in range(count)]
    together(workers, "context")
    time.sleep(0.5)
    return workers


def rates(host):
    workers = start_workers(host, max(PROCESSES))
    for rate in RATES:
        change(host, rate)
        for count in PROCESSES:
            row("signal", rate, count, *measure(host, workers[:count], rate))
    print("        launches of the tenant:", {
        key: value for key, value in host.tenant("t")["launch"].items() if isinstance(value, int)
    }, flush=True)
    for each in workers:
        each.close()


def paces(host):
    workers = start_workers(host, 4)
    for pace, some in (("spin", RATES), ("freeze", RATES[:2])):
        for rate in some:
            change(host, rate, pace)
            for count in (1, 4):
                got, windows, cpu = measure(host, workers[:count], rate, 2)
                off, worst = (got / rate - 1) * 100, max(windows, key=abs) * 100
                # Freezing is coarse, and says so.
                bounds = (1, 10) if pace == "spin" else (5, 50)
                claim(
                    abs(off) <= bounds[0] and abs(worst) <= bounds[1],
                    f"{pace:6} {rate:7}/s, {count:2} processes: {got:9.0f}/s ({off:+.2f} %), "
                    f"worst 100 ms {worst:+.1f} %, daemon {cpu} ms of CPU",
                )
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
    claim(
        with_probe - without < 2000,
        f"cost of a launch: {without:.0f} ns without a budget, {with_probe:.0f} ns counted: +{with_probe - without:.0f} ns, "
        f"times {with_probe / without:.2f}",
    )
    of_free, of_counted = free.tell("code")["code"], counted.tell("code")["code"]
    different = [at for at in range(32) if of_free[2 * at:2 * at + 2] != of_counted[2 * at:2 * at + 2]]
    claim(
        len(different) == 1 and of_counted[2 * different[0]:2 * different[0] + 2] == "cc",
        f"cuLaunchKernel without a budget is untouched: {of_free[:16]}…; with one: {of_counted[:16]}…",
    )
    free.close()
    counted.close()


def crash(host):
    change(host, 2_000)
    workers = start_workers(host, 4)
    pids = [int(pathlib.Path(f"/proc/{each.process.pid}/stat").read_text().split()[0]) for each in workers]
    for each in workers:
        each.process.stdin.write("launch 8\n")
        each.process.stdin.flush()
    time.sleep(2)
    host.daemon.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    host.daemon.wait()
    held = killed
    while time.monotonic() < killed + 2:
        if any(stopped(pid) for pid in descendants(pids)):
            held = time.monotonic()
        time.sleep(0.002)
    claim(held - killed < 1, f"daemon killed: the last process stood still {held - killed:.3f} s after it")
    (host.dir / "run" / "bus").unlink()
    host.start()
    back = time.monotonic()
    import json

    answers = [json.loads(each.process.stdout.readline()) for each in workers]
    bins = collections.Counter()
    for answer in answers:
        for at, count in answer["bins"].items():
            bins[int(at)] += count
    late = [bins[at] * 10 for at in range(int(back * 10) + 10, int(min(a["end"] for a in answers) * 10))]
    claim(
        bool(late) and all(rate < 2_600 for rate in late),
        f"pacing is back with the daemon: {min(late, default=0)} to {max(late, default=0)}/s from a second after its start",
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
    change(host, 5_000)
    one = worker(host, "t")
    one.tell("torch 0")
    time.sleep(0.5)
    before = host.tenant("t")["launch"]["launches"]
    answer = one.tell("torch 3")
    counted = host.tenant("t")["launch"]["launches"] - before
    got = (answer["ops"] - burst(5_000)) / (answer["end"] - answer["start"])
    claim(
        abs(got / 5_000 - 1) <= 0.01,
        f"PyTorch: {answer['ops']} additions in place, {counted} launches counted; {got:.0f}/s under 5000/s",
    )
    claim(abs(counted - answer["ops"]) <= 2, "every one of them was one launch")
    one.close()


def graphs(host):
    for kind, replays in (("one", 1_000), ("nodes", 10)):
        change(host, 1_000, extra=f'launch.graph-cost = "{kind}"')
        one = worker(host, "t")
        one.tell("torch 0")
        time.sleep(0.5)
        one.tell("graph 0.5 100")
        answer = one.tell("graph 3 100")
        rate = answer["replays"] / (answer["end"] - answer["start"])
        claim(
            abs(rate / replays - 1) < 0.05,
            f'graph of 100 kernels under 1000/s, graph-cost "{kind}": {rate:.1f} replays/s, {replays} expected',
        )
        one.close()


def collective(host):
    count = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
    if count < 2:
        print("        collective: one GPU only", flush=True)
        return
    change(host, 2_000)
    script = (
        "import os, time, torch, torch.distributed as d\n"
        "d.init_process_group('nccl'); r = d.get_rank(); torch.cuda.set_device(r)\n"
        "x = torch.ones(1 << 16, device='cuda'); s = time.monotonic()\n"
        "for _ in range(2000):\n    y = x * 2\n    d.all_reduce(y)\n"
        "torch.cuda.synchronize()\n"
        "print('done', r, round(time.monotonic() - s, 2), float(y[0]), flush=True)\n"
        "d.destroy_process_group()\n"
    )
    file = host.dir / "collective.py"
    file.write_text(script)
    run = host.run(
        "t", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(min(count, 4)), file,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    try:
        out, _ = run.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        run.kill()
        out = ""
    claim(out.count("done") == min(count, 4), f"all_reduce over {min(count, 4)} ranks under one budget ends: {out.split()}")


PARTS = {
    "rates": rates, "paces": paces, "cost": cost, "crash": crash, "torch": with_torch, "graphs": graphs,
    "collective": collective,
}


def main():
    wanted = sys.argv[1:] or list(PARTS)
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        sys.exit(f"error: no part {unknown[0]}; there are {', '.join(PARTS)}")
    host = bed.Bed(policy(2_000))
    begin = time.monotonic()
    for name in wanted:
        print(f"{name}:", flush=True)
        PARTS[name](host)
    print(f"{time.monotonic() - begin:.0f} s, {failed} failed", flush=True)
    host.close()
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
