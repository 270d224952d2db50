"""Settings every test of the workspace runs under.

No model hub is asked, no window is opened, the shapes written in jaxtyping annotations are checked at run time, and a
warning that one of our own modules raises is an error. Nothing here imports a package: a test sees it import afresh.
"""

import os
import signal
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell starts what runs in the background with Ctrl-C ignored, and children inherit that: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent


def import_packages() -> dict[str, Path]:
    """Import name -> folder, of every import package that the workspace holds."""
    sources = [ROOT / "shared" / "src", ROOT / "tools" / "src", *sorted(ROOT.glob("packages/*/src"))]
    return {init.parent.name: init.parent for source in sources for init in sorted(source.glob("*/__init__.py"))}


def uses_jaxtyping(folder: Path) -> bool:
    return any("jaxtyping" in module.read_text(encoding="utf-8") for module in folder.rglob("*.py"))


# As for the static checker, an int is good where a float is asked for.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

# At import time, not in a hook: the packages' own conftest files are loaded, and may import them, before any hook runs.
install_import_hook(
    [name for name, folder in import_packages().items() if uses_jaxtyping(folder)],
    CHECKER,
)


def pytest_configure(config: pytest.Config) -> None:
    for name in import_packages():
        config.addinivalue_line("filterwarnings", rf"error:::{name}(\.|$)")
