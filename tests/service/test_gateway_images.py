"""Guards images in chat messages: what reaches the engine, and a 400 in OpenAI's shape for all else."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tokenizers import AddedToken

from moebius.config import ImageConfig
from protos import engine_pb2 as pb
from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

PLACEHOLDER = "<|image|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def picture(kind: str, size: tuple[int, int] = (8, 6), **settings: Any) -> bytes:
    """Returns a file of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).save(buffer, kind, **settings)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """Returns a file as clients send it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


PNG, JPEG, WEBP = picture("PNG"), picture("JPEG"), picture("WEBP")


class SeeingEngine(FakeEngine):
    """Says that its model takes images."""

    placeholder = -1

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        info = super().GetModelInfo(request, context)
        info.supports_vision, info.image_token_id = True, self.placeholder
        return info


class Host(BaseHTTPRequestHandler):
    """Serves an image, one that is too large, and a redirect to the image."""

    def do_GET(self) -> None:
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/image", "/large") else 404)
        self.end_headers()
        self.wfile.write(PNG if self.path == "/image" else bytes(200_000))

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@dataclass
class Setup:
    """Gateway and engine, a host of images, a directory of them."""

    url: str
    engine: FakeEngine
    host: str
    directory: Path
    placeholder: int

    def chat(self, *parts: dict[str, Any] | str, **body: Any) -> httpx.Response:
        """Sends a user's message of text parts and, as strings, URLs of images."""
        content = [
            {"type": "image_url", "image_url": {"url": part}} if isinstance(part, str) else part
            for part in parts
        ]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body)


def text(value: str) -> dict[str, Any]:
    """Returns a text part."""
    return {"type": "text", "text": value}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("images")
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, special=True, normalized=False)])
    write_tokenizer(directory, tokenizer, TEMPLATE)
    (directory / "pictures").mkdir()
    (directory / "pictures" / "red one.png").write_bytes(PNG)
    (directory / "secret.png").write_bytes(PNG)
    (directory / "pictures" / "link.png").symlink_to(directory / "secret.png")
    engine = SeeingEngine(directory, tokenizer)
    engine.placeholder = tokenizer.token_to_id(PLACEHOLDER) or -1
    web = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    address = f"unix:{directory}/engine.sock"
    images = {
        "max_images_per_request": 3,
        "max_image_mib": 0.1,
        "max_image_megapixels": 0.01,
        "image_url_hosts": ("127.0.0.1",),
        "image_dir": str(directory / "pictures"),
    }
    config = gateway_config(address).model_copy(update={"images": ImageConfig.model_validate(images)})
    with serving(engine, address), running_gateway(config) as url:
        host = f"http://127.0.0.1:{web.server_address[1]}"
        yield Setup(url, engine, host, directory, engine.placeholder)
    web.shutdown()
    web.server_close()


@pytest.fixture
def setup(running: Setup) -> Setup:
    running.engine.reset()
    return running


def test_files_reach_the_engine_in_order_with_a_placeholder_each(setup: Setup) -> None:
    """PNG, JPEG and WebP, from data URLs, a host and a directory; max_tokens is the engine's to bound."""
    file = f"file://{setup.directory}/pictures/red%20one.png"
    response = setup.chat(
        text("see"), data_url(JPEG, "jpeg"), text("and"), data_url(WEBP, "webp"), f"{setup.host}/image"
    )
    assert response.status_code == 200, response.text
    assert setup.chat(file, text("this")).status_code == 200
    first, second = setup.engine.seen.requests
    assert [image.data for image in first.images] == [JPEG, WEBP, PNG]
    assert [image.data for image in second.images] == [PNG]
    assert list(first.tokenized.input_ids).count(setup.placeholder) == 3
    assert not first.sampling_params.HasField("max_tokens")


def test_detail_reaches_the_engine(setup: Setup) -> None:
    """`low` changes the size; `auto`, `high` and none are the checkpoint's own sizes."""
    details = ("low", "high", "auto", None)
    for detail in details:
        image = {"url": data_url(PNG)} | ({"detail": detail} if detail else {})
        assert setup.chat({"type": "image_url", "image_url": image}).status_code == 200
    seen = [request.images[0].detail for request in setup.engine.seen.requests]
    assert seen == [pb.IMAGE_DETAIL_LOW, *[pb.IMAGE_DETAIL_HIGH] * 3]


def test_text_parts_without_images_are_still_one_text(setup: Setup) -> None:
    """A conversation without images is rendered as it always was."""
    assert setup.chat(text("see"), text("this")).status_code == 200
    (request,) = setup.engine.seen.requests
    assert not request.images
    assert request.sampling_params.HasField("max_tokens")


