"""Four hundred documents, and the recipe that cuts them into many shards."""

from __future__ import annotations

from ultrascale.data.preparing.prepare import Recipe


def lines(count=400):
    return [f"document {number} has {'some more ' * (number % 7)}words é{number}" for number in range(count)]


def recipe(path, **options):
    return Recipe(**{"tokenizer": path, "shard_bytes": 2000, **options})
