"""Options of commands that are clients of a running server: its API key and its TLS files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.cli_options import ApiKey, ApiKeyFile, CaFile, ClientCertFile, ClientKeyFile
from moebius.network.api_keys import client_key

if TYPE_CHECKING:
    from app.client import ApiClient, ClientTls

_OPTIONS = {
    "api_key": ApiKey,
    "api_key_file": ApiKeyFile,
    "ca_file": CaFile,
    "client_cert_file": ClientCertFile,
    "client_key_file": ClientKeyFile,
}


@dataclass(frozen=True)
class Access:
    """What a command's options say of how a server lets its clients in; filled by `with_access`."""

    key: str
    ca_file: str
    cert_file: str
    key_file: str

    @property
    def tls(self) -> ClientTls:
        """The files for an https server."""
        from app.client import ClientTls

        return ClientTls(self.ca_file, self.cert_file, self.key_file)

    def client(self, url: str) -> ApiClient:
        """Returns a client of the server at `url`. Raises UserError."""
        from app.client import ApiClient

        return ApiClient(url, self.key, tls=self.tls)


def with_access(function: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter `access` of a command by the options that fill it, in its place."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        api_key, api_key_file, *files = (values.pop(name) for name in _OPTIONS)
        function(**values, access=Access(client_key(api_key, api_key_file), *files))

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.name == "access":
            parameters += [
                inspect.Parameter(name, parameter.kind, default="", annotation=option)
                for name, option in _OPTIONS.items()
            ]
        else:
            parameters.append(parameter)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
