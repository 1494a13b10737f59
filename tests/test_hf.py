"""Hugging Face addresses: parsing, shrinking, and one training step of the smoke types."""

import importlib
import sys

import pytest
import torch

from spmd_verify.cases.case import load_case
from spmd_verify.errors import SpmdVerifyError
from spmd_verify.hf.shrink import rules, shrunk

pytest.importorskip("transformers")

HEAD_SAMPLES = ["seqcls/bert", "seq2seq/bart", "speech2seq/whisper", "ctc/hubert", "audio/hubert"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*rules()["smoke"], *HEAD_SAMPLES, "detr"])
def test_a_type_builds_and_trains_one_step(name: str, dtype: str) -> None:
    case = load_case(f"hf:{name}", dtype=dtype)
    model = case.build_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = case.step(model, case.optimizer(model), case.batch(0))

    assert torch.isfinite(loss)
    assert any(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", [name for name in rules()["types"] if name not in rules()["smoke"]]
)
def test_every_listed_type_trains(name: str, dtype: str) -> None:
    case = load_case(f"hf:{name}", dtype=dtype)
    model = case.build_model()

    assert torch.isfinite(case.step(model, case.optimizer(model), case.batch(0)))


def test_the_first_head_of_the_list_is_taken_and_can_be_chosen() -> None:
    assert type(load_case("hf:bert").build_model()).__name__ == "BertLMHeadModel"
    assert type(load_case("hf:mlm/bert").build_model()).__name__ == "BertForMaskedLM"


def test_fields_and_the_batch_are_overridden_in_the_address() -> None:
    case = load_case("hf:gpt2?n_layer=3&batch=5")

    assert case.build_model().config.n_layer == 3
    assert case.batch_size == 5


def test_rows_are_padded_unequally_unless_told_otherwise() -> None:
    padded, plain = load_case("hf:gpt2").inputs(0), load_case("hf:gpt2?padding=0").inputs(0)

    assert len(set((padded["labels"] != -100).sum(1).tolist())) > 1
    assert bool(plain["attention_mask"].all())
    assert not bool((plain["labels"] == -100).any())


def test_a_nested_field_has_a_dotted_name() -> None:
    model = load_case("hf:siglip?vision_config.num_hidden_layers=1").build_model()

    assert model.config.vision_config.num_hidden_layers == 1


def test_overrides_go_over_the_address() -> None:
    case = load_case("hf:gpt2?n_layer=3", overrides={"n_layer": "1", "optimizer": "sgd"})

    assert case.build_model().config.n_layer == 1


def test_rows_are_padded_unequally_with_ignored_labels() -> None:
    batch = load_case("hf:gpt2").batch(0)
    padded = (batch["attention_mask"] == 0).sum(1)

    assert padded.min() < padded.max()
    assert 0.05 < padded.sum() / batch["labels"].numel() < 0.15
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)


def test_every_forward_argument_has_its_batch_on_dim_0() -> None:
    case = load_case("hf:gpt2?batch=7")

    assert case.input_batch_dims == {"input_ids": 0, "attention_mask": 0, "labels": 0}


def test_the_same_address_gives_the_same_model() -> None:
    first, second = (load_case("hf:gpt2", seed=4) for _ in range(2))

    assert first.source_hash == second.source_hash
    pairs = zip(first.build_model().parameters(), second.build_model().parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("address", "slug", "says"),
    [
        ("hf:gpt22", "hf-unknown-type", "did you mean 'gpt2'"),
        ("hf:image/gpt2", "hf-no-head", "it has causal, seqcls"),
        ("hf:nothing/gpt2", "hf-no-head", "Got 'nothing'"),
        ("hf:gpt2?n_layers=3", "hf-unknown-field", "did you mean 'n_layer'"),
        ("hf:gpt2?n_layer", "bad-address", "expected field=value"),
        ("hf:gpt2?batch=0", "bad-number", "at least 1"),
        ("hf:gpt2?padding=2", "bad-number", "0 or 1"),
        ("hf:gpt2?n_head='x'", "hf-refused", "configuration failed"),
    ],
)
def test_a_wrong_address_is_refused(address: str, slug: str, says: str) -> None:
    with pytest.raises(SpmdVerifyError, match=says) as caught:
        load_case(address)

    assert caught.value.slug == slug
    assert caught.value.exit_code == 2


def test_without_transformers_the_error_holds_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(SpmdVerifyError, match=r"pip install 'spmd-verify\[hf\]'") as caught:
        load_case("hf:gpt2")

    assert caught.value.slug == "hf-missing"


def test_shrinking_keeps_types_and_equal_heads() -> None:
    small = shrunk(
        {
            "model_type": "none",
            "hidden_size": 768,
            "attention_dropout": 0,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": None,
            "sliding_window": None,
            "vocab_size": 50000,
            "eos_token_id": 49999,
            "pad_token_id": 49998,
            "bos_token_id": 5,
            "use_cache": True,
        }
    )

    assert small == {
        "hidden_size": 64,
        "attention_dropout": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": False,
    }
    assert type(small["attention_dropout"]) is int


def test_grouped_heads_stay_grouped_and_nested_configurations_shrink() -> None:
    small = shrunk(
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vision_config": {"model_type": "none", "image_size": 224},
        }
    )

    assert small["num_key_value_heads"] == 2
    assert small["vision_config"] == {"model_type": "none", "image_size": 64}


def test_the_data_file_is_part_of_the_package() -> None:
    assert len(rules()["types"]) == 43
    assert set(rules()["smoke"]) <= set(rules()["types"])
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    assert all(hasattr(tables, table) for _, table in rules()["heads"].values())
