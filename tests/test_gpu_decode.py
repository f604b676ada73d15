"""On a CUDA GPU: replayed decoding gives what the CPU gives, and a target that waits for the host runs uncaptured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny import make_tiny
from test_decode_families import VOCAB, drafter_for

from dflash import decode
from dflash.caches import TappedTarget
from dflash.decode import decode_plain, decode_speculative
from dflash.graphs import Graphs
from dflash.sampling import Sampling
from dflash.target import TargetSpec, load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS, LIMITS = (3, 21, 8, 1, 13, 40), [60, 24, 9, 60, 2, 33]


def answers(folder: Path, device: str, temperature: float, **options: Any) -> list[list[list[int]]]:
    """Of the target alone and with an untrained drafter, in fp32."""
    spec = TargetSpec.read(folder)
    target = TappedTarget(load_target(folder, torch.float32, device), spec, (1, 3))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    drafter = drafter_for(spec).to(device)

    def sampling() -> Sampling:
        return Sampling(temperature=temperature, generator=torch.Generator().manual_seed(2))

    own = decode_plain(target, prompts, LIMITS, (7,), sampling(), **options)
    ours = decode_speculative(target, drafter, prompts, LIMITS, (7,), sampling(), **options)
    return [[response.output_ids for response in responses] for responses in (own, ours)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_captured_decoding_gives_the_cpus_answers(
    family: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, rows reused, graphs of several ends."""
    folder = make_tiny(tmp_path / "t", family, vocab_size=VOCAB, seed=1, tie_word_embeddings=False)
    monkeypatch.setattr(decode, "END_STEP", 32)
    captured = []
    keep = Graphs.prepare
    monkeypatch.setattr(Graphs, "prepare", lambda self, *a, **k: (captured.append(a[2]), keep(self, *a, **k))[1])
    expected = answers(folder, "cpu", temperature)
    assert expected[0] == expected[1]
    assert answers(folder, "cuda", temperature, rows=3) == expected
    assert len(captured) > 2
    assert all(captured)


def test_a_target_that_waits_for_the_host_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny(tmp_path / "t", "llama", vocab_size=VOCAB, seed=1)
    expected = answers(folder, "cpu", 0.0)
    usual = TappedTarget.logits

    def waiting(self: TappedTarget, ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        assert ids.sum().item() >= 0
        return usual(self, ids, *rest, **options)

    monkeypatch.setattr(TappedTarget, "logits", waiting)
    assert answers(folder, "cuda", 0.0) == expected
