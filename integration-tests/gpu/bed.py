"""A daemon and tenants on the GPU of this host, for the scripts in this folder.

Needs root, python3, and built binaries (BIN, default target/release of the repository). No bus, no systemd.
Everything that a bed makes goes with it.
"""

import atexit
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPO = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN", REPO / "target" / "release"))
# More lines of gpuquota.toml, say for a simulated GPU.
SETTINGS = os.environ.get("SETTINGS", "")
# The GPU that is measured.
GPU = int(os.environ.get("GPU", 0))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(GPU))
# Beds of this process have names of their own.
NUMBERS = itertools.count()
# Beds that are there, so that a part of a script that breaks leaves none to the next.
OPEN = []
# Seconds after which a worker that does not answer is given up.
PATIENCE = 120
# Seconds that a neighbour is at work before its victim is.
BEFORE = 0.7
MIB = 1 << 20
GIB = 1 << 30


def mounted(path):
    return any(line.split()[1] == path for line in open("/proc/mounts"))


def prepare_host():
    """Mounts what the daemon needs and this host lacks."""
    for kind, path in (("tracefs", "/sys/kernel/tracing"), ("bpf", "/sys/fs/bpf")):
        if not mounted(path) and not (kind == "tracefs" and os.path.exists(path + "/events")):
            subprocess.run(["mount", "-t", kind, "none", path], check=True)


def cgroup_root():
    for path in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(path + "/cgroup.controllers"):
            return path
    sys.exit("error: no cgroup v2 hierarchy on this host")


class Bed:
    def __init__(self, policy, settings="", start=True, under=()):
        """`under` is a command that the daemon is started by, such as setpriv with what it needs."""
        self.under = under
        if os.geteuid() != 0:
            sys.exit("error: this script needs root")
        prepare_host()
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gpuquota-gpu-"))
        self.dir.chmod(0o755)
        self.name = f"gpuquota-gpu-{os.getpid()}-{next(NUMBERS)}"
        self.cgroups = cgroup_root()
        self.top = f"/{self.name}.slice"
        self.pins = f"/sys/fs/bpf/{self.name}"
        self.daemon = None
        (self.dir / "policy.d").mkdir()
        self.write_policy(policy)
        (self.dir / "gpuquota.toml").write_text(
            f'bus = "{self.bus}"\nruntime-directory = "{self.dir}/run"\nbpf-directory = "{self.pins}"\n'
            f'[policy]\nvendor = "{self.dir}/none"\nadmin = "{self.dir}/policy.d"\n' + SETTINGS + settings
        )
        atexit.register(self.close)
        OPEN.append(self)
        if start:
            self.start()

    @property
    def bus(self):
        return f"peer:{self.dir}/run/bus"

    def write_policy(self, policy):
        (self.dir / "policy.d" / "50-test.toml").write_text(policy.replace("@", self.top))

    def start(self):
        log = open(self.dir / "daemon.log", "a")
        self.daemon = subprocess.Popen(
            [*self.under, BIN / "gpuquotad", "--config", self.dir / "gpuquota.toml"], stdin=subprocess.DEVNULL, stderr=log
        )
        deadline = time.monotonic() + 30
        while not (self.dir / "run" / "bus").exists():
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                sys.exit("error: the daemon does not start:\n" + self.log())
            time.sleep(0.05)

    def kill(self):
        """As a crash."""
        self.daemon.kill()
        self.daemon.wait()
        (self.dir / "run" / "bus").unlink(missing_ok=True)

    def restart(self):
        self.stop()
        self.start()

    def stop(self):
        """As an admin does: limits stay in the kernel."""
        self.daemon.terminate()
        try:
            self.daemon.wait(10)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
        self.daemon = None
        (self.dir / "run" / "bus").unlink(missing_ok=True)

    def detach(self):
        """Leaves no program of ours in the kernel."""
        if self.daemon:
            self.stop()
        subprocess.run([BIN / "gpuquotad", "--config", self.dir / "gpuquota.toml", "--detach-all"],
                       stderr=subprocess.DEVNULL, check=False)

    def log(self):
        return (self.dir / "daemon.log").read_text()

    def command(self, *arguments):
        return [BIN / "gpuquotactl", "--bus", self.bus, *arguments]

    def ctl(self, *arguments, check=True):
        return subprocess.run(self.command(*arguments), check=check, capture_output=True, text=True)

    def tenant(self, name):
        answer = json.loads(self.ctl("status", "--json", name).stdout)
        return answer["tenants"][0] if "tenants" in answer else answer

    def usage(self, name, gpu=GPU):
        return next(found for found in self.tenant(name)["gpus"] if found["gpu"] == gpu)

    def run(self, tenant, *command, **popen):
        line = [BIN / "gpuquotactl", "--bus", self.bus, "run", "--socket", self.dir / "run" / "listener.sock"]
        return subprocess.Popen([*line, "--tenant", tenant, "--", *command], **popen)

    def spawn(self, cgroup, *command):
        """A process in a cgroup below the bed's, without the daemon's help."""
        folder = pathlib.Path(f"{self.cgroups}{self.top}/{cgroup}")
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
        )

    def worker(self, tenant, environment=None):
        """A PyTorch process in a tenant that answers each line of input with a line."""
        return worker(self, tenant, "torch_worker.py", environment)

    def close(self):
        atexit.unregister(self.close)
        OPEN.remove(self)
        self.detach()
        top = pathlib.Path(self.cgroups + self.top)
        if top.exists():
            for procs in top.rglob("cgroup.procs"):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.5)
            for folder in sorted((f for f in top.rglob("*") if f.is_dir()), key=lambda f: -len(str(f))):
                folder.rmdir()
            top.rmdir()
        shutil.rmtree(self.dir, ignore_errors=True)


