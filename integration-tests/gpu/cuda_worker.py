"""An ordinary CUDA program: launches empty kernels and allocates memory when its input says so. Knows nothing of quotas.

Goes through the driver's interface by ctypes, or through PyTorch for what its input calls torch.
"""

import collections
import ctypes
import json
import os
import struct
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


def repeated(call, seconds):
    """Calls for so long; how often, and how often in each tenth of a second of the system's clock."""
    clock = time.monotonic
    bins = collections.Counter()
    start = now = clock()
    end = start + seconds
    count = 0
    while now < end:
        call()
        now = clock()
        bins[int(now * 10)] += 1
        count += 1
    return {"launches": count, "start": start, "end": now, "bins": bins}


def launch(seconds):
    call, arguments = cuda.cuLaunchKernel, state["arguments"]
    answer = repeated(lambda: check(call(*arguments), "cuLaunchKernel"), seconds)
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return answer


def cost(count):
    """Nanoseconds per launch, without looking at the clock in between."""
    call, arguments = cuda.cuLaunchKernel, state["arguments"]
    start = time.monotonic_ns()
    for _ in range(count):
        call(*arguments)
    passed = time.monotonic_ns() - start
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return {"ns": passed / count}


def code(function="cuLaunchKernel"):
    """The first instructions of a function of the driver as they are in this process's memory."""
    address = ctypes.cast(getattr(cuda, function), ctypes.c_void_p).value
    return {"code": ctypes.string_at(address, 32).hex()}


def torch_ops(seconds):
    """Additions in place by PyTorch; the first call makes what the others need and adds nothing."""
    import torch

    if "x" not in state:
        state["x"] = torch.zeros(16, device="cuda")
        state["x"].add_(1)
        seconds = 0
    x = state["x"]
    answer = repeated(lambda: x.add_(1), seconds)
    torch.cuda.synchronize()
    return answer


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
    answer = repeated(state["graph"].replay, seconds)
    torch.cuda.synchronize()
    return answer


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps of cuda.h: pinned memory of the first device."""

    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int),
                ("security", ctypes.c_void_p), ("most", ctypes.c_size_t), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 54)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int),
                ("security", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class NodeParameters(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS of cuda.h."""

    _fields_ = [("pool", PoolProperties), ("access", ctypes.c_void_p), ("accesses", ctypes.c_size_t), ("bytes", ctypes.c_size_t),
                ("pointer", ctypes.c_uint64)]


def pool_properties():
    return PoolProperties(kind=1, place=1, device=0)


def by_alloc(size):
    pointer = ctypes.c_uint64()
    return cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), pointer


def by_pitch(size):
    pointer, pitch = ctypes.c_uint64(), ctypes.c_size_t()
    row = 1 << 20
    return cuda.cuMemAllocPitch_v2(ctypes.byref(pointer), ctypes.byref(pitch), ctypes.c_size_t(row), ctypes.c_size_t(size // row), 16), pointer


def by_managed(size):
    pointer = ctypes.c_uint64()
    return cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1), pointer


def by_async(size):
    pointer = ctypes.c_uint64()
    code = cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(size), None)
    return code or cuda.cuStreamSynchronize(None), pointer


def by_pool(size):
    if "pool" not in state:
        state["pool"] = ctypes.c_void_p()
        check(cuda.cuMemPoolCreate(ctypes.byref(state["pool"]), ctypes.byref(pool_properties())), "cuMemPoolCreate")
    pointer = ctypes.c_uint64()
    code = cuda.cuMemAllocFromPoolAsync(ctypes.byref(pointer), ctypes.c_size_t(size), state["pool"], None)
    return code or cuda.cuStreamSynchronize(None), pointer


def by_create(size):
    handle = ctypes.c_uint64()
    properties = AllocationProperties(kind=1, place=1, device=0)
    return cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)), handle


