"""An ordinary CUDA program: launches empty kernels as fast as it can when its input says so. Knows nothing of quotas.

Goes through the driver's interface by ctypes, or through PyTorch for what its input calls torch.
"""

import collections
import ctypes
import json
import os
import sys
import time

PTX = b""".version 6.0
.target sm_52
.address_size 64
.visible .entry empty() { ret; }
"""
LIBRARY = os.environ.get("LIBCUDA", "libcuda.so.1")
cuda = ctypes.CDLL(LIBRARY)
state = {}


def check(code, what):
    if code != 0:
        raise RuntimeError(f"{what}: {code}")


def context():
    """A context and a kernel that does nothing."""
    check(cuda.cuInit(0), "cuInit")
    device, handle = ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    if hasattr(cuda, "cuDevicePrimaryCtxRetain"):
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(handle), "cuCtxSetCurrent")
    else:
        check(cuda.cuCtxCreate_v2(ctypes.byref(handle), 0, device), "cuCtxCreate")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), PTX), "cuModuleLoadData")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"empty"), "cuModuleGetFunction")
    state["arguments"] = (function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    return {"pid": os.getpid()}


def launch(seconds):
    """Launches for so long; how many, and how many in each tenth of a second of the system's clock."""
    call, arguments, clock = cuda.cuLaunchKernel, state["arguments"], time.monotonic
    bins = collections.Counter()
    start = now = clock()
    end = start + seconds
    count = 0
    while now < end:
        check(call(*arguments), "cuLaunchKernel")
        now = clock()
        bins[int(now * 10)] += 1
        count += 1
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return {"launches": count, "start": start, "end": now, "bins": bins}


def cost(count):
    """Nanoseconds per launch, without looking at the clock in between."""
    call, arguments = cuda.cuLaunchKernel, state["arguments"]
    start = time.monotonic_ns()
    for _ in range(count):
        call(*arguments)
    passed = time.monotonic_ns() - start
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return {"ns": passed / count}


def code():
    """The first instructions of cuLaunchKernel as they are in this process's memory."""
    address = ctypes.cast(cuda.cuLaunchKernel, ctypes.c_void_p).value
    return {"code": ctypes.string_at(address, 32).hex()}


def torch_ops(seconds):
    import torch

    if "x" not in state:
        state["x"] = torch.zeros(16, device="cuda")
        state["x"].add_(1)
        torch.cuda.synchronize()
        return {"ops": 0, "start": 0, "end": 1}
    x = state["x"]
    start = now = time.monotonic()
    count = 0
    while now < start + seconds:
        x.add_(1)
        count += 1
        now = time.monotonic()
    torch.cuda.synchronize()
    return {"ops": count, "start": start, "end": now}


def torch_graph(seconds, nodes):
    import torch

    if "graph" not in state:
        x = torch.zeros(16, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                x.add_(1)
        state["graph"] = graph
    graph = state["graph"]
    start = now = time.monotonic()
    count = 0
    while now < start + seconds:
        graph.replay()
        count += 1
        now = time.monotonic()
    torch.cuda.synchronize()
    return {"replays": count, "start": start, "end": now}


COMMANDS = {
    "context": context,
    "launch": lambda seconds: launch(float(seconds)),
    "cost": lambda count: cost(int(count)),
    "code": code,
    "torch": lambda seconds: torch_ops(float(seconds)),
    "graph": lambda seconds, nodes: torch_graph(float(seconds), int(nodes)),
}

for line in sys.stdin:
    words = line.split()
    try:
        print(json.dumps(COMMANDS[words[0]](*words[1:])), flush=True)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
