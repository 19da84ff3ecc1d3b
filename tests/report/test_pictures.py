"""Charts: well-formed, escaped, inside their edges, and correct positions."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise

import pytest

from addnorm.errors import InputError
from addnorm.report import (
    Mark,
    attention_map,
    bar_chart,
    heat_map,
    interval_chart,
    line_chart,
    reliability_chart,
    scatter_chart,
)
from addnorm.report.chart_frame import spread_labels
from addnorm.report.svg import Svg, escape, shorten, text_width
from addnorm.report.xy_charts import drawable_segments, thin_out, wilson_interval

EVIL = "<script>alert('x')</script>\"&\x00\ud800"
NAN = math.nan
SPACE = "{http://www.w3.org/2000/svg}"

PICTURES: dict[str, Callable[[str], Svg]] = {
    "lines": lambda s: line_chart(
        {s: [(0, 1), (1, 2), (2, NAN)], s + "2": [(0, 3)]}, title=s, x=s, y=s, marks=[Mark(1, 2, s)]
    ),
    "long names": lambda s: line_chart({s * 9: [(0, 1)], "b": [(0, 1)]}, title=s),
    "scatter": lambda s: scatter_chart({s: [(0, 1)], s + "b": [(2, 3)]}, title=s, x=s, y=s),
    "bars": lambda s: bar_chart([(s, 1.0), (s * 9, -2.0)], title=s, unit=s, strong=s),
    "intervals": lambda s: interval_chart([(s, 1.0, 0.5), (s * 9, 2.0, 0.1)], title=s, x=s),
    "heat_map": lambda s: heat_map([[1, NAN]], [s], [s, s * 9], title=s, x=s, y=s),
    "attention": lambda s: attention_map([[0.5, 0.5]], [s, s], [s], title=s),
    "reliability": lambda s: reliability_chart({s: [(0.2, 0.3, 9)], s + "b": [(0, 1, 1)]}, title=s),
    "empty": lambda s: line_chart({}, title=s),
}


def tree(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)]


def curve_of(picture: str) -> list[list[tuple[float, float]]]:
    """Return the corners of every curve in a picture."""
    paths = [p.get("d", "") for p in tree(picture).iter(SPACE + "path")
             if "curve" in (p.get("class") or "").split()]  # fmt: skip
    corners = [numbers(path) for path in paths]
    return [list(zip(each[::2], each[1::2], strict=True)) for each in corners]


@pytest.mark.parametrize("name", PICTURES)
def test_all_text_is_escaped(name: str) -> None:
    picture = PICTURES[name](EVIL)
    assert "<script" not in picture and isinstance(picture, Svg)
    root = tree(picture)
    tags = {element.tag.removeprefix(SPACE) for element in root.iter()}
    assert tags <= {"svg", "g", "path", "rect", "circle", "text", "title", "desc"}
    assert not any(key.startswith("on") for element in root.iter() for key in element.attrib)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_title_and_description(name: str) -> None:
    root = tree(PICTURES[name]("a name"))
    assert root.get("role") == "img"
    assert [element.tag for element in root][:2] == [SPACE + "title", SPACE + "desc"]
    assert root[0].text == "a name" and root[1].text


@pytest.mark.parametrize("name", PICTURES)
def test_everything_is_inside_the_edges(name: str) -> None:
    root = tree(PICTURES[name]("name"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter(SPACE + "text"):
        words, size = text[-1].tail if len(text) else text.text, 11
        reach = text_width(words or "", size)
        shift = {"end": 1.0, "middle": 0.5}.get(text.get("text-anchor", ""), 0.0)
        left = float(text.get("x", 0)) - shift * reach
        if text.get("transform"):
            continue
        assert left >= -1 and left + reach <= width + 1, words
        assert 8 <= float(text.get("y", 0)) <= height


def test_colours_are_css_classes() -> None:
    for make in PICTURES.values():
        assert not re.search(r"#[0-9a-f]{3}|rgb|fill=\"", make("a"))


# ── Lines ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_is_drawn_at_its_values() -> None:
    ((a, b, c),) = curve_of(line_chart({"s": [(0, 0), (10, 5), (20, 10)]}, title="t"))
    assert (a[0] + c[0]) / 2 == pytest.approx(b[0], abs=0.1)
    assert (a[1] + c[1]) / 2 == pytest.approx(b[1], abs=0.1)
    assert a[0] < c[0] and a[1] > c[1]


def test_logarithmic_axes() -> None:
    points = [(1, 0.01), (10, 0.1), (100, 1.0)]
    ((a, b, c),) = curve_of(line_chart({"s": points}, title="t", log_x=True, log_y=True))
    assert (a[0] + c[0]) / 2 == pytest.approx(b[0], abs=0.1)
    assert (a[1] + c[1]) / 2 == pytest.approx(b[1], abs=0.1)
    result = curve_of(
        line_chart({"s": [(1, 1), (2, 2), (3, -1), (4, 1), (5, 2)]}, title="t", log_y=True)
    )
    assert [len(part) for part in result] == [2, 2]


def test_gaps_split_a_line_and_a_diverged_curve_has_a_cross() -> None:
    points = [(0, 1), (1, 2), (2, NAN), (3, 2), (4, 1), (5, math.inf)]
    picture = line_chart({"s": points}, title="t")
    assert [len(part) for part in curve_of(picture)] == [2, 2]
    assert "not finite after step 4" in picture
    assert "not finite" not in line_chart({"s": points[:5]}, title="t")
    assert drawable_segments(points, False, False) == [[(0, 1), (1, 2)], [(3, 2), (4, 1)]]


def test_a_single_point_is_a_dot() -> None:
    picture = line_chart({"s": [(3, 2.5)]}, title="t")
    assert picture.count("<circle") == 1 and curve_of(picture) == []


@pytest.mark.parametrize("series", ({}, {"s": []}, {"s": [(0, NAN), (NAN, 1)]}))
def test_series_without_values(series: dict[str, list[tuple[float, float]]]) -> None:
    assert "nothing to show" in line_chart(series, title="t")


def test_long_curves_are_thinned_but_keep_their_peaks() -> None:
    draw = random.Random(0)
    points = [(float(n), draw.random()) for n in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[12_345] = (12_345.0, -9.0)
    kept = thin_out(points, [n / 1e5 for n in range(100_000)])
    assert len(kept) <= 4 * 201 and kept == sorted(kept)
    assert points[54_321] in kept and points[12_345] in kept
    assert {points[0], points[-1]} <= set(kept)
    assert len(line_chart({"s": points}, title="t")) < 20_000


def test_values_above_the_limit_are_clipped() -> None:
    points = [(0, 1), (1, 2), (2, 1e30)]
    ((a, b, _),) = curve_of(line_chart({"s": points}, title="t", most=2))
    assert abs(a[1] - b[1]) > 50
    assert 'overflow="hidden"' in line_chart({"s": points}, title="t", most=2)


def test_labels_do_not_overlap_and_keep_the_order_of_the_ends() -> None:
    series = {name: [(0, 1), (1, 1 + n / 1000)] for n, name in enumerate("abcdefg")}
    series["h"] = [(0, 1), (1, 99)]
    texts = tree(line_chart(series, title="t")).iter(SPACE + "text")
    at = {t.text: float(t.get("y", 0)) for t in texts if "name" in t.get("class", "")}
    assert list(at) == list("abcdefgh")
    assert all(at[one] - at[two] >= 14.9 for one, two in zip("abcdefg", "bcdefgh", strict=True))


def test_marks() -> None:
    marks = [Mark(1, 2, "best 2", "best"), Mark(9, NAN, "diverged", "bad"), Mark(NAN, 1, "lost")]
    picture = line_chart({"s": [(0, 3), (9, 2)]}, title="t", marks=marks)
    assert "best 2" in picture and "diverged" in picture and "lost" not in picture
    with pytest.raises(InputError, match=r"one of best, bad, note: got 'good'. Try 'note'."):
        Mark(0, 0, "", "good")


@pytest.mark.parametrize("seed", range(5))
def test_spread_labels_keeps_distance_and_range(seed: int) -> None:
    draw = random.Random(seed)
    places = [draw.uniform(0, 100) for _ in range(draw.randint(1, 7))]
    moved = spread_labels(places, 14, 0, 100)
    order = sorted(range(len(places)), key=lambda n: places[n])
    assert all(moved[b] - moved[a] >= 14 - 1e-9 for a, b in pairwise(order))
    assert min(moved) >= 0 and max(moved) <= 100
    assert spread_labels([10.0, 50.0, 90.0], 14, 0, 100) == [10, 50, 90]


# ── Rows, clouds, calibration ─────────────────────────────────────────────────────────────────────


def test_bar_lengths_are_proportional_to_values() -> None:
    picture = bar_chart([("a", 4.0), ("b", 1.0), ("c", -2.0), ("d", NAN), ("e", 0.0)], title="t")
    rects = {r[0].text: r for r in tree(picture).iter(SPACE + "rect")}
    size = {name: float(rect.get("width", 0)) for name, rect in rects.items()}
    assert size["a: 4"] == pytest.approx(4 * size["b: 1"], rel=0.01)
    assert size["c: −2"] == pytest.approx(2 * size["b: 1"], rel=0.01)
    assert float(rects["c: −2"].get("x", 0)) < float(rects["a: 4"].get("x", 0))
    assert len(rects) == 4 and "not a number" in picture
    assert "nothing to show" in bar_chart([], title="t")
    for flat in ([("a", 0.0)], [("a", NAN)], [("a", -3.0)]):
        tree(bar_chart(flat, title="t"))


def test_intervals_are_one_deviation_on_each_side() -> None:
    picture = interval_chart([("a", 10, 2), ("b", 20, NAN), ("c", 30, 0)], title="t", guide=15)
    (path,) = [p for p in tree(picture).iter(SPACE + "path")
               if p.get("class") == "whisker thick c0" and p[0].text == "a: 10 ± 2"]  # fmt: skip
    low, _, high = numbers(path.get("d", ""))
    middles = [float(c.get("cx", 0)) for c in tree(picture).iter(SPACE + "circle")]
    assert (low + high) / 2 == pytest.approx(middles[0], abs=0.1)
    unit = (middles[1] - middles[0]) / 10
    assert high - low == pytest.approx(4 * unit, rel=0.02)
    assert "b: 20<" in picture
    assert "nothing to show" in interval_chart([], title="t")
    assert "nothing to show" in interval_chart([("a", NAN, 1)], title="t")


def test_overlapping_points_are_drawn_once() -> None:
    draw = random.Random(0)
    few = scatter_chart({"a": [(1, 1)] * 50 + [(2, 2)]}, title="t", x="x", y="y", diagonal=True)
    assert few.count("<circle") == 2 and few.count("guide") == 1
    many = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(20_000)]
    assert len(scatter_chart({"a": many}, title="t", x="x", y="y")) < 120_000
    assert "nothing to show" in scatter_chart({"a": [(NAN, 1)]}, title="t", x="x", y="y")


def test_reliability_bins_and_their_intervals() -> None:
    picture = reliability_chart(
        {"m": [(0.25, 0.5, 100), (0.75, 0.75, 300), (0.9, 0.1, 0)]}, title="t"
    )
    one, two = tree(picture).iter(SPACE + "circle")
    assert float(two.get("r", 0)) > float(one.get("r", 0))
    guide = next(p for p in tree(picture).iter(SPACE + "path") if p.get("class") == "guide")
    x1, y1, x2, y2 = numbers(guide.get("d", ""))
    assert float(two.get("cx", 0)) == pytest.approx(x1 + 0.75 * (x2 - x1), abs=0.2)
    assert float(two.get("cy", 0)) == pytest.approx(y1 + 0.75 * (y2 - y1), abs=0.2)
    assert "nothing to show" in reliability_chart({"m": []}, title="t")


@pytest.mark.parametrize(("share", "count"), ((0.0, 5), (0.3, 10), (1.0, 7), (0.5, 1000)))
def test_wilson_intervals_solve_their_equation(share: float, count: int) -> None:
    """Wilson's ends are the p with |share − p| = z √(p (1 − p) / n)."""
    for end in wilson_interval(share, count):
        assert (share - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / count, abs=1e-12)


