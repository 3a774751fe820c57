"""Guards `moebius chat` and its client: text as it comes, the server's own counts and its own errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.chat.answer import stream_answer
from app.client import ApiClient, ClientTls
from moebius.errors import UserError
from tests.helpers.sse_server import delta_event, scripted_server, usage_event


def test_answer_is_streamed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Deltas are joined and printed; the token count is the server's, not the number of events."""
    events = [delta_event("Par"), delta_event("is"), delta_event(""), usage_event(7)]
    with scripted_server(events) as server:
        client = ApiClient(server.url + "/v1")
        answer = stream_answer(client, {"model": "m"}, [{"role": "user", "content": "?"}])
        client.close()
    assert capsys.readouterr().out == "Paris\n"
    assert (answer.text, answer.completion_tokens) == ("Paris", 7)
    assert 0 < answer.time_to_first_token <= answer.total_time
    sent = server.requests[0]
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("limit", "said"),
    [({}, "where the model's context ends"), ({"max_tokens": 9}, "at max_tokens (--max-tokens N)")],
    ids=["context", "limit"],
)
def test_an_answer_that_was_cut_off_says_so(
    limit: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is on stderr and says by what: stdout of a thought that has not ended is empty where it is no
    terminal.
    """
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm"}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    with scripted_server([thought, end, usage_event(9)]) as server:
        client = ApiClient(server.url)
        answer = stream_answer(client, {"model": "m", **limit}, [{"role": "user", "content": "?"}])
        client.close()
    printed = capsys.readouterr()
    assert (answer.finish_reason, printed.out) == ("length", "\n")
    assert printed.err == f"9 tokens, cut off {said}\n"


def test_servers_error_is_repeated() -> None:
    """An HTTP error ends as the server's own message with its status."""
    with scripted_server([], status=404) as server:
        client = ApiClient(server.url)
        with pytest.raises(UserError, match="answered 404: no such model"):
            list(client.stream("/v1/completions", {"model": "x"}))


def test_bytes_of_another_locale_are_sent_as_they_were() -> None:
    """Arguments that Python could not decode are UTF-8 all the same; what is not is one error, not sent."""
    with scripted_server([usage_event(0)]) as server:
        client = ApiClient(server.url)
        carried = "Über".encode().decode("ascii", "surrogateescape")
        list(client.stream("/v1/completions", {"prompt": carried}))
        assert server.requests[0]["prompt"] == "Über"
        for broken in (b"\xff".decode("utf-8", "surrogateescape"), "\ud83d"):
            with pytest.raises(UserError, match="not valid UTF-8"):
                list(client.stream("/v1/completions", {"prompt": broken}))
        assert len(server.requests) == 1


def test_error_event_in_a_stream_is_an_error() -> None:
    """A stream that breaks off with an error event is not taken for a complete answer."""
    events = [delta_event("half"), {"error": {"message": "expert server lost"}}]
    with scripted_server(events) as server:
        pieces = ApiClient(server.url).stream("/v1/chat/completions", {"model": "m"})
        assert next(pieces).text == "half"
        with pytest.raises(UserError, match="expert server lost"):
            next(pieces)


def test_model_list_tells_the_checkpoint(tmp_path: object) -> None:
    """`root` is taken as a checkpoint only when it is one on this machine."""
    with scripted_server([], root="/somewhere/else") as server:
        served = ApiClient(server.url).first_model()
    assert (served.name, served.root, served.local_directory) == ("m", "/somewhere/else", None)


def test_files_for_https_are_named(tmp_path: Path) -> None:
    """A CA, certificate or key that cannot be used is an error about its option, before anything is sent."""
    (tmp_path / "ca").write_text("hello")
    with pytest.raises(UserError, match=r"--ca-file: .*ca cannot be used"):
        ApiClient("https://127.0.0.1:1", tls=ClientTls(ca_file=str(tmp_path / "ca")))
    with pytest.raises(UserError, match="are needed together"):
        ApiClient("https://127.0.0.1:1", tls=ClientTls(cert_file="x"))
    with pytest.raises(UserError, match="--client-key-file"):
        ApiClient("https://127.0.0.1:1", tls=ClientTls(cert_file="x", key_file="y"))
