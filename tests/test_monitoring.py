"""What a run reports while it runs: the memory of its state, the time left."""

from __future__ import annotations

import pytest
import torch

from common.metrics import readable

SMALL = "--d-model 16 --n-layers 1 --n-heads 2 --seq-len 16 --global-batch-size 4".split()
LINE = {"step": 7, "loss": 5.25, "grad_norm": 1.5, "lr": 1e-3, "tokens_per_s": 1234.5}
LINE |= {"step_ms": 60.04, "memory_mb": 404.1, "model_state_mb": 15.69, "comm_mb": 3.926}
LINE |= {"seconds_left": 3723.4, "val_loss": 5.1, "val_ppl": 164.02}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_console_line_shows_the_model_state_and_on_a_gpu_the_peak(monkeypatch, on_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    speed = "step     7  loss 5.2500  norm 1.500  lr 1.00e-03  1,234 tok/s  60.0 ms"
    memory = "state 15.69 MB  peak 404 MB" if on_gpu else "state 15.69 MB"
    end = "ETA 1:02:03  val loss 5.1  val ppl 164"
    assert readable(LINE) == f"{speed}  {memory}  sent 3.93 MB  {end}"
    busy = readable(LINE | {"save_ms": 12.34, "mfu": 0.4})
    assert "sent 3.93 MB  save 12.3 ms  MFU 40.0%  ETA" in busy


@pytest.mark.slow
def test_metrics_report_the_seconds_left(pools, corpus_dir):
    flags = [*SMALL, "--data", str(corpus_dir), "--steps", "6", "--log-every", "2"]
    (metrics,) = pools(1, group=False).train("01", flags)
    left = [line["seconds_left"] for line in metrics]
    assert all(x > 0 for x in left[:-1]) and left[-1] == 0
