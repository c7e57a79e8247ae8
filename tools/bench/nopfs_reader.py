"""NoPFS, the peer of the rows budgets: its own loader over whole files, as loader_reader.py reads.

NoPFS (Dryden et al., SC '21; HDMLP is its first version) replaces Dataset and DataLoader: it knows
its own shuffle of all epochs, gives each sample a storage class, and fetches by threads of its own.
None of it is in this repository: `tools/bench/nopfs` builds it elsewhere.

Run as a process with a JSON object on standard input: built (what `tools/bench/nopfs` printed),
root (its folders are the classes), seed, epochs, batch, config (see `configuration`), storage (the
directory of its SSD class), device (as loader_reader.py has it). Prints a JSON list, one object an
epoch: seconds, setup_s (within the first epoch's seconds), stall_s (setup_s, and what the
loop waited for batches), samples, bytes, cpu_s, device_bytes.

INVARIANT: its setting up, in which it already fetches, belongs to the first epoch.
INVARIANT: no page of the origin stays (it drops those that it has read itself), none of its SSD
class beyond an epoch; it stands still while these are dropped, or what it fetched meanwhile would
be in no epoch's seconds.
"""

import contextlib
import ctypes
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.bench.loader_reader import bytes_read, processor_s
from tools.slow_origin import forget_pages
from tools.torchvision_cpu import import_torchvision

THREADS = {"staging": 4, "ram": 2, "ssd": 2}
_MIB = 1 << 20
_MADV_DONTNEED = 4
_MPI = {"ess_singleton_isolated": "1", "btl": "self", "pml": "ob1"}  # no daemon, no network


def configuration(staging: float, ram: float, ssd: float, storage: Path, ranks: int = 1) -> str:
    """Its configuration file, of budgets in bytes: it counts whole MiB, so the nearest; `ssd` 0:
    no such class.

    With one rank there is nobody to serve (no thread that would poll for it). Of bandwidths only
    their order counts: RAM before SSD before other ranks before the origin.
    """

    def storage_class(name: str, mib: int, mb_per_s: int, more: str = "") -> str:
        threads = THREADS[name]
        bandwidth = f"( {{ threads = {threads}; bw = {mb_per_s}; }} )"
        return f"{{ capacity: {mib}; threads: {threads}; {more}bandwidth: {bandwidth}; }}"

    ram_mib, ssd_mib = (max(1, round(size / _MIB)) for size in (ram, ssd))
    where = f'backend: "filesystem"; backend_options: {{ path = "{storage}"; }}; '
    classes = [
        storage_class("staging", math.ceil(staging / _MIB), 20_000),
        storage_class("ram", ram_mib, 20_000, 'backend: "memory"; '),
    ]
    if ssd:
        classes.append(storage_class("ssd", ssd_mib, 1000, where))
    return (
        f"b_c = 1000;\nb_fs = 100;\ndistributed_threads = {int(ranks > 1)};\n"
        "checkpoint = false;\n"
        f"storage_classes: ( {', '.join(classes)} );\n"
        "pfs_bandwidth: ( { processes: 1; bw: 100; } );\n"
    )


def _unmap(storage: Path) -> None:
    """Its file on SSD is mapped, and mapped pages are not dropped: give the mapping's ones back."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path.startswith(f"{storage}/"):
            begin, end = (int(address, 16) for address in span.split("-"))
            where, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
            if ctypes.CDLL(None).madvise(where, size, _MADV_DONTNEED) != 0:
                raise OSError(f"{path} stays in memory")


def _forget_when_told(told: Connection, parents: Connection, storage: Path) -> None:
    """In a process of its own. Drops the pages while our parent is stopped, until it ends."""
    parents.close()
    with contextlib.suppress(EOFError):
        while told.recv():
            os.kill(os.getppid(), signal.SIGSTOP)
            try:
                os.sync()
                forget_pages([storage])
            finally:
                os.kill(os.getppid(), signal.SIGCONT)
            told.send(True)


def packages(built: Path) -> tuple[Any, Any]:
    """`hdmlp`, `hdmlp.lib.torch`: they want torchvision, and a name that an older torch had."""
    import_torchvision()
    torch: Any = importlib.import_module("torch")
    torch._six = SimpleNamespace(string_classes=str)
    sys.path.insert(0, str(built / "source"))
    return importlib.import_module("hdmlp"), importlib.import_module("hdmlp.lib.torch")


def loader_of(work: dict[str, Any], hdmlp: Any, its_torch: Any) -> Any:
    """An iterable of batches, each a list of (size in bytes, class)."""
    job = hdmlp.Job(
        *(work["root"], work["batch"], work["epochs"], "uniform", False),
        seed=work["seed"] + 1,  # 0 would be any
        config_path=work["config"],
        libhdmlp_path=f"{work['built']}/libhdmlp.so",
    )
    dataset = its_torch.HDMLPDatasetFolder(work["root"], job, transform=len)
    return its_torch.HDMLPDataLoader(dataset, collate_fn=list)


def main() -> None:
    work = json.load(sys.stdin)
    storage = Path(work["storage"])
    told, tells = multiprocessing.Pipe()
    forgetting = (tells, told, storage)
    multiprocessing.Process(target=_forget_when_told, args=forgetting, daemon=True).start()
    os.environ |= {f"OMPI_MCA_{name}": value for name, value in _MPI.items()}
    hdmlp, its_torch = packages(Path(work["built"]))
    loader, results = None, []
    for _ in range(work["epochs"]):
        _unmap(storage)
        told.send(True)
        told.recv()
        cpu_s, device_bytes = processor_s(), bytes_read(work["device"])
        begin = time.perf_counter()
        if loader is None:
            loader = loader_of(work, hdmlp, its_torch)
        setup_s = time.perf_counter() - begin
        samples = size_bytes = 0
        stall_s, batches = setup_s, iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            stall_s += time.perf_counter() - asked
            if batch is None:
                break
            samples += len(batch)
            size_bytes += sum(size for size, _ in batch)
        results.append(
            {
                "seconds": time.perf_counter() - begin,
                "setup_s": setup_s,
                "stall_s": stall_s,
                "samples": samples,
                "bytes": size_bytes,
                "cpu_s": processor_s() - cpu_s,
                "device_bytes": bytes_read(work["device"]) - device_bytes,
            }
        )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
