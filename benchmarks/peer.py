"""A training step of fastai's AWD-LSTM, the plain model, in a plain loop: no Learner, none of its callbacks.

Installed apart (benchmarks/fastai-requirements.txt), and imported only where it is asked for.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import AWDLSTMConfig

FOLDER = Path(__file__).parent / ".fastai"


def is_installed() -> bool:
    """And can be imported; asked of another process, since this one has to go on without it."""
    code = f"import sys; sys.path.append({str(FOLDER)!r}); import fastai.text.models.core"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def fastai_step(config: AWDLSTMConfig, vocabulary_size: int) -> Callable[[Tensor, Tensor], None]:
    """A step by (inputs_TB, targets_TB): forward, backward, clipping at 0.25, SGD; the state stays."""
    sys.path.append(str(FOLDER))
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model

    given: dict[str, Any] = {
        "emb_sz": config.embedding_size,
        "n_hid": config.hidden_size,
        "n_layers": config.layers,
        "embed_p": config.embed_p,
        "input_p": config.input_p,
        "hidden_p": config.hidden_p,
        "output_p": config.output_p,
        "weight_p": config.weight_p,
    }
    model = get_language_model(AWD_LSTM, vocabulary_size, {**awd_lstm_lm_config, **given}).train()
    model.reset()
    optimiser = torch.optim.SGD(model.parameters(), lr=30.0, weight_decay=1.2e-6)

    def step(inputs_TB: Tensor, targets_TB: Tensor) -> None:
        logits_BTV, *_ = model(inputs_TB.t().contiguous())
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_TB.t().flatten())
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimiser.step()

    return step
