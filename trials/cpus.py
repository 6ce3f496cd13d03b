"""How many CPUs trials may use: one number for the service, which refuses what asks for more, and for Ray.

Ray by itself counts those of the machine, whatever a cpuset or taskset leaves of them, and takes a
container's quota of less than one CPU for none at all.
"""

import os
from pathlib import Path


def usable_cpus(group: Path = Path("/sys/fs/cgroup")) -> int:
    """By this process's affinity and its container's quota, as cgroup v2 shows it there; at least one."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such control group, or "max"
        return allowed
