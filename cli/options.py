"""The options that every client command takes, before or after the command's name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """As given on the command line; None where the user said nothing."""

    server: str | None = None
    token_file: str | None = None
    output: OutputFormat | None = None
    no_headers: bool = False

    def under(self, nearer: GlobalOptions) -> GlobalOptions:
        """These options with those that were given nearer to the command on top."""
        return GlobalOptions(
            server=nearer.server if nearer.server is not None else self.server,
            token_file=nearer.token_file if nearer.token_file is not None else self.token_file,
            output=nearer.output if nearer.output is not None else self.output,
            no_headers=nearer.no_headers or self.no_headers,
        )


ServerOption = Annotated[str | None, typer.Option("--server", metavar="URL", help="Server (env LULL_SERVER).")]
TokenFileOption = Annotated[
    str | None, typer.Option("--token-file", metavar="FILE", help="File with the bearer token (env LULL_TOKEN_FILE).")
]
OutputOption = Annotated[
    OutputFormat | None, typer.Option("-o", "--output", help="Output format (env LULL_OUTPUT).", show_default=False)
]
NoHeadersOption = Annotated[bool, typer.Option("--no-headers", help="Tables without a head line.")]


def remember_global_options(
    context: typer.Context, server: str | None, token_file: str | None, output: OutputFormat | None, no_headers: bool
) -> None:
    """Keep what was given before the command's name for the command."""
    context.obj = GlobalOptions(server, token_file, output, no_headers)


def global_options(context: typer.Context) -> GlobalOptions:
    found = context.find_root().obj
    return found if isinstance(found, GlobalOptions) else GlobalOptions()
