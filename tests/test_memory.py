from pathlib import Path

import pytest
import torch

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.sampling.decoders import CachedDecoder

from .gradients import first_gradient, make_trainer


def test_the_size_is_halved_until_it_fits_and_stays() -> None:
    tried, said = list[int](), list[str]()

    def work(size: int) -> int:
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    backoff = OOMBackoff("update", "--micro-batch-size", 0, said.append)
    assert backoff.run(work, 14) == 3
    assert backoff.run(work, 14) == 3
    assert backoff.run(work, 2) == 2
    assert tried == [14, 7, 3, 3, 2]
    assert ["from here on 7" in said[0], "from here on 3" in said[1], len(said)] == [True, True, 2]

    def never(size: int) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        OOMBackoff("update", "--micro-batch-size", 0).run(never, 1)


@pytest.mark.parametrize("options", [{"kl_coef": 0.1}, {"num_iterations": 2}])
def test_out_of_memory_in_an_update_leaves_the_gradient_as_it_is(
    options: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = first_gradient(tmp_path / "whole", **options)
    forward = Transformer.forward

    def small(self: Transformer, tokens: object, packing: object, *args: object) -> object:
        out = forward(self, tokens, packing, *args)  # type: ignore[arg-type]
        if len(packing.mask) > 2:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    monkeypatch.setattr(Transformer, "forward", small)
    cut = first_gradient(tmp_path / "cut", **options)
    assert "from here on 3 (see --micro-batch-size)" in (
        said := " ".join(capsys.readouterr().err.split())
    )
    assert "from here on 1 (see --micro-batch-size)" in said
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_out_of_memory_in_a_rollout_leaves_the_tokens_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(tmp_path / "whole").source.batch(0)
    prefill, sizes = CachedDecoder.prefill, list[int]()

    def small(self: CachedDecoder) -> torch.Tensor:
        sizes.append(len(self.prompt_len))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self)

    monkeypatch.setattr(CachedDecoder, "prefill", small)
    trainer = make_trainer(tmp_path / "cut")
    cut = trainer.source.batch(0)
    assert cut.texts == whole.texts
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    assert trainer.sampler.backoffs[4].size == 1
