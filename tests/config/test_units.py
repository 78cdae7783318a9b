import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.description.units import (
    UnitError,
    format_bytes,
    format_bytes_per_second,
    format_count,
    format_flops_per_second,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_length,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4M", 4_000_000), ("16M", 16_000_000), ("69B", 69 * 10**9), ("1.5T", 15 * 10**11), ("4Mi", 2**22),
        ("4_194_304", 2**22), ("4,194,304", 2**22), ("512k", 512_000), ("0.5B", 5 * 10**8),
    ],
)  # fmt: skip
def test_tokens_are_read_as_people_write_them(text, value):
    assert parse_tokens(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("20GiB", 20 * 2**30), ("16 GB", 16 * 10**9), ("16e9", 16 * 10**9), ("512", 512), ("1.5KiB", 1536)]
)
def test_bytes_are_read_as_people_write_them(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["1024,2048", "1,2", "1,2M", "12,3456", ",512", "1,000,00"])
def test_commas_that_are_not_between_thousands_are_refused(text):
    """As lists are written: `--seq-len 1024,2048` was 10,242,048 tokens, and `--seq-len 1,2` a plan of 12."""
    for parse in (parse_tokens, parse_length, parse_count, parse_bytes):
        with pytest.raises(UnitError, match="with commas between thousands only"):
            parse(text)
    assert parse_length("8,192") == 8192 and parse_tokens("1,048,576") == 2**20


@pytest.mark.parametrize("text", ["20G", "20gib", "-5", "0.5B", "", "4M"])
def test_bytes_that_cannot_be_read_are_refused(text):
    with pytest.raises(UnitError, match=r"expected .*found"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["4m", "M", "", "-4M", "1.5", "nan", "4 M B", "4G", "1e400"])
def test_what_cannot_be_read_is_refused_with_what_was_expected(text):
    with pytest.raises(UnitError, match=r"expected .*found"):
        parse_tokens(text)


def test_quantities_are_printed_with_three_figures():
    assert format_bytes(17 * 2**30) == "17 GiB"
    assert format_bytes(1234567) == "1.18 MiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes_per_second(450e9) == "450 GB/s"
    assert format_flops_per_second(989.4e12) == "989 TFLOP/s"
    assert [format_count(n) for n in (8_030_261_248, 512, 999_999, 0)] == ["8.03B", "512", "1.00M", "0"]
    assert [format_seconds(t) for t in (0.0123, 4.56, 3720, 273600, 2e-6)] == ["12.3 ms", "4.56 s", "1h02m", "3d04h", "2 us"]
    assert [format_seconds(days * 86400) for days in (729, 1936, 365_000)] == ["729d00h", "5.3 years", "1,000.0 years"]


@given(st.integers(0, 10**15))
def test_a_printed_count_is_read_back_within_its_three_figures(count):
    assert abs(parse_tokens(format_count(count)) - count) <= 0.005 * count