class Worker:
    def __init__(self, process):
        self.process = process

    def order(self, line):
        """Says what to do; `answer` waits for it."""
        self.line = line
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        # One line is on its way at a time, so none can wait in the buffer of this side.
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise RuntimeError(f"no answer to {self.line!r} within {PATIENCE} s")
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"the worker ended at {self.line!r} with {self.process.wait()}")
        answer = json.loads(answer)
        if list(answer) == ["error"] and answer["error"]:
            raise RuntimeError(f"{self.line}: {answer['error']}")
        return answer

    def tell(self, line):
        self.order(line)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        return self.process.wait(60)


def nvml_bytes():
    """Bytes by process id, as the driver tells them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    return {int(pid): int(mib) * MIB for pid, mib in (line.split(",") for line in lines if line.strip())}


def worker(bed, tenant, script, environment=None, cpus=None):
    """A Python program of this folder that answers each line of input with a line, in a tenant, with tenant None in none; on these
    CPUs only, if any are named."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1, "env": {**os.environ, **(environment or {})}}
    if cpus:
        options["preexec_fn"] = lambda: os.sched_setaffinity(0, cpus)
    command = [sys.executable, pathlib.Path(__file__).with_name(script)]
    return Worker(subprocess.Popen(command, **options) if tenant is None else bed.run(tenant, *command, **options))


def cuda_worker(bed, tenant, **options):
    """A worker that speaks to the driver's interface directly."""
    return worker(bed, tenant, "cuda_worker.py", **options)


def time_worker(bed, tenant, environment=None, **options):
    """A PyTorch worker of time_worker.py."""
    return worker(bed, tenant, "time_worker.py", environment, **options)


def beside(victim, line, neighbour=None, order=None):
    """Milliseconds of each thing that the victim does, alone or while the neighbour carries out its order."""
    if neighbour:
        neighbour.order(order)
        time.sleep(BEFORE)
    times = victim.tell(line)["ms"]
    if neighbour:
        neighbour.answer()
    return times


def together(workers, *lines):
    """One line to all at once, or each its own; their answers."""
    lines = lines if len(lines) > 1 else lines * len(workers)
    for worker, line in zip(workers, lines):
        worker.order(line)
    return [worker.answer() for worker in workers]


def cpu_ms(pid):
    """CPU time that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")
