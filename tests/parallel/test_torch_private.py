"""What torch does not promise to keep is looked for before it is used, and used through one file."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import ultrascale
from ultrascale import torch_private

PRIVATE = re.compile(r"(from|import) torch\S*\._|torch\._[a-zA-Z]|distributed_c10d|\._fsdp_")


def test_this_torch_has_all_that_is_used():
    assert list(torch_private.missing()) == []


def test_what_is_missing_is_named_with_the_versions_that_have_it(monkeypatch):
    monkeypatch.delattr(FSDPModule, "_set_unshard_async_op")
    monkeypatch.delattr(torch, "_assert_async")
    with pytest.raises(ImportError, match=r"lacks .*_assert_async, .*_set_unshard_async_op; install a tested one: 2.11"):
        torch_private.expect_all(list(torch_private.missing()))


def test_tested_versions_are_those_that_may_be_installed():
    (wanted,) = (line for line in requires("ultrascale") or [] if line.startswith("torch"))
    first, last = torch_private.TESTED[0], torch_private.TESTED[-1]
    following = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
    assert f">={first}" in wanted and f"<{following}" in wanted


def test_no_other_file_of_the_package_uses_what_is_private():
    """But for the fault of one version, in a file of its own, and the name that a fork server loads."""
    package = Path(next(iter(ultrascale.__path__)))
    found = [path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert sorted(found) == ["reduced_buckets.py", "torch_private.py", "warm.py"]


@pytest.mark.parametrize("name", torch_private.MODULES_OF)
def test_every_name_is_there(name):
    assert getattr(torch_private, name) is not None


def test_a_missing_name_costs_only_what_asks_for_it(monkeypatch):
    monkeypatch.setitem(torch_private.MODULES_OF, "AllGather", "torch.no_such_module")
    monkeypatch.delitem(vars(torch_private), "AllGather", raising=False)
    with pytest.raises(ImportError, match=r"lacks torch\.no_such_module AllGather; install a tested one"):
        torch_private.__getattr__("AllGather")
    assert torch_private.ReduceScatter
