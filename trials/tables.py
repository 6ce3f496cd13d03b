"""The language-model tables and figures of Zolna et al. 2018, each as one sweep.

Its methods are the sweep's arms, its seeds the draws. A scale changes sizes and lengths only: what a table
compares, dropout rates and factors are the paper's at every scale. A method's own batch size and non-monotone
interval belong to the full length alone.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trials.presets import PRESETS
from trials.spec import SECTION_OF, merged

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

Values = Mapping[str, Any]

MASK_SAMPLES = 5
"""How often MC-eval is repeated, with other masks each time."""

CHANGES: dict[Scale, dict[str, Any]] = {
    "tiny": {
        "corpus": {**PRESETS["quickstart"]["corpus"], "test_tokens": 10_000},
        "model": PRESETS["quickstart"]["model"],
        "training": {"epochs": 4, "batch_size": 20, "bptt": 35},
    },
    "small": {
        "model": {"embedding_size": 64, "hidden_size": 64, "layers": 1},
        "training": {"epochs": 6, "batch_size": 20, "bptt": 70},
    },
    "paper": {"resources": {"gpus": 1}},
}
"""What each scale changes in a preset."""

PLAIN: Values = {"regularizer": "none", "kappa": 0.0, "alpha": 0.0, "beta": 0.0}


@dataclass(frozen=True)
class Score:
    """A perplexity as the paper gives it."""

    mean: float
    plus_minus: float | None = None
    best: float | None = None


@dataclass(frozen=True)
class Row:
    """One row: an arm's trials, after fine-tuning or under sampled masks where it says so."""

    label: str
    arm: str
    finetunes: int = 0
    """How often the best checkpoint is fine-tuned."""
    masks: int = 0
    """Over how many sampled masks predictions are averaged; 0 takes the mean mask."""
    valid: Score | None = None
    test: Score | None = None


@dataclass(frozen=True)
class SearchRow:
    """One row of a search: validation perplexities of the best trials, and how many beat the baseline."""

    label: str
    arm: str
    best: float
    top5_mean: float
    top10_mean: float
    beating: int
    n: int


@dataclass(frozen=True)
class Table:
    """A table or a figure of the paper, with all that is needed to make it again."""

    name: str
    title: str
    where: str
    """In the paper."""
    compares: str
    preset: str
    """The configuration that the arms start from."""
    arms: Mapping[str, Values]
    draws: Mapping[Scale, int]
    rows: tuple[Row, ...] = ()
    search: tuple[SearchRow, ...] = ()
    """Rows of a search, in place of `rows`: nothing but validation counts there."""
    grid: Values = field(default_factory=dict)
    """At the paper's scale: where each non-zero factor of an arm is drawn from."""
    smaller: Mapping[Scale, Values] = field(default_factory=dict)
    """Fields of the sweep at a smaller scale, where the paper's own or the scale's make no sense."""
    curves: bool = False
    activation: bool = False
    """Whether the curves are shown with those of the mean hidden activation."""
    remarks: tuple[str, ...] = ()


def build_spec(
    table: Table, scale: Scale, corpus: dict[str, Any] | None = None, seeds: int | None = None
) -> dict[str, Any]:
    """The JSON of the table's sweep: `seeds` draws of each arm on the scale's or another corpus."""
    base = PRESETS[table.preset]
    of_table = {
        "name": f"{table.name}, {scale}",
        "arms": {arm: _fixed(table, scale, values) for arm, values in table.arms.items()},
        "space": {**base.get("space", {}), **(table.grid if scale == "paper" else {})},
    }
    spec = merged({**merged(base, CHANGES[scale]), **of_table}, dict(table.smaller.get(scale, {})))
    if corpus is not None:
        limits = {key: value for key, value in CHANGES[scale].get("corpus", {}).items() if key != "name"}
        spec["corpus"] = {**limits, **corpus}
    spec["budget"] = {"trials": (seeds or table.draws[scale]) * len(spec["arms"])}
    return deepcopy(spec)  # whoever changes it must not change the preset


def _fixed(table: Table, scale: Scale, values: Values) -> dict[str, Any]:
    """What an arm fixes: at full length all but the factors to search, else its regularization alone."""
    if scale == "paper":
        return {name: value for name, value in values.items() if not (name in table.grid and value)}
    return {name: value for name, value in values.items() if SECTION_OF[name] == "regularization"}


def _arm(preset: str, base: str) -> Values:
    """What a preset changes in another one, as an arm's fixed values."""
    return {
        name: value
        for section in ("model", "training", "regularization")
        for name, value in PRESETS[preset][section].items()
        if value != PRESETS[base][section][name]
    }


