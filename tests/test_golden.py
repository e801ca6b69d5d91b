"""GLoRA against its frozen results (tests/golden/README.md), and those against the executable paper. Kind: oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fedlora import LoRA
from golden.make import play
from support import executable_paper

GOLDEN = Path(__file__).parent / "golden"
TENSORS = safetensors.torch.load_file(GOLDEN / "glora.safetensors")
CASES = json.loads((GOLDEN / "glora.json").read_text())


def uploads(case: str) -> list[dict[str, LoRA]]:
    """The stored inputs, round by round."""
    rounds = []
    for t in range(len(CASES[case]["selected"])):
        names = [c for c in CASES[case]["ranks"] if f"{case}/{t}/client/{c}/B" in TENSORS]
        rounds.append({c: LoRA(*(TENSORS[f"{case}/{t}/client/{c}/{f}"] for f in "BA")) for c in names})
    return rounds


@pytest.mark.parametrize("case", CASES)
def test_the_code_still_gives_the_frozen_results(case: str) -> None:
    results = play(CASES[case]["options"], CASES[case]["weights"], uploads(case))
    assert [r["selected"] for r in results] == CASES[case]["selected"]
    for t, result in enumerate(results):
        for key in ("projector", "coordinates"):
            torch.testing.assert_close(result[key], TENSORS[f"{case}/{t}/{key}"], rtol=0, atol=1e-9)
        for client, factors in result["readout"].items():
            for name, factor in zip("BA", factors, strict=True):
                torch.testing.assert_close(factor, TENSORS[f"{case}/{t}/readout/{client}/{name}"], rtol=0, atol=1e-9)


def test_the_frozen_paper_case_is_the_executable_paper() -> None:
    """Round by round with history, from the stored uploads: state and readouts of algorithms 1-3."""
    case, history = CASES["paper"], {}
    for t, sent in enumerate(uploads("paper")):
        arrays = {c: tuple(x.numpy() for x in lora.factors) for c, lora in sent.items()}
        paper = executable_paper.glora_round(arrays, case["weights"], case["options"]["rho"], 0.5, history)
        history = paper.history
        projector = TENSORS[f"paper/{t}/projector"].numpy()
        np.testing.assert_allclose(projector, paper.U_ref @ paper.U_ref.T, atol=1e-9)
        sizes = np.linalg.svd(paper.Z_g, compute_uv=False)
        np.testing.assert_allclose(np.linalg.norm(TENSORS[f"paper/{t}/coordinates"].numpy(), axis=1), sizes, atol=1e-9)
        for client, (B, A, selected) in paper.readouts.items():
            assert case["selected"][t][client] == selected
            got_B, got_A = (TENSORS[f"paper/{t}/readout/{client}/{f}"].numpy() for f in "BA")
            np.testing.assert_allclose(got_B @ got_A, B @ A, atol=1e-9)


def test_the_frozen_generic_case_is_the_mean() -> None:
    """coordinates are those of the mean: U_ref Z_g = sum p_i B_i A_i, so their Gram matrices agree."""
    for t, sent in enumerate(uploads("generic")):
        mean = sum(CASES["generic"]["weights"][c] * lora.delta() for c, lora in sent.items())
        Z = TENSORS[f"generic/{t}/coordinates"]
        torch.testing.assert_close(Z.mT @ Z, mean.mT @ mean, rtol=0, atol=1e-9)  # type: ignore[union-attr]
        torch.testing.assert_close(TENSORS[f"generic/{t}/projector"] @ mean, mean, rtol=0, atol=1e-9)
