"""Two processes compute what one does: sharded by FSDP2, and split by the tensor-parallel plan."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Cache
from transformers.distributed import DistributedConfig

from latte.layers import SoftmaxState
from latte.models import LatteForCausalLM
from latte.models.cache import tensors
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
    heads = alone.config.num_value_heads if form == "softmax" else alone.config.num_heads
    with torch.no_grad():
        output = split(tokens, use_cache=True)
        torch.testing.assert_close(output.logits, alone(tokens).logits, **CLOSE)
        assert held_heads(output.past_key_values) == {max(heads // 2, 1)}  # each rank has its own
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        assert torch.equal(split.generate(tokens, **options), alone.generate(tokens, **options))
    losses = [model.train()(tokens, labels=tokens).loss for model in (split, alone)]
    torch.testing.assert_close(*losses, **CLOSE)
    for loss in losses:
        loss.backward()
    for (name, expected), actual in zip(alone.named_parameters(), split.parameters(), strict=True):
        grad = actual.grad.full_tensor() if isinstance(actual.grad, DTensor) else actual.grad
        torch.testing.assert_close(grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def held_heads(cache: Cache) -> set[int]:
    """How many heads, or of keys and values how many, the states of a cache are of."""
    states = [layer.state.attention for layer in cache.layers]
    return {x.keys.shape[2] if isinstance(x, SoftmaxState) else next(tensors(x)).shape[1] for x in states}


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_sharded(form, tmp_path):
    launch(train_sharded, tmp_path, form)


EVEN = {"hidden_size": 32, "mixer_blocks": 4, "intermediate_size": 42, "vocab_size": 102}  # some split nothing odd


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_split(form, tmp_path):
    make_model(form, num_heads=4, num_value_heads=2, **EVEN).save_pretrained(tmp_path)
    launch(run_split, tmp_path, form)


def test_heads_that_cannot_be_dealt_out_are_gathered(tmp_path):
    make_model("macchiato", num_heads=1, num_latents=8, window=11, **EVEN).save_pretrained(tmp_path)
    launch(run_split, tmp_path, "macchiato")


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_plans_name_what_there_is(form):
    config = make_config(form)
    names = {name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in make_model(form).model.named_modules()}
    assert set(config.base_model_tp_plan) <= names
    assert set(config.base_model_pp_plan) <= names
    assert {"embed_tokens", "layers.*", "norm"} == set(config.base_model_fsdp_plan)
