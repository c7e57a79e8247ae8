"""`import hintsd.auto`, in a script: its DataLoaders announce their order by themselves, as below
`hintsd run`, where the command that starts it cannot be changed."""

from __future__ import annotations

from hintsd import autohint

autohint.install()
