"""A door into a mount's server, for tests: control operation "native" calls `fusecache._native`.

Python imports a module of this name at its start when it finds one. A test puts this directory into
the PYTHONPATH of its mount; in any other process than the server nothing happens.

With NATIVE_DOOR_REFUSES=NUMBER the server's system call of this number fails with EPERM.
"""

import ast
import ctypes
import errno
import os
import struct
import sys
from typing import Any


def refuse(number: int) -> None:
    """The system call, from now on, in this thread and those it begins (seccomp)."""
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    load_number, if_equal, give = 0x20, 0x15, 0x06  # BPF instructions
    fails, goes_on = 0x00050000 | errno.EPERM, 0x7FFF0000
    code = [(load_number, 0, 0, 0), (if_equal, 0, 1, number), (give, 0, 0, fails)]
    code += [(give, 0, 0, goes_on)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(text)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    word = ctypes.c_ulong
    for arguments in (
        (pr_set_no_new_privs, word(1), word(0)),
        (pr_set_seccomp, word(mode_filter), ctypes.byref(program)),
    ):
        if prctl(*arguments, word(0), word(0)):
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


if "fusecache.server" in sys.orig_argv:
    if "NATIVE_DOOR_REFUSES" in os.environ:
        refuse(int(os.environ["NATIVE_DOOR_REFUSES"]))

    import trio

    from fusecache.control.control import ControlServer, Message, Operation, Send
    from fusecache.server.launch import Launch

    begin = ControlServer.__init__
    parse = Launch.from_json
    launches: list[Launch] = []  # one: a server that was a spare hears of it late

    def from_json(text: str) -> Launch:
        launches.append(parse(text))
        return launches[-1]

    async def native(request: Message, send: Send) -> Message:
        from fusecache import _native  # late: the server loads it in a way of its own

        (launch,) = launches
        arguments = ast.literal_eval(request["arguments"])
        known = {"fuse_fd": launch.fuse_fd, "mountpoint": launch.config["mountpoint"].encode()}
        arguments.update({name: known[name] for name in request["own"]})
        positional = arguments.pop("")
        function = getattr(_native, request["name"])
        result = await trio.to_thread.run_sync(lambda: function(*positional, **arguments))
        return {"result": repr(result)}

    def begin_with_door(
        self: ControlServer, fd: int, operations: dict[str, Operation], *rest: Any
    ) -> None:
        begin(self, fd, {**operations, "native": native}, *rest)

    ControlServer.__init__ = begin_with_door  # type: ignore[assignment]
    Launch.from_json = from_json  # type: ignore[method-assign]
