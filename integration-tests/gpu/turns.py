"""What something costs: measured with it and without it in turns, and compared by the quickest turn of each.

What else the host does makes a turn slower, never quicker. Who is compared runs on the same few CPUs: on others each would be as
fast as its CPU happens to be.
"""

import os

from record import sample

# One takes its turn while the others wait.
CPUS = set(sorted(os.sched_getaffinity(0))[:4])


def in_turns(what, ways, turns):
    """Values by way: `ways` names functions that measure once."""
    found = {way: [] for way in ways}
    for at in range(turns):
        for way, measure in ways.items():
            found[way].append(measure())
            sample(f"{what}/{way}", at, found[way][-1])
    return found


def quickest(found):
    return {way: min(values) for way, values in found.items()}