_PTB_ARMS = {"awd-lstm": {}, "fraternal": _arm("fraternal-ptb", "awd-lstm-ptb")}
_WT2_ARMS = {"awd-lstm": {}, "fraternal": _arm("fraternal-wt2", "awd-lstm-wt2")}
_ONE_RUN: Mapping[Scale, int] = {"tiny": 3, "small": 3, "paper": 1}
_MANY_ARMS: Mapping[Scale, int] = {"tiny": 2, "small": 3, "paper": 1}
_CITED = "The paper's table also cites models of other papers; these two rows are its own runs."
_NO_NUMBERS = "The paper shows curves and prints no number."
_FINETUNING = (
    "Fine-tuning is the released AWD-LSTM code's, as the paper says (§5.4): averaging, AR and TAR (α = 2, "
    "β = 1), and no fraternal dropout, whatever the model was trained with. Below the paper's scale it ends "
    "with its epochs: to converge, by the non-monotone rule with n = 5, takes seven at least."
)

_ALL = (
    Table(
        name="ptb",
        title="Word-level Penn Treebank",
        where="Table 1 (PTB24M)",
        compares="Fraternal Dropout with the AWD-LSTM baseline, each after one fine-tuning",
        preset="awd-lstm-ptb",
        arms=_PTB_ARMS,
        draws=_ONE_RUN,
        rows=(
            Row("AWD-LSTM 3-layer (baseline)", "awd-lstm", 1, valid=Score(60.0), test=Score(57.3)),
            Row("Fraternal dropout + AWD-LSTM", "fraternal", 1, valid=Score(58.9), test=Score(56.8)),
        ),
        remarks=(_CITED, _FINETUNING),
    ),
    Table(
        name="wt2",
        title="Word-level WikiText-2",
        where="Table 2 (WT234Mfnt)",
        compares="Fraternal Dropout with the AWD-LSTM baseline, each after one fine-tuning",
        preset="awd-lstm-wt2",
        arms=_WT2_ARMS,
        draws=_ONE_RUN,
        rows=(
            Row("AWD-LSTM 3-layer (baseline)", "awd-lstm", 1, valid=Score(68.6), test=Score(65.8)),
            Row("Fraternal dropout + AWD-LSTM", "fraternal", 1, valid=Score(66.8), test=Score(64.1)),
        ),
        remarks=(_CITED, _FINETUNING),
    ),
    Table(
        name="seeds",
        title="The baseline under several seeds",
        where="§4.1, after Table 1 (PTB24M)",
        compares="the AWD-LSTM baseline with itself under other seeds, without fine-tuning",
        preset="awd-lstm-ptb",
        arms={"awd-lstm": {}},
        draws={"tiny": 10, "small": 10, "paper": 10},
        rows=(
            Row(
                "AWD-LSTM 3-layer (baseline)",
                "awd-lstm",
                valid=Score(60.64, 0.15, best=60.33),
                test=Score(58.32, 0.14, best=58.05),
            ),
        ),
        remarks=(
            "The paper calls its ± a confidence interval and does not say of which level; ours is of 95 %.",
        ),
    ),
    Table(
        name="fd-vs-eld",
        title="Fraternal dropout and expectation linear dropout",
        where="Table 7 (FDvsELDresults)",
        compares="two regularizers over the same random draws of the other hyperparameters",
        preset="paper-search",
        arms=PRESETS["paper-search"]["arms"],
        draws={"tiny": 6, "small": 20, "paper": 206},
        search=(
            SearchRow("Expectation linear dropout", "eld", 59.4, 60.1, 60.5, 6, 208),
            SearchRow("Fraternal dropout", "fd", 59.4, 59.6, 59.9, 14, 203),
        ),
        smaller={
            "tiny": {
                "arms": {
                    **PRESETS["paper-search"]["arms"],
                    "plain": PRESETS["quickstart"]["arms"]["plain"],
                },
                "baseline": "plain",
            },
            "small": {"baseline": None, "training": {"epochs": 3}},  # forty trials: hours already
        },
    ),
    Table(
        name="ablation",
        title="Ablation: methods on a single-layer LSTM",
        where="Figure 1 (fig_pi_model)",
        compares="learning curves of the baseline, Π-model, ELD, ELDM and FD",
        preset="ablation-ptb",
        arms=PRESETS["ablation-ptb"]["arms"],
        draws=_MANY_ARMS,
        rows=(
            Row("Baseline", "baseline"),
            Row("Π-model", "pi"),
            Row("ELD", "eld"),
            Row("ELDM", "eldm"),
            Row("FD", "fd"),
        ),
        curves=True,
        remarks=(_NO_NUMBERS,),
    ),
    Table(
        name="convergence",
        title="Ablation: Π-model on the three-layer model",
        where="Figure 2 (FDconvergence)",
        compares="validation curves of the Π-model and FD",
        preset="fraternal-ptb",
        arms={"pi": {"regularizer": "pi_model", "kappa": 0.15}, "fd": {}},
        draws=_ONE_RUN,
        rows=(Row("Π-model", "pi"), Row("FD", "fd")),
        curves=True,
        remarks=(_NO_NUMBERS, "The Π-model's κ is the released ablation's; the paper does not say."),
    ),
    Table(
        name="activations",
        title="Ablation: activity regularization",
        where="Figures 3 (ARactivation) and 4 (fig_ar_tar)",
        compares="learning curves and hidden activation of the baseline, TAR, PR, AR and FD",
        preset="ablation-ptb",
        arms={
            "baseline": PLAIN,
            "tar": {**PLAIN, "beta": 1.0},
            "pr": {**PLAIN, "regularizer": "prediction_norm", "kappa": 0.1},
            "ar": {**PLAIN, "alpha": 2.0},
            "fd": {**PLAIN, "regularizer": "fraternal", "kappa": 0.15},
        },
        draws={"tiny": 2, "small": 3, "paper": 12},
        rows=(
            Row("Baseline", "baseline"),
            Row("TAR", "tar"),
            Row("PR", "pr"),
            Row("AR", "ar"),
            Row("FD", "fd"),
        ),
        grid={
            "alpha": {"type": "choice", "values": list(range(1, 13))},
            "beta": {"type": "choice", "values": list(range(1, 13))},
            "kappa": {"type": "choice", "values": [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]},
        },
        curves=True,
        activation=True,
        remarks=(
            _NO_NUMBERS,
            "At the paper's scale α, β and κ are drawn from the paper's grids; the best trial of a row is "
            "the paper's choice. PR, whose grid it does not give, shares FD's. At smaller scales α = 2 and "
            "β = 1 (Merity et al. 2017), κ = 0.15 for FD (released code) and 0.1 for PR (ours) are fixed.",
            "Hidden activation: |m·h|²/d, d the units and m the output dropout's mask, as the mean over each "
            "epoch's tokens in training.",
        ),
    ),
    Table(
        name="finetune",
        title="Importance of fine-tuning, Penn Treebank",
        where="Table 5 (finetuning), left half",
        compares="traditional and fraternal dropout after none, one and two fine-tunings",
        preset="awd-lstm-ptb",
        arms=_PTB_ARMS,
        draws=_ONE_RUN,
        rows=(
            Row("Traditional, none", "awd-lstm", 0, valid=Score(60.7), test=Score(58.8)),
            Row("Traditional, one", "awd-lstm", 1, valid=Score(60.0), test=Score(57.3)),
            Row("Fraternal, none", "fraternal", 0, valid=Score(59.8), test=Score(58.0)),
            Row("Fraternal, one", "fraternal", 1, valid=Score(58.9), test=Score(56.8)),
            Row("Fraternal, two", "fraternal", 2, valid=Score(58.5), test=Score(56.2)),
        ),
        remarks=(_FINETUNING,),
    ),
    Table(
        name="finetune-wt2",
        title="Importance of fine-tuning, WikiText-2",
        where="Table 5 (finetuning), right half",
        compares="traditional and fraternal dropout after none and one fine-tuning",
        preset="awd-lstm-wt2",
        arms=_WT2_ARMS,
        draws=_ONE_RUN,
        rows=(
            Row("Traditional, none", "awd-lstm", 0, valid=Score(69.1), test=Score(66.0)),
            Row("Traditional, one", "awd-lstm", 1, valid=Score(68.6), test=Score(65.8)),
            Row("Fraternal, none", "fraternal", 0, valid=Score(68.3), test=Score(65.3)),
            Row("Fraternal, one", "fraternal", 1, valid=Score(66.8), test=Score(64.1)),
        ),
        remarks=("The paper leaves two fine-tunings on WikiText-2 blank; so does this table.", _FINETUNING),
    ),
    Table(
        name="mc-eval",
        title="Monte Carlo evaluation",
        where="Appendix, Table 8 (MC-eval)",
        compares="sampled masks, whose predictions are averaged, with the mean mask and with FD",
        preset="awd-lstm-ptb",
        arms=_PTB_ARMS,
        draws=_ONE_RUN,
        rows=(
            Row("MC1", "awd-lstm", masks=1, valid=Score(92.2, 0.5), test=Score(89.2, 0.5)),
            Row("MC10", "awd-lstm", masks=10, valid=Score(66.2, 0.2), test=Score(63.7, 0.2)),
            Row("MC50", "awd-lstm", masks=50, valid=Score(64.4, 0.1), test=Score(62.1, 0.1)),
            Row("Baseline (average mask)", "awd-lstm", valid=Score(60.7), test=Score(58.8)),
            Row("Fraternal dropout", "fraternal", valid=Score(59.8), test=Score(58.0)),
        ),
        remarks=(
            "The paper does not say what its ± is. Ours is the 95 % interval over trainings, of which one "
            "has none; beside it is the standard deviation over samples of the masks for one model.",
        ),
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _ALL}
