"""Two processes compute what one does: sharded by FSDP2, and split by the tensor-parallel plan."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

from latte.models import LatteForCausalLM
from tests.models.forms import make_config, make_model, make_tokens

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def launch(function: Callable, directory: Path, form: str) -> None:
    mp.spawn(enter, args=(function, str(directory), form), nprocs=2)


def enter(rank: int, function: Callable, directory: str, form: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meeting", rank=rank, world_size=2)
    function(rank, directory, form)
    dist.barrier()
    dist.destroy_process_group()


def train_sharded(rank: int, directory: str, form: str) -> None:
    """Each rank sees half of the batch; after two steps the weights are those of one process that saw all of it."""
    tokens = make_tokens(4, 23)
    alone, sharded = make_model(form).train(), make_model(form).train()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded.lm_head)
    fully_shard(sharded)
    own = tokens[2 * rank : 2 * rank + 2]
    for model, batch in ((alone, tokens), (sharded, own)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
    for (name, expected), actual in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            actual.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )


def run_split(rank: int, directory: str, form: str) -> None:
    """Logits, losses, gradients and generated tokens of a model that is split among both."""
    tokens = make_tokens(2, 23)
    alone = LatteForCausalLM.from_pretrained(directory)
    split = LatteForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(tp_size=2))
    up = split.model.layers[0].feedforward.up.weight
    assert up.to_local().shape[0] == alone.config.intermediate_size // 2
    with torch.no_grad():
        torch.testing.assert_close(split(tokens).logits, alone(tokens).logits, **CLOSE)
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        assert torch.equal(split.generate(tokens, **options), alone.generate(tokens, **options))
    losses = [model.train()(tokens, labels=tokens).loss for model in (split, alone)]
    torch.testing.assert_close(*losses, **CLOSE)
    for loss in losses:
        loss.backward()
    expected = alone.model.layers[0].attention.value.weight.grad
    torch.testing.assert_close(split.model.layers[0].attention.value.weight.grad.full_tensor(), expected, **CLOSE)


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_sharded(form, tmp_path):
    launch(train_sharded, tmp_path, form)


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_split(form, tmp_path):
    even = {"hidden_size": 32, "num_heads": 2, "mixer_blocks": 4, "intermediate_size": 42, "vocab_size": 102}
    make_model(form, **even).save_pretrained(tmp_path)  # older releases split nothing that is odd
    launch(run_split, tmp_path, form)


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_plans_name_what_there_is(form):
    config = make_config(form)
    names = {name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in make_model(form).model.named_modules()}
    assert set(config.base_model_tp_plan) <= names
    assert set(config.base_model_pp_plan) <= names
    assert {"embed_tokens", "layers.*", "norm"} == set(config.base_model_fsdp_plan)
