"""Python imports this file when an observed process starts: its folder is first on PYTHONPATH.

It takes its folder off the path, runs the `sitecustomize` that Python would have found without it, and lets
the observer wait for the script's own import of torch.
"""

import os
import sys
from importlib import import_module

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))

sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
sys.path.append(_SOURCE)  # last: an installed stowplan comes first
try:
    from stowplan.observe import child
finally:
    sys.path.pop()

_own = sys.modules.pop("sitecustomize", None)
try:
    import_module("sitecustomize")
except ModuleNotFoundError as fault:
    if fault.name != "sitecustomize":
        raise
finally:
    if _own is not None:
        sys.modules.setdefault("sitecustomize", _own)
    child.begin()
