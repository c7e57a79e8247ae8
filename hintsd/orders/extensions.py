"""The file name extensions that ImageFolder takes.

The client names them as hintsd does, and does without the rest of folders.py.
"""

from __future__ import annotations

from typing import Final

IMG_EXTENSIONS: Final = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""torchvision.datasets.folder.IMG_EXTENSIONS."""
