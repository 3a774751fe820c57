"""Files of the model are replaced one by one while it is served, and who reads them is killed: the right text
or a refusal that names the file, never another text; with the file back the service is as before."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.drills.checkpoint import write_checkpoint
from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import Session, promise_right, served, serves_again, undisturbed, wait_for
from tests.helpers.swapped_files import edit_json, put, swap_tokens

MAX_TOKENS = 48
# A start of Python and torch, on a busy machine.
BACK_S = 90.0


@dataclass(frozen=True)
class Case:
    """A file, how it is changed, and who is killed then, in turn."""

    file: str
    change: Callable[[Path], None]
    victims: tuple[str, ...]


def _template(settings: dict[str, Any]) -> None:
    settings["chat_template"] = "{{ messages[0].content }}"


def _cooler(generation: dict[str, Any]) -> None:
    generation.update(repetition_penalty=1.9, top_k=3)


def _rotary(config: dict[str, Any]) -> None:
    config.pop("rope_parameters", None)
    config["rope_theta"] = 17.0


def _other_weights(file: Path) -> None:
    other = write_checkpoint(file.parent.with_name("other"), seed=12)
    shutil.copyfile(other / file.name, file.with_suffix(".made"))
    file.with_suffix(".made").replace(file)


CASES = (
    Case("tokenizer.json", swap_tokens, ("prompts", "gateway", "gpu")),
    Case("tokenizer_config.json", lambda file: edit_json(file, _template), ("prompts", "gateway", "gpu")),
    Case("generation_config.json", lambda file: edit_json(file, _cooler), ("gpu",)),
    Case("config.json", lambda file: edit_json(file, _rotary), ("gateway", "gpu", "expert-0")),
    Case("model.safetensors", _other_weights, ("gpu", "expert-0")),
)


def run(report: Report, period_s: float, streams: int) -> None:
    """Each file with each process that reads it; `period_s` of requests before the file is put back."""
    with served(report) as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=4 * BACK_S) as load:
            for case in CASES:
                for victim in case.victims:
                    if session.stack.process.poll() is None:
                        _replace(session, load, case, victim, period_s)
        report.outcomes = load.outcomes
        promise_right(report, report.outcomes)
        report.promise("ready at the end", wait_for(session.ready, BACK_S))


def _replace(session: Session, load: GreedyLoad, case: Case, victim: str, period_s: float) -> None:
    """One file, one process; both as they were at the end."""
    report, what = session.report, f"{case.file}, {victim} killed"
    file, said = session.model / case.file, f"{case.file} has changed since"
    right = file.read_bytes()
    case.change(file)
    logged, begun = len(session.log()), time.monotonic()
    session.send(victim, signal.SIGKILL)
    named = wait_for(lambda: said in session.log()[logged:], BACK_S)
    report.promise(f"{what}: refused by name", named)
    ready = session.ready()
    time.sleep(period_s)
    report.promise(f"{what}: not ready meanwhile", not ready and not session.ready())
    meanwhile = tally(load.since(begun))
    report.facts[f"{what}: requests meanwhile"] = meanwhile.fates
    put(file, right)
    back = serves_again(load, time.monotonic(), BACK_S)
    report.facts[f"{what}: served again after (s)"] = None if back is None else round(back, 1)
    report.promise(f"{what}: serves again within {BACK_S:g} s", back is not None)
    report.promise(f"{what}: ready again", wait_for(session.ready, BACK_S))
