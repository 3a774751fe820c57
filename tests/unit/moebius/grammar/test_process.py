"""Guards that a grammar costs no more processor time and memory than it may, whatever it is."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from moebius.grammar.compile import GrammarCheck, GrammarError, OverBudget, compiled
from moebius.grammar.process import _HANGS_S, QUICK_S, BudgetedCompiler, GrammarProcess
from protos.engine_pb2 import Choice, Constraint
from tests.helpers.constraints import new_compiler
from tests.helpers.heavy_grammars import heavy_gbnf
from tests.helpers.new_process import new_process

HEAVY = Constraint(ebnf=heavy_gbnf())
LIGHT = [
    Constraint(json_object=True),
    Constraint(json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})),
    Constraint(regex="[ab]+"),
    Constraint(choice=Choice(options=["yes", "no"])),
    Constraint(ebnf='root ::= "a" | "b"'),
    Constraint(lark='start: "a" <[5]>'),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., None]]:
    """Yields what runs a function in a process that may be forked, as this one may not: it has threads."""
    with new_process() as run:
        yield run


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_says_what_this_one_would(run: Callable[..., None], forks: bool) -> None:
    """Grammars and refusals are those of `compiled`, whichever way it is started."""
    run(_says_the_same, forks)


def _says_the_same(forks: bool) -> None:
    process = GrammarProcess(forks)
    try:
        for constraint in LIGHT:
            assert process.compiled(constraint) == compiled(constraint)
        for bad in (Constraint(json_schema='{"not": {}}'), Constraint(ebnf="root ::= [")):
            with pytest.raises(GrammarError) as here:
                compiled(bad)
            with pytest.raises(GrammarError) as there:
                process.compiled(bad)
            assert str(there.value) == str(here.value)
    finally:
        process.close()


def test_a_grammar_that_takes_long_is_refused() -> None:
    """It ends the process that compiles, not the one that starts it; the next one is compiled."""
    process = GrammarProcess()
    try:
        process.compiled(LIGHT[0])
        assert process._process is not None
        started = process._process
        for _ in range(3):
            with pytest.raises(OverBudget, match="more than 1 s of processor time"):
                process.compiled(HEAVY, QUICK_S)
            process.compiled(LIGHT[0])
        assert process._process == started
    finally:
        process.close()


def test_waiting_for_a_processor_costs_nothing() -> None:
    """A grammar is refused for the processor time that it takes, never for the time in which the process had
    no processor: what is stopped for longer than any budget allows is compiled once it goes on."""
    process = GrammarProcess()
    try:
        process.compiled(LIGHT[0])
        assert process._channel is not None
        assert process._process is not None
        # Waiting for an answer has one limit, which is for processes that hang, whatever the budget is.
        limits = set()
        for cpu_s in (QUICK_S, 1.0):
            process.compiled(LIGHT[0], cpu_s)
            limits.add(process._channel.gettimeout())
        assert limits == {_HANGS_S}
        compiling = psutil.Process(process._process).children()[0]
        compiling.suspend()
        resumed = threading.Timer(10 * QUICK_S, compiling.resume)
        resumed.start()
        assert process.compiled(LIGHT[1], QUICK_S) == compiled(LIGHT[1])
        resumed.join()
    finally:
        process.close()


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("who", ["starts", "compiles"])
def test_a_process_that_was_killed_is_replaced(run: Callable[..., None], who: str, forks: bool) -> None:
    """Grammars after a kill, as the kernel kills for memory, are compiled, each answer its own."""
    run(_is_replaced, who, forks)


def _is_replaced(who: str, forks: bool) -> None:
    process = GrammarProcess(forks)
    try:
        process.compiled(LIGHT[0])
        assert process._process is not None
        victim = psutil.Process(process._process)
        victim = victim if who == "starts" else victim.children()[0]
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        for constraint in LIGHT:
            assert process.compiled(constraint) == compiled(constraint)
    finally:
        process.close()


@pytest.mark.parametrize("forks", [False, True])
def test_nothing_is_left(run: Callable[..., None], forks: bool) -> None:
    """Both processes end with the one that asks, or when they are closed."""
    run(_leaves_nothing, forks)


def _leaves_nothing(forks: bool) -> None:
    process = GrammarProcess(forks)
    process.compiled(LIGHT[0])
    assert process._process is not None
    parent = psutil.Process(process._process)
    family = [parent, *parent.children()]
    process.close()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_what_takes_long_has_a_process_of_its_own() -> None:
    """Within a second it is compiled all the same."""
    wide = {f"p{number}": {"type": "string", "maxLength": number} for number in range(300)}
    constraint = Constraint(json_schema=json.dumps({"type": "object", "properties": wide}))
    budgeted = BudgetedCompiler()
    try:
        assert budgeted.compiled(constraint) == compiled(constraint)
        with pytest.raises(OverBudget):
            budgeted.compiled(HEAVY)
    finally:
        budgeted.close()


def test_a_refusal_for_want_of_time_is_not_kept() -> None:
    """What a request has left is no property of the grammar."""
    answers = iter([OverBudget("no time"), None])

    def answer(_constraint: Constraint) -> None:
        error = next(answers)
        if error is not None:
            raise error

    check = GrammarCheck(compiler=answer)
    with pytest.raises(OverBudget):
        check.check(LIGHT[0])
    check.check(LIGHT[0])
    check.check(LIGHT[0])


def test_an_engine_refuses_before_it_compiles() -> None:
    """Ranks hear only of grammars that were found to be in time, and of those whatever they take there."""
    engine, announced = new_compiler(), list[str]()
    engine.announce = announced.append
    vetting = BudgetedCompiler()
    engine.vet = vetting.compiled
    try:
        with pytest.raises(OverBudget):
            engine.make(HEAVY)
        assert announced == []
        assert len(engine.make(Constraint(regex="[ab]+"), 2)) == 2
        assert len(announced) == 1
    finally:
        vetting.close()
