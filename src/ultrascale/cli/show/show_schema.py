"""`ultrascale show schema`: the JSON Schemas of run.toml and of the output of verbs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import tyro

from ultrascale.api.stamp import SCHEMA_NAMES, schema_file
from ultrascale.cli.terminal.parse import parse
from ultrascale.description.problems import did_you_mean, mistake


def show_schema(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "", /) -> int:
    """Print the JSON Schema of run.toml, or of the --json output of a verb; without a name, list the schemas.

        ultrascale show schema

        ultrascale show schema run.toml

        ultrascale show schema plan

    Args:
        name: `run.toml`, or the middle part of the key `schema`: `plan` of `ultrascale/plan/2`.
    """
    if not name:
        width = max(map(len, SCHEMA_NAMES))
        for schema_name in SCHEMA_NAMES:
            print(f"{schema_name:{width}}  {schema_file(schema_name)}")
        return 0
    if name not in SCHEMA_NAMES:
        remedy = did_you_mean(name, SCHEMA_NAMES, f"There are {', '.join(SCHEMA_NAMES)}.")
        raise mistake("schema", f"there is none of {name!r}", remedy)
    print(schema_file(name).read_text(), end="")
    return 0


command = partial(parse, show_schema, "show schema")
"""Run the verb; returns its exit code."""
