"""`fraternal corpus`: what a text holds, before anything is trained on it. No torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.errors import CommandFailed
from service.problems import problems_in
from trials.corpora import (
    SPLITS,
    UNK,
    Corpus,
    CorpusError,
    CorpusSpec,
    Split,
    SplitText,
    load_corpus,
    load_split,
    resolved,
)


@dataclass(frozen=True)
class SplitFacts:
    split: Split
    tokens: int
    """`<eos>` included."""
    types: int
    """Different words, `<eos>` and `<unk>` among them."""
    unk_tokens: int
    """Tokens that are `<unk>`."""
    unknown_tokens: int
    """Those of them that the text spells out and the vocabulary lacks."""
    sha256: str

    @property
    def unk_share(self) -> float:
        return self.unk_tokens / self.tokens


@dataclass(frozen=True)
class CorpusFacts:
    vocabulary_size: int
    splits: tuple[SplitFacts, ...]


def describe(values: dict[str, Any], data_dir: Path) -> CorpusFacts:
    """Raises CommandFailed."""
    corpus = load(parse_corpus_spec(values), data_dir)
    unk = corpus.vocabulary.index.get(UNK, -1)
    facts = (
        SplitFacts(
            split=split,
            tokens=len(corpus.ids(split)),
            types=len(set(corpus.ids(split).tolist())),
            unk_tokens=int((corpus.ids(split) == unk).sum()),
            unknown_tokens=corpus.unk_counts[split],
            sha256=corpus.sha256[split],
        )
        for split in SPLITS
    )
    return CorpusFacts(len(corpus.vocabulary), tuple(facts))


def load(source: CorpusSpec, data_dir: Path) -> Corpus:
    """Raises CommandFailed."""
    try:
        return load_corpus(source, data_dir)
    except CorpusError as error:
        raise CommandFailed(str(error)) from error


def read_split(source: CorpusSpec, split: Split, data_dir: Path) -> SplitText:
    """One split, whose words may be none of a vocabulary. Raises CommandFailed."""
    try:
        return load_split(source, split, data_dir)
    except CorpusError as error:
        raise CommandFailed(str(error)) from error


def parse_corpus_spec(values: dict[str, Any]) -> CorpusSpec:
    """Raises CommandFailed."""
    try:
        return resolved(parse_strictly(CorpusSpec, values, "/corpus"), Path.cwd())
    except CorpusError as error:
        raise CommandFailed(str(error)) from error


def parse_strictly(kind: Any, values: dict[str, Any], at: str = "") -> Any:
    """By the rules of the service. Raises CommandFailed with the pointer, below `at`, of each wrong field."""
    adapter = TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        problems = problems_in(cast(Any, error.errors()), values, adapter.json_schema())
        raise CommandFailed(
            "\n  ".join(f"{at}{found.pointer}: {found.message}" for found in problems)
        ) from error


def to_rich(facts: CorpusFacts) -> RenderableType:
    table = Table("split", box=None)
    for name in ("tokens", "types", "<unk>", "share", "of which outside the vocabulary"):
        table.add_column(name, justify="right")
    for each in facts.splits:
        counts = (f"{each.tokens:,}", f"{each.types:,}", f"{each.unk_tokens:,}")
        table.add_row(each.split, *counts, f"{each.unk_share:.2%}", f"{each.unknown_tokens:,}")
    # Not longer than 80 columns, and folded where there are fewer: a digest that is cut looks like another.
    digests = (Text(f"sha256 {each.split:<6} {each.sha256}", overflow="fold") for each in facts.splits)
    return Group(Text(f"vocabulary of {facts.vocabulary_size:,} types"), table, *digests)


def to_json(facts: CorpusFacts) -> dict[str, Any]:
    document = asdict(facts)
    for each, written in zip(facts.splits, document["splits"], strict=True):
        written["unk_share"] = each.unk_share
    return document
