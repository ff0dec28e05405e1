"""What a call of a model says about its attention, as one value that frameworks pass through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maskc.binding.bound import BoundMask

if TYPE_CHECKING:
    from maskc.runtime.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class Attend:
    """How the layers of one call attend. masks: one bound mask, or one per layer type; the rest as in `maskc.run`."""

    masks: BoundMask | Mapping[str, BoundMask]
    group: Any = None
    plan: AttentionPlan | None = None
    strategy: str = "auto"
    deterministic: bool = False
    backend: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `maskc.run`."""
        options: dict[str, Any] = {"deterministic": self.deterministic, "backend": self.backend}
        if self.group is not None:
            options |= {"group": self.group, "plan": self.plan, "strategy": self.strategy}
        return options
