"""Configs of targets as they are published, without what no rule reads: token ids, the part that sees, code to load."""

import json
from pathlib import Path
from typing import Any

PUBLIC: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
