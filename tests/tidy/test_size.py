"""What a reader has to read does not grow without somebody saying why."""

from __future__ import annotations

import runpy

from tidy.sources import ROOT

SIZE = runpy.run_path(str(ROOT / ".ci" / "size.py"))


def test_no_package_has_grown_beyond_what_is_kept_of_it():
    kept, now = SIZE["kept"](), SIZE["sizes"]()
    grown = {package: tokens - kept.get(package, (0, 0))[1] for package, (_, tokens) in now.items()}
    grown = {package: more for package, more in grown.items() if more > SIZE["SLACK"]}
    assert grown == {}, 'delete something, or say why: python .ci/size.py --write "why"'


def test_comments_docstrings_and_blank_lines_count_nothing(tmp_path):
    path = tmp_path / "code.py"
    told = '"""About it.\n\nMore.\n"""\n\n# A comment.\nx: int = 1  # one\n"""Of x."""\n\n'
    path.write_text(told + '\ndef f():\n    """Do."""\n    return f"text {x}"\n')
    assert SIZE["count"](path) == (3, 12)
    path.write_text(path.read_text() + "y = f(x)\n")
    assert SIZE["count"](path) == (4, 18)
