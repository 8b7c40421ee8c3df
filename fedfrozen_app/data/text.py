"""Text as token ids on disk, and examples that are blocks of it.

``dataset`` is ``wikitext2``, the hub id of a text data set, or any name together with
``data-dir``, a local folder of ``train*.parquet`` and ``test*.parquet`` (or ``valid*``) with a
column ``text``. The lines of a split, one after the other, are its text.

The tokeniser is a byte-level BPE of 2,048 tokens, trained on the training split alone: every
text has ids and nothing is unknown. Training it is deterministic, so every machine that has the
data comes to the same one. It and the ids are kept in the cache folder by the data's content.

An example is a block of ``context-length`` + 1 neighbouring tokens: all but the last are read,
all but the first are to be predicted. Blocks follow each other so that every token but the very
first is predicted once; what is left at the end of a split is not used.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.config_rules import TEXT_DATASETS
from fedfrozen_app.data import sources
from fedfrozen_app.data.cache import cache_root, cached, content_key
from fedfrozen_app.data.sources import Table, Tables
from fedfrozen_app.disk import save_array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fedfrozen_app.models.registry import ModelSpec

logger = logging.getLogger(__name__)

# Part of every key: raise it when the same text would give other ids.
TOKENS_VERSION = 1
HUB_ID, HUB_CONFIGURATION = "Salesforce/wikitext", "wikitext-2-v1"
COLUMN = "text"
VOCABULARY = 2048
TOKENIZER = "tokenizer.json"
# WikiText's headings: " = Title = " is an article, " = = Section = = " a part of one.
HEADING = re.compile(r"\s*= (?!= )(.+)(?<! =) =\s*")
UNTITLED = "(no heading)"


@dataclass(frozen=True, eq=False)
class TextSplit:
    """One split: ``tokens`` int16 [T], mapped from disk, cut into N blocks.

    ``article_starts`` int64 [A] are the positions in ``tokens`` where articles begin.
    """

    tokens: Tensor
    context_length: int
    article_starts: Tensor

    def __len__(self) -> int:
        """Return N, the number of blocks."""
        return (len(self.tokens) - 1) // self.context_length

    @property
    def labels(self) -> Tensor:
        """One class for every block, int64 [N]: a subset of blocks is drawn from all alike."""
        return torch.zeros(len(self), dtype=torch.int64)

    @property
    def articles(self) -> Tensor:
        """The article, int64 [N], in which each block begins; it may end in the next one."""
        starts = torch.arange(len(self)) * self.context_length
        return torch.searchsorted(self.article_starts, starts, right=True) - 1


@dataclass(frozen=True, eq=False)
class TextDataset:
    """A tokenised data set; ``key`` identifies the ids and how they are cut into blocks."""

    name: str
    train: TextSplit
    test: TextSplit
    key: str
    vocabulary: int
    titles: tuple[str, ...]  # of the training split's articles
    tokenizer: Path
    class_names: tuple[str, ...] = ("block",)
    augment: str = "none"
    has_test: bool = True

    @property
    def num_outputs(self) -> int:
        """Return how many tokens a model tells apart."""
        return self.vocabulary

    def examples(
        self, split: str, rows: npt.NDArray[np.int64], spec: "ModelSpec", device: torch.device
    ) -> "TextExamples":
        """Return some blocks of the split ``train`` or ``test``, ready for a model."""
        return TextExamples(self.train if split == "train" else self.test, rows, device)


class TextExamples:
    """Some blocks of a split by position; ``len`` counts blocks, not tokens."""

    def __init__(
        self, split: TextSplit, rows: npt.NDArray[np.int64], device: str | torch.device
    ) -> None:
        self._tokens = split.tokens
        self._starts = torch.from_numpy(rows) * split.context_length
        self._window = torch.arange(split.context_length + 1)
        self._device = torch.device(device)

    def __len__(self) -> int:
        """Return n."""
        return len(self._starts)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens read and those that follow, int64 [B, context] both, on the device."""
        starts = self._starts[positions.cpu()]
        block = self._tokens[starts[:, None] + self._window].to(self._device, torch.int64)
        return block[:, :-1], block[:, 1:]


def load_text(config: RunConfig) -> TextDataset:
    """Return the run's text, tokenised first where no run has done so before.

    Raises
    ------
    ConfigError
        When the data set is unknown or cannot be reached, a split or the column is missing, or
        a split is shorter than one block.
    """
    request, open_tables = _plan(config)
    folder = cache_root(config) / "text" / content_key(version=TOKENS_VERSION, **request)

    def build(entry: Path) -> dict[str, Any]:
        logger.info("training a tokeniser on %s once into %s", config.dataset, folder)
        tables = open_tables()
        key = content_key(version=TOKENS_VERSION, source=tables.fingerprint, **request)
        return {"key": key, **_build(entry, tables)}

    meta = cached(folder, build)
    length = config.context_length
    train, test = (_map_split(folder, split, length) for split in ("train", "test"))
    return TextDataset(
        config.dataset,
        train,
        test,
        key=content_key(tokens=meta["key"], context_length=length),
        vocabulary=meta["vocabulary"],
        titles=tuple(meta["titles"]),
        tokenizer=folder / TOKENIZER,
    )


