"""Figures say what their numbers say."""

import xml.etree.ElementTree as ElementTree

import pytest

from latte.analysis.figures import label_heights, nice_ceiling, short_number, svg_line_chart


def lines(chart):
    """The points of each line, and all texts."""
    picture = ElementTree.fromstring(chart)
    found = [
        [tuple(map(float, point.split(","))) for point in polyline.get("points").split()]
        for polyline in picture.iter("polyline")
    ]
    return found, [text.text for text in picture.iter("text")], len(list(picture.iter("circle")))


def test_larger_values_stand_higher_and_doubled_positions_at_equal_distances():
    flat = [(1, 1), (2, 1), (4, 1)]
    rising = [(1, 1), (2, 2), (4, 4)]
    chart = svg_line_chart(
        {"linear": flat, "quadratic": rising}, title="cost", x_label="tokens", y_label="µs", doubling=True
    )
    (first, second), texts, dots = lines(chart)
    assert first[0][1] == first[2][1] == second[0][1]
    assert second[0][1] > second[1][1] > second[2][1]  # y points down
    assert second[0][1] - second[1][1] == pytest.approx((second[1][1] - second[2][1]) / 2, abs=0.2)
    assert first[1][0] - first[0][0] == pytest.approx(first[2][0] - first[1][0], abs=0.2)
    assert {"linear", "quadratic", "1", "2", "4", "tokens", "µs"} <= set(texts)
    assert dots == 6


def test_a_linear_axis_begins_at_zero():
    (line,), texts, dots = lines(
        svg_line_chart({"loss": [(100, 4), (200, 2), (400, 1)]}, title="l", x_label="x", y_label="y", dots=False)
    )
    assert line[1][0] - line[0][0] == pytest.approx((line[2][0] - line[1][0]) / 2, abs=0.2)
    assert {"0", "80", "400"} <= set(texts)
    assert dots == 0


def test_short_numbers():
    assert [short_number(x) for x in (0, 1024, 240_000, 2_400_000)] == ["0", "1,024", "240,000", "2.4M"]


def test_labels_keep_their_distance():
    heights = label_heights([100, 102, 40], gap=16)
    assert heights == [86, 102, 40]


@pytest.mark.parametrize(("value", "ceiling"), [(0.07, 0.08), (1, 1), (3, 4), (9.5, 10), (141, 200)])
def test_nice_ceiling(value, ceiling):
    assert nice_ceiling(value) == pytest.approx(ceiling)
