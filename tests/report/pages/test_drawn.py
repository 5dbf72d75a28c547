"""A figure's numbers and its description are those that were drawn."""

import numpy as np

from weightscope.core.files import Files
from weightscope.report.pages.style import description, in_our_style, numbers, save, subplots


@in_our_style()
def _figure():
    figure, (curves, cells, bars) = subplots(1, 3, figsize=(6, 2))
    curves.plot([0, 1, 2], [1, 10, 100], label="head 0")
    curves.scatter([0.5], [3], label="median")
    curves.axhline(5)  # a reference line is no number
    curves.set(xlabel="layer", ylabel=r"$\sigma_1(W_{QK})$", yscale="log")
    image = cells.imshow(np.array([[0.1, np.nan], [0.3, 0.4]]))
    cells.set_title("copying")
    cells.set_yticks([0, 1], ["layer 2", "layer 5"])
    figure.colorbar(image, ax=cells)
    bars.barh([0, 1], [0.5, 0.25])
    bars.set(ylabel="heads", xlabel="share")
    return figure


def test_every_number_is_in_the_table_by_panel_and_series() -> None:
    table = numbers(_figure())
    assert list(dict.fromkeys(table["panel"])) == ["sigma_1(W_QK)", "copying", "heads"]
    line = table.where(table["series"] == "head 0")
    assert line["x"].tolist() == [0, 1, 2] and line["y"].tolist() == [1, 10, 100]
    assert table.where(table["series"] == "median")["y"].tolist() == [3]
    cells = table.where(table["panel"] == "copying")
    np.testing.assert_array_equal(cells["value"], [0.1, np.nan, 0.3, 0.4])
    assert cells["y name"].tolist() == ["layer 2", "layer 2", "layer 5", "layer 5"]
    bars = table.where(table["panel"] == "heads")
    assert bars["value"].tolist() == [0.5, 0.25]
    assert len(table) == 3 + 1 + 4 + 2


def test_the_description_says_axes_amounts_and_ranges() -> None:
    assert description(_figure()) == (
        "sigma_1(W_QK): 1 line, layer from 0 to 2, sigma_1(W_QK) from 1 to 100 on a logarithmic scale; "
        "1 point, layer from 0.5 to 0.5, sigma_1(W_QK) from 3 to 3 on a logarithmic scale. "
        "copying: map of 4 cells, values from 0.1 to 0.4. heads: 2 bars, share from 0.25 to 0.5, heads from 0 to 1."
    )


def test_a_figure_is_saved_as_picture_drawing_and_numbers() -> None:
    files = Files()
    assert save(_figure(), files, "three").files == ("three.png", "three.svg", "three.figure.csv")
    assert files.contents["three.figure.csv"].decode() == numbers(_figure()).csv()
    assert save(_figure(), files, "other", "heads.csv").files[-1] == "heads.csv"
    assert set(files.contents) == {"three.png", "three.svg", "three.figure.csv", "other.png", "other.svg"}
