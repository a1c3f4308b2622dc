"""Configs of targets in the form in which they are published: what each leaves implicit, nests, and spells its own way.

Left out is what no rule reads: token ids, the part that sees, code to load.
"""

import json
from pathlib import Path
from typing import Any

PUBLIC: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
