"""The loader stacks that tools/loaders tries, each as people write it. None knows of hints.

Run as a script below `hintsd run`, in an environment that has the libraries:

    python stacks.py NAME DATASET LOG

reads the ImageFolder DATASET with stack NAME, and writes to LOG/PID.json which of its files this
process opened, in order: a list for each epoch; and the same of what it had the kernel read ahead.
Of rows within files both are the rows' bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
BATCH: Final = 4
EPOCHS: Final = 3
PAUSE_S: Final = 0.2
"""Between epochs, which are short: an order that is not sent when its epoch is over is dropped."""

Reading = Callable[[str], Iterator[None]]
"""Reads the dataset at that path; yields at the end of each epoch."""


@dataclass(frozen=True)
class Stack:
    """One row of the table."""

    library: str
    """The distribution whose version is shown."""
    what: str
    expected: str
    """`exact`, or `no`: not hinted, with a line that says why."""
    read: Reading
    processes: int = 1
    copy_samplers: bool = False
    is_wrapped: bool = True
    """Below `hintsd run`; else the stack asks for hints itself."""
    is_native: bool = False
    """Its files are opened by code that is not Python; it needs no torch."""
    early: int = 0
    """Its threads open a file so many places before its turn at most."""


STACKS: Final[dict[str, Stack]] = {}


def stack(
    library: str, what: str, expected: str = "exact", **settings: Any
) -> Callable[[Reading], Reading]:
    """Name a function's stack after it."""

    def add(read: Reading) -> Reading:
        STACKS[getattr(read, "__name__")] = Stack(library, what, expected, read, **settings)  # noqa: B009
        return read

    return add


