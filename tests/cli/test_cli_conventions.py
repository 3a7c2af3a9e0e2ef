"""Conventions of all commands: groups that list, output formats, repetition, named clusters, suggestions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from kvstore.cli.app import root
from kvstore.cli.support.result import CommandOutput, item
from kvstore.config.sources import load_config, parse_assignment
from kvstore.config.values import parse_list
from kvstore.core.errors import InvalidArgument

CLUSTERS = """
[client]
metadata = "10.0.0.1:7400"
token_file = "/etc/kvstore/own"

[clusters.staging]
metadata = "10.1.0.1:7400"

[clusters.prod]
metadata = "10.2.0.1:7400"
token_file = "/etc/kvstore/prod"
tls.ca = "/etc/kvstore/prod.pem"
"""

DAEMONS = {"up", "metadata", "node", "router", "admin"}
WITHOUT_RESULT = DAEMONS | {"completion"}
WITHOUT_STORE = WITHOUT_RESULT | {"demo", "replay", "simulate", "advise", "calibrate", "health", "volumes repair"}
"""Commands that start a store of their own, or look only at this host."""
LIVE = {"events", "top", "history"}
"""Commands that follow changes, ``history`` with --follow."""
ONE_TIME = WITHOUT_RESULT | {
    "demo",
    "stress",
    "replay",
    "simulate",
    "advise",
    "calibrate",
    "doctor",
    "config clusters",
    "config show",
}
"""Commands that run something, or show what changes only with an edit of this host."""
CHANGES = {
    *(f"nodes {name}" for name in ("drain", "undrain", "remove")),
    *(f"volumes {name}" for name in ("check", "evict", "repair")),
    *(f"namespaces {name}" for name in ("bump-weights", "copies", "evict", "invalidate", "keep", "unkeep", "ttl")),
    *(f"tenants {name}" for name in ("set", "unset")),
    "policy set",
}


def commands(context: click.Context | None = None) -> Iterator[tuple[str, click.Command]]:
    """Every command and group below ``kvstore``, with its path."""
    context = context or click.Context(root, info_name="")
    command = context.command
    assert isinstance(command, click.Group)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        inner = click.Context(below, info_name=name, parent=context)
        yield inner.command_path.strip(), below
        if isinstance(below, click.Group):
            yield from commands(inner)


def paths_without(option: str) -> set[str]:
    """Commands that lack an option. Groups are left out."""
    return {
        path
        for path, command in commands()
        if not isinstance(command, click.Group) and not any(option in parameter.opts for parameter in command.params)
    }


def test_command_help_has_example() -> None:
    texts = {path: inspect.cleandoc(command.help or "") for path, command in commands()}
    assert len(texts) > 50
    assert [path for path, text in texts.items() if f"\n  kvstore {path}" not in text] == []


def test_command_result_has_output_option() -> None:
    assert paths_without("--output") == WITHOUT_RESULT


def test_command_of_store_has_cluster_option() -> None:
    assert paths_without("--cluster") == WITHOUT_STORE


def test_command_of_changing_state_repeats() -> None:
    assert paths_without("--watch") == ONE_TIME | CHANGES | LIVE


def test_output_formats_are_the_same_everywhere() -> None:
    types = {
        tuple(parameter.type.choices)
        for _, command in commands()
        for parameter in command.params
        if "--output" in parameter.opts and isinstance(parameter.type, click.Choice)
    }
    assert types == {("table", "json", "yaml")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(CLUSTERS)
    return path


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    done = CliRunner().invoke(root, arguments, env=environment, prog_name="kvstore")
    assert done.exit_code == code, done.output
    return done.output


def test_cluster_replaces_address_and_token(file: Path) -> None:
    config, origins = load_config(file, cluster="prod")
    assert config.client.metadata == "10.2.0.1:7400"
    assert config.client.token_file == Path("/etc/kvstore/prod")
    assert str(config.client.tls.ca) == "/etc/kvstore/prod.pem"
    assert str(origins["client.metadata"]) == f"file {file} [clusters.prod]"


def test_cluster_replaces_address_of_events(file: Path) -> None:
    """``kvstore events`` sends the token of ``[client]``, so it must not ask another cluster."""
    other = {"KVSTORE_EVENTS__METADATA": "10.9.0.1:7400"}
    config, _ = load_config(file, other, cluster="prod")
    assert config.events.metadata == "10.2.0.1:7400"


def test_cluster_without_token_gets_no_other_token(file: Path) -> None:
    config, _ = load_config(file, {"KVSTORE_CLIENT__TOKEN_FILE": "/x"}, cluster="staging")
    assert config.client.token_file is None


def test_cluster_loses_to_flags(file: Path) -> None:
    config, _ = load_config(file, flags=[parse_assignment("client.metadata=127.0.0.1:1")], cluster="prod")
    assert config.client.metadata == "127.0.0.1:1"


def test_cluster_unknown_names_the_known(file: Path) -> None:
    with pytest.raises(InvalidArgument, match="no cluster 'test'; the configuration has prod, staging"):
        load_config(file, cluster="test")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clusters.prod]\ntoken_file = '/x'", "clusters.prod.metadata"),
        ("[clusters.prod]\nmetadata = 'a:1'\ntoken = 'x'", "did you mean 'clusters.prod.token_file'"),
        ("[clusters.PROD]\nmetadata = 'a:1'", "lower-case letters"),
    ],
)
def test_cluster_section_invalid_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        load_config(path)


def test_config_clusters_marks_the_used(file: Path) -> None:
    shown = run("config", "clusters", "--config", str(file), "--cluster", "prod")
    staging, prod = (line.split() for line in shown.splitlines()[1:])
    assert staging == ["staging", "10.1.0.1:7400", "no", "-", "-"]
    assert prod == ["prod", "10.2.0.1:7400", "yes", "/etc/kvstore/prod", "yes"]
    found = json.loads(run("config", "clusters", "--config", str(file), "-o", "json", KVSTORE_CLUSTER="staging"))
    assert [(one["name"], one["used"]) for one in found["items"]] == [("staging", True), ("prod", False)]


def test_output_yaml_equals_json() -> None:
    shown = [run("config", "show", "-o", form) for form in ("json", "yaml")]
    assert json.loads(shown[0]) == yaml.safe_load(shown[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nods"], "Did you mean 'kvstore nodes'?"),
        (["nodes", "drian", "a"], "Did you mean 'kvstore nodes drain'?"),
        (["drain", "a"], "Did you mean 'kvstore nodes drain'?"),
        (["xyzzy"], "'kvstore --help' lists them"),
        (["nodes", "--metdata", "a:1"], "--metadata"),
        (["nodes", "show", "--watch", "a"], "'a' is not a time"),
    ],
)
def test_mistyped_word_gets_suggestion(arguments: list[str], words: str) -> None:
    assert words in run(*arguments, code=2)


def test_group_without_command_lists() -> None:
    assert run("config") == run("config", "show")


@pytest.mark.parametrize("text", ["/a:1GiB,/b:2GiB", '["/a:1GiB", "/b:2GiB"]', "[/a:1GiB,/b:2GiB]"])
def test_volume_list_forms(text: str) -> None:
    config, _ = load_config(flags=[parse_assignment(f"node.nvme={text}")], default_files=())
    assert [str(volume) for volume in config.node.nvme] == ["/a:1GiB", "/b:2GiB"]


def test_list_without_end_is_rejected() -> None:
    with pytest.raises(ValueError, match="is not a list"):
        parse_list("[a, b")


def test_watch_repeats_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.cli.commands.store import plans

    answers = iter([1, 2])

    def ask(*_: object) -> int:
        number = next(answers, None)
        if number is None:
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(plans, "ask", ask)
    monkeypatch.setattr(plans, "_policy", lambda number: CommandOutput({"number": number}, lambda: None))
    shown = run("policy", "show", "--watch", "0.1", "-o", "yaml")
    assert list(yaml.safe_load_all(shown)) == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize(("form", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_stream_item_is_one_document(form: str, load: Callable[[str], object], capsys: pytest.CaptureFixture[str]) -> None:
    item({"key": "a"}, "a", form)
    item({"key": "b\x7f"}, "b", form)
    shown = capsys.readouterr().out
    documents = shown.splitlines() if form == "json" else shown.split("---\n")[1:]
    assert [load(one) for one in documents] == [{"key": "a"}, {"key": "b\x7f"}]


def test_watch_shows_failure_of_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.cli.commands.host import health

    answers = iter([False])

    def serves(*_: object) -> bool:
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(health, "_grpc_serves", serves)
    assert run("health", "metadata", "--watch", "0.1") == "Error: metadata: running, but not serving\n"
