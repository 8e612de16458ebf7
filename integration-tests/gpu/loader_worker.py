"""A PyTorch training loop that waits for its data in one way or another: does what its input says, and answers with JSON. Knows
nothing of quotas."""

import json
import multiprocessing
import os
import sys
import threading
import time

import torch

SIZE = 4096


def feed(connection, wait):
    """A process that is slow to send data."""
    while True:
        time.sleep(wait)
        try:
            connection.send_bytes(b"x" * 4096)
        except (BrokenPipeError, OSError):
            return


class Slow(torch.utils.data.Dataset):
    """Data that takes its time: each item waits."""

    def __init__(self, wait):
        self.wait = wait

    def __len__(self):
        return 1 << 20

    def __getitem__(self, _):
        time.sleep(self.wait)
        return torch.zeros(16)


def from_pipe(wait):
    """Data of another process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    multiprocessing.Process(target=feed, args=(theirs, wait), daemon=True).start()
    theirs.close()
    return lambda: ours.recv_bytes()


def from_loader(wait):
    """PyTorch's own loader, with one process of its own."""
    batches = iter(torch.utils.data.DataLoader(Slow(wait), batch_size=1, num_workers=1))
    return lambda: next(batches)


def from_lock(wait):
    """Data of another thread, behind a lock."""
    ready = threading.Semaphore(0)

    def prepare():
        while True:
            time.sleep(wait)
            ready.release()

    threading.Thread(target=prepare, daemon=True).start()
    return ready.acquire


def from_work(wait):
    """Data that is made by the thread that trains."""

    def augment():
        end = time.perf_counter() + wait
        while time.perf_counter() < end:
            pass

    return augment


WAYS = {"pipe": from_pipe, "loader": from_loader, "lock": from_lock, "work": from_work}


def train_step(one):
    for _ in range(4):
        one = one @ one
        one = one / one.norm()
    torch.cuda.synchronize()
    return one


def train(way, seconds, wait_ms):
    next_batch = WAYS[way](wait_ms / 1000)
    one = torch.rand(SIZE, SIZE, device="cuda")
    train_step(one)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next_batch()
        train_step(one)
        steps += 1
    return {"steps": steps, "ms": 1000 * (time.perf_counter() - began) / max(1, steps)}


def answer(words):
    if words[0] == "context":
        torch.zeros(1, device="cuda")
        return {"pid": os.getpid()}
    if words[0] == "train":
        return train(words[1], float(words[2]), float(words[3]))
    raise ValueError(words)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line.split())), flush=True)
