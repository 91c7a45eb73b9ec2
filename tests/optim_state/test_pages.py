"""The code of the pages about optimizer state runs."""

from __future__ import annotations

import pytest

from tests.docs.test_examples import run_page
from tests.support.ranks import run_kept_ranks


def run_once(page, folder):
    """One folder for all ranks: rank 0 writes what the others read."""
    folder.mkdir(exist_ok=True)
    run_page(page, folder)


@pytest.mark.parametrize(
    "page",
    [
        "docs/how-to/optimizer-state.md",
        "docs/how-to/whole-matrix-optimizers.md",
        "docs/how-to/step-in-backward.md",
    ],
)
def test_the_code_of_a_page_runs(tmp_path, page):
    run_kept_ranks(run_once, 2, page, tmp_path)
