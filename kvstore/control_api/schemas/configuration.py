"""Schemas of settings in force."""

from __future__ import annotations

from pydantic import Field

from kvstore.control_api.schemas.base import ResponseModel


class Setting(ResponseModel):
    """A setting in force. Secrets are masked."""

    key: str = Field(description="section and name, as in kvstore.toml", examples=["node.dram"])
    value: str = Field(description="value in force, as an operator writes it", examples=["64GiB"])
    source: str = Field(description="source of the value: default, file, environment, flag or derived", examples=["file"])
    detail: str = Field(description="file, variable or flag", examples=["/etc/kvstore/kvstore.toml"])
    description: str = Field(description="meaning of the setting", examples=["DRAM arena"])


class Settings(ResponseModel):
    """Configuration of a process, with the source of each value."""

    process: str = Field(description="metadata, admin, or node and its id", examples=["metadata"])
    settings: list[Setting] = Field(description="every setting of the process")


class Configuration(ResponseModel):
    """Configuration of the metadata server and of this admin server."""

    processes: list[Settings] = Field(description="the metadata server, then this admin server")
