"""The launch profile on the GPU of this host. See README.md in this folder."""

import functools
import json
import signal
import subprocess
import time

import bed
import record
from bed import cuda_worker, time_worker
from record import claim, quick
from turns import CPUS, in_turns, quickest

POLICY = '[tenant.t]\ncgroup = "@/t"\n'
# Launches and waits are booked every second, events sent at once.
SETTLE = 1.5


class Look:
    """The launch profile, as long as the block lasts; `found` is what it found."""

    def __init__(self, host, target="t"):
        self.host, self.target = host, target

    def __enter__(self):
        command = self.host.command("profile", self.target, "--for", "1h", "--json")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.wait(lambda report: True)
        return self

    def wait(self, ready):
        """Until what was found so far is as wanted."""
        deadline = time.monotonic() + 30
        while True:
            told = self.host.ctl("profile", self.target, "--so-far", "--json", check=False)
            report = json.loads(told.stdout) if told.returncode == 0 else {}
            if report.get("running") and ready(report):
                return report
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the launch profile is not as wanted: {report} {told.stderr}")
            time.sleep(0.05)

    def probed(self):
        """Until probes are in all processes of the tenant that are there."""
        return self.wait(lambda report: report["processes"] and all(process["files"] for process in report["processes"]))

    def __exit__(self, kind, *_):
        if kind is None:
            time.sleep(SETTLE)
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        if self.process.returncode != 0 and kind is None:
            raise RuntimeError(f"the launch profile ended with {self.process.returncode}: {err}")
        self.found = json.loads(out) if self.process.returncode == 0 else {}


class Events:
    """Events of one kind, as long as the block lasts."""

    def __init__(self, host, kind):
        self.host, self.kind = host, kind

    def __enter__(self):
        self.process = subprocess.Popen(self.host.command("monitor", "--json"), stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        return self

    def __exit__(self, *_):
        time.sleep(SETTLE)
        self.process.terminate()
        lines = self.process.communicate(timeout=30)[0].splitlines()
        self.found = [event for event in map(json.loads, lines) if event["event"] == self.kind]


def launches(found):
    return sum(kernel["launches"] for kernel in found["kernels"])


def worst(found):
    """The process whose time the probes cost most of."""
    return max(found["processes"], key=lambda process: process["cost"])


def names(host):
    """PyTorch's kernels, looked at from before the program begins: all of them have names."""
    with Look(host) as look:
        one = time_worker(host, "t")
        one.tell("context")
        look.probed()
        one.tell(f"step resnet50 {quick(1, 3)}")
    found = look.found
    named = [kernel for kernel in found["kernels"] if kernel.get("symbol")]
    part = sum(kernel["launches"] for kernel in named) / max(1, launches(found))
    most = ", ".join(kernel["name"][:60] for kernel in named[:3])
    claim("99 % of the launches of a training that is looked at from its start are of kernels with names", part >= 0.99,
          f"{100 * part:.2f} % of {launches(found)} launches, {len(named)} of {len(found['kernels'])} kernels; most: {most}; {found['gaps']}",
          key="profile/names", part=part, kernels=len(named))
    waited = [kernel for kernel in found["kernels"] if sum(kernel["durations"])]
    claim("kernels that the training waits for have durations", bool(waited),
          ", ".join(f"{sum(kernel['durations'])} of {kernel['name'][:40]}" for kernel in waited[:3]), key="profile/durations")
    one.close()


def anomaly(host):
    """A kernel that is launched with five times the work: one event, and none while it is steady."""
    one = time_worker(host, "t")
    with Events(host, "anomaly") as events, Look(host) as look:
        one.tell("context")
        look.probed()
        # 40 ms: so much longer than what a scheduler does that nothing else is three times as long.
        rounds = 2 * one.tell("calibrate 20000")["rounds"]
        one.tell(f"burst 1 {rounds} 4")
        steady = look.wait(lambda report: any(kernel.get("usual_usec") for kernel in report["kernels"]))
        before = sum(kernel["anomalies"] for kernel in steady["kernels"])
        one.tell(f"burst 1 {5 * rounds} 1")
        one.tell(f"burst 1 {rounds} 2")
    found = [event for event in events.found if event["kernel"] == "spin"]
    claim("a kernel that is five times as slow for a second raises exactly one event, and none before",
          len(found) == 1 and before == 0, f"{before} before, then " + json.dumps(events.found), key="profile/anomaly", events=len(found))
    usual = next((kernel["usual_usec"] for kernel in look.found["kernels"] if kernel["name"] == "spin"), None)
    claim("what is usual for a kernel of 40 ms is about that", usual is not None and 36_000 < usual < 48_000, f"{usual} us",
          key="profile/usual", usual=usual)
    one.close()


def nothing_left(host):
    """A breakpoint is in the launch call while somebody looks, and none before and after."""
    one = cuda_worker(host, "t")
    one.tell("context")
    read_code = functools.partial(one.tell, "code")
    before = read_code()["code"]
    with Look(host) as look:
        look.probed()
        during = read_code()["code"]
    after = read_code()["code"]
    claim("a breakpoint is in cuLaunchKernel while somebody looks, and none before and after",
          before == after and during[:2] == "cc" != before[:2], f"{before[:16]}…, {during[:16]}…, {after[:16]}…", key="profile/nothing-left")
    one.close()


def compare(host, what, unit, ask, most):
    """Measures with and without a look, in turns."""
    looks = []

    def profiled():
        with Look(host) as look:
            look.probed()
            measured = ask()
        looks.append(worst(look.found))
        return measured

    found = in_turns(what, {"without": ask, "with": profiled}, quick(3, 7))
    best = quickest(found)
    without, with_look = best["without"], best["with"]
    ratio = with_look / without
    cost = record.median([process["cost"] for process in looks])
    covered = record.median([process["covered"] for process in looks])
    claim(f"{what}, its launches profiled: at most {most} times", ratio <= most,
          f"{without:.4g} {unit} without, {with_look:.4g} {unit} with, times {ratio:.4f} by the quickest of {len(looks)} turns; the daemon's estimate is "
          f"{100 * cost:.2f} % of the process's time, with probes in it for {100 * covered:.0f} %",
          key=f"profile/overhead/{what}", without=without, profiled=with_look, ratio=ratio, cost=cost, covered=covered)
    budget = looks[0]["budget"]
    claim(f"{what}: the estimate is within insight.budget", cost <= budget, f"{100 * cost:.2f} of {100 * budget:.2f} %",
          key=f"profile/budget/{what}", cost=cost, budget=budget)


def steps(host):
    """What a step costs with and without: a mean over so many seconds, since probes come and go."""
    # The cost of beginning is spread over it.
    length = quick(6, 8)
    for kind, what, most in (
        ("resnet50", "ResNet-50 training step, batch 32", 1.01),
        ("decode", "eager decoding step of short kernels", 1.02),
    ):
        one = time_worker(host, "t", cpus=CPUS)
        one.tell("context")
        one.tell(f"step {kind} 0.5")
        compare(host, what, "ms", lambda: 1000 * length / one.tell(f"step {kind} {length}")["count"], most)
        one.close()


PARTS = {"names": names, "anomaly": anomaly, "nothing": nothing_left, "steps": steps}

if __name__ == "__main__":
    host = bed.Bed(POLICY)
    record.run("profile", {name: functools.partial(part, host) for name, part in PARTS.items()})
