"""Every way to allocate, filled past a budget: what is charged, what is refused, what NVML says. See README.md in this folder."""

import time

import record
from bed import Bed, GIB, MIB, cuda_worker, nvml_bytes
from record import claim

# cuda.h: CUDA_ERROR_OUT_OF_MEMORY
OUT_OF_MEMORY = 2
LIMIT = 2 * GIB
BLOCK = 64
DEVICE = ("cuMemAlloc", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemCreate", "graph memory node")
# Pinned memory of the host is no memory of the GPU; managed memory may be on either side.
HOST = ("cuMemHostAlloc", "cuMemHostRegister")
# Ranges of managed memory are looked for this often and a bit.
SEEN_WITHIN = 5
# CUDA_ERROR_NOT_PERMITTED
NOT_PERMITTED = 800


def bed_of(*lines):
    text = "\n".join(lines)
    return Bed(f'[tenant.t]\ncgroup = "@/t"\nmemory.max = "2GiB"\n{text}\n')


def filled(host, way, most=3 * 1024):
    worker = cuda_worker(host, "t")
    pid = worker.tell("context")["pid"]
    before, nvml_before = host.usage("t"), nvml_bytes().get(pid, 0)
    answer = worker.tell(f"fill {way.replace(' ', '_')} {BLOCK} {most}")
    after, nvml = host.usage("t"), nvml_bytes().get(pid, 0)
    worker.close()
    return answer, before, after, after["memory_used"] - before["memory_used"], nvml - nvml_before


def device():
    host = bed_of()
    for way in DEVICE:
        answer, _, after, charged, seen = filled(host, way)
        holds = answer["code"] == OUT_OF_MEMORY and after["memory_peak"] <= LIMIT and after["breaches"] == 0
        near = abs(charged - seen) <= 0.02 * max(seen, 1)
        claim(f"{way}: out of memory at 2 GiB, never above, and charged as NVML says within 2 %", holds and near,
              f"{answer['mib']} MiB, error {answer['code']}; charged {charged // MIB} MiB, NVML {seen // MIB} MiB", key=f"path/{way}")
    host.close()


def managed():
    """Managed memory above memory.max, where there is to be none, and where it is not counted: the program goes on in each."""
    for setting in ("charge", "deny", "ignore"):
        host = bed_of(f'memory.managed = "{setting}"')
        worker = cuda_worker(host, "t")
        worker.tell("context")
        before = host.usage("t")
        answer = worker.tell(f"fill cuMemAllocManaged {BLOCK} {3 * 1024}")
        # What the daemon is not asked about it would find by now.
        time.sleep(SEEN_WITHIN)
        after = host.usage("t")
        # That is told of a call that is refused, too.
        lives = worker.process.poll() is None and "code" in worker.tell("fill cuMemAlloc 2 2")
        charged = (after["memory_used"] - before["memory_used"]) // MIB
        is_refused = answer["code"] == NOT_PERMITTED and after["denials"] > before["denials"] and after["breaches"] == 0
        holds = lives and {
            "charge": is_refused and after["memory_peak"] <= LIMIT and charged == answer["mib"] > 1024,
            "deny": is_refused and answer["mib"] == 0 and charged < 64,
            "ignore": answer["code"] == 0 and charged < 64,
        }[setting]
        claim(f'cuMemAllocManaged, memory.managed = "{setting}": ' + {
            "charge": "refused at 2 GiB, never above", "deny": "refused", "ignore": "not charged"}[setting],
            holds, f"{answer['mib']} MiB, error {answer['code']}; {charged} MiB charged, {after['breaches']} breaches; the process "
            f"{'goes on' if lives else 'was ended'}", key=f"path/managed/{setting}")
        worker.close()
        host.close()


def pinned():
    host = bed_of('memory.host = "1GiB"')
    for way in HOST:
        answer, _, after, charged, _ = filled(host, way, 2 * 1024)
        claim(f"{way}: refused at memory.host = 1 GiB, and no GPU memory charged", answer["code"] != 0 and answer["mib"] <= 1024 and charged < 64 * MIB,
              f"{answer['mib']} MiB, error {answer['code']}; {charged // MIB} MiB of the GPU charged", key=f"path/{way}")
    host.close()


def shared():
    """Memory that one process makes and another of the same or of another tenant opens: paid once, by its owner."""
    host = Bed('[tenant.t]\ncgroup = "@/t"\nmemory.max = "2GiB"\n[tenant.u]\ncgroup = "@/u"\nmemory.max = "2GiB"\n')
    owner, guest = cuda_worker(host, "t"), cuda_worker(host, "u")
    owner.tell("context")
    guest.tell("context")
    before = host.usage("u")["memory_used"]
    handle = owner.tell("share")["handle"]
    guest.tell(f"open {handle}")
    grown = host.usage("u")["memory_used"] - before
    claim("memory opened by IPC is paid by its owner only", grown < 64 * MIB, f"the guest's charge grew by {grown // MIB} MiB of 256", key="path/ipc")
    guest.close()
    owner.close()
    left = host.usage("t")["memory_used"] + host.usage("u")["memory_used"]
    claim("and nothing is left when both have ended", left == 0, f"{left} bytes", key="path/ipc-left")
    host.close()


if __name__ == "__main__":
    record.run("paths", {"device": device, "managed": managed, "pinned": pinned, "shared": shared})
