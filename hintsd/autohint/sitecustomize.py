"""Runs when a Python below `hintsd run` starts (see the package), then lets the sitecustomize that
it hides run: the distribution's, or the user's own."""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        from hintsd import autohint

        autohint.install()
    except ImportError:
        from importlib.util import find_spec

        if find_spec("torch") is not None:
            is_explained = os.environ.get("HINTSD_EXPLAIN") == "1"
            end = "not going on" if is_explained else "going on without hints"
            sys.stderr.write(
                f"hintsd run: {sys.executable} has no hintsd (from fusecache's checkout: "
                f"{sys.executable} -m pip install ./client); {end}\n"
            )
            if is_explained:  # it would train
                sys.stderr.flush()
                os._exit(1)
    except Exception:  # a fault of ours must not become the script's
        pass

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
