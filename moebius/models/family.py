"""What one family of models is. Each module in `families` describes one; `registry` finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moebius.checkpoint.gguf.family import GgufFamily
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.keys import HfKeys
from moebius.models.names import RenameRule, TensorNames


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The vision tower of a multimodal family."""

    read: Callable[[HfKeys, HfKeys], VisionConfig]  # Of config.json and of its `vision_config`.
    # From checkpoint names to those of transformers' modules, below `visual`, `vision_tower`, `mm_projector`,
    # `resampler_model`; tried in order, and what none matches is no part of the tower.
    renames: tuple[RenameRule, ...]
    tower: str  # How transformers' classes of the tower begin.
    # A key of `gpu_service.vision.processor.PROCESSORS`.
    processor: Literal[
        "ernie", "gemma4", "glm", "glm5", "kimi", "llama4", "minimax", "pixtral", "qwen", "step"
    ]
    # Names of the tokens in an image's place, by the fields of `gpu_service.core.images.ImageLayout`: those
    # that the chat template leaves to the image processor. None: the image token alone, in the template, too.
    tokens: Mapping[str, str] = field(default_factory=dict)

    def tower_name(self, name: str) -> str | None:
        """Returns the name in the tower's module; None: the tensor is no part of the tower."""
        for rule in self.renames:
            matches, renamed = rule.apply(name)
            if matches:
                return renamed
        return None


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """Layers of multi-token prediction that can be served; their names are in the family's `TensorNames`.

    `ModelConfig.num_mtp_layers`, which the family reads from config.json, says how many there are.
    """

    # Whether the projection reads the hidden state first; False: the embedding.
    hidden_first: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. What computes it follows from the layers of the `ModelConfig` that `read` makes."""

    model_type: str
    # Raises ModelConfigError naming key, value and what is allowed.
    read: Callable[[HfKeys], ModelConfig]
    names: TensorNames
    vision: VisionFamily | None = None  # None: text only.
    gguf: tuple[GgufFamily, ...] = ()  # GGUF architectures whose files are read as this family.
    mtp: MtpFamily | None = None  # None: its multi-token prediction, if there is any, can not be served.
    # Whether published models of it are known to exceed, on ordinary prompts, what float16 holds.
    overflows_float16: bool = False
