import json
import xml.etree.ElementTree as ElementTree

import pytest

from ultrascale.plan.pipeline.play import StageSeconds, simulate
from ultrascale.plan.view.draw_schedule import boxes, draw_svg, draw_text
from ultrascale.plan.view.trace_events import trace_events
from ultrascale.schedules.build import build_schedule

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline():
    return simulate(build_schedule("1f1b", 2, 3), StageSeconds(1.0, 1.0, 1.0))


def text(timeline, **options):
    return [[line.plain for line in block] for block in draw_text(timeline, **options)]


def test_a_line_of_text_is_to_scale(timeline):
    assert text(timeline, width=24, colour=False) == [["F0F1····B0──F2B1──··B2──", "··F0B0──F1B1──F2B2──····"]]
    assert text(timeline, width=12, colour=False) == [["FF··B0FB1·B2", "·FB0FB1FB2··"]]


def test_with_colour_a_number_will_do_where_the_letter_does_not_fit(timeline):
    assert text(timeline, width=24, colour=True)[0][0] == "F0F1····B0  F2B1  ··B2  "
    assert text(timeline, width=12, colour=True)[0][0] == "01··B02B1·B2"


def test_a_line_that_is_too_long_is_cut_into_blocks(timeline):
    blocks = text(timeline, width=5, colour=False)
    whole = text(timeline, width=12, colour=False)[0]
    assert ["".join(parts) for parts in zip(*blocks, strict=True)] == whole
    assert {len(line) for block in blocks[:-1] for line in block} == {5}


def test_every_pass_is_one_box_of_the_picture_with_its_number_and_its_times():
    timeline = simulate(build_schedule("dualpipe-v", 2, 5), StageSeconds(1.0, 1.0, 1.0))
    picture = ElementTree.fromstring(draw_svg(timeline, title="a < b", unit="units"))
    titles = [element.text for element in picture.iter(f"{SVG}title")]
    passes = sum(len(action.parts) for row in timeline.schedule for action in row)
    assert len(titles) == passes == len(list(boxes(timeline)))
    assert "forward of micro-batch 0, stage 0, 0 to 1" in titles
    texts = [element.text or "" for element in picture.iter(f"{SVG}text")]
    assert texts[0] == "a < b" and texts[1].startswith(f"step {timeline.step_seconds:g} units, the bubble is")
    assert {"forward", "backward", "input gradient", "weight gradient", "bubble"} <= set(texts)


def test_the_picture_is_to_scale(timeline):
    picture = ElementTree.fromstring(draw_svg(timeline, title=""))
    found = [rect for rect in picture.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    per_second = float(found[0].get("width", "0"))
    for rect, box in zip(found, boxes(timeline), strict=True):
        assert float(rect.get("width", "0")) == pytest.approx((box.end - box.start) * per_second, abs=0.01)
        assert float(rect.get("x", "0")) - float(found[0].get("x", "0")) == pytest.approx(box.start * per_second, abs=0.02)


def test_a_trace_has_a_track_a_rank_every_pass_and_every_message(timeline):
    events = json.loads(json.dumps(trace_events(timeline, title="t")))["traceEvents"]
    passes = {(event["tid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert len(passes) == 12
    assert (passes[1, "B0"]["ts"], passes[1, "B0"]["dur"]) == (2e6, 2e6)
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["rank 0", "rank 1"]
    sent, received = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert len(sent) == len(received) == 6
    assert all(after["ts"] >= before["ts"] for before, after in zip(sent, received, strict=True))
    held = [event["args"]["whole"] for event in events if event["ph"] == "C" and event["name"].endswith("rank 0")]
    assert (max(held), held[-1]) == (2, 0)


def test_no_text_leaves_the_picture_however_many_stages_a_rank_has():
    timeline = simulate(build_schedule("interleaved", 4, 8, 10), StageSeconds(1.0, 1.0, 1.0))
    root = ElementTree.fromstring(draw_svg(timeline, title="ten stages a rank"))
    texts = [one for one in root.iter(f"{SVG}text") if one.get("text-anchor") == "end"]
    assert "10 stages from 3" in [one.text for one in texts]
    for one in texts:  # a letter of Helvetica is 0.5 of its size wide on average
        assert float(one.attrib["x"]) - 0.5 * float(one.attrib["font-size"]) * len(one.text or "") > 0
