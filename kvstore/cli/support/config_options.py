"""Configuration options that commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from kvstore.cli.support.logs import set_up_logs
from kvstore.config.model import Config
from kvstore.config.sources import Origin, Provenance, Setting, load_config, parse_assignment
from kvstore.core.errors import InvalidArgument

_P = ParamSpec("_P")
_R = TypeVar("_R")


def setting_option(*names: str, key: str, metavar: str, help: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:  # noqa: A002
    """Create a flag for one setting, equivalent to ``--set key=value``."""

    def note(ctx: click.Context, _parameter: click.Parameter, value: object) -> None:
        if value is not None:
            _settings_of(ctx).append(Setting(key, value, Origin("flag", names[0])))

    return click.option(*names, callback=note, expose_value=False, metavar=metavar, help=f"{help}  [{key}]")


def with_config(command: Callable[Concatenate[Config, _P], _R]) -> Callable[_P, _R]:
    """Add ``--config`` and ``--set``, set up logs and pass the effective configuration as the first argument."""

    @_config_options
    @functools.wraps(command)
    def loaded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        config, _ = configuration(click.get_current_context())
        set_up_logs(config.log)
        return command(config, *args, **kwargs)

    return loaded


def with_quiet_config(command: Callable[Concatenate[Config, _P], _R]) -> Callable[_P, _R]:
    """Like ``with_config``, for interactive commands: the log level is warning unless ``log.level`` is set."""

    @_config_options
    @functools.wraps(command)
    def loaded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        config, provenance = configuration(click.get_current_context())
        log = config.log
        if provenance["log.level"].source == "default":
            log = log.model_copy(update={"level": "warning"})
        set_up_logs(log)
        return command(config, *args, **kwargs)

    return loaded


def with_provenance(command: Callable[Concatenate[Config, Provenance, _P], _R]) -> Callable[_P, _R]:
    """Like ``with_config``, for commands that also report the sources of values."""

    @_config_options
    @functools.wraps(command)
    def loaded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        config, provenance = configuration(click.get_current_context())
        return command(config, provenance, *args, **kwargs)

    return loaded


def configuration(ctx: click.Context) -> tuple[Config, Provenance]:
    """Return the effective configuration of a command that has the shared options.

    Raises:
        click.UsageError: a setting is unknown or invalid.
    """
    file = ctx.meta.get(_FILE_KEY)
    try:
        return load_config(file, os.environ, _settings_of(ctx), cluster=ctx.meta.get(CLUSTER_KEY))
    except InvalidArgument as error:
        raise click.UsageError(str(error), ctx) from error


def refuse_unused(hint: str, *used: str) -> None:
    """Reject settings of ``--set`` that the command ignores, because the user would expect an effect.

    Args:
        hint: advice for the user.
        used: prefixes of the settings that the command uses.

    Raises:
        click.UsageError: another setting was given.
    """
    ctx = click.get_current_context()
    unused = [setting.key for setting in _settings_of(ctx) if not setting.key.startswith(used)]
    if unused:
        raise click.UsageError(f"--set {unused[0]} has no effect here: {hint}", ctx)


def handed_on(decided: Mapping[str, str]) -> list[str]:
    """Convert ``--config`` and ``--set`` to arguments of the daemons that a command starts. Daemons inherit the environment.

    Args:
        decided: settings that the command chooses itself, each with advice for the user.

    Raises:
        click.UsageError: one of these settings was given, and would have no effect.
    """
    ctx = click.get_current_context()
    file = ctx.meta.get(_FILE_KEY)
    arguments = [] if file is None else ["--config", str(file)]
    for setting in _settings_of(ctx):
        if setting.key in decided:
            raise click.UsageError(f"--set {setting.key} has no effect here: {decided[setting.key]}", ctx)
        arguments += ["--set", f"{setting.key}={setting.value}"]
    return arguments


def _complete_clusters(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        config, _ = load_config(ctx.meta.get(_FILE_KEY), os.environ)
    except InvalidArgument:
        return []
    return [CompletionItem(name) for name in sorted(config.clusters) if name.startswith(incomplete)]


def _note_cluster(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[CLUSTER_KEY] = value


cluster_option = click.option(
    "--cluster",
    envvar="KVSTORE_CLUSTER",
    metavar="NAME",
    expose_value=False,
    callback=_note_cluster,
    shell_complete=_complete_clusters,
    help="Named cluster of the configuration: address, TLS and token of [clusters.NAME].",
)

_FILE_KEY = "kvstore.config_file"
CLUSTER_KEY = "kvstore.cluster"
_SETTINGS_KEY = "kvstore.settings"


def _settings_of(ctx: click.Context) -> list[Setting]:
    settings: list[Setting] = ctx.meta.setdefault(_SETTINGS_KEY, [])
    return settings


def _note_file(ctx: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    if value is not None or _FILE_KEY not in ctx.meta:  # a command's file overrides that of its group
        ctx.meta[_FILE_KEY] = value


def _note_assignments(ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> None:
    for text in values:
        try:
            _settings_of(ctx).append(parse_assignment(text))
        except InvalidArgument as error:
            raise click.BadParameter(str(error), ctx) from error


def _config_options(command: Callable[_P, _R]) -> Callable[_P, _R]:
    command = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        expose_value=False,
        callback=_note_assignments,
        help="Set any value of the configuration, e.g. --set node.dram=4GiB.",
    )(command)
    return click.option(
        "--config",
        "-c",
        envvar="KVSTORE_CONFIG",
        type=click.Path(dir_okay=False, path_type=Path),
        expose_value=False,
        callback=_note_file,
        help="TOML file (default: ./kvstore.toml, /etc/kvstore/kvstore.toml).",
    )(command)
