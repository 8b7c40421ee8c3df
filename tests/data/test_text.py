"""Claims about text: tokens, blocks, articles and how they are divided, on a small corpus."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data import text
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import draw_partition, make_partition, partition_report
from fedfrozen_app.data.partitioners import divide_articles
from fedfrozen_app.data.text import TextDataset, TextExamples, find_headings

ARTICLES = [
    "",
    " = Ashes = \n",
    "",
    " The ashes of the old fire were cold , and the fire of the morning was not lit . \n",
    "",
    " = = Embers = = \n",
    "",
    " With u = 2 the embers glow ; what glows is <unk> and what is <unk> glows again . \n",
    " = Wins ; L = \n",
    "",
    " = Birch = \n",
    "",
    " A birch is a tree of the north : naïve , 10 @.@ 5 metres tall , white and thin . \n",
    " Another line about the birch , which stands where the pine does not stand . \n",
    "",
    " = Cedar = \n",
    "",
    " The cedar is a tree of the south , and its wood was carried over the sea . \n",
]
TITLES = ("Ashes", "Birch", "Cedar")
LENGTH = 7


def write(folder: Path, **splits: list[str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in splits.items():
        pq.write_table(pa.table({"text": lines}), folder / f"{split}.parquet")
    return str(folder)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "data", train=ARTICLES, test=ARTICLES[10:14])


@pytest.fixture
def settings(run_config: Callable[..., RunConfig], corpus: str) -> Callable[..., RunConfig]:
    def build(**keys: object) -> RunConfig:
        return run_config(
            **{
                "dataset": "trees",
                "data_dir": corpus,
                "model": "tinygpt-mini",
                "partitioner": "iid",
                "context_length": LENGTH,
                "num_clients": 2,
                **keys,
            }
        )

    return build


def load(config: RunConfig) -> TextDataset:
    dataset = load_dataset(config)
    assert isinstance(dataset, TextDataset)
    return dataset


def decode(dataset: TextDataset, tokens: torch.Tensor) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(dataset.tokenizer)).decode(tokens.tolist())


def test_the_ids_of_a_split_are_its_text(settings: Callable[..., RunConfig]) -> None:
    dataset = load(settings())
    assert decode(dataset, dataset.train.tokens) == "".join(ARTICLES)  # nothing is unknown
    assert decode(dataset, dataset.test.tokens) == "".join(ARTICLES[10:14])
    assert dataset.train.tokens.dtype == torch.int16
    assert 256 < dataset.vocabulary == dataset.num_outputs <= 2048
    assert len(dataset.train.tokens) < 0.6 * len("".join(ARTICLES).encode())


def test_every_token_but_the_first_is_predicted_once(settings: Callable[..., RunConfig]) -> None:
    split = load(settings()).train
    examples = TextExamples(split, np.arange(len(split)), "cpu")
    x, y = examples.batch(torch.arange(len(split)))
    assert x.shape == y.shape == (len(split), LENGTH) and x.dtype == y.dtype == torch.int64
    used = len(split) * LENGTH
    assert len(split.tokens) - LENGTH <= used < len(split.tokens)
    assert torch.equal(x.flatten(), split.tokens[:used].long())
    assert torch.equal(y.flatten(), split.tokens[1 : used + 1].long())


def test_examples_are_the_blocks_asked_for(settings: Callable[..., RunConfig]) -> None:
    split = load(settings()).train
    examples = TextExamples(split, np.array([3, 5, 11]), "cpu")
    assert len(examples) == 3
    x, _ = examples.batch(torch.tensor([2, 0]))
    assert x.tolist() == [split.tokens[77:84].tolist(), split.tokens[21:28].tolist()]


def test_articles_begin_at_headings_between_blank_lines(
    settings: Callable[..., RunConfig],
) -> None:
    assert find_headings(ARTICLES) == {1: "Ashes", 10: "Birch", 15: "Cedar"}
    dataset = load(settings())
    assert dataset.titles == TITLES
    starts = [*dataset.train.article_starts.tolist(), len(dataset.train.tokens)]
    for title, begin, end in zip(TITLES, starts[:-1], starts[1:], strict=True):
        assert decode(dataset, dataset.train.tokens[begin:end]).startswith(f" = {title} = \n")
    articles = dataset.train.articles
    assert articles.tolist() == sorted(articles.tolist()) and set(articles.tolist()) == {0, 1, 2}
    first = int(articles.tolist().index(1))  # the first block that begins in the second article
    assert (first - 1) * LENGTH < starts[1] <= first * LENGTH


def test_text_before_the_first_heading_is_an_article_without_a_title(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    folder = write(tmp_path / "late", train=ARTICLES[2:], test=ARTICLES)
    assert load(settings(data_dir=folder)).titles == ("(no heading)", "Birch", "Cedar")


def test_a_text_is_tokenised_once_and_found_again_by_its_content(
    settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(settings())
    elsewhere = settings().model_copy(update={"cache_dir": str(tmp_path / "other")})
    again = load(elsewhere)
    assert again.tokenizer != first.tokenizer
    assert again.tokenizer.read_bytes() == first.tokenizer.read_bytes()
    assert again.key == first.key
    monkeypatch.setattr(text, "train_tokenizer", None)  # a second training would fail
    copied = write(tmp_path / "copy", train=ARTICLES, test=ARTICLES[10:14])
    assert torch.equal(load(settings(data_dir=copied)).train.tokens, first.train.tokens)
    # blocks of another length are other examples of the same ids
    longer = load(settings(context_length=13))
    assert longer.key != first.key and longer.tokenizer == first.tokenizer


def test_another_training_text_gives_another_entry(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    other = write(tmp_path / "other", train=ARTICLES[:-1], test=ARTICLES[10:14])
    assert load(settings()).key != load(settings(data_dir=other)).key


def test_iid_clients_hold_all_blocks_once(settings: Callable[..., RunConfig]) -> None:
    config = settings(num_clients=3, public_fraction=0.2, max_train_examples=11)
    dataset = load(config)
    partition = make_partition(config, dataset)
    assert len(partition.public) == 2
    held = np.concatenate([*partition.clients, partition.public])
    assert len(np.unique(held)) == len(held) == 11
    assert [len(rows) for rows in partition.clients] == [3, 3, 3]


def test_natural_clients_hold_whole_articles(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = settings(partitioner="natural", num_clients=2)
    dataset = load(config)
    partition = make_partition(config, dataset)
    articles = dataset.train.articles.numpy()
    held = [set(articles[rows].tolist()) for rows in partition.clients]
    assert sorted(len(one) for one in held) == [1, 2] and not held[0] & held[1]
    assert sum(map(len, partition.clients)) == len(dataset.train)
    report = partition_report(partition, dataset)
    assert sorted(title for client in report["articles"] for title in client) == sorted(TITLES)
    assert report["class_counts"] == [[len(rows)] for rows in partition.clients]
    draw_partition(report, tmp_path / "partition.png")
    assert (tmp_path / "partition.png").stat().st_size > 1000


def test_articles_go_to_the_client_with_the_fewest_blocks() -> None:
    sizes = [31, 2, 3, 5, 7, 11, 13, 17, 19]
    articles = np.repeat(np.arange(9), sizes)
    clients = divide_articles(articles, 3, 1, seed=1)
    assert sorted(np.concatenate(clients).tolist()) == list(range(108))
    held = [set(articles[rows].tolist()) for rows in clients]
    assert sum(map(len, held)) == 9
    assert max(map(len, clients)) - min(map(len, clients)) <= 31
    assert [len(c) for c in divide_articles(articles, 100, 1, seed=1)].count(31) == 1
    assert len(divide_articles(articles, 100, 1, seed=1)) == 9  # an upper bound
    other = divide_articles(articles, 3, 1, seed=2)
    assert any(a.tolist() != b.tolist() for a, b in zip(clients, other, strict=True))
    with pytest.raises(ConfigError, match="would hold 2 blocks, below min-partition-size=3"):
        divide_articles(articles, 9, 3, seed=1)


@pytest.mark.parametrize(
    ("splits", "keys", "words"),
    [
        (
            {"train": ["no headings here , only words \n"] * 9},
            {"partitioner": "natural"},
            "no head",
        ),
        ({"train": ARTICLES, "test": ["too short"]}, {"context_length": 400}, "for one block"),
        ({"train": ARTICLES, "test": [""]}, {}, "must hold text in every row"),
    ],
)
def test_text_that_cannot_serve_is_an_error(
    settings: Callable[..., RunConfig],
    tmp_path: Path,
    splits: dict[str, list[str]],
    keys: dict[str, object],
    words: str,
) -> None:
    folder = write(tmp_path / "bad", **{"test": ARTICLES, **splits})
    config = settings(data_dir=folder, **keys)
    with pytest.raises(ConfigError, match=words):
        make_partition(config, load_dataset(config))


def test_missing_columns_splits_and_names_are_errors(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="has no test split"):
        load_dataset(settings(data_dir=write(tmp_path / "one", train=ARTICLES)))
    folder = write(tmp_path / "two", train=ARTICLES, test=ARTICLES)
    pq.write_table(pa.table({"words": ARTICLES}), Path(folder) / "train.parquet")
    with pytest.raises(ConfigError, match="has no column 'text', only words"):
        load_dataset(settings(data_dir=folder))
    with pytest.raises(ConfigError, match="reads text and dataset=trees is none that is known"):
        load_dataset(settings(data_dir=""))


@pytest.mark.parametrize("name", ["wikitext2", "Salesforce/wikitext"])
def test_wikitext2_is_asked_from_the_hub_by_its_configuration(
    run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import datasets

    asked: list[tuple[str, ...]] = []

    def fake(*where: str) -> datasets.DatasetDict:
        asked.append(where)
        parts = {"train": ARTICLES, "validation": ARTICLES[:5], "test": ARTICLES[10:14]}
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_dict({"text": lines}) for split, lines in parts.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", fake)
    config = run_config(dataset=name, partitioner="iid", context_length=LENGTH)
    dataset = load(config)
    assert decode(dataset, dataset.test.tokens) == "".join(ARTICLES[10:14])
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    load(config)
    assert len(asked) == 1  # afterwards the cache serves
