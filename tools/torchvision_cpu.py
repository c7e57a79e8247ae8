"""Import torchvision beside a CPU-only torch.

The registries' default torchvision wheel is built for CUDA. Beside a CPU-only torch its operator
library does not load, and then `import torchvision` fails on the missing operators `nms` and
`qnms`. Declaring the two (without an implementation) lets the rest be imported: `ImageFolder` and
the transforms are plain Python, the stock ones.

INVARIANT: nothing is declared unless a plain import has failed first.
This is for the demo and for tests only; the product never imports torch.
"""

import sys

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[object] = []  # a torch Library takes its operators back when it is collected


def import_torchvision() -> None:
    """Make `import torchvision` work in this process. ImportError: it or torch is not installed."""
    try:
        import torchvision  # type: ignore[import-untyped]  # has no types
    except RuntimeError:  # "operator torchvision::nms does not exist"
        from torch.library import Library

        library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch's own
        for operator in ("nms", "qnms"):
            library.define(operator + _SIGNATURE)  # type: ignore[no-untyped-call]  # as above
        _declared.append(library)
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision  # noqa: F401
