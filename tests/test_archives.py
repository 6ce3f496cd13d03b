"""The archive that leaves the service: whole, told about, checked by tools that know nothing of us."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.archives import Joined, Piece, archive_of
from service.database import now
from service.errors import CheckpointDamaged
from service.records import SweepRecord
from service.schemas import TrialDetail, VerificationView
from tests.fakes import checkpoint_files, spec, verified
from tests.test_report import trial
from trials.store import pack, unpack
from trials.tasks import Task
from trials.verification import Check

ASKED = spec(name="a | b", sampler={"name": "random", "seed": 5})
TASK = Task(
    "s1", 4, 2, "fd", 7, ASKED.trial_config("fd", {"kappa": 0.1, "batch_size": 20}), ASKED.corpus, "cpu", 0
)
FILES = checkpoint_files(TASK, 3, 4.5)
SHA256 = hashlib.sha256(pack(FILES)).hexdigest()
EXTRA = ["README.md", "LICENSE.txt", "provenance.json"]


def record() -> SweepRecord:
    at = now()
    return SweepRecord(
        id="s1",
        written_spec=ASKED.model_dump(mode="json"),
        state="succeeded",
        state_since=at,
        state_reason=None,
        generation=1,
        epochs_at_launch=0,
        fruitless_launches=0,
        driver=None,
        lease_until=None,
        created_at=at,
        started_at=at,
        finished_at=at,
        ran_s=1.0,
        running_since=None,
        study="s1",
        retry_numbers=None,
        revision=1,
        writes=None,
    )


RECORD = record()


def detail(**changes: Any) -> TrialDetail:
    fields = {
        "checkpoint_sha256": SHA256,
        "runtime": "torch 2.13; threads 1",
        "device": "cpu: one",
        "best_epoch": 3,
        **changes,
    }
    view = trial(4, "fd", 90.0, seed=7, attempt=2, params={"kappa": 0.1, "batch_size": 20}, **fields)
    return TrialDetail(**dict(view), config={}, curve=[])


def verification(**changes: Any) -> VerificationView:
    found = asdict(verified(Check("s1", 4, 3, 4.5, SHA256, "cpu", ASKED.corpus, "cpu", 1, 60.0)))
    return VerificationView(**{**found, "verified_at": RECORD.created_at, **changes})


def archived(file: bytes = pack(FILES), **changes: Any) -> bytes:
    with archive_of(io.BytesIO(file), RECORD, detail(**changes)) as archive:
        content = archive.read()
        assert len(content) == archive.size
    return content


def test_tar_and_sha256sum_find_everything_in_order(tmp_path: Path) -> None:
    (tmp_path / "best.tar").write_bytes(archived())
    listed = subprocess.run(
        ["tar", "-tf", "best.tar"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(listed) == sorted([*FILES, *EXTRA, "SHA256SUMS"])
    assert listed[0] == "README.md"
    assert archived().endswith(bytes(2 * tarfile.BLOCKSIZE)), "some tools take a tar without its end for cut"
    subprocess.run(["tar", "-xf", "best.tar"], cwd=tmp_path, check=True)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)
    summed = {line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()}
    assert summed == {*FILES, *EXTRA}


def test_what_the_trial_wrote_is_in_it_as_it_was() -> None:
    files = unpack(archived(), "it")
    assert {name: files[name] for name in FILES if name != "metrics.json"} == {
        name: content for name, content in FILES.items() if name != "metrics.json"
    }
    metrics = json.loads(files["metrics.json"])
    assert metrics.pop("verification") is None
    assert metrics == json.loads(FILES["metrics.json"])


def test_it_says_where_it_comes_from_and_how_it_came_out() -> None:
    files = unpack(archived(verification=verification()), "it")
    provenance = json.loads(files["provenance.json"])
    assert provenance["sweep"]["id"] == "s1"
    assert provenance["sweep"]["sampler"]["seed"] == 5
    assert provenance["trial"] == {
        "number": 4,
        "arm": "fd",
        "draw": 2,
        "attempt": 2,
        "params": {"kappa": 0.1, "batch_size": 20},
    }
    assert (provenance["seed"], provenance["device"]) == (7, "cpu: one")
    assert provenance["runtime"] == "torch 2.13; threads 1"
    assert provenance["corpus_sha256"] == {"train": "1a", "valid": "2b", "test": "3c"}
    assert provenance["checkpoint_sha256"] == SHA256
    found = json.loads(files["metrics.json"])["verification"]
    assert (found["outcome"], found["valid_loss"], found["tolerance"]) == ("verified", 4.5, 1e-6)
    readme = files["README.md"].decode()
    assert "perplexity 90.0171" in readme
    assert "the loss is 0.0e+00 nats per token off, of 1e-06 allowed, on cpu" in readme
    assert "fraternal evaluate s1-t00004-best.tar" in readme
    assert "public domain" in files["LICENSE.txt"].decode()


@pytest.mark.parametrize(
    ("state", "found", "words"),
    [
        ("RUNNING", None, "not yet: the trial runs"),
        ("COMPLETE", None, "| not yet |"),
        ("RUNNING", {"epoch": 2}, "not yet: the trial runs"),
        ("RUNNING", {"checkpoint_sha256": "0" * 64}, "not yet: the trial runs"),
        ("COMPLETE", {"outcome": "impossible", "message": "no text"}, "impossible: no text"),
    ],
)
def test_it_does_not_claim_more_than_was_found(state: str, found: dict[str, Any] | None, words: str) -> None:
    of = None if found is None else verification(**found)
    files = unpack(archived(state=state, verification=of), "it")
    assert words in files["README.md"].decode()


def test_its_bytes_are_a_function_of_file_and_rows() -> None:
    assert archived(verification=verification()) == archived(verification=verification())
    assert archived() != archived(verification=verification())


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"no tar",
        pack(FILES)[:200_000],
        pack({name: content for name, content in FILES.items() if name != "config.json"}),
        pack({**FILES, "metrics.json": b"[]"}),
        pack({**FILES, "config.json": b"{}"}),
        pack({**FILES, "config.json": b"\xff"}),
    ],
)
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETE", "FAIL"])
def test_a_damaged_file_is_said_to_be_and_not_sent(file: bytes, state: str) -> None:
    with pytest.raises(CheckpointDamaged, match="trial 4 of sweep s1 is not what was written"):
        archived(file, state=state)


@pytest.mark.parametrize("state", ["COMPLETE", "PRUNED", "FAIL"])
def test_a_file_that_is_another_than_the_trial_reported_is_not_sent(state: str) -> None:
    other = pack({**FILES, "model.safetensors": b"other"})
    with pytest.raises(CheckpointDamaged, match="is on record"):
        archived(other, state=state)
    assert unpack(archived(other, state="RUNNING"), "it")["model.safetensors"] == b"other"


@pytest.mark.parametrize("state", ["PRUNED", "FAIL"])
def test_a_better_one_that_a_killed_process_had_saved_but_not_reported_is_sent(state: str) -> None:
    ahead = pack({**FILES, "metrics.json": json.dumps({"epoch": 4, "valid_loss": 4.4}).encode()})
    files = unpack(archived(ahead, state=state, verification=verification()), "it")
    metrics = json.loads(files["metrics.json"])
    assert (metrics["epoch"], metrics["verification"]) == (4, None)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def plain_members() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [(tarfile.TarInfo(name), content) for name, content in unpack_all(pack(FILES)).items()]


def unpack_all(file: bytes) -> dict[str, bytes]:
    """With its sums."""
    with tarfile.open(fileobj=io.BytesIO(file)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def link_to(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member, b""


def larger_than_the_file(name: str, size: int) -> bytes:
    """A file whose header of this member says that it has so many bytes, of which none are there."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def flipped(file: bytes, of: bytes) -> bytes:
    at = file.index(of)
    return file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (tar_of(*plain_members(), (tarfile.TarInfo("/etc/cron.d/x"), b"*")), "holds '/etc/cron.d/x'"),
        (tar_of(*plain_members(), (tarfile.TarInfo("../x"), b"")), r"holds '\.\./x'"),
        (tar_of(*plain_members(), (tarfile.TarInfo("metrics.json"), b"{}")), "twice"),
        (tar_of(link_to("config.json", tarfile.LNKTYPE), *plain_members()[2:]), "no plain file"),
        (tar_of(link_to("model.safetensors", tarfile.SYMTYPE)), "no plain file"),
        (tar_of(link_to("model.safetensors", tarfile.DIRTYPE)), "no plain file"),
        (larger_than_the_file("config.json", 10 * 2**30), "10,737,418,240 bytes"),
        (larger_than_the_file("model.safetensors", 10 * 2**30), "unexpected end"),
        (larger_than_the_file("model.safetensors", 2**80), "int too large"),
        (flipped(pack(FILES), bytes(range(256))), "SHA-256 of model.safetensors"),
        (flipped(pack(FILES), b"<unk>"), "SHA-256 of vocabulary.txt"),
        (pack({**FILES, "metrics.json": b"[" * 10**5}), "RecursionError"),
        (pack({**FILES, "metrics.json": b'{"epoch": 9, "valid_loss": 1e400}'}), "no finite"),
        (pack({**FILES, "metrics.json": b'{"epoch": 9, "valid_loss": NaN}'}), "no finite"),
        (pack({**FILES, "config.json": b"[]"}), "no object"),
    ],
)
@pytest.mark.parametrize("state", ["RUNNING", "FAIL"])
def test_what_nobody_vouches_for_is_not_believed(file: bytes, words: str, state: str) -> None:
    """Of a trial that runs, or was ended by a kill, the file need not be the one on record."""
    with pytest.raises(CheckpointDamaged, match=words):
        archived(file, state=state, best_epoch=2)


