"""The CPUs of this machine."""

import os


def usable_cpus() -> int:
    """Return how many CPUs this process may use: those of its affinity mask where the system has one, otherwise all."""
    if hasattr(os, "sched_getaffinity"):  # Linux; Python 3.13 has `os.process_cpu_count`
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
