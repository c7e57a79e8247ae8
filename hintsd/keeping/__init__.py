"""What stays in a mount's cache by the rule of a published policy, live (pure).

INVARIANT: importing it is quick: the command line names the rules.
"""

from typing import Final

AUTO: Final = "auto"
NONE: Final = "none"
NAMES: Final = (
    *(AUTO, NONE, "shade", "icache", "lru", "lfu", "random"),
    *("sh_app", "sh_pqlfu", "sh_pq", "sh_lru", "sh_lfu", "sh_rand"),
)
"""AUTO is the planner's own rule; NONE has nothing stay. All others are some of those in
hintsd/policies/catalogue.py. Those that begin with sh_: SHADE's ablations (section 6.2)."""
