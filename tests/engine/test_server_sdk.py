"""Every call of the unmodified SDK, over HTTP, against an engine in a process of its own."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import pytrio
from pytrio import AdamParams, Datum, ModelInput, SamplingParams

from core.config import EngineSettings
from engine.connection import open_embedded
from engine.embedded.digests import DIGEST_METRIC

TEXT = "Who founded the city in which Ada was born? Answer: nobody knows."
HOT = 8.0
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


@pytest.fixture(scope="module")
def service(shared_run: Path) -> Iterator[pytrio.ServiceClient]:
    """Open an SDK client of a running engine."""
    connection = open_embedded(EngineSettings(), shared_run)
    yield connection.service
    connection.watch.close()


@pytest.fixture(scope="module")
def trainer(service: pytrio.ServiceClient) -> pytrio.TrainingClient:
    """Open a training client that the module's tests share."""
    return service.create_lora_training_client("rolltape/tiny", rank=8, seed=3)


@pytest.fixture(scope="module")
def tokens(trainer: pytrio.TrainingClient) -> list[int]:
    """Return the token ids of a short text, by the tokenizer that the SDK itself loads offline."""
    encoded = trainer.get_tokenizer().encode(TEXT)
    assert trainer.get_tokenizer().decode(encoded) == TEXT
    return list(encoded)


def policy_datum(tokens: list[int], advantage: float = 0.5) -> Datum:
    """Return a datum for the policy losses."""
    count = len(tokens) - 1
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [-1.0] * count,
            "advantages": [advantage] * count,
        },
    )


def test_capabilities_name_the_one_model(service: pytrio.ServiceClient) -> None:
    """The catalogue has one model, a local folder, and its context."""
    (model,) = service.get_server_capabilities().supported_models
    assert Path(model.model_name).is_dir()
    assert model.max_context_length == 2048
    assert model.training.available
    assert model.sampling.available
    assert service.get_supported_models() == [model.model_name]


@pytest.mark.parametrize("loss", LOSSES)
def test_forward_and_backward_with_every_loss(
    trainer: pytrio.TrainingClient, tokens: list[int], loss: str
) -> None:
    """Each loss gives one logprob per target, the same in forward and forward_backward."""
    data = [policy_datum(tokens), policy_datum(tokens[:9])]
    forward = trainer.forward(data, loss_fn=loss).result()
    backward = trainer.forward_backward(data, loss_fn=loss).result()
    assert forward.metrics == backward.metrics
    assert [out["logprobs"].shape for out in backward.loss_fn_outputs] == [[len(tokens) - 1], [8]]
    assert forward.metrics["token_count"] == len(tokens) + 7
    metrics = trainer.optim_step(AdamParams(learning_rate=1e-4)).result().metrics
    assert metrics["grad_norm"] > 0
    assert all(0 <= metrics[f"{DIGEST_METRIC}{word}"] < 2**32 for word in range(8))


def test_loss_config_reaches_the_loss(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """A heavier penalty raises the loss; a setting that no loss has is refused."""
    data = [policy_datum(tokens)]
    usual = trainer.forward(data, loss_fn="dro").result().metrics["loss_sum"]
    config: dict[str, object] = {"beta": 0.5}
    strict = trainer.forward(data, loss_fn="dro", loss_fn_config=config).result()
    assert strict.metrics["loss_sum"] > usual
    with pytest.raises(pytrio.PyTrioError, match="wobble"):
        trainer.forward(data, loss_fn="ppo", loss_fn_config={"wobble": 1.0}).result()


def test_auto_shift_drops_the_first_label(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """auto_shift scores label t+1 at token t, and says 0 for the label that it drops."""
    whole = Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens})
    shifted = trainer.forward([whole], auto_shift=True).result()
    plain = trainer.forward([policy_datum(tokens)], loss_fn="cross_entropy").result()
    first, *rest = shifted.loss_fn_outputs[0]["logprobs"].data
    assert first == 0.0
    assert rest == plain.loss_fn_outputs[0]["logprobs"].data
    assert shifted.metrics == plain.metrics