# ── Maps ──────────────────────────────────────────────────────────────────────────────────────────


def shades(picture: str) -> dict[str, tuple[str, float]]:
    """Return kind and strength of each cell, by its tip."""
    rects = [rect for rect in tree(picture).iter(SPACE + "rect") if len(rect)]
    return {
        r[0].text or "": (r.get("class", ""), float(r.get("fill-opacity", "nan"))) for r in rects
    }


def test_cells_are_shaded_by_their_values() -> None:
    result = shades(heat_map([[0, 1], [2, 4]], ["a", "b"], ["c", "d"], title="t"))
    assert result == {
        "a · c: 0": ("plus", 0),
        "a · d: 1": ("plus", 0.25),
        "b · c: 2": ("plus", 0.5),
        "b · d: 4": ("plus", 1),
    }


def test_two_colours_around_zero_with_the_same_scale() -> None:
    result = shades(heat_map([[-4, 2, NAN]], ["a"], ["b", "c", "d"], title="t"))
    assert result["a · b: −4"] == ("minus", 1) and result["a · c: 2"] == ("plus", 0.5)
    assert result["a · d: not a number"][0] == "missing"


def test_explicit_bounds() -> None:
    result = shades(heat_map([[1, 3, 9]], ["a"], ["b", "c", "d"], title="t", low=1, high=5))
    assert [strength for _, strength in result.values()] == [0, 0.5, 1]
    tree(heat_map([[2, 2]], ["a"], ["b", "c"], title="t", low=2))


