"""An ordinary GPU program: does what its input says, and answers with JSON. Knows nothing of quotas.

Kernels do a fixed amount of arithmetic. One that waits for a clock would not do: a clock goes on while the kernel is
preempted, so it would finish work that it was never given time for.
"""

import collections
import ctypes
import functools
import json
import os
import random
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
cuda = ctypes.CDLL("libcuda.so.1")
BIN = 0.1  # seconds
held = []


@functools.cache
def spin_kernel():
    """The kernel and where it may write."""
    out = torch.zeros(1, device="cuda")
    return torch.cuda._compile_kernel(SOURCE, "spin"), out


@functools.cache
def launch_of(rounds):
    """Arguments of cuLaunchKernel, made once: then a launch costs Python few microseconds, and a burst waits for the GPU."""
    kernel, out = spin_kernel()
    values = ctypes.c_void_p(out.data_ptr()), ctypes.c_int(rounds)
    pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    held.append(values)
    grid = (ctypes.c_uint(size) for size in (BLOCKS, 1, 1, 256, 1, 1, 0))
    return kernel.func, *grid, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), pointers, None


def spin(rounds):
    code = cuda.cuLaunchKernel(*launch_of(rounds))
    if code:
        raise RuntimeError(f"cuLaunchKernel: {code}")


def prepare():
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


@functools.cache
def inference():
    """Inference with 2 billion weights, as for one token of a language model, captured as a CUDA graph: more than a millisecond."""
    width = 8192
    layers = (layer for _ in range(32) for layer in (torch.nn.Linear(width, width, device="cuda", dtype=torch.half), torch.nn.GELU()))
    return capture(torch.nn.Sequential(*layers), torch.randn(8, width, device="cuda", dtype=torch.half))


def capture(model, x):
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
    # The graph uses their memory.
    held.append((model, x))
    return captured


def graph(seconds):
    return latencies(inference().replay, seconds)


def serve(rate, seconds, seed):
    """An open loop: requests come at random moments, whether or not the last one is done; milliseconds from arrival to end.

    `gpu_ms` is what a request takes on the GPU: if that is near the whole of an undisturbed request, the GPU is what it waits for."""
    captured = inference()
    moments = random.Random(seed)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    captured.replay()
    end.record()
    end.synchronize()
    times = []
    arrival = time.perf_counter()
    last = arrival + seconds
    while True:
        arrival += moments.expovariate(rate)
        if arrival > last:
            break
        while time.perf_counter() < arrival:
            time.sleep(0 if arrival - time.perf_counter() < 0.001 else 0.0005)
        captured.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - arrival) * 1000)
    return {"ms": [round(t, 4) for t in times], "gpu_ms": start.elapsed_time(end)}


def copy(seconds):
    """Copies inside the card as fast as it can."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return keep_busy(lambda: b.copy_(a), seconds, 1, 8)


@functools.cache
def step(kind):
    """One step of a program, as a function."""
    if kind == "resnet50":
        import torchvision

        model = torchvision.models.resnet50().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        images, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")

        def train_step():
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return train_step
    # One token of a decoder of 24 layers, batch 1: short kernels.
    width = 2048
    layer = lambda: torch.nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0, batch_first=True, device="cuda", dtype=torch.half)
    model = torch.nn.Sequential(*(layer() for _ in range(24))).train()
    x = torch.randn(1, 1, width, device="cuda", dtype=torch.half)
    if kind == "decode-graph":
        return capture(model, x).replay

    def eager():
        with torch.no_grad():
            model(x)

    return eager


def step_time(kind, seconds):
    """Median and p99 of a step, each waited for, in milliseconds."""
    work = step(kind)
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    times = sorted(latencies(work, seconds)["ms"])
    return {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "count": len(times)}


def fault():
    """A kernel that writes where there is no memory: the context is lost, and with it the work of this process."""
    kernel = torch.cuda._compile_kernel(
        "extern \"C\" __global__ void wild(float* out) { out[1ull << 44] = 1.0f; }", "wild"
    )
    try:
        kernel((1, 1, 1), (1, 1, 1), (torch.zeros(1, device="cuda"),))
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {"fault": str(error).splitlines()[0]}
    return {"fault": None}


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
    if words[0] == "serve":
        return serve(float(words[1]), float(words[2]), int(words[3]))
    if words[0] == "copy":
        return copy(float(words[1]))
    if words[0] == "step":
        return step_time(words[1], float(words[2]))
    if words[0] == "steps":
        return keep_busy(step(words[1]), float(words[2]), 1, 2)
    if words[0] == "hold":
        held.append(torch.empty(int(words[1]) << 20, dtype=torch.uint8, device="cuda"))
        return {}
    if words[0] == "fault":
        return fault()
    raise ValueError(words)


for line in sys.stdin:
    try:
        print(json.dumps(answer(line.split())), flush=True)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
