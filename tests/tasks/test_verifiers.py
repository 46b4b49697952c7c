from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.tasks.verifiers import exact, last_number, math, numeric


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72),
        ("She pays 3 and 4. #### 1,234 dollars", 1234),
        ("so it is 1,234.50.", Fraction("1234.5")),
        ("10-5", 5),
        ("it fell by -5 degrees", -5),
        ("it fell to \u22127", -7),
        ("-$5 or $-6", -6),
        ("about $1,234", 1234),
        ("1,2,3", 3),
        ("1,2345", 2345),
        ("3/4 of it", Fraction(3, 4)),
        ("1.5e3", 1500),
        ("50%", 50),
        ("5kg", 5),
        ("**42**", 42),
        ("\\boxed{7}", 7),
        ("= .5", Fraction(1, 2)),
        ("3/0", None),
        ("H2O and x2", None),
        ("v1.2.3", None),
        ("none at all", None),
        ("", None),
        ("9" * 100_000, None),
        ("1e999999999", None),
    ],
)
def test_last_number(text: str, number: Fraction | int | None) -> None:
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 6), st.text(alphabet="abc ,;:", max_size=8))
def test_any_way_of_writing_a_decimal_is_read_exactly(value: int, places: int, before: str) -> None:
    number = Fraction(value, 10**places)
    assert last_number(f"{before} {float(number):,.{places}f}. ") == Fraction(f"{float(number):.{places}f}")


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    number = last_number(text)
    assert number is None or isinstance(number, Fraction)


def test_numeric_compares_values_not_texts() -> None:
    row = {"question": "?", "answer": "Half of 48 is 24. 48+24=<<48+24=72>>72\n#### 72"}
    assert numeric("The answer is 72.0 clips.", row) == 1.0
    assert numeric("The answer is 27.", row) == 0.0
    assert numeric("I do not know.", row) == 0.0
    with pytest.raises(ValueError, match="holds no number: 'many'"):
        numeric("5", {"answer": "many"})


def test_exact_ignores_white_space_around() -> None:
    assert exact(" Ann knight\n", {"kinds": "Ann knight"}, answer_column="kinds") == 1.0
    assert exact("Ann  knight", {"answer": "Ann knight"}) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("\\frac{1}{2}", "so it is $0.5$", 1.0),
        ("x^2+1", "The answer is \\boxed{1+x^2}.", 1.0),
        ("x^2+1", "The answer is \\boxed{1-x^2}.", 0.0),
        ("working 3 #### 42", "it is 42", 1.0),
        ("7", "no idea", 0.0),
    ],
)
def test_math(answer: str, completion: str, right: float) -> None:
    pytest.importorskip("math_verify")
    assert math(completion, {"answer": answer}) == right