def _plan(config: RunConfig) -> tuple[dict[str, Any], Callable[[], Tables]]:
    """Return what identifies the text before it is opened, and how to open it."""
    if config.data_dir:
        files = sources.parquet_files(Path(config.data_dir).expanduser())
        request = {"files": sources.digest_files(files), "vocabulary": VOCABULARY}
        return request, lambda: sources.open_folder(files, fingerprint="")
    if config.dataset in TEXT_DATASETS:
        hub_id, configuration = HUB_ID, HUB_CONFIGURATION
    elif "/" in config.dataset:
        hub_id, configuration = config.dataset, ""
    else:
        raise ConfigError(
            f"model={config.resolved_model} reads text and dataset={config.dataset} is none that "
            f"is known; use dataset={TEXT_DATASETS[0]}, a hub id (owner/name), or set data-dir to "
            "a folder of parquet files with a column 'text'"
        )
    request = {"hub": [hub_id, configuration], "vocabulary": VOCABULARY}
    return request, lambda: sources.open_hub(hub_id, configuration)


# --- building ---------------------------------------------------------------------------
def _build(entry: Path, tables: Tables) -> dict[str, Any]:
    """Train the tokeniser, write it and the ids of both splits; return what describes them."""
    if tables.test is None:
        raise ConfigError(
            f"{tables.train.origin} has no test split; add test*.parquet (or valid*.parquet) to "
            "a local folder and set data-dir to it"
        )
    lines = {"train": _lines(tables.train), "test": _lines(tables.test)}
    tokenizer = train_tokenizer(lines["train"])
    tokenizer.save(str(entry / TOKENIZER))
    titles: dict[str, list[str]] = {}
    for split, text in lines.items():
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(text)]
        ends = np.cumsum([len(ids) for ids in encoded])
        tokens = np.fromiter((i for ids in encoded for i in ids), np.int16, ends[-1])
        save_array(entry / f"{split}_tokens.npy", tokens)
        headings = find_headings(text)
        begins = np.array([ends[line] - len(encoded[line]) for line in headings], dtype=np.int64)
        titles[split] = list(headings.values())
        if begins[:1].tolist() != [0]:  # text before the first heading, or no headings
            begins, titles[split] = np.insert(begins, 0, 0), [UNTITLED, *titles[split]]
        save_array(entry / f"{split}_articles.npy", begins)
    return {"vocabulary": tokenizer.get_vocab_size(), "titles": titles["train"]}


def _lines(table: Table) -> list[str]:
    if COLUMN not in table.features:
        raise ConfigError(
            f"{table.origin}: the {table.split} split has no column {COLUMN!r}, only "
            f"{', '.join(table.features)}; a language model needs one of strings"
        )
    lines = table.values(COLUMN)
    if not all(isinstance(line, str) for line in lines) or not any(lines):
        raise ConfigError(
            f"{table.origin}: column {COLUMN!r} of the {table.split} split must hold text in "
            "every row; drop empty files and rows without a value"
        )
    return lines


def train_tokenizer(lines: Iterable[str]) -> "Tokenizer":
    """Return a byte-level BPE of at most :data:`VOCABULARY` tokens; the same for the same text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def find_headings(lines: Sequence[str]) -> dict[int, str]:
    """Return the titles of articles by their line: headings with blank lines around them.

    Without the blank lines, formulas and table keys of WikiText-2 (`` = Wins ; L = ``) would
    make 629 articles of its 600.
    """
    padded = ["", *lines, ""]
    return {
        number: match[1]
        for number, line in enumerate(lines)
        if not padded[number].strip() and not padded[number + 2].strip()
        if (match := HEADING.fullmatch(line))
    }


# --- reading ----------------------------------------------------------------------------
def _map_split(folder: Path, split: str, context_length: int) -> TextSplit:
    tokens = np.load(folder / f"{split}_tokens.npy", mmap_mode="c")  # as for images
    if len(tokens) <= context_length:
        raise ConfigError(
            f"the {split} split has {len(tokens)} tokens and context-length={context_length} "
            f"needs {context_length + 1} for one block; lower context-length or give more text"
        )
    articles = np.load(folder / f"{split}_articles.npy")
    return TextSplit(torch.from_numpy(tokens), context_length, torch.from_numpy(articles))


def article_titles(
    dataset: TextDataset, clients: Sequence[npt.NDArray[np.int64]]
) -> list[list[str]]:
    """Return the titles of the articles in which each client's blocks begin."""
    articles: npt.NDArray[np.int64] = dataset.train.articles.numpy()
    return [[dataset.titles[a] for a in np.unique(articles[rows])] for rows in clients]
