"""The log: samples in the order of an epoch (docs/LOG.md).

The mount's side: room and segments. What is packed, and when: hintsd/plan/layout.py; bytes:
native/log; files: store/log.py.
"""