def test_values_are_shown_if_they_fit() -> None:
    small = heat_map([[0.25, 0.5]], ["a"], ["b", "c"], title="t")
    assert ">.25</text>" in small and ">.5</text>" in small
    wide = heat_map([[0.25] * 60], ["a"], ["b"] * 60, title="t")
    assert ">.25</text>" not in wide


@pytest.mark.parametrize("side", (21, 79, 200))
def test_large_maps_stay_small_and_show_every_cell(side: int) -> None:
    cells = [[math.sin(r * c / 50) for c in range(side)] for r in range(side)]
    names = [str(n) for n in range(side)]
    picture = heat_map(cells, names, names, title="t")
    assert len(picture) < 90_000
    sheets = [p.get("d", "") for p in tree(picture).iter(SPACE + "path")
              if "sheet" in p.get("class", "")]  # fmt: skip
    result = [
        (int(r), int(c) + n)
        for sheet in sheets
        for c, r, count in re.findall(r"M(\d+) (\d+)h(\d+)", sheet)
        for n in range(int(count))
    ]
    block = math.ceil(side / 80)
    means = {}
    for r in range(0, side, block):
        for c in range(0, side, block):
            each = [v for row in cells[r : r + block] for v in row[c : c + block]]
            means[r // block, c // block] = sum(each) / len(each)
    most = max(map(abs, means.values()))
    assert sorted(result) == [at for at, mean in means.items() if abs(mean) / most > 0.5 / 24]
    assert ("mean of" in picture) == (block > 1)


def test_attention_maps_have_targets_as_rows() -> None:
    result = shades(attention_map([[0.9, 0.1, 0.0]], ["in", "3", "days"], ["Tagen"]))
    assert result["Tagen · in: 0.9"] == ("plus", 1)


def test_long_tokens_are_rotated() -> None:
    assert "rotate(-50" in attention_map([[1.0]], ["Donnerstag"], ["a"])
    assert "rotate(-50" not in attention_map([[1.0]], ["am"], ["a"])


def test_names_must_match_the_matrix() -> None:
    with pytest.raises(InputError, match=r"table is 1 × 2, the names are 1 × 1. Try the names"):
        heat_map([[1, 2]], ["a"], ["b"], title="t")
    with pytest.raises(InputError, match="one name for each row"):
        heat_map([[1], [1, 2]], ["a", "b"], ["c"], title="t")
    assert "nothing to show" in heat_map([], [], [], title="t")


# ── Words ─────────────────────────────────────────────────────────────────────────────────────────


def test_shorten() -> None:
    assert shorten("short", 100) == "short"
    cut = shorten("a rather long name", 60)
    assert cut.endswith("…") and text_width(cut) <= 60
    assert text_width("日本") == 24 and escape("\n\x7f") == "␊␡"


def test_the_legend_does_not_cover_the_axis_label() -> None:
    bins = [(0.2, 0.3, 9)]
    names = ("rows held out, as trained", "rows held out, calibrated", "rows of the test file")
    picture = reliability_chart({name: bins for name in names}, title="t")
    dots = [float(x) for x in re.findall(r'cx="([\d.]+)" cy="10"', picture)]
    label = re.search(r'x="([\d.]+)" y="14">observed', picture)
    assert len(dots) == 3 and label is not None
    assert min(dots) - 4 > float(label[1]) + text_width("observed", 12)


def test_legend_names_are_complete_if_they_fit() -> None:
    bins = [(0.2, 0.3, 9)]
    picture = reliability_chart(
        {name: bins for name in ("as trained", "calibrated", "test")}, title="t"
    )
    key = re.findall(r'<text class="name c\d" [^>]*>(?:<title>[^<]*</title>)?([^<]*)<', picture)
    assert sorted(key) == ["as trained", "calibrated", "test"]
    long = reliability_chart(
        {name * 4: bins for name in ("as trained", "calibrated", "t")}, title="t"
    )
    assert "…" in long and "t" * 4 in long


def test_guides_are_dashed_in_the_colour_of_their_curve() -> None:
    curves = {"one": [(1.0, 1.0), (2.0, 2.0)], "two": [(1.0, 3.0), (2.0, 4.0)]}
    plain = line_chart(curves, title="Costs")
    picture = line_chart(curves, title="Costs", guides={"two": [(1.0, 3.5), (2.0, 8.0)]})
    assert "dashed" not in plain and picture.count('class="curve c1 dashed"') == 1
    assert picture.count('class="name') == 2  # a guide has no name of its own
    assert "two, expected" in picture
