"""Count what a reader of `src` has to read: lines of code and tokens by package, held to .ci/size.toml.

    python .ci/size.py                                 a table, and the difference to the committed figures
    python .ci/size.py --write "why src has grown"     write them anew; growth wants a reason, which is kept with its size

Counted as tinygrad's sz.py does: a line with a token on it, and tokens, without comments, docstrings and line ends. Not core is
what could be taken away and the rest would still plan, train, trace and prove.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ultrascale"
KEPT = Path(__file__).parent / "size.toml"
NOT_CORE = {"demo", "soak", "primer", "validation", "page", "jobs"}
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
REASONS_KEPT = 20
SLACK = 100
"""Tokens that a package may have above its kept figure without a reason. The figure stays where it was."""


def docstring_lines(text: str) -> set[int]:
    """Numbers of lines that are nothing but text: docstrings, and those of fields."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Those that count. From Python 3.12 on an f-string is many tokens; here it is one, as before."""
    depth, names = 0, tokenize.tok_name
    for token in tokens:
        name = names[token.type]
        depth -= name.endswith("STRING_END")
        if depth == 0 and token.type not in SKIPPED and not name.endswith("STRING_START"):
            yield token
        depth += name.endswith("STRING_START")


def count(path: Path) -> tuple[int, int]:
    """(lines, tokens) of a file."""
    text = path.read_text(encoding="utf-8")
    skipped = docstring_lines(text)
    tokens = list(_whole_strings(tokenize.generate_tokens(io.StringIO(text).readline)))
    tokens = [token for token in tokens if not (token.type == tokenize.STRING and token.start[0] in skipped)]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)}), len(tokens)


def sizes() -> dict[str, tuple[int, int]]:
    """(lines, tokens) of each package of `src`; files beside the packages are `top`."""
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE).parts
        package = inside[0] if len(inside) > 1 else "top"
        found = count(path)
        lines[package] += found[0]
        tokens[package] += found[1]
    return {package: (lines[package], tokens[package]) for package in sorted(lines)}


def kept() -> dict[str, tuple[int, int]]:
    """The committed figures."""
    return {package: (told[0], told[1]) for package, told in tomllib.loads(KEPT.read_text())["size"].items()}


def total(found: dict[str, tuple[int, int]], *, core: bool = False) -> int:
    """Tokens of all packages, or of those that are core."""
    return sum(tokens for package, (_, tokens) in found.items() if not (core and package in NOT_CORE))


def table(now: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]]) -> str:
    rows = [f"{'package':12} {'lines':>7} {'tokens':>8} {'change':>8}"]
    for package in sorted({*now, *before}):
        lines, tokens = now.get(package, (0, 0))
        change = tokens - before.get(package, (0, 0))[1]
        rows.append(f"{package:12} {lines:7,} {tokens:8,} {change:+8,}{'' if package not in NOT_CORE else '   not core'}")
    changes = f"{total(now) - total(before):+,} tokens, core {total(now, core=True):,}"
    return "\n".join([*rows, f"{'all':12} {sum(lines for lines, _ in now.values()):7,} {total(now):8,} ({changes})"])


def write(now: dict[str, tuple[int, int]], why: str) -> None:
    told = tomllib.loads(KEPT.read_text()) if KEPT.exists() else {}
    before = kept() if told else {}
    grown = total(now) - total(before)
    reasons = [f"{datetime.now(UTC):%Y-%m-%d}: {grown:+,} tokens: {why}", *told.get("why", [])][:REASONS_KEPT]
    lines = ["# Tokens and lines of src by package, written by .ci/size.py --write WHY. A test holds src to them.", "why = ["]
    lines += [*(f'  "{reason.replace(chr(34), chr(39))}",' for reason in reasons), "]", "", "[size]  # lines, tokens"]
    KEPT.write_text("\n".join([*lines, *(f"{package} = [{size[0]}, {size[1]}]" for package, size in now.items())]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="WHY", help="write the figures anew, with the reason of what has grown")
    why = parser.parse_args().write
    now = sizes()
    print(table(now, kept() if KEPT.exists() else {}))
    if why is not None:
        write(now, why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
