"""A report as one HTML page that needs nothing but itself. `python -m service.report_page SWEEP` writes one.

It is made in a process of its own: pictures of thousands of curves take seconds, and some hundred MiB, which
who serves requests has better use for.
"""

import base64
import json
import sys
from collections.abc import Sequence
from operator import attrgetter

import optuna
from markupsafe import Markup
from optuna.storages import get_storage

from service.database import now, open_engine, utc
from service.errors import SweepNotFound, UnreadableSpec, UnreadableStudy
from service.html import rendered, style
from service.pictures import Epoch, Picture, Story, draw_all, every_of
from service.progress import duration
from service.records import Records
from service.report import build_report
from service.report_texts import MOST_COMPARISONS, counts_line, number, pairs_line, percents, title
from service.schemas import ENDED, TrialView
from service.settings import Settings
from service.studies import open_storage
from service.views import SweepViews
from trials.perplexity import finite_perplexity
from trials.version import own_version


def write_page(story: Story, pictures: Sequence[Picture]) -> str:
    ended = sum(trial.state in ENDED for trial in story.trials)
    epochs = sum(trial.epochs_done for trial in story.trials)
    return rendered(
        "report.html",
        title=title(story.report),
        style=Markup(style("report.css")),
        report=story.report,
        counted=f"{ended} of {story.spec.budget.trials} trials ended, {epochs:,} epochs",
        ran=duration(story.ran_s) if story.ran_s else "",
        colours={arm: look[0] for arm, look in story.looks.items()},
        best=_best_in(story),
        pictures=pictures,
        every=story.every,
        spec=json.dumps(story.spec.model_dump(mode="json"), indent=2, ensure_ascii=False),
        version=own_version(),
        most=MOST_COMPARISONS,
        joined=lambda text: text.replace(" %", "\u00a0%"),
        encoded=lambda svg: base64.b64encode(svg).decode(),
        number=number,
        percents=percents,
        counts_line=counts_line,
        pairs_line=pairs_line,
    )


def _best_in(story: Story) -> TrialView | None:
    """The best of those that the table of the arms has."""
    numbers = {arm.best_trial for arm in story.report.arms}
    told = [trial for trial in story.trials if trial.number in numbers]
    return min(told, key=attrgetter("rank"), default=None)


def read_story(records: Records, views: SweepViews, sweep_id: str) -> Story:
    """Raises SweepNotFound, UnreadableSpec, UnreadableStudy."""
    record = records.get_sweep(sweep_id)
    trials = views.trials(record)
    report = build_report(sweep_id, record.state, record.spec, trials, now())
    every = every_of(len(trials), records.count_epochs(sweep_id))
    epochs = [
        Epoch(
            number=row.number,
            epoch=row.epoch,
            perplexity=finite_perplexity(row.valid_loss),
            recorded_at=utc(row.recorded_at),
            seconds=row.seconds,
            tokens=row.tokens,
        )
        for row in records.epochs_of(sweep_id, len(record.spec.arms), every)
    ]
    return Story(record.spec, report, trials, epochs, record.running_s(), every)


def main(sweep_id: str, settings: Settings) -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = settings.resolved_database_url
    views = SweepViews(records := Records(open_engine(url)), get_storage(open_storage(url)))
    try:
        story = read_story(records, views, sweep_id)
    except (SweepNotFound, UnreadableSpec, UnreadableStudy) as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(write_page(story, list(draw_all(story))).encode())
    return 0


if __name__ == "__main__":
    from_environment = Settings()
    sys.exit(main(sys.argv[1], from_environment))
