"""Which log a job's samples are moved into, and when (pure).

hintsd's side: hintsd/plan/layout.py applies these rules to what a mount has. The mount's side, room
and segments: fusecache/reorder; bytes: fusecache/native/log; files: fusecache/store/log.py.
"""
