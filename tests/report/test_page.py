"""The page of a report, opened in a real browser without a network."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.report import figures
from fedfrozen_app.report.page import POLICY, html_table
from fedfrozen_app.report.settings import Setting
from fedfrozen_app.report.write import write_report
from tests.report.test_report import write_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
MEASURE = (
    "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for strategy, last in (("fedavg", 0.8), ("scaffold", 0.7), ("fedprox", 0.75)):
        for seed in (1, 2):
            run = write_run(folder / "runs", strategy, seed, [0.1, 0.5, last + 0.01 * seed])
            counts = [[seed, 2, 3], [4, 0, 1]]
            run.write_partition({"class_counts": counts, "class_names": ["a", "b", "<c>"]})
    return write_report([folder / "runs"], folder / "out")[-1]


def browse(page: Path, width: int, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},1600",
               "--disable-background-networking", "--enable-logging=stderr", *options,
               page.as_uri()]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_the_page_holds_everything_itself(page: Path) -> None:
    content = page.read_text()
    places = re.findall(r'(?:src|href)="([^"]{1,40})', content)
    # four curves, a front and a partition, and the time
    assert len(places) == 1 + 7 and all(place.startswith("data:") for place in places)
    assert "url(" not in content and "@import" not in content


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_the_page_without_errors_or_requests(page: Path, width: int) -> None:
    picture = page.with_name(f"{width}.png")
    done = browse(page, width, f"--screenshot={picture}")
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert pixels.shape[1] == width
    inked = (pixels < 200).mean(axis=0)  # a picture or a letter reaches well to both sides
    assert inked[: width // 4].max() > 0.02 and inked[-width // 4 :].max() > 0.02
    copy = page.with_name(f"measured-{width}.html")
    copy.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>").replace(POLICY, ""))
    title = re.search(r"<title>(\d+) (\d+)</title>", browse(copy, width, "--dump-dom").stdout)
    assert title is not None and int(title[1]) <= int(title[2])  # nothing sticks out


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_a_request_to_elsewhere_would_be_an_error_in_the_console(page: Path) -> None:
    copy = page.with_name("asks.html")
    asks = '<img src="http://127.0.0.1:9/x.png">'
    copy.write_text(page.read_text().replace("</body>", f"{asks}</body>"))
    assert "Content Security Policy" in browse(copy, 400, "--dump-dom").stderr


def test_names_cannot_be_markup() -> None:
    table = "| run | n |\n| --- | ---: |\n| <b>x</b> | **1 +- 2** |\n"
    assert '<td class="text">&lt;b&gt;x&lt;/b&gt;</td><td><strong>1 &plusmn; 2</strong></td>' in (
        html_table(table)
    )


def test_clients_own_tests_are_a_table_and_a_picture(tmp_path: Path) -> None:
    for seed, accuracies in ((1, [0.2, 0.6, 0.7]), (2, [0.4, 0.5, 0.9])):
        run = write_run(tmp_path / "runs", "fedavg", seed, [0.1, 0.5])
        for server_round in (0, 1):  # only the last round's count
            run.append_clients(
                server_round,
                (
                    {"client": client, "num_examples": 5, "accuracy": value * server_round,
                     "accuracy_after": value + 0.1}
                    for client, value in enumerate(accuracies)
                ),
            )  # fmt: skip
    out = tmp_path / "out"
    write_report([tmp_path / "runs"], out)
    *_, row = (out / "clients.md").read_text().splitlines()
    # of .2 .6 .7 .4 .5 .9: mean .55, deviation sqrt(.2950 / 6), tenth percentile .3
    assert row == "| run | 0.5500 | 0.2000 | 0.3000 | 0.2217 | 0.6500 | 0.3000 | 6 |"
    assert "Clients' own tests" in (out / "report.html").read_text()
    assert (out / "pictures" / "clients.png").exists()


def test_a_long_run_of_many_clients_is_drawn_as_an_image(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "fedavg", 1, [0.1] + [0.5] * 500)
    counts = np.random.default_rng(1).integers(0, 9, (1000, 62)).tolist()
    names = [str(index) for index in range(62)]
    run.write_partition({"class_counts": counts, "class_names": names})
    write_report([run.path], tmp_path / "out")
    drawn = json.loads((tmp_path / "out" / "bandwidth.json").read_text())
    assert len(drawn[""]["run"]["round"]) == 501
    picture = (tmp_path / "out" / "pictures" / "partition.svg").read_text()
    assert "<image" in picture and len(picture) < 200_000


@pytest.mark.parametrize(("most", "scale"), [(1.5, "linear"), (50.0, "log")])
def test_bytes_are_on_a_logarithmic_axis_only_where_they_lie_far_apart(
    most: float, scale: str
) -> None:
    figure, axes = figures.new_figure()
    axes[0][0].plot([1.0, most], [0.1, 0.2])
    axes[0][0].axhline(0.15)  # says nothing about bytes
    figures._by_megabytes(axes[0][0], anything=True)
    assert axes[0][0].get_xscale() == scale
    figures.save(figure, [])


def test_a_legend_of_many_settings_leaves_room_for_the_curves(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "fedavg", index, [0.1, 0.5]) for index in range(30)]
    settings = [
        Setting((("method", f"a rather long name {index}"),), (run,))
        for index, run in enumerate(runs)
    ]
    # a warning, which is an error in tests, would say that the axes have collapsed
    figures.draw_bandwidth(settings, [tmp_path / "many.png"])
    with Image.open(tmp_path / "many.png") as picture:
        assert picture.height > 900