def _wrong_images(setup: Setup) -> dict[str, tuple[list[dict[str, Any] | str], str, str]]:
    """Content, what the message says, and the code."""
    gif, large = picture("GIF"), picture("PNG", (200, 100))
    heavy = picture("PNG", (8, 8)) + bytes(120_000)
    invalid = "invalid_image"
    return {
        "not base64": (["data:image/png;base64,a$b="], "not valid base64", invalid),
        "no base64": (["data:image/png,abc"], "must begin with", invalid),
        "not an image": ([data_url(b"hello, hello")], "not a PNG, JPEG or WEBP", invalid),
        "another kind": ([data_url(gif, "gif")], "not a PNG, JPEG or WEBP", invalid),
        "another media": ([data_url(PNG).replace("image/", "video/")], "must begin with", invalid),
        "empty": (["data:image/png;base64,"], "not a PNG, JPEG or WEBP", invalid),
        "many pixels": ([data_url(large)], "200 x 100 pixels are more than 0.01 megapixels", invalid),
        "many bytes": ([data_url(heavy)], "larger than 0.1 MiB", invalid),
        "many images": ([data_url(PNG)] * 4, "at most 3", "too_many_images"),
        "a scheme": (["ftp://127.0.0.1/a.png"], "not with 'ftp'", invalid),
        "no scheme": (["picture.png"], "not with 'picture.png'", invalid),
        "a host": (["http://localhost:1/a.png"], "not fetched from 'localhost'", invalid),
        "a strange host": (["http://[1/a.png"], "not fetched from", invalid),
        "not there": ([f"{setup.host}/none"], "status 404", invalid),
        "a redirect": ([f"{setup.host}/redirect"], "status 302", invalid),
        "too much": ([f"{setup.host}/large"], "larger than 0.1 MiB", invalid),
        "outside": ([f"file://{setup.directory}/secret.png"], "no such file", invalid),
        "upwards": ([f"file://{setup.directory}/pictures/../secret.png"], "no such file", invalid),
        "a link out": ([f"file://{setup.directory}/pictures/link.png"], "no such file", invalid),
        "no file": ([f"file://{setup.directory}/pictures/none.png"], "no such file", invalid),
        "both": ([{"type": "text", "text": "a", "image_url": {"url": "b"}}], "nothing else", "invalid_value"),
        "no url": ([{"type": "image_url"}], "needs 'image_url'", "invalid_value"),
        "detail": (
            [{"type": "image_url", "image_url": {"url": "b", "detail": "medium"}}],
            "'auto', 'high' or 'low'",
            "invalid_value",
        ),
        "audio": ([{"type": "input_audio"}], "type", "invalid_value"),
    }


def test_wrong_images_are_refused_with_what_is_wrong(setup: Setup) -> None:
    for name, (parts, message, code) in _wrong_images(setup).items():
        response = setup.chat(*parts)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), (name, error)
        assert message in error["message"], (name, error)
        assert error["code"] == code, (name, error)
        assert error["param"].startswith("messages"), (name, error)
    assert setup.engine.seen.requests == []


def test_a_typed_placeholder_is_text_unless_asked(setup: Setup) -> None:
    """A user who types the placeholder does not make the model expect another image."""
    assert setup.chat(text(f"what is {PLACEHOLDER}?"), data_url(PNG)).status_code == 200
    (request,) = setup.engine.seen.requests
    assert list(request.tokenized.input_ids).count(setup.placeholder) == len(request.images) == 1
    parts = [text(PLACEHOLDER), {"type": "image_url", "image_url": {"url": data_url(PNG)}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "parse_special": True}
    error = httpx.post(f"{setup.url}/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_image", "messages")
    assert "2 image placeholders for 1" in error["message"]


def test_images_are_not_tokenised(setup: Setup) -> None:
    """How many tokens an image takes is not known to the gateway; a wrong count would be worse than none."""
    content = [{"type": "image_url", "image_url": {"url": data_url(PNG)}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    response = httpx.post(f"{setup.url}/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_without_settings_only_data_urls_are_taken(setup: Setup) -> None:
    """Neither hosts nor files are open by default."""
    address = f"unix:{setup.directory}/engine.sock"
    with running_gateway(gateway_config(address)) as url:
        closed = Setup(url, setup.engine, setup.host, setup.directory, setup.placeholder)
        for wrong in (f"{setup.host}/image", f"file://{setup.directory}/pictures/red%20one.png"):
            response = closed.chat(wrong)
            assert response.status_code == 400
            assert "data URL" in response.json()["error"]["message"]
        assert closed.chat(data_url(PNG)).status_code == 200
