"""The demo model: a small real mixture of experts, built once from a public package.

SmolLM2-135M-Instruct (dense, Apache-2.0) is re-ordered into 8 shared and 16 routed experts per layer and
written as an ordinary Hugging Face `glm4_moe` checkpoint, so every later step treats it like any other
model. Nothing here imports torch or transformers.
"""

from app.demo_model.build import build_demo_model, default_directory
from app.demo_model.download import DemoModelError, ProgressCallback, rich_progress, verify_checkpoint

__all__ = [
    "DemoModelError",
    "ProgressCallback",
    "build_demo_model",
    "default_directory",
    "rich_progress",
    "verify_checkpoint",
]
