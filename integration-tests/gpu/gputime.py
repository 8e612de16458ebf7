"""GPU time on a real GPU: what docs/time.md claims, measured. See README.md in this folder.

Prints one line per claim, and writes everything that was measured to time.csv in OUT (default: the current folder).
"""

import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from bed import Bed, Worker

OUT = pathlib.Path(os.environ.get("OUT", "."))
WORKER = pathlib.Path(__file__).with_name("time_worker.py")
KERNEL_US = 500
SHORT_US = 25
failures = []
rows = []


def claim(what, holds, detail=""):
    word = {True: "ok  ", False: "FAIL", None: "info"}[holds]
    print(f"{word}  {what}{'  (' + detail + ')' if detail else ''}", flush=True)
    if holds is False:
        failures.append(what)


def note(test, who, quantity, at, value):
    rows.append((test, who, quantity, at, value))


def start(bed, tenant, environment=None):
    """A worker in a tenant, or outside of every tenant."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1,
             "env": {**os.environ, **(environment or {})}}
    command = [sys.executable, WORKER]
    return Worker(subprocess.Popen(command, **pipes) if tenant is None else bed.run(tenant, *command, **pipes))


def tell_all(workers, lines):
    """Gives everybody an order at the same time, and waits for all answers."""
    for worker, line in zip(workers, lines):
        worker.process.stdin.write(line + "\n")
        worker.process.stdin.flush()
    answers = []
    for worker, line in zip(workers, lines):
        answer = worker.process.stdout.readline().strip()
        if not answer:
            sys.exit(f"error: a worker ended at {line!r} with {worker.process.wait()}")
        answers.append(json.loads(answer))
    return answers


def windows(answers, seconds, length=1.0):
    """Finished steps of each worker in windows of `length`, of the middle `seconds` in which all of them worked."""
    counts = [dict(map(tuple, answer["bins"])) for answer in answers]
    first = max(min(count) for count in counts) + 5
    per = round(length * 10)
    return [
        [sum(count.get(first + per * w + tenth, 0) for tenth in range(per)) for count in counts]
        for w in range(int(seconds / length))
    ]


def percent(counts):
    total = sum(counts) or 1
    return [100 * count / total for count in counts]


def show(values):
    return " : ".join(f"{value:.1f}" for value in values)


def shares(test, workers, lines, seconds, wanted=None, within=1.0, within_window=2.0, groups=None):
    """Lets workers compete, and compares their shares with `wanted` (percent). Returns steps per second of each."""
    answers = tell_all(workers, lines)
    found = windows(answers, seconds)
    for w, counts in enumerate(found):
        for who, count in enumerate(counts):
            note(test, who, "steps", w, count)
    total = [sum(column) for column in zip(*found)]
    grouped = lambda counts: [sum(counts[i] for i in group) for group in groups] if groups else counts
    got = percent(grouped(total))
    if wanted is None:
        claim(test, None, show(got))
    else:
        off = max(abs(g - w) for g, w in zip(got, wanted))
        worst = max(abs(g - w) for counts in found for g, w in zip(percent(grouped(counts)), wanted))
        claim(f"{test}: within {within} point over {seconds} s", off <= within, f"{show(got)}, off by {off:.2f}")
        claim(f"{test}: within {within_window} points in each second", worst <= within_window, f"off by {worst:.2f} at worst")
    return [count / seconds for count in total]


def at(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def latency(test, victim, line, neighbour=None, neighbour_line=None):
    """p50 and p99 of what the victim does, beside a neighbour or alone."""
    if neighbour:
        neighbour.process.stdin.write(neighbour_line + "\n")
        neighbour.process.stdin.flush()
        time.sleep(1.5)
    times = victim.tell(line)["ms"]
    if neighbour:
        neighbour.process.stdout.readline()
    for i, value in enumerate(times):
        note(test, 0, "ms", i, value)
    p50, p99 = at(times, 0.5), at(times, 0.99)
    claim(test, None, f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(times)} times")
    return p99


def policy(names, extra=""):
    return extra + "".join(f'[tenant.{name}]\ncgroup = "@/{name}.slice"\n' for name in names)


class Run:
    def __init__(self, wanted):
        self.wanted = wanted
        self.bed = None
        self.workers = {}

    def has(self, part):
        return not self.wanted or part in self.wanted

    def worker(self, name):
        if name not in self.workers:
            self.workers[name] = start(self.bed, name.rstrip("0123456789"))
            self.workers[name].tell("context")
        return self.workers[name]

    def set(self, tenant, *properties):
        self.bed.ctl("set-property", tenant, *properties, "--runtime")
        time.sleep(0.1)

    def spin(self, seconds):
        return f"saturate {self.rounds} {seconds}"

    def without(self):
        """What the driver does by itself, before any daemon runs."""
        a, b = start(None, None), start(None, None)
        tell_all([a, b], ["context", "context"])
        self.rounds = a.tell(f"calibrate {KERNEL_US}")["rounds"]
        self.short = a.tell(f"calibrate {SHORT_US}")["rounds"]
        alone = self.alone("alone, kernels/s", a)
        self.alone_rate = alone
        if self.has("default"):
            rates = shares("default time-slicing, two tenants", [a, b], [self.spin(7)] * 2, 5)
            claim("default time-slicing, sum / alone", None, f"{sum(rates) / alone:.1%}")
        if self.has("latency"):
            victim = f"burst 20 {self.short} 3"
            self.burst_alone = latency("burst alone", a, victim)
            latency("burst beside a neighbour, default time-slicing", a, victim, b, self.spin(6))
            self.graph_alone = latency("graph alone", a, "graph 3")
            latency("graph beside a neighbour, default time-slicing", a, "graph 3", b, self.spin(7))
        a.close()
        b.close()

    def alone(self, test, worker):
        answer = worker.tell(self.spin(4))
        found = windows([answer], 3)
        rate = sum(count for (count,) in found) / 3
        claim(test, None, f"{rate:.0f}")
        return rate

    def weights(self):
        a, b = self.worker("a"), self.worker("b")
        for wa, wb in ((50, 50), (25, 75), (30, 70), (10, 90)):
            self.set("a", f"time.weight={wa}")
            self.set("b", f"time.weight={wb}")
            rates = shares(f"weight {wa}:{wb}", [a, b], [self.spin(11.5)] * 2, 10, (wa, wb))
            claim(f"weight {wa}:{wb}, sum / alone", None, f"{sum(rates) / self.alone_rate:.1%}")

    def loops(self):
        a, b = self.worker("a"), self.worker("b")
        self.set("a", "time.weight=30")
        self.set("b", "time.weight=70")
        shares("matmul loops 30:70", [a, b], ["matmul 4096 7"] * 2, 5, (30, 70), 2, 3)
        shares("training loops 30:70", [a, b], ["train 7"] * 2, 5, (30, 70), 2, 4)

    def many(self):
        for name in "abcde":
            self.set(name, "time.weight=100")
        workers = [self.worker(name) for name in "abc"]
        self.set("c", "time.weight=200")
        shares("three tenants 25:25:50", workers, [self.spin(6.5)] * 3, 5, (25, 25, 50))
        second = self.worker("a2")
        self.set("c", "time.weight=100")
        shares("two processes in one tenant count as one", [workers[0], second, workers[1]], [self.spin(6.5)] * 3, 5,
               (50, 50), groups=((0, 1), (2,)))
        self.workers.pop("a2").close()
        workers += [self.worker("d"), self.worker("e")]
        for name, weight in zip("abcde", (10, 15, 20, 25, 30)):
            self.set(name, f"time.weight={weight}")
        shares("five tenants 10:15:20:25:30", workers, [self.spin(7)] * 5, 5, (10, 15, 20, 25, 30))
        for name in "cde":
            self.workers.pop(name).close()

    def ceilings(self):
        a = self.worker("a")
        for limit in (25, 50, 75):
            self.set("a", f"time.max={limit}%")
            answer = a.tell(self.spin(10))
            found = [count for (count,) in windows([answer], 8)]
            for w, count in enumerate(found):
                note(f"ceiling {limit} %", 0, "steps", w, count)
            got = 100 * sum(found) / 8 / self.alone_rate
            worst = max(abs(100 * count / self.alone_rate - limit) for count in found[1:])
            claim(f"ceiling {limit} %: within 2 points", abs(got - limit) <= 2, f"{got:.1f} %; a second is off by {worst:.1f} at worst")
            time_ = self.bed.usage("a").get("time") or {}
            claim(f"ceiling {limit} %: what the daemon measured", None, f"{100 * time_.get('share_10s', 0):.1f} % in 10 s")
        self.set("a", "time.max=")

    def latencies(self):
        victim, neighbour = self.worker("a"), self.worker("b")
        for work, line, alone in (("burst", f"burst 20 {self.short} 4", self.burst_alone), ("graph", "graph 4", self.graph_alone)):
            self.set("a", "time.weight=95")
            self.set("b", "time.weight=5")
            p99 = latency(f"{work} beside a neighbour, weight 95:5", victim, line, neighbour, self.spin(8))
            claim(f"{work}, weight 95:5: p99 within 2.2 of alone", p99 <= 2.2 * alone, f"{p99 / alone:.2f}")
            self.bed.write_policy(policy("bcde", EXCLUSIVE))
            self.bed.ctl("reload")
            victim.tell(f"burst 20 {self.short} 0.2")
            p99 = latency(f"{work} beside a neighbour, exclusive", victim, line, neighbour, self.spin(8))
            claim(f"{work}, exclusive: p99 within 1.1 of alone", p99 <= 1.1 * alone, f"{p99 / alone:.2f}")
            self.bed.write_policy(policy("abcde"))
            self.bed.ctl("reload")

    def freeze(self):
        a = self.worker("a")
        a.process.stdin.write(self.spin(6) + "\n")
        a.process.stdin.flush()
        time.sleep(1)
        for _ in range(20):
            self.bed.ctl("freeze", "a")
            time.sleep(0.02)
            self.bed.ctl("thaw", "a")
            time.sleep(0.02)
        answer = json.loads(a.process.stdout.readline())
        claim("frozen and thawed 20 times, the program saw no error", bool(answer["bins"]))
        state = json.loads(self.bed.ctl("dump-state").stdout).get("time", {})
        for what in ("freeze", "thaw"):
            took = state.get(what, {})
            claim(f"{what}: under 1 ms", (took.get("p50_us") or 1e9) < 1000,
                  f"p50 {took.get('p50_us')} us, p99 {took.get('p99_us')} us, {took.get('count')} times")
        took = state.get("slice", {})
        claim("setting a slice", None, f"p50 {took.get('p50_us')} us, {took.get('count')} times")

    def long_round(self):
        """Restarts the daemon with another round; the tenants do not notice."""
        a, b = self.worker("a"), self.worker("b")
        settings = self.bed.dir / "gpuquota.toml"
        settings.write_text(settings.read_text() + '[time]\nround = "20ms"\n')
        self.bed.daemon.terminate()
        self.bed.daemon.wait(10)
        self.bed.start()
        self.set("a", "time.weight=50")
        self.set("b", "time.weight=50")
        time.sleep(1)
        alone = self.alone("alone with round 20 ms, kernels/s", a)
        rates = shares("round 20 ms, 50:50", [a, b], [self.spin(7)] * 2, 5, (50, 50))
        claim("round 20 ms: sum at least 97 % of alone", sum(rates) >= 0.97 * alone, f"{sum(rates) / alone:.1%}")

    def mps(self):
        if not shutil.which("nvidia-cuda-mps-control"):
            claim("MPS", None, "not on this machine")
            return
        folder = self.bed.dir / "mps"
        folder.mkdir()
        control = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
        command = ["nvidia-cuda-mps-control"]
        subprocess.run([*command, "-d"], check=True, env={**os.environ, **control})
        try:
            workers = [start(None, None, {**control, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}) for share in (30, 70)]
            tell_all(workers, ["context"] * 2)
            rates = shares("MPS, 30 and 70 % of the threads", workers, [self.spin(6)] * 2, 4)
            claim("MPS, sum / alone", None, f"{sum(rates) / self.alone_rate:.1%}")
            for worker in workers:
                worker.close()
        finally:
            subprocess.run(command, input="quit\n", text=True, check=False, env={**os.environ, **control})


EXCLUSIVE = '[class.urgent]\npriority = 200\nexclusive = true\n[tenant.a]\ncgroup = "@/a.slice"\nclass = "urgent"\n'


def main():
    run = Run(sys.argv[1:])
    began = time.monotonic()
    try:
        run.without()
        run.bed = Bed(policy("abcde"))
        for part, measure in (("shares", run.weights), ("loops", run.loops), ("latency", run.latencies),
                              ("ceilings", run.ceilings), ("freeze", run.freeze), ("many", run.many),
                              ("round", run.long_round)):
            if run.has(part):
                measure()
        for worker in run.workers.values():
            worker.close()
        run.workers.clear()
        if run.has("mps"):
            run.mps()
    except BaseException:
        if run.bed:
            print(run.bed.log(), file=sys.stderr)
        raise
    finally:
        with open(OUT / "time.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("test", "who", "quantity", "at", "value"))
            writer.writerows(rows)
        if run.bed:
            (OUT / "daemon.log").write_text(run.bed.log())
    clocks = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks_event_reasons.active",
                             "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip()
    claim("the GPU", None, clocks)
    claim("all of it took", None, f"{time.monotonic() - began:.0f} s")
    if failures:
        sys.exit(f"{len(failures)} claims do not hold")


main()