def test_ignored_targets_take_no_part(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """A target of -100 counts as no token."""
    targets = [-100, *tokens[2:]]
    datum = Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets})
    result = trainer.forward([datum]).result()
    assert result.metrics["token_count"] == len(tokens) - 2
    assert result.loss_fn_outputs[0]["logprobs"].data[0] == 0.0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_custom_loss_equals_the_built_in_one(service: pytrio.ServiceClient, tokens: list[int]) -> None:
    """A custom loss that sums the negative logprobs has the gradient of cross_entropy."""
    import torch

    def negative_sum(_data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[object, dict[str, float]]:
        loss = -logprobs[0].sum()
        return loss, {"custom": float(loss.detach())}

    norms = []
    for custom in (True, False):
        client = service.create_lora_training_client("rolltape/tiny", rank=4, seed=5)
        if custom:
            output = client.forward_backward_custom([policy_datum(tokens)], negative_sum).result()
            assert "custom" in output.metrics
        else:
            client.forward_backward([policy_datum(tokens)]).result()
        norms.append(client.optim_step(AdamParams()).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_sampling_parameters(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """Seeds repeat, greedy ignores them, stop strings and ids end a sequence, prompts are scored."""
    client = trainer.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(tokens)
    # Hot enough that the text does not depend on what the base model has learned.
    params = SamplingParams(max_tokens=12, seed=7, temperature=HOT)
    one = client.sample(prompt, num_samples=3, sampling_params=params).result()
    two = client.sample(prompt, num_samples=3, sampling_params=params).result()
    assert one == two
    assert len({tuple(sequence.tokens) for sequence in one.sequences}) == 3
    assert all(len(s.tokens) == len(s.logprobs) for s in one.sequences)
    assert one.output_tokens == sum(len(sequence.tokens) for sequence in one.sequences)
    unseeded = SamplingParams(max_tokens=12, temperature=HOT)
    assert (
        client.sample(prompt, sampling_params=unseeded).result()
        != client.sample(prompt, sampling_params=unseeded).result()
    )
    greedy = [
        client.sample(
            prompt, sampling_params=SamplingParams(max_tokens=6, temperature=0.0, seed=seed)
        ).result()
        for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]
    top = client.sample(prompt, sampling_params=SamplingParams(max_tokens=6, top_k=1)).result()
    assert top.sequences[0].tokens == greedy[0].sequences[0].tokens


def test_stop_conditions(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """A stop string over several tokens, and a stop id, end the sequence where they occur."""
    client = trainer.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(tokens)
    decode = trainer.get_tokenizer().decode
    for seed in range(50):
        hot = SamplingParams(max_tokens=12, seed=seed, temperature=HOT)
        sequence = client.sample(prompt, sampling_params=hot).result().sequences[0]
        text = decode(sequence.tokens[2:5])
        # Single bytes of a character have no text of their own.
        if len(sequence.tokens) == 12 and "\ufffd" not in text:
            break
    by_text = client.sample(prompt, sampling_params=hot.model_copy(update={"stop": [text]})).result()
    assert by_text.sequences[0].tokens == sequence.tokens[:5]
    assert by_text.sequences[0].stop_reason == "stop"
    stop_id = sequence.tokens[1]
    by_id = client.sample(prompt, sampling_params=hot.model_copy(update={"stop": [stop_id]})).result()
    end = sequence.tokens.index(stop_id) + 1
    assert by_id.sequences[0].tokens == sequence.tokens[:end]


def test_prompt_logprobs(trainer: pytrio.TrainingClient, tokens: list[int]) -> None:
    """compute_logprobs agrees with the trainer's forward pass and with top-1."""
    client = trainer.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(tokens)
    first, *logprobs = client.compute_logprobs(prompt).result()
    assert first is None
    forward = trainer.forward([policy_datum(tokens)], loss_fn="cross_entropy").result()
    np.testing.assert_allclose(logprobs, forward.loss_fn_outputs[0]["logprobs"].data, rtol=0, atol=1e-5)
    scored = client.sample(
        prompt,
        sampling_params=SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    assert scored.prompt_logprobs[1:] == logprobs
    assert scored.topk_prompt_logprobs[0] is None
    for best, own in zip(scored.topk_prompt_logprobs[1:], logprobs, strict=True):
        assert best is not None
        assert best[0][1] >= own
        assert [logprob for _, logprob in best] == sorted((lp for _, lp in best), reverse=True)


def test_restoring_with_the_optimizer_goes_on_byte_identically(
    service: pytrio.ServiceClient, tokens: list[int], shared_run: Path
) -> None:
    """Two steps in one run equal one step, a saved state, and one step in a restored run."""

    def step(client: pytrio.TrainingClient, advantage: float) -> None:
        client.forward_backward([policy_datum(tokens, advantage)], "importance_sampling").result()
        client.optim_step(AdamParams(learning_rate=1e-2)).result()

    def weights(uri: str) -> bytes:
        run, kind, name = uri.removeprefix("trio://").split("/")
        return (shared_run / "engine" / "runs" / run / kind / f"{name}.npz").read_bytes()

    client = service.create_lora_training_client("rolltape/tiny", rank=8, seed=11)
    step(client, 0.5)
    state = client.save_state("half").result().path
    step(client, -0.25)
    whole = client.save_weights_for_sampler("whole").result().path

    resumed = service.create_training_client_from_state_with_optimizer(state)
    step(resumed, -0.25)
    assert weights(resumed.save_weights_for_sampler("whole").result().path) == weights(whole)

    loaded = service.create_lora_training_client("rolltape/tiny", rank=8, seed=99)
    loaded.load_state_with_optimizer(state).result()
    step(loaded, -0.25)
    assert weights(loaded.save_weights_for_sampler("whole").result().path) == weights(whole)

    fresh = service.create_training_client_from_state(state)
    step(fresh, -0.25)
    assert weights(fresh.save_weights_for_sampler("whole").result().path) != weights(whole)
    plain = service.create_lora_training_client("rolltape/tiny", rank=8, seed=99)
    plain.load_state(state).result()
    step(plain, -0.25)
    assert weights(plain.save_weights_for_sampler("w").result().path) != weights(whole)


def test_parts_of_the_adapter_can_be_left_out(service: pytrio.ServiceClient, tokens: list[int]) -> None:
    """train_attn, train_mlp and train_unembed change what is saved; ranks beyond 4..64 are refused."""
    sizes = []
    for unembed in (True, False):
        client = service.create_lora_training_client("rolltape/tiny", rank=4, seed=1, train_unembed=unembed)
        sizes.append(client.save_weights_for_sampler("w").result().size)
    assert sizes[0] > sizes[1]
    with pytest.raises(pytrio.PyTrioError, match="rank"):
        service.create_lora_training_client("rolltape/tiny", rank=3)


def test_rest_lists(service: pytrio.ServiceClient) -> None:
    """Runs, checkpoints, sessions and samplers are listed, filtered, paged and deleted."""
    rest = service.create_rest_client()
    client = service.create_lora_training_client("rolltape/tiny", rank=4, seed=1)
    state = client.save_state("s").result().path
    weights = client.save_weights_for_sampler("w", ttl_seconds=100).result().path
    run = rest.get_training_run(client.training_run_cuid).result()
    assert (run.lora_rank, run.is_lora, run.corrupted) == (4, True, False)
    listed = rest.list_training_runs(limit=1).result()
    assert [item.training_run_id for item in listed.training_runs] == [client.training_run_cuid]
    assert listed.cursor.total_count >= 1
    saved = {c.path: c for c in rest.list_checkpoints(client.training_run_cuid).result().checkpoints}
    assert {path: c.checkpoint_type for path, c in saved.items()} == {
        state: "training",
        weights: "sampler",
    }
    assert saved[state].expires_at is None
    assert saved[weights].expires_at is not None
    lifetime = saved[weights].expires_at - saved[weights].time
    assert lifetime.total_seconds() == pytest.approx(100)
    sampler = service.create_sampling_client("rolltape/tiny", weights)
    assert rest.get_sampler(sampler.sampling_run_cuid).result().model_path == weights
    session = rest.get_session(service.service_session_cuid).result()
    assert client.training_run_cuid in session.training_run_ids
    assert service.service_session_cuid in rest.list_sessions().result().sessions
    rest.delete_checkpoint(client.training_run_cuid, saved[weights].checkpoint_id).result()
    left = rest.list_checkpoints(client.training_run_cuid).result().checkpoints
    assert [item.path for item in left] == [state]
    with pytest.raises(pytrio.PyTrioError, match="no checkpoint"):
        service.create_sampling_client("rolltape/tiny", weights)
    with pytest.raises(pytrio.PyTrioError, match="no download address"):
        rest.get_checkpoint_archive_url(saved[state].checkpoint_id).result()


def test_a_taken_name_is_refused_unless_overwritten(service: pytrio.ServiceClient) -> None:
    """Checkpoint names are unique in their run; save_state can overwrite, and the run goes on."""
    client = service.create_lora_training_client("rolltape/tiny", rank=4, seed=1)
    client.save_state("s").result()
    with pytest.raises(pytrio.PyTrioError, match="exists already"):
        client.save_state("s").result()
    assert client.save_state("s", overwrite=True).result().path.endswith("/state/s")


def test_images_are_a_clear_error(trainer: pytrio.TrainingClient, service: pytrio.ServiceClient) -> None:
    """An image is refused in words by sampling and training, and the run stays usable."""
    image = pytrio.ImageChunk(data=b"png", format="png", expected_tokens=1)
    prompt = ModelInput(chunks=[image])
    sampler = service.create_sampling_client("rolltape/tiny")
    with pytest.raises(pytrio.PyTrioError, match="text only"):
        sampler.sample(prompt, sampling_params=SamplingParams(max_tokens=1)).result()
    datum = Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [3]})
    with pytest.raises(pytrio.PyTrioError, match="text only"):
        trainer.forward_backward([datum]).result()
    assert trainer.save_state("after-image").result().path


def test_unknown_models_and_uris_are_refused(service: pytrio.ServiceClient) -> None:
    """A wrong model or checkpoint is an error at once, in words."""
    with pytest.raises(pytrio.PyTrioError, match="rolltape/tiny"):
        service.create_lora_training_client("Qwen/Qwen3.5-4B")
    with pytest.raises(pytrio.PyTrioError, match="no checkpoint"):
        service.create_training_client_from_state("trio://run-0000000000000000/state/x")
    client = service.create_lora_training_client("rolltape/tiny", rank=4)
    weights = client.save_weights_for_sampler("w").result().path
    with pytest.raises(pytrio.PyTrioError, match="restore a saved state"):
        service.create_training_client_from_state(weights)
