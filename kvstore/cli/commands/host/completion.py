"""``kvstore completion``: shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvstore.cli.support.help import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, and names of nodes, volumes and namespaces.

    Names come from the configured metadata server. If it does not answer at once, no names are offered.

    Examples:
      kvstore completion bash > ~/.local/share/bash-completion/completions/kvstore
      kvstore completion zsh > "${fpath[1]}/_kvstore"
      kvstore completion fish > ~/.config/fish/completions/kvstore.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(ctx.find_root().command, {}, "kvstore", "_KVSTORE_COMPLETE").source())
