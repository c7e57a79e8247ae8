"""Runs when a Python below `hintsd run` starts (see the package), then lets the sitecustomize that
it hides run: the distribution's, or the user's own."""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    is_explained = os.environ.get("HINTSD_EXPLAIN") == "1"  # then nothing is to be trained
    try:
        from importlib.util import find_spec

        from hintsd import autohint

        if is_explained and find_spec("hintsd.client.explaining") is None:
            raise ImportError
        autohint.install()
    except ImportError:
        if find_spec("torch") is not None:
            command, what, end = "run", "no hintsd", "going on without hints"
            if is_explained:
                command, what, end = "explain", "no hintsd, or an older one", "not going on"
            sys.stderr.write(
                f"hintsd {command}: {sys.executable} has {what} (from fusecache's checkout: "
                f"{sys.executable} -m pip install ./client); {end}\n"
            )
            if is_explained:
                sys.stderr.flush()
                os._exit(1)
    except Exception as error:  # a fault of ours must not become the script's
        if is_explained:
            sys.stderr.write(f"hintsd explain: {error!r}\n")
            sys.stderr.flush()
            os._exit(1)

    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # Children find it by PYTHONPATH; this process is not to find anything else here.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_begin()
