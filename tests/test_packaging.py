"""What an installation gets: the version, the public names, and the package with its type marker and nothing else."""

import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import latte

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = target.glob("*.whl")
    assert wheel.name == f"latte_attention-{latte.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(wheel).namelist()


def test_version_of_the_distribution_is_the_version_of_the_package():
    assert version("latte-attention") == latte.__version__


def test_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="latte")
    assert command.value == "latte.cli:main"


@pytest.mark.parametrize("name", latte.__all__)
def test_public_names_are_those_of_their_homes(name):
    home = import_module(latte._HOMES[name])
    assert getattr(latte, name) is getattr(home, name)
    assert name in home.__all__
    assert name in dir(latte)


def test_every_public_name_has_a_home():
    assert sorted(latte._HOMES) == sorted(latte.__all__)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'espresso'"):
        _ = latte.espresso


def test_wheel_holds_the_whole_package_and_its_type_marker(wheel_files):
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "latte").rglob("*.py")}
    assert package | {"latte/py.typed"} <= set(wheel_files)


def test_wheel_holds_nothing_else(wheel_files):
    metadata = f"latte_attention-{latte.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel_files} == {"latte", metadata}
    assert f"{metadata}/licenses/LICENSE" in wheel_files
