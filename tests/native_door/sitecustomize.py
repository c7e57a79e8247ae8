"""A door into a mount's server, for tests: control operation "native" calls `fusecache._native`.

Python imports a module of this name at its start when it finds one. A test puts this directory into
the PYTHONPATH of its mount; in any other process than the server nothing happens.
"""

import ast
import sys
from typing import Any

if "fusecache.server" in sys.orig_argv:
    import trio

    from fusecache.control import ControlServer, Message, Operation, Send
    from fusecache.launch import Launch

    launch = Launch.from_json(sys.orig_argv[-1])
    begin = ControlServer.__init__

    async def native(request: Message, send: Send) -> Message:
        from fusecache import _native  # late: the server loads it in a way of its own

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
