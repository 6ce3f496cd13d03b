"""The laws of what is inside a checkpoint."""

import hashlib
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import Tensor

from tests.test_store import Planted
from trials.checkpoints import BestCheckpoint, pack_state, read_best, unpack_state, write_best
from trials.corpora import Vocabulary
from trials.store import CorruptCheckpoint, pack, unpack

TENSORS = {
    "embedding": torch.arange(12.0).view(4, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "count": torch.tensor(7),
}
BEST = BestCheckpoint(
    tensors=TENSORS,
    config={"seed": 2**53 - 1, "training": {"weight_decay": 1.2e-6}},
    vocabulary=Vocabulary(("<eos>", "<unk>", "naïve", "κ")),
    metrics={"epoch": 3, "valid_loss": 0.1 + 0.2},
)


def assert_equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_best_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    write_best(tmp_path / "best.tar", BEST)
    found = read_best(tmp_path / "best.tar")
    assert_equal_tensors(found.tensors, TENSORS)
    assert replace(found, tensors={}) == replace(BEST, tensors={})


def test_best_is_readable_from_an_open_file_too() -> None:
    found = read_best(io.BytesIO(pack(BEST.files())))
    assert found.metrics == BEST.metrics


def test_best_knows_the_digest_of_the_bytes_that_it_was_read_from(tmp_path: Path) -> None:
    """Of these, whatever lies there later; a pipe is read once."""
    content = pack(BEST.files())
    (tmp_path / "best.tar").write_bytes(content)
    for file in (tmp_path / "best.tar", io.BytesIO(content)):
        assert read_best(file).file_sha256 == hashlib.sha256(content).hexdigest()


def test_best_holds_the_four_files_that_are_promised() -> None:
    assert list(BEST.files()) == ["model.safetensors", "config.json", "vocabulary.txt", "metrics.json"]


def test_equal_checkpoints_are_equal_bytes_whatever_the_order_of_their_keys() -> None:
    turned = replace(BEST, config=dict(reversed(BEST.config.items())))
    assert pack(turned.files()) == pack(BEST.files())


def test_missing_file_is_a_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_best(tmp_path / "none.tar")


@pytest.mark.parametrize("name", list(BEST.files()))
@pytest.mark.parametrize("content", [None, b"\xff scrap"], ids=["missing", "scrap"])
def test_best_with_a_bad_part_is_refused(name: str, content: bytes | None, tmp_path: Path) -> None:
    files = BEST.files()
    del files[name]
    if content is not None:
        files[name] = content
    (tmp_path / "best.tar").write_bytes(pack(files))
    with pytest.raises(CorruptCheckpoint, match=r"best\.tar"):
        read_best(tmp_path / "best.tar")


@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000])
def test_best_that_is_nested_without_end_is_refused(name: str, content: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{name} is nested too deeply"):
        read_best(io.BytesIO(pack({**BEST.files(), name: content})))


def read_last(file: BinaryIO) -> object:
    return unpack_state(unpack(file, "last"), "last")


@pytest.mark.parametrize("name", [*BEST.files(), *pack_state({}, {})])
def test_a_pickle_in_place_of_a_part_is_refused_and_never_loaded(name: str, tmp_path: Path) -> None:
    trap = pickle.dumps(Planted(tmp_path / "sprung"))
    read = read_best if name in BEST.files() else read_last
    parts = {**BEST.files(), **pack_state(TENSORS, {}), name: trap}
    with pytest.raises(CorruptCheckpoint):
        read(io.BytesIO(pack(parts)))
    assert not list(tmp_path.iterdir())


def test_last_comes_back_to_the_last_bit() -> None:
    values = {"steps": 12, "history": [{"valid_loss": 0.1 + 0.2, "is_best": True}]}
    tensors, back = unpack_state(unpack(pack(pack_state(TENSORS, values)), "last"), "last")
    assert_equal_tensors(tensors, TENSORS)
    assert back == values


def test_a_last_that_is_nested_without_end_is_damaged() -> None:
    with pytest.raises(CorruptCheckpoint, match="no `last`"):
        unpack_state({**pack_state(TENSORS, {}), "training.json": b"[" * 100_000}, "here")


def test_best_is_no_last_and_last_is_no_best() -> None:
    with pytest.raises(CorruptCheckpoint, match="no `last`"):
        unpack_state(BEST.files(), "here")
    with pytest.raises(CorruptCheckpoint, match="no `best`"):
        read_best(io.BytesIO(pack(pack_state(TENSORS, {}))))
