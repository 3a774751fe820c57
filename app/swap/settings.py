"""From a configuration file with `models` to the settings of each model's processes."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from app.commands.once import for_this_process
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config, models_of
from moebius.errors import ConfigError, all_problems
from moebius.network.api_keys import ApiKeys

_LATEST = ":latest"


@dataclass(frozen=True)
class ModelsConfig:
    """Several models and what they share; filled by `read_models`."""

    # Of the port that clients use.
    shared: MoebiusConfig
    # Of each model's own `moebius serve`, by name, in the file's order.
    models: Mapping[str, MoebiusConfig]
    # With which models are asked to sleep and wake; empty: no key is needed.
    key: str

    def name_for(self, asked: str | None) -> str | None:
        """Returns the name of the model that a client means; None: there is none. Without a name it is the
        first model; aliases count where no name fits."""
        if asked is None:
            return next(iter(self.models))
        for name in (asked, asked.removesuffix(_LATEST)):
            if name in self.models:
                return name
        for name, config in self.models.items():
            if any(fnmatchcase(asked, alias) for alias in config.model.model_aliases):
                return name
        return None


def read_models(path: str, flags: Mapping[str, Any]) -> ModelsConfig:
    """Returns the models of a file that has some; `flags` are of all of them.

    Raises ConfigError naming everything that is wrong, in all models.
    """
    found, problems = {}, list[str]()
    named = models_of(path)
    for name, settings in named.items():
        try:
            found[name] = load_config(path, flags, (name, settings))
            if not found[name].model.model:
                problems.append(f"{path}: models.{name} has no `model`: a directory, file or name on the hub")
        except ConfigError as error:
            problems += getattr(error, "details", (str(error),))
    if problems:
        raise all_problems(problems)
    shared = load_config(path, flags, ("", {}))
    gateway = shared.gateway
    key = gateway.api_key
    if ApiKeys(gateway.api_key, gateway.api_key_file).required and not key:
        key = secrets.token_urlsafe(32)
    ports = _free_ports(len(found))
    models = {name: _own(name, found[name], port, key) for (name, port) in zip(found, ports, strict=True)}
    return ModelsConfig(shared, models, key)


def _own(name: str, config: MoebiusConfig, port: int, key: str) -> MoebiusConfig:
    """Returns the settings of one model's `moebius serve`: on a port of this host, with its keys and ours.

    Its key file stays, so that each client has its own prefixes, files and limits there, too.
    """
    keys = config.gateway.api_key_file
    config = for_this_process(config)
    own = {"port": port, "api_key": key, "api_key_file": keys, "cors_origins": (), "allowed_hosts": ()}
    own |= {"gateway_metrics_port": 0, "web_page": False}
    return config.model_copy(
        update={
            "gateway": config.gateway.model_copy(update=own),
            "model": config.model.model_copy(update={"served_model_name": name}),
        }
    )


def _free_ports(count: int) -> list[int]:
    """Returns ports that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
