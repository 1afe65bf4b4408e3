"""Options that routers, workers and the cluster's configuration share."""

from __future__ import annotations

from pydantic import Field, field_validator

from common.host import LOOPBACK
from common.options import Options


class SocketOptions(Options):
    """How a process takes part in the cluster's ZeroMQ traffic."""

    interface: str = Field(LOOPBACK, description="address that sockets bind to and peers reach")
    cluster_secret: str | None = Field(None, description="when set, every socket speaks CURVE")


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
