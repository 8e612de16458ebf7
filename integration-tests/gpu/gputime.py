"""GPU time on a real GPU: what docs/time.md claims, measured. See README.md in this folder."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import record
from bed import GPU, OPEN, Bed, Worker, beside, nvml_bytes, time_worker as start, together
from record import at, claim, quick, sample, skip

WORKER = pathlib.Path(__file__).with_name("time_worker.py")
KERNEL_US = 500
SHORT_US = 25


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


def compete(test, workers, lines, seconds, skip=0, run=0):
    """Finished steps of each in windows of a second, but for so many seconds at the start."""
    found = windows(together(workers, *lines), skip + seconds)[skip:]
    for w, counts in enumerate(found):
        for who, count in enumerate(counts):
            sample(f"{test}/{who}", run * seconds + w, count)
    return found


def judge(test, runs, wanted=None, within=1.0, within_window=2.0, groups=None, key=None):
    """Compares the shares of each run, and of each second, with `wanted` (percent). Returns steps per second of each, in the mean."""
    grouped = lambda counts: [sum(counts[i] for i in group) for group in groups] if groups else counts
    off = lambda counts: max(abs(got - w) for got, w in zip(percent(grouped(counts)), wanted))
    add = lambda rows: [sum(column) for column in zip(*rows)]
    seconds, of = len(runs[0]), f", {len(runs)} times" if len(runs) > 1 else ""
    total = add(add(found) for found in runs)
    got = show(percent(grouped(total)))
    if wanted is None:
        claim(test + of, None, got, key=key)
    else:
        offs = [off(add(found)) for found in runs]
        worst = max(off(counts) for found in runs for counts in found)
        claim(f"{test}: within {within} points over {seconds} s{of}", max(offs) <= within,
              f"{got}, off by {max(offs):.2f}{' at worst' if of else ''}", key=key, off=max(offs), worst=worst)
        claim(f"{test}: within {within_window} points in each second", worst <= within_window, f"off by {worst:.2f} at worst")
    return [count / seconds / len(runs) for count in total]


def shares(test, workers, lines, seconds, skip=0, **judged):
    """Lets workers compete once, and compares their shares with what is wanted."""
    return judge(test, [compete(test, workers, lines, seconds, skip)], **judged)


WEIGHTS = (50, 50), (25, 75), (30, 70), (10, 90)
# A process that does nothing for three seconds lends its share.
FORGOTTEN = 6
# What the victim does in its first moments is not counted: both sides of the comparison begin.
SETTLED_MS = 600


def latency(test, victim, line, neighbour=None, neighbour_line=None):
    """p50 and p99 of what the victim does, beside a neighbour or alone, once both are at work."""
    times = beside(victim, line, neighbour, neighbour_line)
    first, passed = 0, 0
    while passed < SETTLED_MS and first < len(times) // 2:
        passed += times[first]
        first += 1
    times = times[first:]
    for i, value in enumerate(times):
        sample(f"{test}/ms", i, value)
    return at(times, 0.5), at(times, 0.99)


def policy(names, extra=""):
    return extra + "".join(f'[tenant.{name}]\ncgroup = "@/{name}.slice"\n' for name in names)


# The launch budget is no limit: with it the daemon sees within 2 ms that the tenant is at work (docs/time.md).
EXCLUSIVE = """[class.urgent]
priority = 200
exclusive = true
[tenant.a]
cgroup = "@/a.slice"
class = "urgent"
launch.max = "1M/s"
"""

# A neighbour of little weight keeps others waiting for as short a slice as there is. The switches cost throughput.
SHORT_ROUND = '[time]\nround = "4ms"\nleast-slice = "200us"\n'

# The neighbour has what is left once the target is met.
TARGET = """[class.background]
priority = 0
[tenant.a]
cgroup = "@/a.slice"
launch.max = "1M/s"
time.weight = 95
time.latency-target = "700us"
[tenant.b]
cgroup = "@/b.slice"
class = "background"
time.weight = 5
"""


class Run:
    """The daemon and the workers that the parts below share."""

    def __init__(self):
        self.bed = None
        self.workers = {}
        a = start(None, None)
        a.tell("context")
        self.rounds = a.tell(f"calibrate {KERNEL_US}")["rounds"]
        self.short = a.tell(f"calibrate {SHORT_US}")["rounds"]
        self.alone_rate = sum(count for (count,) in windows([a.tell(self.spin(3.5))], 2)) / 2
        a.close()

    def all(self, *names):
        """The workers of these names, each in the tenant of its first letter, under a daemon."""
        if self.bed not in OPEN:
            self.workers.clear()
            self.bed = Bed(policy("abcde"))
        new = [name for name in names if name not in self.workers]
        for name in new:
            self.workers[name] = start(self.bed, name.rstrip("0123456789"))
        together([self.workers[name] for name in new], "context")
        return [self.workers[name] for name in names]

    def set(self, tenant, *properties):
        self.bed.ctl("set-property", tenant, *properties, "--runtime")
        time.sleep(0.1)

    def ask_for(self, text):
        self.bed.write_policy(text)
        self.bed.ctl("reload")
        time.sleep(0.3)

    def weigh(self, a, b):
        self.set("a", f"time.weight={a}")
        self.set("b", f"time.weight={b}")

    def state(self):
        """GPU time as the daemon knows it."""
        return json.loads(self.bed.ctl("dump-state").stdout)["time"]

    def told(self, tenant, what):
        return (self.bed.usage(tenant).get("time") or {}).get(what, 0)

    @contextlib.contextmanager
    def settings(self, text):
        """Restarts the daemon with these settings too, and without them at the end; the tenants do not notice."""
        path = self.bed.dir / "gpuquota.toml"
        plain = path.read_text()
        path.write_text(plain + text)
        self.bed.restart()
        try:
            yield
        finally:
            path.write_text(plain)
            self.bed.restart()

    def spin(self, seconds):
        return f"saturate {self.rounds} {seconds}"

    def alone(self):
        claim("one tenant alone, kernels/s", None, f"{self.alone_rate:.0f}", key="alone", rate=self.alone_rate)

    def close(self):
        """Ends the shared daemon; the next part that needs one starts another."""
        for name in list(self.workers):
            self.workers.pop(name).close()
        if self.bed in OPEN:
            self.bed.close()
        self.bed = None

    def systems(self):
        """What the driver does by itself, what MPS does, and weights, in turns."""
        free = [start(None, None) for _ in range(2)]
        together(free, "context")
        pair = self.all("a", "b")
        line, seconds, repeats = self.spin(quick(5.5, 11.5)), quick(4, 10), quick(1, 5)
        default, mps_shares = "default time slicing, two processes", "MPS, 30 and 70 % of the threads"
        runs, told = {}, {}
        with Mps() as mps:
            clients = [start(None, None, mps.share(part)) for part in (30, 70)] if mps else []
            together(clients, "context")
            for run in range(repeats):
                for test, workers in ((default, free), (mps_shares, clients)):
                    if workers:
                        runs.setdefault(test, []).append(compete(test, workers, [line] * 2, seconds, run=run))
                for weights in WEIGHTS:
                    self.weigh(*weights)
                    test = f"weights {weights[0]}:{weights[1]}"
                    runs.setdefault(test, []).append(compete(test, pair, [line] * 2, seconds, run=run))
                    told[test] = (show([100 * self.told(tenant, "share_10s") for tenant in "ab"]),
                                  show([100 * self.told(tenant, "pressure")["full"]["avg10"] for tenant in "ab"]))
            for worker in clients:
                worker.close()
        for worker in free:
            worker.close()
        for test, found in runs.items():
            name = test.removeprefix("weights ")
            key = {default: "default", mps_shares: "mps"}.get(test, name)
            wanted = None if test in (default, mps_shares) else tuple(map(int, name.split(":")))
            rates = judge(test, found, wanted, key=f"share/{key}")
            claim(f"{test}, sum / alone", None, f"{sum(rates) / self.alone_rate:.1%}", key=f"sum/{key}")
            if test in told:
                claim(f"{test}, what the daemon tells of the last 10 s", None, "shares {}, pressure {}".format(*told[test]), key=f"told/{key}")

    def loops(self):
        a, b = self.all("a", "b")
        length = quick(4, 10)
        for weights in WEIGHTS:
            self.weigh(*weights)
            for work, line in (("matmul", "matmul 4096"), ("training", "train")):
                key = f"share/{work}" + ("" if weights == (30, 70) else f"/{weights[0]}:{weights[1]}")
                shares(f"PyTorch {work} loops {weights[0]}:{weights[1]}", [a, b], [f"{line} {length + 2}"] * 2, length, wanted=weights, key=key)

    def many(self):
        a, b, c, d, e = self.all("a", "b", "c", "d", "e")
        for name in "abcde":
            self.set(name, "time.weight=100")
        length = quick(4, 10)
        line = self.spin(length + 1.5)
        self.set("c", "time.weight=200")
        shares("three tenants 25:25:50", [a, b, c], [line] * 3, length, wanted=(25, 25, 50), key="share/three")
        self.set("c", "time.weight=100")
        (second,) = self.all("a2")
        shares("two processes in one tenant count as one", [a, second, b], [line] * 3, length,
               wanted=(50, 50), groups=((0, 1), (2,)), key="share/two-in-one")
        self.workers.pop("a2").close()
        weights = (10, 15, 20, 25, 30)
        for name, weight in zip("abcde", weights):
            self.set(name, f"time.weight={weight}")
        shares("five tenants 10:15:20:25:30", [a, b, c, d, e], [line] * 5, length, wanted=weights, key="share/five")
        self.all("a2")
        shares("the same, the first one with a forgotten process too", [a, b, c, d, e], [self.spin(FORGOTTEN + length + 1.5)] * 5, length,
               skip=FORGOTTEN, wanted=weights, key="share/forgotten")
        for name in ("a2", "c", "d", "e"):
            self.workers.pop(name).close()

    def ceilings(self):
        (a,) = self.all("a")
        length = quick(6, 10)
        for limit in (25, 50, 75):
            self.set("a", f"time.max={limit}%")
            a.order(self.spin(length + 2))
            time.sleep(length)
            board, idle = record.gpu_facts()[GPU]["utilization.gpu"], [place["tgid"] for place in self.state()["places"] if place["idle"]]
            found = [count for (count,) in windows([a.answer()], length)]
            for w, count in enumerate(found):
                sample(f"ceiling {limit} %", w, count)
            got = 100 * sum(found) / length / self.alone_rate
            worst = max(abs(100 * count / self.alone_rate - limit) for count in found[1:])
            told = self.told("a", "share_10s")
            claim(f"ceiling of {limit} % on an idle GPU: within 2 points", abs(got - limit) <= 2,
                  f"{got:.1f} %; a second is off by {worst:.1f} at worst; the daemon tells {100 * told:.1f} %, NVML {board} of the board, "
                  f"{len(idle)} of {len(self.workers)} processes idle", key=f"ceiling/{limit}", got=got)
        self.set("a", "time.max=")

    def latencies(self):
        """A victim alone and beside a saturating neighbour: by what the driver and MPS do, and by each control."""
        pair, free, repeats = self.all("a", "b"), [start(None, None) for _ in range(2)], 5
        together(free, "context")
        with Mps() as mps:
            clients = [start(None, None, mps.share(part)) for part in (70, 30)] if mps else []
            together(clients, "context")
            for work, line in (("20 kernels of 25 us", f"burst 20 {self.short} 1.5"), ("graph", "graph 1.5")):
                for victim in (pair[0], *free[:1], *clients[:1]):
                    victim.tell(line)  # makes what it needs
                # What holds, who takes part, how long the victim may take in times of alone.
                systems = {
                    "alone": (None, pair[:1], None), "default time slicing": (None, free, None), "MPS, 70 and 30 % of the threads": (None, clients, None),
                    "weights 95:5": (policy("abcde"), pair, 2.2), "weights 95:5 in a short round": (policy("abcde"), pair, 2.2),
                    "weights 95:5 and a latency target": (policy("cde", TARGET), pair, 2.2), "exclusive": (policy("bcde", EXCLUSIVE), pair, 1.1),
                }
                systems = {how: system for how, system in systems.items() if system[1]}
                found = {how: [] for how in systems}
                for _ in range(repeats):
                    for how, (text, workers, _) in systems.items():
                        if text:
                            self.ask_for(text)
                        with self.settings(SHORT_ROUND) if how.endswith("short round") else contextlib.nullcontext():
                            if text == policy("abcde"):
                                self.weigh(95, 5)
                            victim, *neighbour = workers
                            beside_whom = (neighbour[0], self.spin(3)) if neighbour else ()
                            found[how].append(latency(f"{work}, {how}", victim, line, *beside_whom))
                alone = record.median([p99 for _, p99 in found["alone"]])
                for how, times in found.items():
                    p50, p99 = (record.median(column) for column in zip(*times))
                    spread, most = f"{min(p for _, p in times):.2f} to {max(p for _, p in times):.2f}", systems[how][2]
                    claim(f"{work}, {how}" + (f": p99 within {most} times alone" if most else ""), bool(p99 <= most * alone) if most else None,
                          f"p50 {p50:.2f} ms, p99 {p99:.2f} ms ({spread} in {repeats} runs), p99 {p99 / alone:.2f} times alone",
                          key=f"latency/{work}/{how}", p50=p50, p99=p99, ratio=p99 / alone)
            for worker in (*free, *clients):
                worker.close()
        self.ask_for(policy("abcde"))

    def freeze(self):
        (a,) = self.all("a")
        a.order(self.spin(4))
        time.sleep(1)
        for _ in range(20):
            self.bed.ctl("freeze", "a")
            time.sleep(0.02)
            self.bed.ctl("thaw", "a")
            time.sleep(0.02)
        answer = a.answer()
        claim("frozen and thawed 20 times, the program saw no error", bool(answer["bins"]))
        state = self.state()
        for what in ("freeze", "thaw"):
            took = state.get(what, {})
            claim(f"{what}: under 1 ms", (took.get("p50_us") or 1e9) < 1000,
                  f"p50 {took.get('p50_us')} us, p99 {took.get('p99_us')} us, {took.get('count')} times", key=f"act/{what}")
        took = state.get("slice", {})
        claim("setting a slice", None, f"p50 {took.get('p50_us')} us, {took.get('count')} times", key="act/slice")
        pid = a.tell("context")["pid"]
        place = next(place for place in state["places"] if place["tgid"] == pid)
        claim("a context", None, f"{place['groups']} channel groups, {place['channels']} channels", key="act/channels")
        self.bed.ctl("freeze", "a")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while (left := self.bed.usage("a")["memory_used"]) and time.monotonic() < killed + 5:
            time.sleep(0.01)
        took = time.monotonic() - killed
        self.bed.ctl("thaw", "a")
        self.workers.pop("a").process.wait()
        (a,) = self.all("a")
        goes_on = bool(a.tell(self.spin(0.5))["bins"])
        claim("a frozen process that is killed leaves nothing within a second, and the next one works", left == 0 and took < 1 and goes_on,
              f"{1000 * took:.0f} ms, {left} bytes", key="act/killed")

    def rounds_(self):
        """Restarts the daemon with other rounds; the tenants do not notice."""
        a, b = self.all("a", "b")
        for length in (5, 10, 20, 40):
            with self.settings(f'[time]\nround = "{length}ms"\n'):
                self.weigh(50, 50)
                time.sleep(0.5)
                seconds = quick(3, 10)
                rates = shares(f"round {length} ms, 50:50", [a, b], [self.spin(seconds + 1.5)] * 2, seconds, wanted=(50, 50))
                part = sum(rates) / self.alone_rate
                sample("sum by round", length, 100 * part)
                claim(f"round of {length} ms: sum" + (" at least 97 % of alone" if length == 20 else " / alone"),
                      part >= 0.97 if length == 20 else None, f"{part:.1%}", key=f"round/{length}", part=part)
        with self.settings(SHORT_ROUND):
            for weights in ((95, 5), (50, 50)):
                self.weigh(*weights)
                rates = shares(f"round of 4 ms, slices from 200 us, {weights[0]}:{weights[1]}", [a, b], [self.spin(4.5)] * 2, 3,
                               key=f"share/short-{weights[0]}")
                claim(f"round of 4 ms, slices from 200 us, {weights[0]}:{weights[1]}: sum / alone", None,
                      f"{sum(rates) / self.alone_rate:.1%}", key=f"sum/short-{weights[0]}")

    def eager(self):
        """A training that launches its kernels one by one, beside a neighbour that saturates the GPU: what each control makes of it."""
        victim, neighbour = self.all("a", "b")
        length = quick(4, 10)
        line = f"steps resnet50 {length + 1.5}"
        victim.tell("steps resnet50 0.5")
        (alone,) = (sum(column) / length for column in zip(*windows([victim.tell(line)], length)))
        claim("ResNet-50 training alone, steps/s", None, f"{alone:.1f}", key="eager/alone")

        def beside(how, key):
            rates = shares(f"ResNet-50 training beside saturating kernels, {how}", [victim, neighbour], [line, self.spin(length + 1.5)], length)
            parts = [100 * rate / whole for rate, whole in zip(rates, (alone, self.alone_rate))]
            told = [100 * self.told(tenant, "share_10s") for tenant in "ab"]
            claim(f"ResNet-50 training beside saturating kernels, {how}: each in percent of what it does alone", None,
                  f"{show(parts)}; the daemon tells shares of {show(told)}", key=f"eager/{key}", parts=parts)

        self.weigh(50, 50)
        beside("weights 50:50", "weights")
        with self.settings(SHORT_ROUND):
            self.weigh(50, 50)
            beside("weights 50:50 in a short round", "short")
        for tenant in "ab":
            self.set(tenant, "time.max=50%")
        beside("ceilings of 50 %", "ceilings")
        for tenant in "ab":
            self.set(tenant, "time.max=")

    def adoption(self):
        """Processes that were there before the daemon."""
        self.close()
        bed = Bed(policy("xy"), start=False)
        workers = [Worker(bed.spawn(tenant + ".slice", sys.executable, WORKER)) for tenant in "xy"]
        together(workers, "context")
        together(workers, "hold 1024")
        bed.start()
        held = []
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not all(used >= 1 << 30 for used in held or [0]):
            time.sleep(0.5)
            held = [bed.usage(tenant)["memory_used"] for tenant in "xy"]
        nvml = nvml_bytes()
        told = [nvml.get(worker.process.pid, 0) for worker in workers]
        claim("adopted: the ledger has what NVML tells, within 2 %", all(abs(a - b) <= 0.02 * b for a, b in zip(held, told)),
              f"ledger {[used >> 20 for used in held]} MiB, NVML {[used >> 20 for used in told]} MiB", key="adopt/memory")
        bed.ctl("set-property", "x", "time.weight=25", "--runtime")
        bed.ctl("set-property", "y", "time.weight=75", "--runtime")
        time.sleep(0.5)
        shares("adopted, weights 25:75", workers, [self.spin(5.5)] * 2, 4, wanted=(25, 75), key="adopt/share")
        for worker in workers:
            worker.close()
        left = [bed.usage(tenant)["memory_used"] for tenant in "xy"]
        claim("adopted: nothing is left when they have ended", not any(left), f"{left}", key="adopt/left")
        bed.close()


class Mps:
    """An MPS server of one's own, if the host has one; false otherwise, and then that is on record."""

    def __enter__(self):
        self.environment = None
        if not shutil.which("nvidia-cuda-mps-control"):
            skip("MPS", "nvidia-cuda-mps-control is not on this host")
            return self
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpuquota-mps-"))
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(self.folder), "CUDA_MPS_LOG_DIRECTORY": str(self.folder)}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env={**os.environ, **self.environment})
        return self

    def __bool__(self):
        return self.environment is not None

    def share(self, percent_):
        """Environment of a client that has that part of the threads."""
        return {**self.environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent_)}

    def __exit__(self, *_):
        if self.environment:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False,
                           env={**os.environ, **self.environment})
            shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    run = Run()
    record.run("time", {
        "alone": run.alone, "shares": run.systems, "loops": run.loops, "latency": run.latencies, "ceilings": run.ceilings,
        "freeze": run.freeze, "many": run.many, "rounds": run.rounds_, "eager": run.eager, "adoption": run.adoption,
    })
