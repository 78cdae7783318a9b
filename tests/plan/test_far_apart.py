from __future__ import annotations

import pytest
from rich.console import Console

from ultrascale.cli.main import main
from ultrascale.description.problems import SpecError
from ultrascale.plan.view.far_apart import LIMITS, FarPlan, far_apart
from ultrascale.plan.view.far_view import show


def coast_to_coast(**changes) -> FarPlan:
    given = {"distance_kilometres": 4800, "line_bits_per_second": 100e12, "step_seconds": 60}
    return far_apart(72e12, **(given | changes))


def test_light_takes_48_ms_there_and_back_over_4800_km_and_the_bytes_of_72t_parameters_take_seconds() -> None:
    plan = coast_to_coast()
    assert plan.num_bytes == 144e12
    assert plan.flight_seconds == pytest.approx(24e-3)
    assert plan.latency_seconds == pytest.approx(48e-3)
    assert plan.transfer_seconds == pytest.approx(11.52)
    assert plan.utilisation == pytest.approx(60 / 71.568)


def test_a_ring_of_many_sites_uses_both_ways_and_as_much_light() -> None:
    ring = coast_to_coast(num_sites=12, distance_kilometres=400)
    assert ring.latency_seconds == pytest.approx(22 * 2e-3)
    assert ring.bytes_per_line == pytest.approx(2 * 11 / 12 * 144e12 / 2)
    assert ring.transfer_seconds == pytest.approx(10.56)


def test_sites_with_a_line_each_send_all_their_bytes_over_it_in_two_rounds() -> None:
    for sites in (2, 4):
        plan = coast_to_coast(num_sites=sites, uplink=True, switching_seconds=1e-3)
        assert plan.transfer_seconds == pytest.approx(2 * (sites - 1) / sites * 144e12 / 12.5e12)
        assert plan.latency_seconds == pytest.approx(4 * (24e-3 + 1e-3))


def test_reducing_every_h_steps_divides_what_shows_by_h() -> None:
    plan = coast_to_coast()
    lost = [plan.every(h).seconds_per_step - 60 for h in (1, 10, 100)]
    assert lost == pytest.approx([11.568, 1.1568, 0.11568])
    assert plan.every(100).exposed_seconds == plan.exposed_seconds


def test_the_interval_that_is_asked_for_reaches_the_share_and_one_less_does_not() -> None:
    for overlap in (False, True):
        plan = coast_to_coast(line_bits_per_second=1e12, overlap=overlap)
        h = plan.outer_every_for(0.95)
        assert h > 1
        assert plan.every(h).utilisation >= 0.95 > plan.every(h - 1).utilisation


def test_the_line_that_is_asked_for_reaches_the_share_exactly() -> None:
    for overlap in (False, True):
        plan = coast_to_coast(overlap=overlap, line_bits_per_second=1e12)
        needed = plan.line_bytes_per_second_for(0.9)
        assert coast_to_coast(overlap=overlap, line_bits_per_second=8 * needed).utilisation == pytest.approx(0.9)
    assert coast_to_coast(step_seconds=1e-3).line_bytes_per_second_for(0.9) == float("inf")


def test_fewer_bits_carry_fewer_bytes() -> None:
    assert coast_to_coast(bits_per_parameter=4).transfer_seconds == pytest.approx(coast_to_coast().transfer_seconds / 4)


def test_the_window_a_protocol_must_keep_open_is_rate_times_round_trip() -> None:
    assert coast_to_coast().bytes_in_flight == pytest.approx(12.5e12 * 48e-3)


def test_numbers_without_sense_are_named_together() -> None:
    with pytest.raises(SpecError) as error:
        far_apart(0, distance_kilometres=-1, line_bits_per_second=1e12, step_seconds=1, num_sites=1)
    assert [p.key for p in error.value.problems] == ["parameters", "kilometres", "sites"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0, 1e300])
def test_no_number_that_is_none_gets_into_a_plan(number: float) -> None:
    for key in ("line_bits_per_second", "step_seconds", "bits_per_parameter", "outer_every"):
        with pytest.raises(SpecError, match=f"{LIMITS[key][0]}: must be from"):
            coast_to_coast(**{key: number})


def test_the_command_tells_all_its_mistakes_by_their_flags_and_prints_no_half_plan(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        "--parameters x --kilometres nan --line-gbits inf --step-seconds -1 --sites 100000000000 --bits 0 --every 0 "
        "--switching-ms -1"
    )
    assert main(["plan", "far", *wrong.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "8 mistakes" in printed.err
    for flag in ("parameters", "kilometres", "line-gbits", "step-seconds", "sites", "bits", "every", "switching-ms"):
        assert f"\n  {flag}\n" in printed.err
    assert "from 0.001 to 1,000,000,000 Gbit/s, is inf" in printed.err and "is 100,000,000,000" in printed.err


def test_thousands_are_set_apart() -> None:
    console = Console(width=100, record=True, force_terminal=False)
    show(coast_to_coast(num_sites=20_000, outer_every=5_000), console)
    text = console.export_text()
    assert "on 20,000 sites" in text and "39,998 hops" in text and "5,000 steps" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_printed_plan_says_what_takes_how_long(width: int) -> None:
    console = Console(width=width, record=True, force_terminal=False)
    show(coast_to_coast(), console)
    text = console.export_text()
    assert "72T parameters on 2 sites, 4,800 km from one to the next" in text
    assert "131 TiB" in text and "11.5 s" in text and "48 ms" in text
    assert "reduce every 4 steps" in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_json_holds_what_was_asked_and_what_follows() -> None:
    plan = coast_to_coast(outer_every=50)
    told = plan.to_json()
    assert told["outer_every"] == 50
    assert told["all_reduce_seconds"] == plan.all_reduce_seconds