def by_graph(size):
    """A graph whose only node allocates, and that is launched."""
    graph, node, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuGraphCreate(ctypes.byref(graph), 0), "cuGraphCreate")
    parameters = NodeParameters(pool=pool_properties(), bytes=size)
    code = (
        cuda.cuGraphAddMemAllocNode(ctypes.byref(node), graph, None, ctypes.c_size_t(0), ctypes.byref(parameters))
        or cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        or cuda.cuGraphLaunch(executable, None)
        or cuda.cuStreamSynchronize(None)
    )
    return code, parameters


def by_host(size):
    pointer = ctypes.c_void_p()
    return cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0), pointer


def by_register(size):
    import mmap

    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), 0), memory


WAYS = {
    "cuMemAlloc": by_alloc, "cuMemAllocPitch": by_pitch, "cuMemAllocManaged": by_managed, "cuMemAllocAsync": by_async,
    "cuMemAllocFromPoolAsync": by_pool, "cuMemCreate": by_create, "graph memory node": by_graph, "cuMemHostAlloc": by_host,
    "cuMemHostRegister": by_register,
}


def fill(way, mib, most):
    """Allocates blocks of so many MiB until it fails or there are `most` MiB; the driver's error code, 0 for none."""
    got, kept = 0, state.setdefault("kept", [])
    while got < most:
        code, what = WAYS[way.replace("_", " ")](mib << 20)
        if code != 0:
            return {"mib": got, "code": code}
        kept.append(what)
        got += mib
    return {"mib": got, "code": 0}


def managed(mib):
    """Managed memory that is on the GPU and full of ones."""
    size = int(mib) << 20
    code, pointer = by_managed(size)
    check(code, "cuMemAllocManaged")
    state["managed"] = pointer, size
    return touch(1)


def touch(value):
    """Milliseconds for the GPU to write all of the managed memory; whether it held throughout what was written last, read before."""
    pointer, size = state["managed"]
    first = ctypes.string_at(pointer.value, 1)
    same = all(ctypes.string_at(pointer.value + at, 1) == first for at in range(0, size, 64 << 20))
    start = time.monotonic()
    check(cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(int(value)), ctypes.c_size_t(size)), "cuMemsetD8")
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return {"ms": 1000 * (time.monotonic() - start), "held": first[0] if same else None}


def wait_for_memory(mib):
    """Seconds that one allocation takes, and the driver's error code."""
    start = time.monotonic()
    code, pointer = by_alloc(int(mib) << 20)
    state.setdefault("kept", []).append(pointer)
    return {"s": time.monotonic() - start, "code": code}


def share():
    """Memory of 256 MiB that another process may open."""
    code, pointer = by_alloc(256 << 20)
    check(code, "cuMemAlloc")
    handle = (ctypes.c_ubyte * 64)()
    check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), pointer), "cuIpcGetMemHandle")
    return {"handle": bytes(handle).hex()}


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def open_shared(handle):
    pointer = ctypes.c_uint64()
    handle = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    check(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, 1), "cuIpcOpenMemHandle")
    return {}


def allocations(count):
    """Nanoseconds for an allocation of 2 MiB and its end."""
    pointer = ctypes.c_uint64()
    start = time.monotonic_ns()
    for _ in range(count):
        check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 << 20)), "cuMemAlloc")
        check(cuda.cuMemFree_v2(pointer), "cuMemFree")
    return {"ns": (time.monotonic_ns() - start) / count}


