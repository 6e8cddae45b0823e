"""What a result depends on, as one value.

The plan, reuse, shared reading, kept answers and arms compare identities to decide whether two things are the
same. A part is a setting or a content hash. A name or a path is used only if the content cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opdcl.rundir.hashes import hash_value
from opdcl.rundir.layout import RunDir


@dataclass(frozen=True)
class Identity:
    """All that something depends on, as plain data: equal parts make equal results."""

    parts: Any

    @property
    def key(self) -> str:
        """A hash of all parts, as 16 digits."""
        return hash_value(self.parts)

    def changed_since(self, earlier: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts that were others, or were not there; of numbers, both values too."""
        changed = []
        for key in sorted({*earlier, *self.parts}):
            match earlier.get(key), self.parts.get(key):
                case int() | float() as then, int() | float() as now if then != now:
                    changed.append(f"{key} {then:g} -> {now:g}")
                case then, now if then != now:
                    changed.append(key)
        return changed


def weights_of_base(manifest: Mapping[str, Any]) -> str:
    """Return the hash of the weights of a run's base, by its manifest; "" if it recorded none."""
    base = manifest.get("base") or {}
    # With a whole tuned model the fingerprint covers both models, and `weights` the base alone.
    return str(base.get("weights") or base.get("fingerprint_before") or "")


def recorded_contents(run: RunDir) -> dict[str, str]:
    """Return the hashes of what a run's training stages read, by key, such as `finetune.data` or `start`."""
    contents = {}
    for stage in ("finetune", "recover"):
        for name, value in (run.stage_record(stage).get("inputs") or {}).items():
            if name.startswith("content of "):
                contents[f"{stage}.{name.removeprefix('content of ')}"] = str(value)
            elif name == "start":
                contents[name] = str(value)
    return contents
