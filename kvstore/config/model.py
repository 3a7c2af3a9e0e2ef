"""The configuration of all programs of the store.

Sources in order of precedence, lowest first: built-in defaults, a TOML file, environment variables
(``KVSTORE_NODE__DRAM=4GiB``; two underscores separate section and setting), flags. ``kvstore.config.sources`` reads them. No part
of the client library imports this package, because it requires pydantic.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvstore.config.admin import AdminSection
from kvstore.config.base import Section
from kvstore.config.client import ClientSection, ClusterSection
from kvstore.config.events import EventsSection
from kvstore.config.metadata import MetadataSection
from kvstore.config.node import NodeSection
from kvstore.config.router import RouterSection
from kvstore.config.values import DurationMs


def _check_cluster_name(name: str) -> str:
    if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,62}", name):
        raise ValueError("the name of a cluster may contain only lower-case letters, digits, - and _")
    return name


ClusterName = Annotated[str, AfterValidator(_check_cluster_name)]


class LogSection(Section):
    """Logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="lowest severity that is logged")
    format: Literal["console", "json"] = Field(default="console", description="lines for people, or one JSON object per line")


class ObserveSection(Section):
    """Slow loads and traces."""

    slow_load_ms: DurationMs = Field(default=1_000, description="a node logs a load that takes longer, with its breakdown")
    traces: Literal["off", "otlp", "file"] = Field(
        default="off",
        description="OpenTelemetry spans: off, otlp (HTTP to a collector) or file (JSON lines); requires the extra observe",
    )
    traces_endpoint: str | None = Field(
        default=None,
        description="URL of the collector, e.g. http://127.0.0.1:4318/v1/traces; unset: OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    traces_file: Path | None = Field(default=None, description="file to which spans are appended if traces = file")
    traces_share: float = Field(
        default=1.0, ge=0.0, le=1.0, description="share of traces to record, of those that begin in this process"
    )


class Config(Section):
    """The whole configuration."""

    data_dir: Path | None = Field(
        default=None, description="folder of all data that outlives the processes; unset: ~/.local/share/kvstore"
    )
    metadata: MetadataSection = MetadataSection()
    node: NodeSection = NodeSection()
    client: ClientSection = ClientSection()
    clusters: dict[ClusterName, ClusterSection] = Field(
        default={}, description="named clusters for --cluster and KVSTORE_CLUSTER, each with its own [clusters.NAME] section"
    )
    router: RouterSection = RouterSection()
    admin: AdminSection = AdminSection()
    events: EventsSection = EventsSection()
    log: LogSection = LogSection()
    observe: ObserveSection = ObserveSection()