class Rm:
    """A client of the driver's resource manager, without CUDA."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.file = os.open(os.path.join(os.environ.get("SIMGPU_DIR", "/dev"), "nvidiactl"), os.O_RDWR)
        # NVOS64: a client (class NV01_ROOT_CLIENT), whose handle comes back.
        client = ctypes.create_string_buffer(struct.pack("=4I32x", 0, 0, 0, 0x41), 48)
        check(self.prepared(0x2B, client)(), "RM_ALLOC")
        self.client = struct.unpack_from("=I", client, 8)[0]

    def prepared(self, number, argument):
        """A call, with everything made that Python would have to make for it."""
        # _IOWR('F', number, size)
        command = ctypes.c_ulong(3 << 30 | len(argument) << 16 | ord("F") << 8 | number)
        return lambda: self.libc.ioctl(self.file, command, argument)

    def control(self, number, parameters):
        """A prepared control on the client itself, and its status once it was called."""
        # NVOS54
        argument = ctypes.create_string_buffer(
            struct.pack("=4IQ2I", self.client, self.client, number, 0, ctypes.addressof(parameters), len(parameters), 0), 32)
        return self.prepared(0x2A, argument), lambda: struct.unpack_from("=I", argument, 28)[0]


def controls(count):
    """Nanoseconds of a cheap control of the driver's (NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS) and of an ioctl on a file that is no
    GPU's, without what this interpreter takes to call a function; the best of ten."""
    rm = Rm()
    ids = ctypes.create_string_buffer(128)
    call, status = rm.control(0x201, ids)
    check(call(), "RM_CONTROL")
    check(status(), "RM_CONTROL")
    null = os.open("/dev/null", os.O_RDWR)
    # TIOCGWINSZ; a file that is no terminal has none.
    elsewhere = lambda: rm.libc.ioctl(null, ctypes.c_ulong(0x5413), ids)

    def nanoseconds(call):
        start = time.monotonic_ns()
        for _ in range(count):
            call()
        return (time.monotonic_ns() - start) / count

    best, other, own = (min(nanoseconds(one) for _ in range(10)) for one in (call, elsewhere, lambda: rm.libc.abs(1)))
    os.close(null)
    os.close(rm.file)
    return {"ns": best - own, "elsewhere_ns": other - own}


def handle_info(handle):
    """What the driver says of an object of a client of ours that has none (NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO: its parent)."""
    rm = Rm()
    call, status = rm.control(0xD02, ctypes.create_string_buffer(struct.pack("=4I", handle, 1, 0, 0), 16))
    check(call(), "RM_CONTROL")
    os.close(rm.file)
    return {"status": status()}


def graph_cost(count, nodes):
    """Nanoseconds to launch a graph of so many kernels, by its median."""
    import torch

    torch_graph(0, nodes)
    times = []
    for _ in range(count):
        start = time.monotonic_ns()
        state["graph"].replay()
        times.append(time.monotonic_ns() - start)
    torch.cuda.synchronize()
    return {"ns": sorted(times)[count // 2]}


def timed_context():
    start = time.monotonic()
    context()
    return {"seconds": time.monotonic() - start}


def without_preload():
    """Starts this program anew, without a library that was preloaded into it. Answers first: the next line is for the new one."""
    print("{}", flush=True)
    os.environ.pop("LD_PRELOAD", None)
    os.execv(sys.executable, [sys.executable, *sys.argv])


COMMANDS = {
    "nothing": dict,
    "context": context,
    "timed-context": timed_context,
    "without-preload": without_preload,
    "launch": lambda seconds: launch(float(seconds)),
    "cost": lambda count: cost(int(count)),
    "code": code,
    "torch": lambda seconds: torch_ops(float(seconds)),
    "graph": lambda seconds, nodes: torch_graph(float(seconds), int(nodes)),
    "graph-cost": lambda count, nodes: graph_cost(int(count), int(nodes)),
    "fill": lambda way, mib, most: fill(way, int(mib), int(most)),
    "share": share,
    "open": open_shared,
    "allocations": lambda count: allocations(int(count)),
    "controls": lambda count: controls(int(count)),
    "managed": managed,
    "touch": touch,
    "allocate": wait_for_memory,
    "handle-info": lambda handle: handle_info(int(handle, 0)),
}

for line in sys.stdin:
    words = line.split()
    try:
        print(json.dumps(COMMANDS[words[0]](*words[1:])), flush=True)
    except (RuntimeError, AttributeError) as error:
        # An AttributeError names a function that this libcuda does not export.
        print(json.dumps({"error": str(error)}), flush=True)
