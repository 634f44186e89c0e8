"""Figures say what their numbers say."""

import xml.etree.ElementTree as ElementTree

import pytest

from latte.analysis.figures import label_heights, nice_ceiling, svg_heat_map, svg_line_chart, text_heat_map


def test_text_heat_map_has_more_ink_for_more_probability():
    assert text_heat_map([[1.0, 0.0], [0.01, 0.99]]) == "██  \n··██"


def test_svg_heat_map_has_a_square_for_each_positive_entry():
    picture = ElementTree.fromstring(svg_heat_map([[1.0, 0.0], [0.25, 0.75]], title="p(s|t) < 1"))
    squares = [square for square in picture.iter("rect") if square.get("class") == "cell"]
    assert [float(square.get("fill-opacity")) for square in squares] == pytest.approx([1, 0.5, 0.866])
    assert squares[1].find("title").text == "p(s=0 | t=1) = 0.250"


def test_svg_line_chart_draws_larger_values_higher():
    chart = svg_line_chart(
        [1, 2, 4], {"linear": [1, 1, 1], "quadratic": [1, 2, 4]}, title="cost", x_label="tokens", y_label="µs"
    )
    flat, rising = [
        [float(point.split(",")[1]) for point in polyline.get("points").split()]
        for polyline in ElementTree.fromstring(chart).iter("polyline")
    ]
    assert flat[0] == flat[2] == rising[0]
    assert rising[0] > rising[1] > rising[2]  # y points down
    assert rising[0] - rising[1] == pytest.approx((rising[1] - rising[2]) / 2, abs=0.2)


def test_labels_keep_their_distance():
    heights = label_heights([100, 102, 40], gap=16)
    assert heights == [86, 102, 40]


@pytest.mark.parametrize(("value", "ceiling"), [(0.07, 0.08), (1, 1), (3, 4), (9.5, 10), (141, 200)])
def test_nice_ceiling(value, ceiling):
    assert nice_ceiling(value) == pytest.approx(ceiling)
