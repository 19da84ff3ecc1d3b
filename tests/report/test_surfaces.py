"""Probability surfaces."""

import pytest

from addnorm.errors import InputError
from addnorm.report.surfaces import Surface, surface_chart


def test_a_panel_for_each_table_and_model() -> None:
    sure, unsure = Surface([[0.0, 1.0]], [(0.25, 0.5, 1)], "0.10"), Surface([[0.5, 0.5]])
    picture = surface_chart([[sure, unsure]], ["moons"], ["forest", "<line>"], title="Two")
    assert picture.count("<circle") == 1 and 'class="dot c0"' in picture
    assert picture.count('class="frame"') == 2 and "0.10" in picture
    assert picture.count("sheet plus") == picture.count("sheet minus") == 1
    assert "&lt;line&gt;" in picture and "<line>" not in picture


def test_panels_must_match_their_names() -> None:
    with pytest.raises(InputError, match="one panel for each row and column"):
        surface_chart([[Surface([[0.5]])]], ["a"], ["b", "c"], title="Two")
    with pytest.raises(InputError, match="one length"):
        surface_chart([[Surface([[0.5], [0.1, 0.2]])]], ["a"], ["b"], title="Two")
