"""Options that routers, workers and the cluster's configuration share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from common.host import LOOPBACK, is_loopback, local_address
from common.options import Options
from common.ports import Ports, PortText
from common.secrets import SECRET_VARIABLE, ClusterSecret, members_secret


class PortOptions(Options):
    """Which TCP ports Baton's own sockets have, for firewalls (docs/security.md)."""

    mailboxes: PortText = Field("0", description="of requests and control, one for each process")
    events: PortText = Field("0", description="of KV events and their replay, four for each worker")
    kv: PortText = Field("0", description="of KV pages over tcp and of Mooncake's grants, for each D")
    mooncake: PortText = Field("0", description="of Mooncake's own sockets, two for each worker that uses it")

    def of(self, use: str) -> Ports:
        """The ports of one of the fields."""
        return Ports(getattr(self, use), f"ports.{use}")


class SocketOptions(Options):
    """How a process takes part in the cluster's traffic."""

    interface: str = Field(
        LOOPBACK,
        description="what sockets bind to and peers reach: an address, a network device, a name, or auto",
    )
    ports: PortOptions = Field(
        PortOptions(), description="a range for each use, such as {mailboxes: 20000-20199}; 0: any free port"
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="its first line is the cluster's secret, with which every socket speaks CURVE; further "
        f"lines are accepted, too. null: the environment's {SECRET_VARIABLE}, or none. Needed off loopback",
    )

    @model_validator(mode="after")
    def _closed_off_loopback(self) -> SocketOptions:
        known = self.cluster_secret_file is not None or SECRET_VARIABLE in os.environ
        if not known and not is_loopback(self.interface):
            raise ValueError(
                f"{self.interface} is open to the network: give a cluster_secret_file or {SECRET_VARIABLE}"
            )
        return self

    def here(self) -> Self:
        """The options with this host's address as `interface`. Raises ConfigError."""
        return self.model_copy(update={"interface": local_address(self.interface)})

    def secret(self) -> ClusterSecret | None:
        """The cluster's secret. Raises ConfigError for one that cannot be used, and for none off loopback."""
        return members_secret(self.cluster_secret_file, self.interface)


class ServedModel(Options):
    """Which model is served, and under which name."""

    model: str = Field(min_length=1, description="directory or Hugging Face id of the model")
    served_model_name: str | None = Field(
        None, description="name in the API; default: the model's last path part"
    )

    generation_config: str = Field(
        "auto", min_length=1,
        description="where requests get what they leave out (temperature, top_p, ...), and where the tokens "
        "that end an answer are listed: auto, the model's generation_config.json; vllm, neutral values and "
        "the model's end tokens; or a folder with such a file",
    )  # fmt: skip
    model_version: str = Field(
        "", max_length=64, description="name of this version of the model, for weights; not in the API"
    )

    @property
    def model_name(self) -> str:
        """The model's name in the API, in page hashes and in worker records."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @field_validator("served_model_name")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("an empty name cannot be asked for: remove it or give one")
        return value
