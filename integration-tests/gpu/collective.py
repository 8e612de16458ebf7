"""A collective of several GPUs under one launch budget. See README.md in this folder."""

import os
import subprocess
import sys

import record
from bed import Bed
from record import claim, skip

POLICY = '[tenant.t]\ncgroup = "@/t"\nlaunch.max = "2000/s"\nlaunch.pace = "signal"\n'


def all_reduce():
    count = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
    if count < 2:
        skip("all_reduce over GPUs under one launch budget", "this host has one GPU, and NCCL wants one for each rank")
        return
    host = Bed(POLICY)
    script = (
        "import os, time, torch, torch.distributed as d\n"
        "d.init_process_group('nccl'); r = d.get_rank(); torch.cuda.set_device(r)\n"
        "x = torch.ones(1 << 16, device='cuda'); s = time.monotonic()\n"
        "for _ in range(2000):\n    y = x * 2\n    d.all_reduce(y)\n"
        "torch.cuda.synchronize()\n"
        "os.write(1, f'rank {r} done in {time.monotonic() - s:.2f} s\\n'.encode())\n"
        "d.destroy_process_group()\n"
    )
    file = host.dir / "collective.py"
    file.write_text(script)
    run = host.run(
        "t", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(min(count, 4)), file,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
    )
    try:
        out, _ = run.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        run.kill()
        out = ""
    claim(f"2,000 all_reduce over {min(count, 4)} ranks under one budget of 2,000/s end", out.count(" done ") == min(count, 4),
          "; ".join(out.splitlines()) or "not within 90 s", key="collective")
    host.close()


if __name__ == "__main__":
    record.run("collective", {"all_reduce": all_reduce})
