"""The page in a real browser: load, change, share, go back, compare, drop a file, refuse nonsense."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from page.dropped import LLAMA

from ultrascale.cli.main import main
from ultrascale.cli.plan.page import question
from ultrascale.page.controls import LARGEST_FILE

PLANNED = "body[data-state=done] #status:has-text('Planned in')"


def opened(tab, link):
    tab.goto(link)
    tab.wait_for_selector(PLANNED)
    return tab


def changed(tab, name, value):
    """Fill a control, as a person does, and wait for the plan of it."""
    before = tab.url
    field = tab.locator(f"#control-{name}")
    if field.evaluate("node => node.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
    tab.wait_for_url(lambda url: url != before)
    tab.wait_for_selector(PLANNED)


def test_it_loads_and_shows_the_planners_numbers(tab, link, capsys):
    opened(tab, f"{link}?model=gpt2&count=8&tokens_per_batch=512k&seq_len=1024")
    words = ["--model", "gpt2", "--gpus", "8xh100-sxm", "--tokens-per-batch", "512k", "--seq-len", "1024", "--json"]
    main(["plan", *words])
    printed = json.loads(capsys.readouterr().out)
    assert f"{printed['time']['tokens_per_second']:,.0f}" in tab.inner_text("#facts")
    assert tab.locator("#memory .bar button").all_inner_texts() == ["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    assert tab.locator("#ranking tbody tr").count() == min(10, len(printed["search"]["ranked"]))


@pytest.mark.parametrize("width", [800, 1200])
def test_no_label_is_wider_than_its_control(tab, link, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(f"{link}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector(".field label")
    script = """fields => fields.filter((field) => {
      const range = document.createRange();
      range.selectNodeContents(field.querySelector("label"));
      return range.getBoundingClientRect().right > field.getBoundingClientRect().right + 0.5;
    }).map((field) => field.innerText)"""
    assert tab.locator(".field:visible").evaluate_all(script) == []
    tab.wait_for_selector(PLANNED)


def test_a_control_is_in_the_link_and_the_link_is_a_plan(tab, link, browser):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    changed(tab, "tp", "2")
    assert parse_qs(urlsplit(tab.url).query)["tp"] == ["2"]
    told = tab.inner_text("#facts")
    assert "tp2" in told
    other = opened(browser.new_page(), tab.url)
    assert (other.inner_text("#facts"), other.input_value("#control-tp")) == (told, "2")
    other.close()
    tab.go_back()
    tab.wait_for_selector("#facts:not(:has-text('tp2'))")
    assert tab.input_value("#control-tp") == ""
    tab.go_forward()
    tab.wait_for_selector("#facts:has-text('tp2')")


def test_a_slider_moves_the_number(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    slider = tab.locator("[data-of=count]")
    slider.focus()
    slider.press("ArrowRight")
    tab.wait_for_selector("#facts:has-text('16 x')")
    assert "count=16" in tab.url


def test_a_layout_of_the_ranking_is_planned_by_the_keyboard(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    second = tab.locator("#ranking tbody tr").nth(1)
    layout = second.locator("td").first.inner_text()
    second.locator("button").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_url("**tp=**")
    tab.wait_for_selector(PLANNED)
    assert layout in tab.inner_text("#ranking")
    assert tab.locator("#ranking tbody tr").count() < 10


def test_two_plans_are_compared_with_differences_first(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    tab.click("#keep")
    tab.wait_for_selector("#compared")
    changed(tab, "tp", "2")
    tab.wait_for_selector("#compared:has-text('tp2')")
    kinds = tab.locator("#compared tbody tr").evaluate_all("rows => rows.map((row) => row.className)")
    assert kinds == sorted(kinds, key=lambda kind: kind == "same")
    assert {"same", "tied"} <= set(kinds)


def test_the_schedule_tells_of_the_pass_under_the_pointer(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024&pp=2&schedule=1f1b&tokens_per_batch=64k")
    tab.locator("#schedule .pass.F").first.hover()
    assert tab.inner_text("#schedule .told").startswith("rank 0: forward of micro-batch 0, stage 0, ")


def test_the_notes_of_a_plan_are_shown(tab, link):
    asked = {"model": "llama-3-8b", "count": "64", "machine": "h100-sxm", "seq_len": "8192", "tokens_per_batch": "4M"}
    notes = json.loads(question(asked)["json"])["notes"]
    assert "--data.document-mask false" in notes[0] and "--layout.attention flash-3" in notes[1]
    opened(tab, link)
    assert tab.locator("#facts .notes li").all_inner_texts() == notes


NONSENSE = {
    "count": ("1000000000000", "more machines than anybody plans for"),
    "a negative count": ("-8", "-8"),
    "seq_len": ("1000000000000", "1000000000000"),
    "tp": ("3", "tp = 3"),
}
NONSENSE |= {"tokens_per_batch": ("many", "many")}


@pytest.mark.parametrize(("name", "value", "says"), [(n, *v) for n, v in NONSENSE.items()], ids=NONSENSE)
def test_nonsense_gets_the_command_lines_sentence(tab, link, name, value, says, capsys):
    opened(tab, link)
    name = name.rpartition(" ")[2]
    tab.fill(f"#control-{name}", value)
    tab.wait_for_selector("#error:visible")
    asked = {"count": "64", "seq_len": "8192", "tokens_per_batch": "4M"} | {name: value}
    gpus = f"{asked.pop('count')}xh100-sxm"
    words = [f"--{key.replace('_', '-')}={text}" for key, text in asked.items()]
    assert main(["plan", "--model", "llama-3-8b", f"--gpus={gpus}", *words]) == 2
    assert tab.inner_text("#error").strip() in capsys.readouterr().err
    tab.fill(f"#control-{name}", "64" if name == "count" else "")
    tab.wait_for_selector("#error", state="hidden")


def test_the_json_that_is_saved_is_what_the_command_line_prints(tab, link, capsys):
    opened(tab, f"{link}?model=gpt2&count=8&tokens_per_batch=512k&seq_len=1024&tp=2")
    tab.click("summary:has-text('plan.json')")
    with tab.expect_download() as saved:
        tab.click("button:has-text('Save plan.json')")
    words = ["--model=gpt2", "--seq-len=1024", "--tokens-per-batch=512k", "--tp=2", "--gpus=8xh100-sxm", "--json"]
    assert main(["plan", *words]) == 0
    clock = re.compile(rb'"seconds": [0-9.e-]+,')
    assert clock.sub(b"", saved.value.path().read_bytes(), 1) == clock.sub(b"", capsys.readouterr().out.encode(), 1)


def test_the_step_is_drawn_with_messages_by_axis_and_a_roofline(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024&pp=2&tp=2&tokens_per_batch=64k&micro_batch_size=1")
    assert tab.locator("#memory .bar b").all_inner_texts() == ["rank 0", "rank 1"]
    assert {text.split(",")[0] for text in tab.locator("#sent .bar b").all_inner_texts()} >= {"tp", "pp", "dp"}
    tab.locator("#roofline .operation").first.hover()
    assert "TFLOP/s" in tab.inner_text("#roofline .told")
    assert tab.locator("#roofline tbody tr").count() > 10


def test_a_dropped_file_is_there_after_loading_again_and_going_back(tab, link):
    opened(tab, f"{link}?count=8&seq_len=1024&model=gpt2")
    tab.set_input_files("#file", {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(LLAMA).encode()})
    tab.wait_for_selector("body[data-state=done] #status:has-text('from config.json')")
    tab.reload()
    tab.wait_for_selector("body[data-state=done] #status:has-text('from config.json')")
    tab.go_back()
    tab.wait_for_selector("#facts:has-text('gpt2')")
    assert "config.json" not in tab.inner_text("#status")


RUN = """
cluster = "16xh200"
[model]
preset = "gpt2"
[layout]
dp = 8
tp = 2
zero_stage = 1
[batch]
sequence_length = 512
sequences_per_batch = 64
"""


def test_a_dropped_run_is_planned_as_it_is_and_can_be_kept(tab, link):
    """The page opens on a question of its own, of which a run's file takes nothing."""
    opened(tab, link)
    tab.set_input_files("#file", {"name": "run.toml", "mimeType": "application/toml", "buffer": RUN.encode()})
    tab.wait_for_selector("body[data-state=done] #status:has-text('from run.toml')")
    told = tab.inner_text("#facts")
    assert all(words in told for words in ("gpt2", "16 x NVIDIA H200", "dp8 tp2, ZeRO 1", "64 sequences of 512"))
    assert (tab.input_value("#control-model"), tab.input_value("#control-count")) == ("", "")
    tab.click("#keep")
    changed(tab, "count", "32")
    assert "32 x NVIDIA H200" in tab.inner_text("#facts")
    tab.reload()
    tab.wait_for_selector("#compared:has-text('16 x NVIDIA H200')")
    changed(tab, "model", "llama-3-8b")
    assert "32 x NVIDIA H100" in tab.inner_text("#facts") and tab.input_value("#control-tokens_per_batch") == "4M"