def _opened(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _folder(root: str) -> Any:
    from torchvision.datasets import ImageFolder

    return ImageFolder(root, loader=lambda path: len(_opened(path)))


def _epochs(loader: Any, set_epoch: Any = None) -> Iterator[None]:
    for epoch in range(EPOCHS):
        if set_epoch is not None:
            set_epoch.set_epoch(epoch)
        for _ in loader:
            pass
        yield


def _row_epochs(loader: Any) -> Iterator[None]:
    """Of rows within files, whose bytes are `x`."""
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            if not number:
                time.sleep(PAUSE_S)  # what is read before it is asked for is asked for no more
            _read[-1] += [row.hex() for row in batch["x"]]
        yield


class _Listed:
    """A dataset of one's own: a list of files, and no more."""

    def __init__(self, root: str) -> None:
        self.files = [str(path) for path in sorted(Path(root).rglob("*.png"))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        return len(_opened(self.files[index]))


class _Telling(_Listed):
    def __hintsd_paths__(self) -> list[str]:
        return self.files


def _told(root: str, threads: int, read: Callable[[list[str]], object]) -> Iterator[None]:
    """Epochs in an order of one's own, which hintsd is told: `read` reads the paths of one."""
    import hintsd

    files = _Listed(root).files

    def order(epoch: int) -> list[str]:
        return random.Random(epoch).sample(files, len(files))

    job = hintsd.files(order, epochs=EPOCHS, workers=threads)
    job.hear(60.0)
    for epoch in range(EPOCHS):
        job.step(0, epoch)
        read(order(epoch))
        yield
    job.close()


# ---- torch ---------------------------------------------------------------------------------------


@stack("torch", "`DataLoader(ImageFolder, shuffle=True)`")
def torch_shuffle(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    return _epochs(DataLoader(_folder(root), BATCH, shuffle=True))


@stack("torch", "`DistributedSampler`, `set_epoch`")
def torch_distributed(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader, DistributedSampler

    data = _folder(root)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1)
    return _epochs(DataLoader(data, BATCH, sampler=sampler), sampler)


@stack("torch", "a dataset of one's own", "no")
def torch_own_dataset(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    data: Any = _Listed(root)
    return _epochs(DataLoader(data, BATCH, shuffle=True))


@stack("torch", "a dataset of one's own with `__hintsd_paths__`")
def torch_telling_dataset(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    data: Any = _Telling(root)
    return _epochs(DataLoader(data, BATCH, shuffle=True))


def _repeated(data: Any) -> Any:
    """The RASampler of torchvision's reference scripts, in short: repeated augmentation."""
    import torch
    from torch.utils.data import Sampler

    class RASampler(Sampler[int]):
        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return len(data) // 2

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator()
            generator.manual_seed(self.epoch)
            order = torch.randperm(len(data), generator=generator).tolist()
            thrice = [index for index in order for _ in range(3)]
            return iter(thrice[1::2][: len(self)])

    return RASampler()


@stack("torch", "a sampler of one's own (so is torchvision's RASampler)", "no")
def torch_own_sampler(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    data = _folder(root)
    sampler = _repeated(data)
    return _epochs(DataLoader(data, BATCH, sampler=sampler), sampler)


@stack("torch", "the same, `hintsd run --copy-samplers`", copy_samplers=True)
def torch_copied_sampler(root: str) -> Iterator[None]:
    return torch_own_sampler(root)


@stack("torch", "the same, `hintsd.order_of.register`")
def torch_registered_sampler(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    import hintsd

    data = _folder(root)
    sampler = _repeated(data)
    hintsd.order_of.register(type(sampler), list)
    return _epochs(DataLoader(data, BATCH, sampler=sampler), sampler)


@stack("torch", "`import hintsd.auto` in the script", is_wrapped=False)
def torch_auto(root: str) -> Iterator[None]:
    import hintsd.auto  # noqa: F401

    return torch_shuffle(root)


@stack("torch", "a loop of one's own, `hintsd.files`", is_wrapped=False)
def files_loop(root: str) -> Iterator[None]:
    return _told(root, 0, lambda paths: [_opened(path) for path in paths])


@stack("torch", "`IterableDataset`", "no")
def torch_iterable(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader, IterableDataset

    class Files(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([len(_opened(path)) for path in _Listed(root).files])

    return _epochs(DataLoader(Files(), BATCH))


# ---- torchdata -----------------------------------------------------------------------------------


@stack("torchdata", "`StatefulDataLoader`, resumed amid an epoch")
def torchdata_resumed(root: str) -> Iterator[None]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(_folder(root), BATCH, shuffle=True)

    first = loader()
    for place, _ in enumerate(first):
        if place == 2:
            state = first.state_dict()
    yield
    resumed = loader()
    resumed.load_state_dict(state)
    yield from _epochs(resumed)


@stack("torchdata", "`StatefulDistributedSampler`")
def torchdata_distributed(root: str) -> Iterator[None]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import (
        StatefulDistributedSampler,
    )

    data = _folder(root)
    sampler = StatefulDistributedSampler(data, num_replicas=2, rank=1)
    return _epochs(StatefulDataLoader(data, BATCH, sampler=sampler), sampler)


# ---- accelerate, transformers --------------------------------------------------------------------


def _prepared(root: str, **settings: Any) -> Iterator[None]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    loader = accelerator.prepare(DataLoader(_folder(root), BATCH, shuffle=True))
    yield from _epochs(loader)
    accelerator.end_training()


@stack("accelerate", "`prepare`, one process")
def accelerate_plain(root: str) -> Iterator[None]:
    return _prepared(root)


@stack("accelerate", "`SeedableRandomSampler`, one process")
def accelerate_seedable(root: str) -> Iterator[None]:
    return _prepared(root, use_seedable_sampler=True)


@stack("accelerate", "`BatchSamplerShard`, two processes", processes=2)
def accelerate_two(root: str) -> Iterator[None]:
    return _prepared(root)


@stack("accelerate", "`SeedableRandomSampler`, two processes", processes=2)
def accelerate_seedable_two(root: str) -> Iterator[None]:
    return _prepared(root, use_seedable_sampler=True)


@stack("accelerate", "`use_stateful_dataloader`, one process")
def accelerate_stateful(root: str) -> Iterator[None]:
    return _prepared(root, use_stateful_dataloader=True)


@stack("accelerate", "`dispatch_batches`, two processes: the first one reads", processes=2)
def accelerate_dispatched(root: str) -> Iterator[None]:
    return _prepared(root, dispatch_batches=True)


def _trained(root: str, resume: bool = False, callbacks: Any = ()) -> Iterator[None]:
    import tempfile

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": (self.weight * x.float()).mean()}

    class Ends(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            end_epoch()

    def train(out: str, epochs: int, **settings: Any) -> None:
        arguments = TrainingArguments(
            out,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
            **settings.pop("arguments"),
        )
        Trainer(
            Model(),
            arguments,
            train_dataset=_folder(root),
            data_collator=lambda rows: {"x": torch.tensor([row[0] for row in rows])},
            callbacks=[Ends(), *callbacks],
        ).train(**settings)

    with tempfile.TemporaryDirectory() as out:
        if resume:
            train(out, 2, arguments={"save_steps": 8, "max_steps": 8})
            end_epoch()
            train(
                out,
                2,
                arguments={"save_strategy": "no"},
                resume_from_checkpoint=f"{out}/checkpoint-8",
            )
        else:
            train(out, EPOCHS, arguments={"save_strategy": "no"})
    yield from ()


@stack("transformers", "`Trainer`, one process")
def trainer(root: str) -> Iterator[None]:
    return _trained(root)


@stack("transformers", "`Trainer`, two processes", processes=2)
def trainer_two(root: str) -> Iterator[None]:
    return _trained(root)


@stack("transformers", "`Trainer`, resumed amid an epoch")
def trainer_resumed(root: str) -> Iterator[None]:
    return _trained(root, resume=True)


@stack("transformers", "`Trainer` with `hintsd.hf.HintsCallback`", is_wrapped=False)
def trainer_callback(root: str) -> Iterator[None]:
    import hintsd.hf

    return _trained(root, callbacks=[hintsd.hf.HintsCallback()])


# ---- timm ----------------------------------------------------------------------------------------


def _timm(root: str, **settings: Any) -> Iterator[None]:
    import torch
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=root, split="")
    loader = create_loader(
        data,
        input_size=8,
        batch_size=BATCH,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
        **settings,
    )
    return _epochs(loader, loader.sampler if hasattr(loader.sampler, "set_epoch") else None)


@stack("timm", "`create_loader`, `ImageDataset`, training")
def timm_training(root: str) -> Iterator[None]:
    return _timm(root, is_training=True)


@stack("timm", "`create_loader`, validation")
def timm_validation(root: str) -> Iterator[None]:
    return _timm(root, is_training=False)


@stack("timm", "`create_loader`, two processes", processes=2)
def timm_two(root: str) -> Iterator[None]:
    _initialized()
    return _timm(root, is_training=True, distributed=True)


@stack("timm", "`OrderedDistributedSampler`, two processes", processes=2)
def timm_ordered(root: str) -> Iterator[None]:
    _initialized()
    return _timm(root, is_training=False, distributed=True)


@stack("timm", "`RepeatAugSampler`, two processes", processes=2)
def timm_repeated(root: str) -> Iterator[None]:
    _initialized()
    return _timm(root, is_training=True, distributed=True, num_aug_repeats=3)


@stack("timm", "`use_multi_epochs_loader`", "no")
def timm_multi_epochs(root: str) -> Iterator[None]:
    return _timm(root, is_training=True, use_multi_epochs_loader=True)


def _initialized() -> None:
    import torch

    torch.distributed.init_process_group("gloo")


# ---- Lightning -----------------------------------------------------------------------------------


def _fitted(root: str, devices: int, callbacks: Any = ()) -> Iterator[None]:
    import lightning
    import torch
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, _: int) -> Any:
            return (self.weight * batch[0].float()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

        def on_train_epoch_end(self) -> None:
            end_epoch()

    lightning.Trainer(
        max_epochs=EPOCHS,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(_folder(root), BATCH, shuffle=True))
    yield from ()


@stack("lightning", "`Trainer.fit`, one process")
def lightning_one(root: str) -> Iterator[None]:
    return _fitted(root, 1)


@stack("lightning", "`Trainer.fit`, `ddp`, two processes", processes=2)
def lightning_two(root: str) -> Iterator[None]:
    return _fitted(root, 2)


@stack("lightning", "`Trainer.fit` with `hintsd.lightning.HintsCallback`", is_wrapped=False)
def lightning_callback(root: str) -> Iterator[None]:
    import hintsd.lightning

    return _fitted(root, 1, [hintsd.lightning.HintsCallback()])


# ---- MONAI ---------------------------------------------------------------------------------------


def _monai(root: str, dataset: str = "Dataset", item: Any = None, **settings: Any) -> Any:
    import monai.data

    files = [item(path) if item else path for path in _Listed(root).files]

    def load(row: Any) -> int:
        paths = [row] if isinstance(row, str) else row.values()
        return sum(len(_opened(path)) for path in paths)

    return getattr(monai.data, dataset)(files, load, **settings)


@stack("monai", "`DataLoader(Dataset of paths)`")
def monai_paths(root: str) -> Iterator[None]:
    from monai.data import DataLoader

    return _epochs(DataLoader(_monai(root), batch_size=BATCH, shuffle=True))


@stack("monai", '`DataLoader(Dataset of {"image": path})`, MONAI\'s `DistributedSampler`')
def monai_dicts(root: str) -> Iterator[None]:
    from monai.data import DataLoader, DistributedSampler

    data = _monai(root, item=lambda path: {"image": path})
    sampler = DistributedSampler(data, even_divisible=False, num_replicas=2, rank=1)
    return _epochs(DataLoader(data, batch_size=BATCH, sampler=sampler), sampler)


@stack("monai", "`Dataset` of several files a sample", "no")
def monai_pairs(root: str) -> Iterator[None]:
    from monai.data import DataLoader

    data = _monai(root, item=lambda path: {"image": path, "label": path})
    return _epochs(DataLoader(data, batch_size=BATCH, shuffle=True))


@stack("monai", "`CacheDataset`: reads once, at the start", "no")
def monai_cached(root: str) -> Iterator[None]:
    from monai.data import DataLoader

    data = _monai(root, "CacheDataset", progress=False)
    end_epoch()
    return _epochs(DataLoader(data, batch_size=BATCH, shuffle=True))


# ---- datasets, WebDataset ------------------------------------------------------------------------


def _images(root: str) -> Any:
    import datasets

    return datasets.load_dataset(
        "imagefolder", data_dir=root, split="train", cache_dir=os.environ["LOADERS_CACHE"]
    )


def _collated(rows: list[Any]) -> int:
    return len(rows)


@stack("datasets", '`load_dataset("imagefolder")`')
def datasets_imagefolder(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    data = _images(root)
    return _epochs(DataLoader(data, BATCH, shuffle=True, collate_fn=_collated))


@stack("datasets", "the same, shuffled and cut by `datasets`, `with_transform`")
def datasets_selected(root: str) -> Iterator[None]:
    from torch.utils.data import DataLoader

    data = _images(root).shuffle(seed=3).select(range(5, 25)).with_transform(lambda rows: rows)
    return _epochs(DataLoader(data, BATCH, shuffle=True, collate_fn=_collated))


@stack("datasets", "arrow files (`load_from_disk`), shuffled and cut: rows within files")
def datasets_arrow(root: str) -> Iterator[None]:
    import datasets
    from torch.utils.data import DataLoader

    rows = {"x": [os.urandom(100 + number) for number in range(40)], "label": list(range(40))}
    saved = os.path.join(os.environ["LOADERS_CACHE"], "saved")
    datasets.Dataset.from_dict(rows).save_to_disk(saved)
    data = datasets.load_from_disk(saved).shuffle(seed=3).select(range(5, 37))
    return _row_epochs(DataLoader(data.select_columns("x"), BATCH, shuffle=True))


class _Hdf5:
    """A dataset of one's own: rows of an HDF5 file."""

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, "rows.h5")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, bytes]:
        import h5py

        with h5py.File(self.path) as file:
            return {"x": file["rows"][index].tobytes()}

    def __hintsd_paths__(self) -> Any:
        import h5py

        import hintsd

        with h5py.File(self.path) as file:
            return hintsd.rows_of(file["rows"])


@stack("h5py", "a dataset of one's own, `hintsd.rows_of(h5py.Dataset)`")
def hdf5(root: str) -> Iterator[None]:
    import h5py
    import numpy as np
    from torch.utils.data import DataLoader

    data: Any = _Hdf5(root)
    with h5py.File(data.path, "w") as file:
        file["rows"] = np.random.default_rng(1).integers(0, 1 << 62, (40, 30))
    return _row_epochs(DataLoader(data, BATCH, shuffle=True))


@stack("datasets", "parquet files, `streaming=True`, shuffled")
def datasets_streaming(root: str) -> Iterator[None]:
    import datasets
    from torch.utils.data import DataLoader

    files = [os.path.join(root, "class0", f"{number}.parquet") for number in range(8)]
    for number, file in enumerate(files):
        datasets.Dataset.from_dict({"x": [number] * BATCH}).to_parquet(file)
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return _epochs(DataLoader(data.shuffle(seed=3, buffer_size=4), BATCH))


@stack("datasets", "`imagefolder`, `streaming=True`", "no")
def datasets_streamed_images(root: str) -> Iterator[None]:
    import datasets
    from torch.utils.data import DataLoader

    data = datasets.load_dataset("imagefolder", data_dir=root, split="train", streaming=True)
    return _epochs(DataLoader(data, BATCH, collate_fn=_collated))


def _web_dataset(root: str, samples: int = -1, **options: Any) -> Iterator[None]:
    """`samples`: of an epoch; -1: all."""
    import io
    import tarfile

    import webdataset
    from torch.utils.data import DataLoader

    shards = [os.path.join(root, "class0", f"{number}.tar") for number in range(8)]
    for shard in shards:
        with tarfile.open(shard, "w") as tar:
            member = tarfile.TarInfo("0.bin")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    data = webdataset.WebDataset(shards, **options)
    if samples > 0:
        data = data.with_epoch(samples)
    return _epochs(DataLoader(data, BATCH, collate_fn=_collated))


@stack("webdataset", "`WebDataset`: tar shards, in a shuffled order")
def webdataset_shards(root: str) -> Iterator[None]:
    return _web_dataset(root, shardshuffle=100, detshuffle=True, seed=3)


@stack("webdataset", "`WebDataset(resampled=True).with_epoch`", "no")
def webdataset_resampled(root: str) -> Iterator[None]:
    return _web_dataset(root, 8, resampled=True)


# ---- tf.data, DALI: as docs/LOADERS.md shows them ------------------------------------------------


def _tf_data(root: str, threads: int) -> Iterator[None]:
    import tensorflow as tf

    def read(paths: list[str]) -> None:
        files = tf.data.Dataset.from_tensor_slices(paths)
        for _ in files.map(tf.io.read_file, threads).batch(BATCH).prefetch(2):
            pass

    return _told(root, threads, read)


_TF: Final = "`tf.data`, `num_parallel_calls={}`, `hintsd.files`"


@stack("tensorflow-cpu", _TF.format(1), is_wrapped=False, is_native=True)
def tf_data(root: str) -> Iterator[None]:
    return _tf_data(root, 1)


@stack("tensorflow-cpu", _TF.format(4), is_wrapped=False, is_native=True, early=3)
def tf_data_parallel(root: str) -> Iterator[None]:
    return _tf_data(root, 4)


def _dali(root: str, threads: int) -> Iterator[None]:
    import numpy as np
    from nvidia.dali import fn, pipeline_def, types

    coming: list[str] = []

    def names() -> Iterator[Any]:
        paths = [np.frombuffer(os.fsencode(path), np.uint8) for path in coming]
        for first in range(0, len(paths), BATCH):
            yield paths[first : first + BATCH]

    def reader() -> Any:
        return fn.io.file.read(fn.external_source(names, cycle="raise", dtype=types.UINT8))

    pipe = pipeline_def(reader, batch_size=BATCH, num_threads=threads, device_id=None)()

    def read(paths: list[str]) -> None:
        coming[:] = paths
        try:
            while True:
                pipe.run()
        except StopIteration:
            pipe.reset()

    return _told(root, threads, read)


_DALI: Final = "`fn.io.file.read`, `num_threads={}`, `hintsd.files`"


@stack("nvidia-dali-cuda120", _DALI.format(1), is_wrapped=False, is_native=True)
def dali(root: str) -> Iterator[None]:
    return _dali(root, 1)


@stack("nvidia-dali-cuda120", _DALI.format(4), is_wrapped=False, is_native=True, early=3)
def dali_parallel(root: str) -> Iterator[None]:
    return _dali(root, 4)


# ---- the process ---------------------------------------------------------------------------------

_read: list[list[str]] = [[]]
_asked: list[list[str]] = [[]]  # the bytes that the kernel was asked for ahead
_opens: _Opens | None = None


class _Opens:
    """Which files of a dataset were opened since it was last asked, as the kernel tells: by
    whatever code, of whatever process. Of one file twice in a row it tells once."""

    _IN_OPEN, _IN_Q_OVERFLOW = 0x20, 0x4000

    def __init__(self, root: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK)
        self._classes: dict[int, str] = {}
        for entry in os.scandir(root):
            watch = libc.inotify_add_watch(self._fd, os.fsencode(entry.path), self._IN_OPEN)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify")
            self._classes[watch] = entry.name

    def told(self) -> list[str]:
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return []
        files, at = [], 0
        while at < len(data):
            watch, mask, _, length = struct.unpack_from("iIII", data, at)
            assert not mask & self._IN_Q_OVERFLOW
            name = os.fsdecode(data[at + 16 : at + 16 + length].rstrip(b"\0"))
            if name:  # not of the directory itself
                files.append(f"{self._classes[watch]}/{name}")
            at += 16 + length
        return files


def end_epoch() -> None:
    """What is opened from now on is of the next one."""
    if _opens is not None:
        _read[-1] += _opens.told()
    _read.append([])
    _asked.append([])
    time.sleep(PAUSE_S)


def _advised(descriptor: int, offset: int, length: int, advice: int) -> None:
    _asked[-1].append(os.pread(descriptor, length, offset).hex())


def _watch(root: str, is_native: bool) -> None:
    global _opens
    if is_native:
        _opens = _Opens(root)
        return
    below = os.path.join(root, "")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(below):
            path = arguments[0]
            is_read = not arguments[2] & (os.O_DIRECTORY | os.O_WRONLY | os.O_RDWR)
            if path.endswith((".png", ".tar")) and is_read:
                _read[-1].append(path[len(below) :])

    sys.addaudithook(look)


def main(name: str, root: str, log: str) -> None:
    """Read with the stack of that name."""
    sys.path.append(str(ROOT))
    is_native = STACKS[name].is_native
    if not is_native:
        from tools.torchvision_cpu import import_torchvision

        import_torchvision()
        import torch

        torch.manual_seed(7)
    from hintsd.client import link
    from hintsd.client.ranges import advice, tables

    socket = os.environ["LOADERS_SOCKET"]
    vars(link)["find_socket"] = lambda path: (socket, path)  # as if the dataset were on a mount
    vars(advice)["check_mounted"] = lambda ranges: None
    vars(tables)["is_on_mount"] = lambda folder: folder.endswith("saved")
    vars(os)["posix_fadvise"] = _advised
    _watch(root, is_native)
    for _ in STACKS[name].read(root):
        end_epoch()
    told = [[epoch for epoch in epochs if epoch] for epochs in (_read, _asked)]
    Path(log, f"{os.getpid()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
