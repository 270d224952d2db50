"""`python -m ac_router.bench`, next to the other benchmarks."""

from ac_router.bench import run
from chapbook_shared.bench import main

if __name__ == "__main__":
    main(run)
