from __future__ import annotations

import math

from stretto.fleet.figures import Totals
from stretto.fleet.messages import Figures
from stretto.tally import Tally


def test_places_compute_side_by_side_but_one_after_the_other_in_a_place() -> None:
    totals = Totals()
    for place, seconds in ((0, 1.0), (1, 2.0), (0, 4.0)):
        totals.add(place, Figures({"steps": 10.0, "step_seconds": seconds}, Tally()))
    assert totals.take_engine() == {"steps": 30.0, "step_seconds": 5.0, "worker_seconds": 7.0}
    assert totals.take_engine()["steps"] == 0.0


def test_ratios_of_several_drafters_are_those_of_all_they_counted() -> None:
    totals = Totals()
    one = Tally({"proposed": 10.0}, {"right": (5.0, 10.0), "deep": (0.0, 0.0)}, {"wait": 0.5})
    other = Tally(
        {"proposed": 90.0}, {"right": (0.0, 90.0), "deep": (0.0, 0.0), "late": (1.0, 4.0)}, {"wait": 0.2}
    )
    totals.add(0, Figures({}, one))
    totals.add(1, Figures({}, other))
    found = totals.take_drafter().figures()
    assert math.isnan(found.pop("deep"))
    assert found == {"proposed": 100.0, "right": 0.05, "late": 0.25, "wait": 0.5}
    assert totals.take_drafter().figures() == {}