def test_a_file_with_holes_is_no_checkpoint(tmp_path: Path) -> None:
    with (tmp_path / "metrics.json").open("wb") as file:
        file.truncate(2**20)
    subprocess.run(
        ["tar", "--sparse", "--format=gnu", "-cf", "it.tar", "metrics.json"], cwd=tmp_path, check=True
    )
    with pytest.raises(CheckpointDamaged, match="no plain file"):
        archived((tmp_path / "it.tar").read_bytes(), state="RUNNING")


def test_nobodys_words_break_the_table_of_the_readme() -> None:
    config = json.loads(FILES["config.json"])
    config["corpus"] = {"path": "/text/a|b\n# <b>`c"}
    file = pack({**FILES, "config.json": json.dumps(config).encode()})
    of = {"checkpoint_sha256": hashlib.sha256(file).hexdigest()}
    found = verification(**of, outcome="impossible", message="ended with 1: Traceback\n  | File <x>\n")
    readme = unpack(archived(file, **of, verification=found), "it")["README.md"].decode()
    rows = [line for line in readme.partition("## Use it")[0].splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [3] * 7
    assert "/text/a\\|b \\# \\<b\\>\\`c" in readme


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    moves=st.lists(st.tuples(st.sampled_from(["read", "seek", "end"]), st.integers(0, 100)), max_size=12),
)
def test_pieces_read_like_the_one_file_that_they_make(sizes: list[int], moves: list[tuple[str, int]]) -> None:
    whole = bytes(range(256))[: sum(sizes)]
    pieces, start = [], 0
    for number, size in enumerate(sizes):
        part = whole[start : start + size]
        inner: BinaryIO = io.BytesIO(b"before" + part + b"after")
        pieces.append(Piece(part, size) if number % 2 else Piece(inner, size, len("before")))
        start += size
    joined, plain = io.BufferedReader(Joined(pieces)), io.BytesIO(whole)
    for move, by in moves:
        if move == "read":
            assert joined.read(by) == plain.read(by)
        elif move == "seek":
            assert joined.seek(by) == plain.seek(by)
        else:
            back = -min(by, len(whole))
            assert joined.seek(back, io.SEEK_END) == plain.seek(back, io.SEEK_END)
        assert joined.tell() == plain.tell()


def test_closing_it_closes_the_file() -> None:
    file = io.BytesIO(pack(FILES))
    archive_of(file, RECORD, detail()).close()
    assert file.closed
