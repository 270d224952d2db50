import json
import subprocess
import sys

MODULES = ["bench", "demo", "jobs", "lm", "progress", "report", "seeding", "validate"]
HEAVY = {"torch", "numpy", "transformers", "matplotlib", "openai", "httpx", "pyarrow", "jinja2", "rich", "pydantic"}


def test_importing_the_base_modules_loads_no_heavy_library():
    imports = "; ".join(f"import chapbook_shared.{name}" for name in MODULES)
    script = f"import sys, json; {imports}; print(json.dumps([m.partition('.')[0] for m in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert HEAVY & set(json.loads(out)) == set()
