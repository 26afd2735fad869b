"""How many KV slots fit: from the setting, or from what the machine has free."""

from pathlib import Path

import torch

from forerun.errors import CacheMemoryError

# Of the memory that is free when the engine starts, this much may go to the KV cache.
UNKNOWN = 4 << 30  # bytes taken to be free where the system does not say
AUTO_SHARE = {"cpu": 0.25, "cuda": 0.8}


def free_memory(device: torch.device) -> int:
    """Bytes free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min((limit for limit in (_available(), _left_in_group()) if limit is not None), default=UNKNOWN)


def _available() -> int | None:
    """What Linux could hand out without swapping, file caches included; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    """What a container's limit (cgroup v2) leaves; None without one."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() else None


def cache_slots(
    memory: int | None, *, bytes_per_slot: int, page_size: int, wanted: int, context: int, device: torch.device
) -> int:
    """Slots for the KV cache, a multiple of page_size.

    memory: bytes set by the user, or None to size the cache by the machine: a share of the free memory, but no more
    than `wanted` slots (every request of a full batch at full length). context: slots of one request of full length.
    Raises CacheMemoryError when not even one page fits, or when the setting asks for more than the machine has free.
    """
    free = free_memory(device)
    if memory is not None and memory > free:
        raise CacheMemoryError(
            f"cache.memory asks for {_size(memory)}, but {_size(free)} are free on {device.type}; lower it "
            f"(a token takes {_size(bytes_per_slot)}, a request of {context} tokens {_size(context * bytes_per_slot)})"
        )
    budget = memory if memory is not None else min(int(free * AUTO_SHARE[device.type]), wanted * bytes_per_slot)
    slots = budget // bytes_per_slot // page_size * page_size
    if slots < page_size:
        raise CacheMemoryError(
            f"the key/value cache gets {_size(budget)}, but one page of {page_size} tokens needs "
            f"{_size(page_size * bytes_per_slot)}; raise cache.memory or lower cache.page_size"
        )
    return slots


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