def test_what_is_open_and_where_the_focus_is_outlive_an_answer(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    tab.click("#memory summary")
    tab.focus("#memory .bar button >> nth=3")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**zero_stage=3**")
    tab.wait_for_selector(PLANNED)
    assert tab.locator("#memory details[open]").count() == 1
    assert tab.evaluate("document.activeElement.textContent") == "ZeRO 3"


def test_an_unknown_model_in_a_link_is_refused(tab, link):
    tab.goto(f"{link}?model=lama-3-8b")
    tab.wait_for_selector("#error:has-text('there is no model called')")


def test_a_config_json_is_planned_and_weights_are_not_read(tab, link):
    opened(tab, f"{link}?count=8&seq_len=1024")
    tab.set_input_files("#file", {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(LLAMA).encode()})
    tab.wait_for_selector("#status:has-text('from config.json')")
    assert "llama-3-8b" not in tab.inner_text("#facts")
    large = {"name": "model.safetensors", "mimeType": "application/octet-stream", "buffer": bytes(LARGEST_FILE + 1)}
    tab.set_input_files("#file", large)
    tab.wait_for_selector("#error:has-text('1,000,001 bytes')")
    whole = {"file": {"name": "model.safetensors", "size": LARGEST_FILE + 1}}
    assert tab.inner_text("#error").split() == question(whole)["error"].split()
    missing = {"name": "config.json", "mimeType": "application/json", "buffer": b'{"hidden_size": 512}'}
    tab.set_input_files("#file", missing)
    tab.wait_for_selector("#error:has-text('model_type')")


OUTSIDE = """[...document.querySelectorAll('.group *')].filter((one) =>
  one.getBoundingClientRect().right > one.closest('.group').getBoundingClientRect().right).map((one) => one.outerHTML)"""
"""Controls that stand out of their group's box."""


@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_nothing_is_wider_than_the_screen(tab, link, width):
    tab.set_viewport_size({"width": width, "height": 900})
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024&pp=2")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(OUTSIDE) == []


def test_every_control_has_a_label_a_unit_and_a_range(tab, link):
    opened(tab, f"{link}?model=gpt2&count=8&seq_len=1024")
    fields = tab.locator("#form .field:has([id^=control-])")
    for field in fields.all():
        about = field.locator("[aria-describedby]").get_attribute("aria-describedby")
        assert field.locator("label .unit").is_visible() and field.locator("label .unit").inner_text()
        assert tab.locator(f"#{about}").text_content()
    assert fields.count() == 17


def test_a_plan_as_one_file_is_drawn_without_a_network(tab, tmp_path, capsys):
    path = tmp_path / "plan.html"
    words = ["--model", "gpt2", "--gpus", "8xh100", "--seq-len", "1024", "--pp", "2", "--explain"]
    assert main(["plan", *words, "--html", str(path)]) == 0
    capsys.readouterr()
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("#scaling")
    assert requests == [path.as_uri()]
    assert tab.locator("section").evaluate_all("all => all.map((one) => one.id)") == [
        "facts", "ranking", "memory", "time", "schedule", "sent", "roofline", "front", "why", "scaling", "files",
    ]  # fmt: skip
    assert (path.stat().st_size < 1_000_000, tab.locator("form").count()) == (True, 0)
