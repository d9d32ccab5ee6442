"""Which calls of `torch.compile` concern a script: those in its own code, and those of a module.

Libraries compile functions of theirs when they are imported, as with a decorator.
"""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch import nn

_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib", "stdlib")})


def concerns_the_script(args: tuple[object, ...], kwargs: Mapping[str, object], caller: FrameType) -> bool:
    """Whether `torch.compile(*args, **kwargs)`, called from there, compiles what the script trains."""
    target = args[0] if args else kwargs.get("model")
    return isinstance(target, nn.Module) or not caller.f_code.co_filename.startswith(_LIBRARIES)
