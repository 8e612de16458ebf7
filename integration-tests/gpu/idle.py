"""What leaves the GPU of this host idle, and what it costs to look. See README.md in this folder."""

import functools
import json
import signal
import subprocess
import time

import bed
import record
from bed import time_worker
from record import claim, quick, skip
from turns import CPUS, in_turns, quickest

POLICY = '[tenant.t]\ncgroup = "@/t"\n[tenant.other]\ncgroup = "@/other"\n'
# NVML tells use with a delay, which the end of a look waits for.
PATIENCE = 60
# A wait for data, far longer than a step and than the spans in which NVML tells use.
WAIT_MS = 400


class Look:
    """A look at what leaves the GPU idle, as long as the block lasts; `found` is what it found."""

    def __init__(self, host, target, *arguments):
        self.host = host
        self.target = str(target)
        self.command = host.command("idle", self.target, "--for", "30min", "--json", *arguments)

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not self.is_running():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the look does not start: " + self.process.communicate()[1])
            time.sleep(0.05)
        return self

    def is_running(self):
        told = self.host.ctl("idle", self.target, "--so-far", "--json", check=False)
        return told.returncode == 0 and json.loads(told.stdout)["running"]

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=PATIENCE)
        if self.process.returncode != 0:
            raise RuntimeError(f"the look ended with {self.process.returncode}: {err}")
        self.found = json.loads(out)


def share_of(found, pid):
    """What is told of a process on the GPU that is measured; None if nothing is."""
    gpus = [gpu for gpu in found["gpus"] if gpu["gpu"] == bed.GPU]
    return next((share for gpu in gpus for share in gpu["shares"] if share["pid"] == pid), None)


def parts(share):
    """Parts of the idle time by state: least, estimate, most."""
    idle = max(1, share["idle_usec"])
    return {one["state"]: tuple(one[key] / idle for key in ("least_usec", "idle_usec", "most_usec")) for one in share["states"]}


def described(share):
    known = max(1, share["known_usec"])
    told = [f"used {share['used_usec'] / known:.0%}, idle {share['idle_usec'] / known:.0%}"]
    for state, (least, estimate, most) in sorted(parts(share).items(), key=lambda item: -item[1][1]):
        if estimate >= 0.01:
            told.append(f"{state} {estimate:.0%} ({least:.0%}-{most:.0%})")
    return ", ".join(told)


def names(stack):
    return [frame.get("function") or frame["file"].rsplit("/", 1)[-1] for frame in stack["frames"]]


def loops(host):
    """A training loop whose data is slow, in four ways: the state that is told is that of the wait."""
    for way, states in (("pipe", {"io"}), ("loader", {"io", "lock"}), ("lock", {"lock"}), ("work", {"running", "queued"})):
        one = bed.worker(host, "t", "loader_worker.py")
        pid = one.tell("context")["pid"]
        flames = host.dir / f"idle-{way}.txt"
        with Look(host, "t", "--folded", flames) as look:
            length = quick(8, 20)
            answer = one.tell(f"train {way} {length} {WAIT_MS}")
        share = share_of(look.found, pid)
        told = described(share) if share else f"nothing: {look.found['gpus']}"
        part = sum(estimate for state, (_, estimate, _) in parts(share).items() if state in states) if share else 0
        claim(f"a loop that waits {WAIT_MS} ms for its data ({way}) is found to be {' or '.join(sorted(states))}", part >= 0.6,
              f"{told}; {answer['steps']} steps of {answer['ms']:.0f} ms", key=f"idle/loop/{way}", part=part)
        top = next((stack for stack in look.found["stacks"] if stack["pid"] == pid and stack["state"] in states), None)
        shown = " < ".join(names(top)[:8]) if top else "none"
        claim(f"its stack ({way})", top is not None,
              f"{shown}; {len(flames.read_text().splitlines())} stacks; {look.found['gaps']['lost']} changes lost",
              key=f"idle/stack/{way}")
        steps = [gpu.get("step_usec") for gpu in look.found["gpus"] if gpu["gpu"] == bed.GPU]
        claim(f"spans in which NVML tells use ({way})", None, f"{(steps or [None])[0]} us", key=f"idle/step/{way}")
        if look.found["gaps"].get("no_samples"):
            skip(f"stacks of running threads ({way})", look.found["gaps"]["no_samples"])
        one.close()


def frozen(host):
    """A tenant that is frozen on the GPU is told to be held."""
    one = time_worker(host, "t")
    pid = one.tell("context").get("pid")
    one.tell("step resnet50 0.3")
    with Look(host, "t") as look:
        host.ctl("freeze", "t")
        one.order("step resnet50 1")
        time.sleep(3)
        host.ctl("thaw", "t")
        one.answer()
    shares = [share for gpu in look.found["gpus"] for share in gpu["shares"] if share["context"]]
    share = share_of(look.found, pid) if pid else (shares or [None])[0]
    part = parts(share)["held"][0] if share else 0
    claim("a tenant frozen for 3 s is told to be held", part >= 0.6, described(share) if share else "nothing",
          key="idle/frozen", part=part)
    one.close()


def cost(host):
    """A training step without a look, beside one at another tenant, and in one, in turns."""
    one = time_worker(host, "t", cpus=CPUS)
    other = time_worker(host, "other")
    for worker in (one, other):
        worker.tell("context")
    one.tell("step resnet50 0.3")
    length = quick(0.8, 5)
    looks = {"beside": [], "in": []}
    measure = lambda: one.tell(f"step resnet50 {length}")["p50"]

    def looked_at(way, target):
        with Look(host, target) as look:
            measured = measure()
        looks[way].append(max(look.found["processes"], key=lambda process: process["cost"]))
        return measured

    found = in_turns("idle/step", {"without": measure, "beside": lambda: looked_at("beside", "other"), "in": lambda: looked_at("in", "t")},
                     quick(5, 9))
    best = quickest(found)
    without = best["without"]
    for way in ("beside", "in"):
        value = best[way]
        ratio = value / without
        cost, covered = (record.median([process[key] for process in looks[way]]) for key in ("cost", "covered"))
        claim(f"ResNet-50 training step, batch 32, {way} a look: at most 1.02 times", ratio <= 1.02,
              f"{without:.4g} ms without, {value:.4g} ms {way}, times {ratio:.3f} by the quickest of {len(found[way])} turns; to be followed cost "
              f"a process {100 * cost:.2f} % of its time at most, for {100 * covered:.0f} % of the time", key=f"idle/overhead/{way}",
              without=without, looked=value, ratio=ratio, cost=cost, covered=covered)
    other.close()
    one.close()


PARTS = {"loops": loops, "frozen": frozen, "cost": cost}

if __name__ == "__main__":
    host = bed.Bed(POLICY)
    record.run("idle", {name: functools.partial(part, host) for name, part in PARTS.items()})
