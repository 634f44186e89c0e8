"""Prefix caches that are broken, or none, are refused when they are loaded."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from latte.models import load_cache, save_cache
from tests.models.forms import make_model, make_tokens


@pytest.fixture
def saved(tmp_path):
    """A model and the path of a prefix of its own."""
    model = make_model("macchiato")
    save_cache(model(make_tokens(1, 13)).past_key_values, tmp_path / "prefix", model.config)
    return model, tmp_path / "prefix"


@pytest.mark.parametrize("left", [0, 5, 500])
def test_a_file_that_was_cut_short(left, saved):
    model, path = saved
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match="prefix is no cache that save_cache has written, or a part of one: "):
        load_cache(path, model.config)


@pytest.mark.parametrize("name", ["shape", "seen", "kinds"])
def test_a_file_of_something_else(name, saved):
    model, path = saved
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    del metadata[name]
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(ValueError, match=f"prefix is no cache that save_cache has written, or a part of one: '{name}'"):
        load_cache(path, model.config)


@pytest.mark.parametrize("name", ["position", "attention.valid", "attention.latents.mean"])
def test_a_missing_tensor(name, saved):
    model, path = saved
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    named = load_file(path)
    del named[f"layers.1.{name}"]
    save_file(named, path, metadata=metadata)
    with pytest.raises(ValueError, match=f"prefix has no tensor 'layers.1.{name}'; save the cache again"):
        load_cache(path, model.config)


def test_no_file(saved):
    model, path = saved
    for missing in (path.parent, path.parent / "nothing"):
        with pytest.raises(FileNotFoundError, match=f"{missing}: there is no such file"):
            load_cache(missing, model.config)
