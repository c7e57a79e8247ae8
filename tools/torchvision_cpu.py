"""Import torchvision beside a CPU-only torch.

The registries' default torchvision wheel is built for CUDA. Beside a CPU-only torch its operator
library does not load, and then `import torchvision` fails on the missing operators `nms` and
`qnms`. Declaring the two (without an implementation) lets the rest be imported: `ImageFolder` and
the transforms are plain Python, the stock ones.

INVARIANT: nothing is declared unless a plain import has failed first.
This is for the demo and for tests only; the product never imports torch.
"""

import sys
from types import ModuleType

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LATER = ("models", "ops")  # they take as long as torch itself
_declared: list[object] = []  # a torch Library takes its operators back when it is collected


def import_torchvision() -> None:
    """Make `import torchvision` work in this process; its networks are imported by who asks for
    them. ImportError: it or torch is not installed.
    """
    if "torchvision" in sys.modules:
        return
    try:
        _import()
    except RuntimeError:  # "operator torchvision::nms does not exist"
        from torch.library import Library

        library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch's own
        for operator in ("nms", "qnms"):
            library.define(operator + _SIGNATURE)  # type: ignore[no-untyped-call]  # as above
        _declared.append(library)
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _import()


def _import() -> None:
    """Without _LATER. As it comes, torchvision imports them whether they are used or not."""
    names = [f"torchvision.{each}" for each in _LATER]
    sys.modules.update((name, ModuleType(name)) for name in names)
    try:
        import torchvision  # type: ignore[import-untyped]  # has no types
    finally:
        for name in names:
            sys.modules.pop(name, None)
    for each in _LATER:
        delattr(torchvision, each)
