"""An ordinary PyTorch program: does what its input says, and answers with JSON. Knows nothing of quotas."""

import json
import os
import sys

import torch

MIB = 1 << 20
blocks = []


def allocate(bytes_):
    blocks.append(torch.empty(bytes_, dtype=torch.uint8, device="cuda"))


def fill(block_mib, most_mib):
    """Allocates blocks until PyTorch reports that memory is out, and returns how many MiB that were."""
    got = 0
    while got < most_mib:
        try:
            allocate(block_mib * MIB)
        except torch.OutOfMemoryError as error:
            return {"mib": got, "error": type(error).__name__, "text": str(error)[:120]}
        got += block_mib
    return {"mib": got, "error": None}


def answer(words):
    if words[0] == "context":
        torch.zeros(1, device="cuda")
        return {"pid": os.getpid()}
    if words[0] == "fill":
        return fill(int(words[1]), int(words[2]))
    if words[0] == "alloc":
        try:
            allocate(int(words[1]) * MIB)
            return {"mib": int(words[1]), "error": None}
        except torch.OutOfMemoryError as error:
            return {"mib": 0, "error": type(error).__name__}
    if words[0] == "keep":
        del blocks[int(words[1]):]
        return {"blocks": len(blocks)}
    if words[0] == "empty-cache":
        torch.cuda.empty_cache()
        return {}
    if words[0] == "compute":
        one = torch.ones(1 << 20, device="cuda")
        return {"sum": float((one * 2).sum().item())}
    if words[0] == "reserved":
        return {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    raise ValueError(words)


for line in sys.stdin:
    print(json.dumps(answer(line.split())), flush=True)
