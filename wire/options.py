"""Options that routers, workers and the cluster's configuration share."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from common.host import LOOPBACK
from common.options import Options
from common.secrets import SECRET_VARIABLE, ClusterSecret, open_secret


def is_loopback(interface: str) -> bool:
    """Whether only this host reaches an interface."""
    try:
        return ipaddress.ip_address(interface).is_loopback
    except ValueError:
        return interface == "localhost"


class SocketOptions(Options):
    """How a process takes part in the cluster's ZeroMQ traffic."""

    interface: str = Field(LOOPBACK, description="address that sockets bind to and peers reach")
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

    def secret(self) -> ClusterSecret | None:
        """The cluster's secret. Raises ConfigError for one that cannot be used."""
        return open_secret(self.cluster_secret_file)


class ServedModel(Options):
    """Which model is served, and under which name."""

    model: str = Field(min_length=1, description="directory or Hugging Face id of the model")
    served_model_name: str | None = Field(
        None, description="name in the API; default: the model's last path part"
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
