"""What was really run, as a page: docs/results.md and its pictures, from kept run folders alone.

    python docs/results.py                                 write the page
    python docs/results.py --keep runs/table-4-2-small     keep a sweep's run folders first
    python docs/results.py --base base.safetensors         keep what a base says of itself

A kept run folder is a run folder without its model and checkpoint, its JSON without line breaks,
and of every path in its config the last part. Every figure and every verdict of the page is
computed from these folders; the paper's claims are the only sentences that are not.
"""

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import safe_open

from fedfrozen_app.report import figures, tables
from fedfrozen_app.report.provenance import provenance
from fedfrozen_app.report.settings import Setting, label_names, panels_of, read_settings
from fedfrozen_app.runs.comparison import statement
from fedfrozen_app.runs.provenance import without_folders
from fedfrozen_app.runs.store import CLIENTS, EARLY_END, FAILURE, METRICS
from fedfrozen_app.runs.sweep import LABELS_FILE

DOCS = Path(__file__).resolve().parent
RUNS = DOCS / "results" / "runs"
AS_THEY_ARE = (METRICS, CLIENTS, FAILURE, EARLY_END)
COMPACT = ("config.json", "partition.json", "start.json")
CONFIGS = {"config", "resolved"}  # in config.json
BASE = "base.json"
PLAIN, OURS = "fedavg", "fedfrozen"
HEAD = """# What was run here

Made by `python docs/results.py` from the run folders in `docs/results/runs/`; nothing is typed in
but the paper's claims. The experiments are FedFrozen's
([arXiv:2605.06446](https://arxiv.org/abs/2605.06446)), in the sizes that two cores can do. FLITE's
are [on their own page](flite.md).

"""
NOISE = (
    "Noise below: two standard errors of the difference of two means over seeds, or, of one seed, "
    "of two accuracies on that many test images."
)


