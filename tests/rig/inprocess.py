"""SGLang's own modules in this process, to hold functions against them or to call them on small models."""

import importlib
import os
import sys
import warnings
from typing import Any

from rig.server import RIG


def sglang_module(name: str) -> Any:
    """The installed module ``sglang.<name>``, imported as on a CPU server.

    Puts this folder at the end of ``sys.path``, for the packages that SGLang wants and that are not installed, and
    leaves it there. SGLang warns a lot while it is imported, which is not ours to mend.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if str(RIG) not in sys.path:
        sys.path.append(str(RIG))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"sglang.{name}")
