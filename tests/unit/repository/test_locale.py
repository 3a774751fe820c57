"""Guards files against the locale: they are UTF-8 wherever they are written or read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

from app.chat.conversation import Conversation
from app.supervisor.runfile import write_private
from moebius.config import MoebiusConfig
from moebius.config.loader import effective_config, load_config

directory = Path(sys.argv[1])
config = MoebiusConfig.model_validate({"model": {"model": "/models/Schr\\u00f6dinger-\\u6a21\\u578b"}})
write_private(directory / "settings.yaml", effective_config(config))
assert load_config(directory / "settings.yaml", {}) == config

kept = Conversation({}, messages=[{"role": "user", "content": "\\u4f60\\u597d"}])
assert kept.enter(f"/save {directory}/talk.json").says
found = Conversation({"model": "m"})
found.enter(f"/load {directory}/talk.json")
assert found.messages == kept.messages
"""


def test_files_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    """Settings and conversations in any language are written and read back where the locale is ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