# --- what is kept -----------------------------------------------------------------------
def keep(sweep: Path, to: Path) -> None:
    """Copy the finished run folders of a sweep without models, compactly, in place of earlier ones.

    Raises
    ------
    ConfigError
        If the folder holds no finished run of a sweep.
    """
    runs = [run for setting in read_settings([sweep]) for run in setting.runs]
    labels = json.loads((sweep / LABELS_FILE).read_text())
    target = to / sweep.name
    shutil.rmtree(target, ignore_errors=True)
    for run in runs:
        copy = target / run.path.name
        copy.mkdir(parents=True)
        for name in COMPACT:
            content = json.loads((run.path / name).read_text())
            for part in CONFIGS & content.keys():
                content[part] = without_folders(content[part])
            (copy / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")
        for name in AS_THEY_ARE:
            if (run.path / name).exists():
                shutil.copyfile(run.path / name, copy / name)
    kept = {run.path.name: labels[run.path.name] for run in runs}
    (target / LABELS_FILE).write_text(json.dumps(kept) + "\n")


def keep_base(weights: Path, to: Path) -> None:
    """Write down the header of a weights file that ``fedfrozen pretrain`` wrote."""
    with safe_open(weights, "pt") as file:
        (to / BASE).write_text(json.dumps(file.metadata(), sort_keys=True) + "\n")


def base(runs: Path) -> str:
    """Return what the small experiments begin with."""
    told = json.loads((runs / BASE).read_text())
    return (
        f"All begin with one {told['model']}, pretrained on {told['dataset']} for "
        f"{told['epochs']} epochs (accuracy there {float(told['test_accuracy']):.4f}) by the "
        "command at the head of `experiments/fedfrozen/table-4-2-small.toml`.\n"
    )


# --- FedFrozen's Table 4.2 --------------------------------------------------------------
def table_4_2(runs: Path, pictures: Path) -> str:
    """Return the section about seven methods at three alphas, and about their step sizes."""
    settings = read_settings([runs / "table-4-2-small"])
    figures.draw_bandwidth(settings, [pictures / "table-4-2-small.png"], "alpha")
    tuning = read_settings([runs / "table-4-2-small-tuning"])
    claims = [
        ("FedFrozen is comparable to the strongest method at every alpha", comparable(settings)),
        ("it avoids severe degradation at alpha = 0.1", degradation(settings)),
        ("(ours) what the freeze saves", savings(settings)),
    ]
    return "\n".join([
        "## FedFrozen's Table 4.2 on CIFAR-10, small\n",
        tables.pivot(settings, "alpha"),
        notes(settings),
        claim_table(claims),
        "![accuracy against bytes](results/table-4-2-small.png)\n",
        tables.markdown(settings),
        provenance(settings),
        "### Step sizes\n",
        "Every method over the same grid, loss on the validation share; bold: what the table above "
        "is with.\n",
        step_sizes(tuning),
        provenance(tuning),
    ])  # fmt: skip


def comparable(settings: Sequence[Setting]) -> str:
    """Return FedFrozen's distance to the best method at every alpha, and who else is as near.

    Where everybody is within noise of the best, nothing is shown about anybody.
    """
    parts, near = [], {name(one) for one in settings}
    for panel in panels(settings, "alpha"):
        ours = named(panel, OURS)
        sound = [one for one in panel if not one.has_diverged]
        best = max(sound, key=lambda one: (mean(one), one is ours))
        near &= {name(one) for one in sound if mean(best) - mean(one) <= noise_of(one, best)}
        behind, noise = 100 * (mean(best) - mean(ours)), 100 * noise_of(ours, best)
        below = f"{behind:.1f} points below {name(best)} (noise: {noise:.1f})"
        parts.append(f"alpha {ours.label('alpha')}: {'the best' if best is ours else below}")
    methods = {name(one) for one in settings}
    others = ", ".join(sorted(near - {OURS})) or "nobody"
    return (
        f"{verdict(OURS in near and near != methods)}: {'; '.join(parts)}; of the others within "
        f"noise of the best at every alpha: {others}"
    )


def degradation(settings: Sequence[Setting]) -> str:
    """Return what every method loses from the largest alpha to the smallest, on the same seeds.

    Shown if FedFrozen loses no more than the median of the others and, beyond noise, less than the
    one that loses most.
    """
    by_alpha = {float(panel[0].label("alpha")): panel for panel in panels(settings, "alpha")}
    low, high = min(by_alpha), max(by_alpha)
    lost = {}
    for one in by_alpha[low]:
        before, after = by_seed(named(by_alpha[high], name(one))), by_seed(one)
        seeds = before.keys() & after.keys()
        lost[name(one)] = statistics.mean(before[seed] - after[seed] for seed in seeds)
    others = [value for method, value in lost.items() if method != OURS]
    worst = max(lost, key=lost.__getitem__)
    pairs = [(named(by_alpha[alpha], OURS), named(by_alpha[alpha], worst)) for alpha in (low, high)]
    noise = math.hypot(*(noise_of_images(*pair) for pair in pairs))  # of four accuracies
    shows = lost[OURS] <= statistics.median(others) and lost[worst] - lost[OURS] > noise
    texts = [f"{method} {100 * lost[method]:.1f}" for method in sorted(lost, key=lost.__getitem__)]
    return (
        f"{verdict(shows)}: points lost from alpha {high:g} to {low:g}: {', '.join(texts)}; to be "
        "shown, FedFrozen has to lose no more than the median of the others, and "
        f"{100 * noise:.1f} points (noise) less than the one that loses most"
    )


def savings(settings: Sequence[Setting]) -> str:
    """Return what FedFrozen's frozen rounds take of those before, within each run."""
    plain = [result.up for one in settings if name(one) == PLAIN for result in one.results]
    ours = [one for one in settings if name(one) == OURS]
    ratios: dict[str, list[float]] = {"bytes_up": [], "seconds_train": [], "seconds_total": []}
    for lines in (lines for one in ours for lines in one.metrics):
        for what, found in ratios.items():
            frozen, before = (
                statistics.mean(getattr(line, what) for line in lines
                                if line.phase == phase and line.test_accuracy is None)
                for phase in ("frozen", "warmup")
            )  # fmt: skip
            found.append(frozen / before)
    up, trained, clock = (statistics.median(found) for found in ratios.values())
    whole = statistics.mean(result.up for one in ours for result in one.results)
    return (
        f"a frozen round uploads {up:.3f} of the bytes of a warm-up round (the whole run "
        f"{whole / statistics.mean(plain):.3f} of FedAvg's), trains in {trained:.2f} of its "
        f"seconds and takes {clock:.2f} of its time on the clock, tests aside (medians over runs)"
    )


def step_sizes(settings: Sequence[Setting]) -> str:
    """Return the validation loss of every method at every step size, each one's lowest bold."""
    steps = sorted({one.label("lr") for one in settings}, key=float)
    by_strategy: dict[str, list[Setting]] = {}
    for one in settings:
        by_strategy.setdefault(strategy(one), []).append(one)
    best = {place_of_best(group) for group in by_strategy.values()}
    texts = {}
    for one in settings:
        mark = "**" if (name(one), one.label("lr")) in best else ""
        texts[name(one), one.label("lr")] = f"{mark}{validated(one):.3f}{mark}"
    body = [
        [method, *(texts.get((method, step), "-") for step in steps)]
        for method in dict.fromkeys(map(name, settings))
    ]
    return tables.markdown_table(["method", *(f"lr {step}" for step in steps)], body, 1)


def strategy(setting: Setting) -> str:
    """Return the config key of that name."""
    return str(setting.runs[0].config()["config"]["strategy"])


def validated(setting: Setting) -> float:
    """Return the last loss on the validation share; of what diverged, infinity."""
    last = [lines[-1].validation_loss for lines in setting.metrics]
    known = [loss for loss in last if loss is not None]
    return math.inf if setting.has_diverged or not known else statistics.mean(known)


def place_of_best(settings: Sequence[Setting]) -> tuple[str, str]:
    """Return method and step size of the lowest loss, of equal ones the smallest step."""
    best = min(settings, key=lambda one: (validated(one), float(one.label("lr"))))
    return name(best), best.label("lr")


# --- the warm-up's length ---------------------------------------------------------------
def warmup(runs: Path, pictures: Path) -> str:
    """Return the section about when to freeze."""
    settings = read_settings([runs / "warmup-small"])
    figures.draw_bandwidth(settings, [pictures / "warmup-small.png"])
    return "\n".join([
        "## How long to warm up\n",
        tables.markdown(settings),
        notes(settings),
        claim_table([(
            "freezing too early leaves a poor kernel, too late exposes it to drift (shown in the "
            "paper by simulation)", interior(settings),
        )]),
        "![accuracy against bytes](results/warmup-small.png)\n",
        provenance(settings),
    ])  # fmt: skip


def interior(settings: Sequence[Setting]) -> str:
    """Return whether some ratio between none and all is best, and by how much."""
    by_ratio = {float(one.label("warmup-ratio")): one for one in settings}
    best = max(by_ratio, key=lambda ratio: mean(by_ratio[ratio]))
    ends = [by_ratio[min(by_ratio)], by_ratio[max(by_ratio)]]
    over = [mean(by_ratio[best]) - mean(end) for end in ends]
    noise = [noise_of(by_ratio[best], end) for end in ends]
    shows = all(gain > bound for gain, bound in zip(over, noise, strict=True))
    return (
        f"{verdict(shows)}: the best ratio is {best:g}, {100 * over[0]:.1f} points over no warm-up "
        f"(noise: {100 * noise[0]:.1f}) and {100 * over[1]:.1f} over no freeze (noise: "
        f"{100 * noise[1]:.1f})"
    )


# --- FEMNIST ----------------------------------------------------------------------------
def femnist(runs: Path, pictures: Path) -> str:
    """Return the section about clients who are writers, and about label skew on them."""
    settings = read_settings([runs / "femnist-small"])
    return "\n".join([
        "## FEMNIST: writers as clients, and label skew\n",
        tables.markdown(settings),
        notes(settings),
        claim_table([("FedFrozen is comparable to FedAvg", " / ".join(
            comparable_to_plain(panel) for panel in panels(settings, "partition")))]),
        provenance(settings),
    ])  # fmt: skip


def comparable_to_plain(panel: Sequence[Setting]) -> str:
    """Return FedFrozen's distance to FedAvg."""
    ours, plain = named(panel, OURS), named(panel, PLAIN)
    gain, noise = mean(ours) - mean(plain), noise_of(ours, plain)
    return (
        f"{ours.label('partition')}: {verdict(gain >= -noise)}, {100 * gain:+.1f} points "
        f"(noise: {100 * noise:.1f})"
    )


# --- parts ------------------------------------------------------------------------------
def panels(settings: Sequence[Setting], label: str) -> list[list[Setting]]:
    """Return the settings that have the same value of a label, by that value."""
    assert label in label_names(settings), label
    groups = panels_of(settings, "method").values()
    return [list(group) for group in sorted(groups, key=lambda group: group[0].label(label))]


def name(setting: Setting) -> str:
    """Return the method of a setting."""
    return setting.label("method")


def named(settings: Sequence[Setting], method: str) -> Setting:
    """Return the setting of a method."""
    return next(one for one in settings if name(one) == method)


def mean(setting: Setting) -> float:
    """Return the mean accuracy over seeds."""
    return statistics.mean(tables.qualities(setting))


def by_seed(setting: Setting) -> dict[int, float]:
    """Return the accuracy of every seed."""
    seeds = [int(run.config()["seed"]) for run in setting.runs]
    return dict(zip(seeds, tables.qualities(setting), strict=True))


def noise_of(one: Setting, other: Setting) -> float:
    """Return two standard errors of the difference of two accuracies.

    Over seeds where both have two or more, else over the test images of one seed.
    """
    samples = [tables.qualities(each) for each in (one, other)]
    if min(map(len, samples)) > 1:
        return tables.noise(*samples)
    return noise_of_images(one, other)


def noise_of_images(one: Setting, other: Setting) -> float:
    """Return two standard errors of the difference of two accuracies on as many test images."""
    tested = json.loads((one.runs[0].path / "partition.json").read_text())["num_test_examples"]
    rates = [mean(one), mean(other)]
    return 2 * math.sqrt(sum(rate * (1 - rate) / tested for rate in rates))


def verdict(shows: bool) -> str:
    """Return what a claim came to."""
    return "shows" if shows else "**not shown**"


def notes(settings: Sequence[Setting]) -> str:
    """Return what the marks and noise of a table are, and whether its runs are one comparison."""
    said = statement([run for one in settings for run in one.runs])
    return f"{tables.NOTE} {NOISE}\n\n{said}\n"


def claim_table(claims: Iterable[tuple[str, str]]) -> str:
    """Return the paper's claims beside what came out here."""
    return tables.markdown_table(["claim", "here"], claims, 2)


def write_page(runs: Path, docs: Path) -> Path:
    """Write results.md and its pictures to a folder and return the page's path."""
    pictures = docs / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    sections = [base(runs), *(make(runs, pictures) for make in (table_4_2, warmup, femnist))]
    (page := docs / "results.md").write_text(HEAD + "\n".join(sections))
    return page


def main() -> None:
    """Keep what is asked for and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keep", nargs="*", type=Path, default=[], metavar="SWEEP_FOLDER")
    parser.add_argument("--base", type=Path, metavar="WEIGHTS_FILE")
    asked = parser.parse_args()
    for sweep in asked.keep:
        keep(sweep, RUNS)
    if asked.base:
        keep_base(asked.base, RUNS)
    print(write_page(RUNS, DOCS))


if __name__ == "__main__":
    main()
