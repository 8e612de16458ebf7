"""Looks at this host before anything is measured: what is missing ends the run, what is absent is said and skipped later."""

import importlib.util
import os
import shutil
import subprocess
import sys

from bed import BIN, cgroup_root, prepare_host
from record import gpu_facts


def main():
    problems, notes = [], []
    if os.geteuid() != 0:
        problems.append("these scripts need root: they make cgroups and load BPF programs")
    for program in ("gpuquotad", "gpuquotactl"):
        if not os.access(BIN / program, os.X_OK):
            problems.append(f"no {program} in {BIN}: build it (cargo build --release -p gpuquota-enforcer) or name its folder in BIN")
    if not shutil.which("nvidia-smi"):
        problems.append("nvidia-smi is not installed: is there a driver?")
    elif not gpu_facts():
        problems.append("nvidia-smi shows no GPU")
    for module, why in (("torch", "the workloads are PyTorch programs"), ("torchvision", "the ResNet-50 step comes from it")):
        if importlib.util.find_spec(module) is None:
            problems.append(f"Python has no {module}: {why}")
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    prepare_host()
    print(f"cgroup v2 at {cgroup_root()}, kernel {os.uname().release}")
    for gpu in gpu_facts():
        print(", ".join(f"{name} {value}" for name, value in gpu.items()))
    if not shutil.which("nvidia-cuda-mps-control"):
        notes.append("MPS: nvidia-cuda-mps-control is not on this host; its columns are left out")
    if len(gpu_facts()) < 2:
        notes.append("the collective under a launch budget: NCCL wants a GPU for each rank, and there is one")
    if not os.environ.get("HAMI_CORE"):
        notes.append("HAMi-core: HAMI_CORE names no build of it")
    if importlib.util.find_spec("matplotlib") is None:
        notes.append("plots: Python has no matplotlib")
    others = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader"],
                            capture_output=True, text=True, check=False).stdout.strip()
    if others:
        notes.append(f"others use the GPU, and figures will suffer: {'; '.join(others.splitlines())}")
    doctor = subprocess.run([BIN / "gpuquotactl", "doctor"], capture_output=True, text=True, check=False).stdout
    for line in doctor.splitlines():
        print(f"doctor: {line}")
    for note in notes:
        print(f"will be skipped: {note}" if not note.startswith("others") else f"warning: {note}")


main()
