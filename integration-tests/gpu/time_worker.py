"""An ordinary GPU program: does what its input says, and answers with JSON. Knows nothing of quotas.

Kernels do a fixed amount of arithmetic. One that waits for a clock would not do: a clock goes on while the kernel is
preempted, so it would finish work that it was never given time for.
"""

import collections
import json
import os
import sys
import time

import torch

SOURCE = r"""
extern "C" __global__ void spin(float* out, int rounds) {
    float a = threadIdx.x * 0.001f, b = 1.0f;
    for (int i = 0; i < rounds; i++) {
        a = a * 0.999f + b;
        b = b * 1.001f - a;
    }
    if (a == 12345.0f) out[0] = b;
}
"""
BLOCKS = 132 * 8
spin_kernel = None
spin_out = None
BIN = 0.1  # seconds


def spin(rounds):
    spin_kernel((BLOCKS, 1, 1), (256, 1, 1), (spin_out, rounds))


def prepare():
    global spin_kernel, spin_out
    spin_out = torch.zeros(1, device="cuda")
    if spin_kernel is None:
        spin_kernel = torch.cuda._compile_kernel(SOURCE, "spin")
        spin(1)
    torch.cuda.synchronize()


def calibrate(micros):
    """Rounds of the kernel that take so long on a GPU of one's own."""
    prepare()
    rounds = 4000
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        count = 50
        spin(rounds)
        start.record()
        for _ in range(count):
            spin(rounds)
        end.record()
        end.synchronize()
        each = start.elapsed_time(end) * 1000 / count
        rounds = max(1, int(rounds * micros / each))
    return {"rounds": rounds, "us": each}


def keep_busy(step, seconds, batch, ahead=4):
    """Calls step in batches, so many of them ahead of the GPU; returns finished steps by tenth of a second."""
    bins = collections.Counter()
    pending = collections.deque()
    end = time.monotonic() + seconds
    while True:
        now = time.monotonic()
        if now < end:
            for _ in range(batch):
                step()
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
        elif not pending:
            break
        while pending and (len(pending) > ahead or now >= end):
            pending.popleft().synchronize()
            bins[int(time.monotonic() / BIN)] += batch
    return {"bins": sorted(bins.items())}


def saturate(rounds, seconds):
    prepare()
    # Some 50 ms ahead: a program that is held up for a moment still wants all of the GPU.
    return keep_busy(lambda: spin(rounds), seconds, 8, 12)


def matmul(size, seconds):
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    out = torch.empty(size, size, device="cuda")
    torch.cuda.synchronize()
    return keep_busy(lambda: torch.matmul(a, b, out=out), seconds, 1)


def train(seconds):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU()))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = (torch.randn(4096, 2048, device="cuda") for _ in range(2))

    def step():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    return keep_busy(step, seconds, 1)


def latencies(work, seconds):
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000)
    return {"ms": [round(t, 4) for t in times]}


def burst(kernels, rounds, seconds):
    """Some kernels, then a wait, again and again."""
    prepare()

    def work():
        for _ in range(kernels):
            spin(rounds)

    work()
    torch.cuda.synchronize()
    return latencies(work, seconds)


def graph(seconds):
    """Inference with 2 billion weights, as for one token of a language model, captured as a CUDA graph: about a millisecond."""
    width = 8192
    layers = (layer for _ in range(32) for layer in (torch.nn.Linear(width, width, device="cuda", dtype=torch.half), torch.nn.GELU()))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(8, width, device="cuda", dtype=torch.half)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(captured):
        model(x)
    captured.replay()
    torch.cuda.synchronize()
    return latencies(captured.replay, seconds)


def answer(words):
    if words[0] == "context":
        torch.zeros(1, device="cuda")
        prepare()
        return {"pid": os.getpid()}
    if words[0] == "calibrate":
        return calibrate(float(words[1]))
    if words[0] == "saturate":
        return saturate(int(words[1]), float(words[2]))
    if words[0] == "matmul":
        return matmul(int(words[1]), float(words[2]))
    if words[0] == "train":
        return train(float(words[1]))
    if words[0] == "burst":
        return burst(int(words[1]), int(words[2]), float(words[3]))
    if words[0] == "graph":
        return graph(float(words[1]))
    raise ValueError(words)


for line in sys.stdin:
    print(json.dumps(answer(line.split())), flush=True)
