"""What an assembled engine process holds."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_service.assembly.kv_memory import KvMemory
from gpu_service.assembly.vision import Vision
from gpu_service.engine.engine import Engine
from gpu_service.experts.client import ExpertClient
from gpu_service.model_config import ModelConfig
from gpu_service.parallel.group import RankGroup
from gpu_service.placement.recorder import ExpertRecorder
from gpu_service.verify.self_test import SelfTestReport


@dataclass(frozen=True, slots=True)
class Built:
    """Everything `main` serves and closes; filled by `build_engine`."""

    engine: Engine
    group: RankGroup
    experts: ExpertClient | None
    recorder: ExpertRecorder | None
    memory: KvMemory
    model_config: ModelConfig
    num_pages: int
    context_limit: int
    # Length of the warm-up's longest prompt.
    warm_up_tokens: int
    # What was measured of this rank's experts before anything was served; None: switched off, or no experts.
    self_test: SelfTestReport | None = None
    # None: the model does not see, or is served without its tower.
    vision: Vision | None = None

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends every request, then the engine, its experts and its rank's part in the group, in order.

        False: a step is still computing after `timeout_s`, and nothing was closed.
        """
        if not self.engine.stop(timeout_s):
            return False
        if self.experts is not None:
            self.experts.close()
        self.group.close()
        return True
