"""What is told about tenants: energy that adds up, recordings at milliseconds, faults of a process, and what it costs. See README.md in this folder."""

import csv
import json
import select
import socket
import subprocess
import time
import urllib.request

import record
from bed import Bed, GPU, cpu_ms, cuda_worker, time_worker, together
from record import claim, quick, sample, skip

TWO = """
[tenant.a]
cgroup = "@/a"
[tenant.b]
cgroup = "@/b"
time.weight = 300
"""


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def scrape(port):
    """Joules of the board, and of everybody who is told apart on the measured GPU."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    board, parts = 0.0, {}
    for line in text.splitlines():
        if f'gpu="{GPU}"' not in line:
            continue
        name, value = line.rsplit(" ", 1)
        if name.startswith("gpuquota_gpu_energy_joules_total"):
            board = float(value)
        elif "energy" in name and "joules_total{" in name:
            parts[name] = float(value)
    return board, parts


def scrape_after_a_look(port):
    """While nothing runs the daemon looks at the board rarely, and what is told apart is as of its last look."""
    _, before = scrape(port)
    end = time.monotonic() + 30
    while True:
        time.sleep(0.25)
        board, parts = scrape(port)
        if parts != before or time.monotonic() > end:
            return board, parts


def energy():
    port = free_port()
    host = Bed(TWO, f'[metrics]\naddress = "127.0.0.1:{port}"\n')
    workers = [time_worker(host, name) for name in ("a", "b")]
    together(workers, "context")
    board, parts = scrape_after_a_look(port)
    if not board:
        skip("energy of tenants", "NVML does not count the energy of this board")
    else:
        together(workers, f"matmul 4096 {quick(15, 40)}")
        time.sleep(2)
        board_after, parts_after = scrape_after_a_look(port)
        used = board_after - board
        told = sum(parts_after.values()) - sum(parts.values())
        claim("energy of two tenants, of nobody and of others adds up to the board's within 1 %", abs(told / used - 1) <= 0.01,
              f"{used:.0f} J of the board, {told:.0f} J told apart: {100 * (told / used - 1):+.2f} %", key="telemetry/energy", ratio=told / used)
    for worker in workers:
        worker.close()
    host.close()


def recording():
    host = Bed(TWO)
    worker = cuda_worker(host, "a")
    worker.tell("context")
    worker.order(f"launch {quick(4, 14)}")
    file = host.dir / "steps.csv"
    length = quick(2, 10)
    done = host.ctl("record", "--gpu", str(GPU), "--for", f"{length}s", "--interval", "5ms", "--output", str(file), check=False)
    worker.answer()
    if done.returncode:
        skip("a recording at 5 ms", done.stderr.strip())
    else:
        with open(file, newline="") as text:
            rows = list(csv.DictReader(text))
        times = [float(row["time_seconds"]) for row in rows if not row["tenant"]]
        gaps = sorted(1000 * (after - before) for before, after in zip(times, times[1:]))
        for at, gap in enumerate(gaps[:: max(1, len(gaps) // 200)]):
            sample("gap of a recording, ms", at, gap)
        claim("a recording at 5 ms keeps its pace in the median", gaps[len(gaps) // 2] <= 5.5,
              f"{len(times)} looks, {gaps[len(gaps) // 2]:.2f} ms apart in the median, {gaps[-1]:.1f} ms at most", key="telemetry/record", p50=gaps[len(gaps) // 2])
        claim("a recording shows the tenant", any(row["tenant"] == "a" for row in rows), key="telemetry/record-tenant")
    worker.close()
    host.close()


def faults():
    """A process whose kernel faults: event and tenant."""
    host = Bed(TWO)
    worker = time_worker(host, "a")
    pid = worker.tell("context")["pid"]
    monitor = subprocess.Popen(host.command("monitor", "--json"), stdout=subprocess.PIPE, text=True)
    time.sleep(1)
    worker.order("fault")
    events, end = [], time.monotonic() + 10
    while time.monotonic() < end and not events:
        if select.select([monitor.stdout], [], [], 1)[0]:
            event = json.loads(monitor.stdout.readline())
            events += [event] if event["event"] == "xid" else []
    monitor.kill()
    doctor = json.loads(host.ctl("doctor", "--json", check=False).stdout)
    source = next((found["detail"] for found in doctor["findings"] if found["subject"] == "GPU faults"), "unknown")
    if not events:
        skip("a fault is laid to its tenant", f"the driver reported none within 10 s ({source})")
    elif events[0]["certainty"] != "process":
        skip("a fault is laid to its process", f"this host's source names none ({source})")
    else:
        claim("a fault is laid to its tenant and process", (events[0]["tenant"], events[0]["pid"]) == ("a", pid),
              f"Xid {events[0]['xid']} by {events[0]['source']}", key="telemetry/fault")
    worker.process.kill()
    host.close()


def cost():
    """A training step beside nothing, beside the daemon that remembers, and while a recording at 5 ms runs."""
    host = Bed(TWO)
    worker = time_worker(host, "a")
    worker.tell("context")
    length = quick(1, 5)
    kind = "resnet50"
    worker.tell(f"step {kind} 0.3")
    alone, recorded = [], []
    for at in range(quick(3, 7)):
        alone.append(worker.tell(f"step {kind} {length}")["p50"])
        recording = subprocess.Popen(host.command("record", "--gpu", str(GPU), "--for", f"{length + 2}s", "--interval", "5ms",
                                                  "--output", str(host.dir / "cost.csv")), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(0.5)
        if recording.poll():
            skip("cost of a recording at 5 ms", recording.stderr.read().strip())
            break
        recorded.append(worker.tell(f"step {kind} {length}")["p50"])
        recording.wait()
        sample("step, ms", at, alone[-1])
        sample("step beside a recording, ms", at, recorded[-1])
    if recorded:
        ratio = record.median(recorded) / record.median(alone)
        claim("a training step while a recording at 5 ms runs", None, f"times {ratio:.3f}", key="telemetry/cost-record", ratio=ratio)
    before = cpu_ms(host.daemon.pid)
    time.sleep(length)
    used = (cpu_ms(host.daemon.pid) - before) / (length * 10)
    claim("the daemon beside one tenant that holds memory, history and baselines on", None, f"{used:.2f} % of a core", key="telemetry/cpu", percent=used)
    worker.close()
    host.close()


if __name__ == "__main__":
    record.run("telemetry", {"energy": energy, "recording": recording, "faults": faults, "cost": cost})
