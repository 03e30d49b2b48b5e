"""The measured peak performance of this machine, with which the other benchmarks are compared."""

import platform
import time
from collections.abc import Callable

import torch


def seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 5,
    warm: int = 2,
    clock: Callable[[torch.device], float] | None = None,
) -> float:
    """Return the median seconds of some runs by a clock (the wall's, unless another is given), after warm-up."""
    clock, times = clock or now, []
    for i in range(warm + repeats):
        begin = clock(device)
        work()
        times.append(clock(device) - begin)
        if i < warm:
            times.clear()
    return sorted(times)[len(times) // 2]


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def used(device: torch.device) -> float:
    """Return the CPU time of this process in seconds, all threads together: other work on the machine adds little."""
    return time.process_time()


def ceilings(device: torch.device) -> dict[str, float]:
    """Return bytes per second that a copy reads and writes, and operations per second of large matrix products."""
    gpu = device.type == "cuda"
    source = torch.ones(2**30 if gpu else 2**25, device=device)
    rates = {"copy_bytes": 2 * source.nbytes / seconds(_copier(source), device)}
    del source
    size = 8192 if gpu else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    rates["float32_flops"] = 2 * size**3 / seconds(lambda: a @ b, device)
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32_flops"] = 2 * size**3 / seconds(lambda: a @ b, device)
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = a.bfloat16(), b.bfloat16()
        rates["bf16_flops"] = 2 * size**3 / seconds(lambda: a @ b, device)
    return {name: float(f"{value:.4g}") for name, value in rates.items()}


def _copier(source: torch.Tensor) -> Callable[[], object]:
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def describe(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}
