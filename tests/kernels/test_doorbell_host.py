"""Guards the doorbell kernels, run on the host from the very source that GPUs run, against real servers.

Sums are exact, epochs come from device memory, and whatever breaks, a step ends with the failure named.
"""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.doorbell.program import Box, State
from gpu_service.experts.servers import CheckedExperts
from moebius import _kernels_testing as testing
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import MailboxServer, field_offsets
from tests.helpers.doorbell_host import doorbell_client, host_kernels
from tests.helpers.doorbell_steps import MODEL, Layer
from tests.helpers.mailbox import geometry, new_mailbox, served_mailbox, spawn_server


def test_box_has_the_size_the_kernels_expect() -> None:
    """The launch argument's mirror; its fields are all 64-bit words, so their order shows in every test."""
    assert ctypes.sizeof(Box) == host_kernels().box_bytes()


@pytest.mark.covering(2)
@pytest.mark.parametrize(("grid", "block"), [(1, 1), (3, 1), (1, 64), (2, 40)])
@pytest.mark.parametrize(
    ("source", "carried"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_answers_are_added_for_any_rows(
    num_servers: int, source: str, carried: str, grid: int, block: int
) -> None:
    """No row, some, all that a slot holds, and more than all slots hold."""
    with (
        served_mailbox(geometry(num_servers, dtype=carried)) as box,
        doorbell_client(box, MODEL, grid=grid, block=block) as (client, _),
    ):
        client.wait_ready(60)
        for rows in (0, 1, 3, 7, 8, 40):
            layer = Layer(rows, seed=rows, dtype=getattr(torch, source))
            assert torch.equal(layer.run(client), layer.expected(num_servers))
        assert client.failure() is None
        assert client.stats().calls == 1 + 1 + 1 + 2 + 6


@pytest.mark.parametrize(
    ("source", "carried"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "float32")],
)
def test_hidden_states_are_converted_to_what_the_mailbox_carries(source: str, carried: str) -> None:
    """Rounded to nearest even like torch's, widened exactly, float16's smallest and largest numbers too."""
    with served_mailbox(geometry(2, dtype=carried)) as box, doorbell_client(box, MODEL) as (client, _):
        client.wait_ready(60)
        layer = Layer(5, dtype=getattr(torch, source))
        values = torch.randn(layer.hidden_states.shape)
        values[1] *= torch.logspace(-9, -3, values.shape[1])
        values[2, :4] = torch.tensor([65504.0, -65519.9, 2**-24, 1.5 * 2**-25])
        layer.hidden_states = values.to(layer.hidden_states.dtype)
        rounded = layer.hidden_states.to(getattr(torch, carried)).float()
        got, routed = layer.run(client), layer.routed(2)
        assert torch.equal(got, layer.partial + ((rounded + routed / 2) + (2 * rounded + routed / 2)))


def test_replay_counts_on_in_device_memory() -> None:
    """The same launches with new inputs in place, as a captured graph repeats them; epochs never repeat."""
    with served_mailbox(geometry(2)) as box, doorbell_client(box, MODEL) as (client, host):
        client.wait_ready(60)
        layers = [Layer(rows, seed=rows, layer=rows % 5) for rows in (1, 4, 9)]
        tickets = [(layer, layer.run(client)) for layer in layers]
        first = int(host.state[State.EPOCH])
        for step in range(1, 4):
            for layer, output in tickets:
                layer.redraw(seed=100 * step)
                output.copy_(layer.partial)
            client.begin_step()
            host.replay()
            assert client.failure() is None
            assert int(host.state[State.EPOCH]) == first * (1 + step)
            for layer, output in tickets:
                assert torch.equal(output, layer.expected(2))


def test_deadline_ends_the_step_and_recovery_replays_it() -> None:
    """Without a server the first wait gives up, later launches do nothing, and after recovery all is well."""
    with new_mailbox(geometry()) as box, doorbell_client(box, MODEL, deadline_ms=30) as (client, host):
        MailboxServer(box.name, 0, EchoBackend(48)).start()  # leaves at once: no process holds it
        host.set_words(State.GENERATION, [0])
        layer = Layer(40)
        client.begin_step()
        untouched = layer.run(client)
        failure = client.failure()
        assert isinstance(failure, ExpertUnavailable)
        assert failure.server_index == 0
        assert "30 ms" in failure.reason or "absent" in failure.reason
        assert torch.equal(untouched, layer.partial)
        given_out = int(host.state[State.EPOCH])
        layer.run(client)
        assert int(host.state[State.EPOCH]) == given_out
        with pytest.raises(ExpertUnavailable, match="state is absent"):
            client.recover(0.01)
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        client.recover(60)
        assert torch.equal(layer.run(client), layer.expected(1))
        assert client.failure() is None
        # What was abandoned is not computed.
        assert client.stats().calls == 6
        server.stop()


def test_stale_answer_is_named() -> None:
    """An answer to a later epoch than the device's means that the counter was lost."""
    with served_mailbox(geometry()) as box, doorbell_client(box, MODEL) as (client, host):
        client.wait_ready(60)
        layer = Layer(1)
        layer.run(client)
        host.set_words(State.EPOCH, [7])
        outcome = ctypes.c_uint64.from_address(
            box.kernel.address + host.box.done_lines + field_offsets()["DoneLine.outcome"]
        )
        outcome.value = 9 << 24
        host.set_words(State.SLOT_EPOCH, [8])
        host.launched[-1]()
        failure = client.failure()
        assert isinstance(failure, ExpertUnavailable)
        assert "another request than epoch 8" in failure.reason


def test_compute_failure_carries_the_servers_text() -> None:
    """It is not retried; the client is usable after recovery."""
    with served_mailbox(geometry(2), fail_layer=2) as box, doorbell_client(box, MODEL) as (client, _):
        client.wait_ready(60)
        Layer(3, layer=2).run(client)
        failure = client.failure()
        assert isinstance(failure, ExpertComputeFailed)
        assert "layer 2" in str(failure)
        assert "set to fail at layer 2" in str(failure)
        client.recover(60)
        layer = Layer(3, layer=1)
        assert torch.equal(layer.run(client), layer.expected(2))


@pytest.mark.parametrize("is_memops", [False, True])
def test_killed_server_is_noticed_before_the_deadline_and_returns(is_memops: bool) -> None:
    """The host's watch tells the device, which cannot see file locks; the replayed step is right.

    pytest's limit is shorter than the deadline.
    """
    with new_mailbox(geometry()) as box:
        first = spawn_server(box, 0)
        with doorbell_client(box, MODEL, deadline_ms=3_600_000, is_memops=is_memops) as (client, host):
            client.wait_ready(60)
            layer = Layer(5)
            client.begin_step()
            output = layer.run(client)
            assert torch.equal(output, layer.expected(1))
            first.kill()
            first.wait()
            output.copy_(layer.partial)
            client.begin_step()
            host.replay()
            failure = client.failure()
            assert isinstance(failure, ExpertUnavailable)
            assert "is gone" in failure.reason
            second = spawn_server(box, 0)
            try:
                client.recover(60)
                client.begin_step()
                host.replay()
                assert client.failure() is None
                assert torch.equal(output, layer.expected(1))
            finally:
                second.kill()
                second.wait()


@pytest.mark.parametrize("is_memops", [False, True])
def test_a_server_killed_again_in_its_check_is_waited_for(is_memops: bool) -> None:
    """A device finds out when the check's step has ended; the recovery goes on until a check has passed."""
    with new_mailbox(geometry()) as box:
        processes = [spawn_server(box, 0)]
        with doorbell_client(box, MODEL, deadline_ms=60_000, is_memops=is_memops) as (client, _):
            client.wait_ready(60)
            checked = CheckedExperts(client)
            checks = 0

            def lose() -> None:
                processes[-1].kill()
                processes[-1].wait()

            def check() -> str:
                nonlocal checks
                checks += 1
                if checks < 3:
                    lose()
                checked.begin_step()
                layer = Layer(3)
                output = layer.run(checked)
                if (failure := checked.failure()) is not None:
                    processes.append(spawn_server(box, 0))
                    raise failure
                return "" if torch.equal(output, layer.expected(1)) else "another answer"

            checked.check_with(check)
            lose()
            processes.append(spawn_server(box, 0))
            try:
                checked.recover(60)
                assert checks == 3
                assert checked.failure() is None
                assert torch.equal((layer := Layer(5)).run(checked), layer.expected(1))
            finally:
                lose()


def test_restart_between_two_waits_is_noticed() -> None:
    """An answer of another generation than the one that was ready is not trusted; the step runs again."""
    with new_mailbox(geometry()) as box, doorbell_client(box, MODEL) as (client, _):
        for expected in (False, True):
            server = MailboxServer(box.name, 0, EchoBackend(48))
            server.start()
            if not expected:
                client.wait_ready(60)
            Layer(2).run(client)
            assert (client.failure() is not None) is expected
            if expected:
                assert "restarted" in str(client.failure())
                client.recover(60)
                assert torch.equal((layer := Layer(2)).run(client), layer.expected(1))
            server.stop()


def test_memops_wait_for_constant_flags() -> None:
    """Cleared before each ring and set by each answer, in any slot and replay."""
    with served_mailbox(geometry(3)) as box, doorbell_client(box, MODEL, is_memops=True) as (client, host):
        client.wait_ready(60)
        layer = Layer(30)
        output = layer.run(client)
        for seed in range(3):
            assert torch.equal(output, layer.expected(3))
            layer.redraw(seed)
            output.copy_(layer.partial)
            host.replay()


def test_memops_without_an_answer_are_released() -> None:
    """They have no deadline of their own: the watch ends them."""
    with new_mailbox(geometry()) as box:
        server = MailboxServer(box.name, 0, EchoBackend(48))
        with doorbell_client(box, MODEL, watch_ms=50, is_memops=True) as (client, _):
            client.begin_step()
            Layer(20).run(client)
            failure = client.failure()
            assert isinstance(failure, ExpertUnavailable)
            assert "no answer within 50 ms" in failure.reason
            server.start()
            client.recover(60)
            client.begin_step()
            assert torch.equal((layer := Layer(20)).run(client), layer.expected(1))
            server.stop()


def test_shut_down_ends_a_step() -> None:
    """The launcher's word is seen by a waiting kernel."""
    with new_mailbox(geometry()) as box, doorbell_client(box, MODEL) as (client, _):
        box.shut_down()
        Layer(1).run(client)
        assert "shut down" in str(client.failure())


def test_bad_arguments_are_named() -> None:
    """Shapes, types and a ticket from before a recovery."""
    with served_mailbox(geometry()) as box, doorbell_client(box, MODEL) as (client, _):
        client.wait_ready(60)
        layer = Layer(2)
        with pytest.raises(ValueError, match="allowed"):
            client.submit(0, layer.hidden_states.double(), layer.topk_ids, layer.topk_weights)
        ticket = layer.submit(client)
        with pytest.raises(ValueError, match="contiguous float32"):
            client.collect(ticket, torch.zeros(48, 2).T)
        client.recover(60)
        with pytest.raises(ValueError, match="since its last recovery"):
            client.collect(ticket)


def test_ping_pong_of_the_bench_counts_rounds_and_gives_up() -> None:
    """The limit's kernel against the C++ side it meets, and alone."""
    kernels, rounds = host_kernels(), 50
    words = (ctypes.c_uint32 * 64)()
    address = -(-ctypes.addressof(words) // 64) * 64

    def answer() -> None:
        testing.ping_pong(address, asks=False, rounds=rounds, spin_ns=10**10)

    other = threading.Thread(target=answer)
    other.start()
    elapsed = kernels.launch_ping_pong(ctypes.c_void_p(address), 10, rounds - 10, ctypes.c_uint64(10**10))
    other.join()
    assert elapsed > 0
    assert ctypes.c_uint32.from_address(address).value == 2 * rounds
    assert kernels.launch_ping_pong(ctypes.c_void_p(address), 0, 1, ctypes.c_uint64(10**6)) == 0


def test_trace_context_of_a_sampled_step_reaches_the_server() -> None:
    """The context travels in device memory, so that a replayed graph carries that of its own step; the next
    step has none.
    """
    context = SpanContext(0x1234 << 64, 0x5678, is_remote=False, trace_flags=TraceFlags(1))
    with new_mailbox(geometry()) as box, doorbell_client(box, MODEL) as (client, host):
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        client.wait_ready(60)
        client.begin_step()
        Layer(2, layer=3).run(client)
        with trace.use_span(NonRecordingSpan(context)):
            client.begin_step()
            host.replay()
        client.begin_step()
        host.replay()
        (call,) = server.take_traced_calls()
        assert int.from_bytes(call.trace_id, "big") == context.trace_id
        assert int.from_bytes(call.span_id, "big") == context.span_id
        assert (call.flags, call.layer, call.rows) == (1, 3, 2)
        server.stop()
