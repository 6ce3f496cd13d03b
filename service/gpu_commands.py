"""`fraternal gpus`: what GPUs this machine has, and how many trials share each of them best."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import CommandFailed
from service.options import DEFAULT_DATA_DIR, AsJson, DataDir, say

if TYPE_CHECKING:
    from service.packing import Packing
    from trials.gpus import Gpu


def gpus(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Train side by side on each kind of GPU, for minutes, and keep the result.",
        ),
    ] = False,
    as_json: AsJson = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """List the GPUs that trials can use here, and how many trials share each kind best.

    `--measure` finds that out, for `"resources": "auto"` of the service with this data directory. Let nothing
    else use the GPUs meanwhile; measure again after a change of card, driver or of NVIDIA's MPS.

    Example: `fraternal gpus --measure`
    """
    from service.launcher import usable_gpus
    from service.packing import read_packings
    from trials.gpus import driver_version

    there = usable_gpus()
    if measure:
        if not there:
            raise CommandFailed(f"there is no GPU to measure: {_why_none()}")
        for gpu in {gpu.name: gpu for gpu in there}.values():
            _measure(gpu, data_dir, as_json)
    packings = read_packings(data_dir)
    if as_json:
        known = {name: json.loads(packing.model_dump_json()) for name, packing in packings.items()}
        print(
            json.dumps(
                {
                    "driver": driver_version(),
                    "gpus": [{**asdict(gpu), "packing": known.get(gpu.name)} for gpu in there],
                },
                indent=2,
            )
        )
        return
    _print(there, packings)


def _why_none() -> str:
    from service.launcher import torch_version
    from trials.gpus import VISIBLE, driver_version

    if torch_version().endswith("+cpu"):
        return f"torch {torch_version()} is built for CPUs alone; install its CUDA build"
    if driver_version() is None:
        return "NVIDIA's driver is not there, or not to be seen from here"
    return f"{VISIBLE} leaves none of those that the driver knows"


def _measure(gpu: "Gpu", data_dir: Path, as_json: bool) -> None:
    import anyio

    from service.launcher import LocalLauncher, ProbeFailed, torch_version, usable_gpus
    from service.packing import Measured, packing_of, write_packing
    from service.packing import measure as measured
    from service.settings import Settings
    from trials.cpus import usable_cpus
    from trials.gpus import VISIBLE, driver_version

    most = max(1, usable_cpus() // len(usable_gpus()))
    found: list[Measured] = []

    async def run() -> None:
        launcher = LocalLauncher(Settings(data_dir=data_dir, ray_address=None))
        async for one in measured(launcher, "cuda", gpu.memory_bytes, most):
            found.append(one)
            say(f"{gpu.name}, {one.shape}: {_rates(one.tokens_per_s)}", as_json)

    say(f"measuring {gpu.name} ({gpu.uuid}), with up to {most} trials at once", as_json)
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = gpu.uuid
    try:
        anyio.run(run)
    except ProbeFailed as error:
        raise CommandFailed(f"{gpu.name} could not be measured: {error}") from error
    finally:
        del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before
    write_packing(data_dir, packing_of(gpu.name, driver_version(), torch_version(), found))


def _rates(tokens_per_s: dict[int, float]) -> str:
    return ", ".join(f"{n} at once {rate:,.0f} tokens/s" for n, rate in tokens_per_s.items())


def _print(there: "tuple[Gpu, ...]", packings: "dict[str, Packing]") -> None:
    from rich.console import Console
    from rich.table import Table

    from trials.gpus import driver_version
    from trials.memory import amount

    if not there:
        print(f"no GPU that trials could use: {_why_none()}")
        return
    print(f"NVIDIA's driver {driver_version()}")
    for gpu in there:
        print(f"{gpu.name}  {amount(gpu.memory_bytes)}  {gpu.uuid}")
    for name in dict.fromkeys(gpu.name for gpu in there):
        packing = packings.get(name)
        if packing is None:
            print(
                f"\n{name}: `auto` gives each trial its own; how many share one best has not been measured, "
                "see `fraternal gpus --measure`"
            )
            continue
        counts = sorted({count for one in packing.shapes for count in one.tokens_per_s})
        print(f"\n{name}: tokens/s of all trials that share it, {packing.measured_at:%Y-%m-%d}")
        table = Table("model", *map(str, counts), "auto")
        for one in packing.shapes:
            rates = [one.tokens_per_s.get(count) for count in counts]
            cells = ["" if rate is None else f"{rate:,.0f}" for rate in rates]
            table.add_row(one.shape, *cells, str(one.best))
        Console().print(table)
