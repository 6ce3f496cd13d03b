"""A service of one's own: real processes."""

import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from service.database import migrate, open_engine
from service.errors import CommandFailed
from service.running import Signals, running_service
from service.settings import own_database_url
from service.tokens import Tokens

QUIET = Console(quiet=True)
pytestmark = pytest.mark.sqlite("a service for the length of a command is told of no database")


def pid_of(data_dir: Path) -> int:
    return int((data_dir / "service.lock").read_text())


@pytest.mark.parametrize("asked", [True, False])
def test_a_signal_on_the_way_out_does_not_change_how_an_interrupted_command_ends(asked: bool) -> None:
    """Python itself gives up its handlers before the process is gone."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Signals():
            if asked:
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if asked else before)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


@pytest.mark.slow
def test_each_command_talks_to_the_service_that_it_started(tmp_path: Path) -> None:
    """Also where several start at the same moment, each on a port of its own, and all of them go."""
    one, other = tmp_path / "one", tmp_path / "other"
    with Signals() as signals, running_service(one, signals, QUIET) as first:
        with running_service(other, signals, QUIET) as second:
            assert first.base_url != second.base_url
            ports = [int(client.base_url.rpartition(":")[2]) for client in (first, second)]
            for data_dir, port in zip((one, other), ports, strict=True):
                listening = psutil.Process(pid_of(data_dir)).net_connections("inet")
                assert port in {connection.laddr.port for connection in listening}
        assert first.list_sweeps() == []
    assert not {pid_of(one), pid_of(other)} & set(psutil.pids())


@pytest.mark.slow
def test_a_command_signs_in_where_that_is_asked_for_and_nowhere_begins_it(tmp_path: Path) -> None:
    with closing(Tokens(open_engine(own_database_url(tmp_path)))) as tokens:
        migrate(open_engine(own_database_url(tmp_path)))
        for _ in range(2):
            before = tokens.list_tokens()
            with Signals() as signals, running_service(tmp_path, signals, QUIET) as client:
                assert client.list_sweeps() == []
            assert tokens.list_tokens() == before
            tokens.create("somebody", "read", None)


def ask_a_service_that_was_killed(data_dir: Path) -> None:
    with Signals() as signals, running_service(data_dir, signals, QUIET) as client:
        process = psutil.Process(pid_of(data_dir))
        process.send_signal(signal.SIGKILL)
        process.wait()
        client.list_sweeps()


@pytest.mark.slow
def test_a_service_that_dies_under_a_command_is_said_to_have_died(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"does not answer any more .* see .*service\.log"):
        ask_a_service_that_was_killed(tmp_path / "data")


@pytest.mark.slow
def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        Signals() as signals,
        running_service(tmp_path / "data", signals, QUIET),
        pytest.raises(CommandFailed, match=r"did not start: .*is in use by the service"),
        running_service(tmp_path / "data", signals, QUIET),
    ):
        pass
