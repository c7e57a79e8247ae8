"""What pyproject.toml cannot say: hintsd.pth lies beside the packages (docs/PACKAGES.md)."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Not in an editable install: there tools/setup copies it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("hintsd/hintsd.pth", self.build_lib)


setup(cmdclass={"build_py": BuildWithPth})
