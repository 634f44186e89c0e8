"""The Auto classes know our models once both packages are imported, in whichever order, and nobody waits for it."""

import subprocess
import sys

import pytest

KNOWN = "print(transformers.AutoConfig.for_model('latte').model_type)"


def run(script: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_latte_imports_neither_torch_nor_transformers():
    loaded = run("import sys, latte; print([name for name in ('torch', 'transformers') if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize(
    "imports",
    [
        "import latte, transformers",
        pytest.param("import transformers, latte", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoModel; import latte, transformers", marks=pytest.mark.slow),
        # Modules that import the Auto classes on their way, and are then half done:
        pytest.param("import latte; import transformers.modeling_layers; import transformers", marks=pytest.mark.slow),
        pytest.param("import latte; from transformers import LlamaModel; import transformers", marks=pytest.mark.slow),
        pytest.param("import latte; from transformers import Trainer; import transformers", marks=pytest.mark.slow),
        pytest.param("from latte.models import LatteConfig; import transformers", marks=pytest.mark.slow),
        pytest.param("import latte, peft, transformers", marks=pytest.mark.slow),
    ],
)
def test_in_whichever_order(imports):
    assert run(f"{imports}; {KNOWN}") == "latte"


@pytest.mark.slow
def test_modules_of_transformers_are_imported_as_ever():
    """The finder that waits is gone afterwards, and the modules have the loaders that they always have."""
    script = "import latte, sys, transformers; transformers.AutoConfig; from latte import autoclasses;"
    script += "print([f for f in sys.meta_path if type(f).__module__ == 'latte.autoclasses'],"
    script += " transformers.models.auto.__spec__.origin.endswith('__init__.py'))"
    assert run(script) == "[] True"


@pytest.mark.slow
def test_an_old_transformers_is_left_alone():
    script = """
import warnings
from importlib import metadata
true = metadata.version
metadata.version = lambda name: "4.57.1" if name == "transformers" else true(name)
import latte
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from transformers import AutoConfig
print(any("Latte models need transformers >= 5.17, and this is 4.57.1" in str(w.message) for w in caught))
"""
    assert run(script) == "True"
