"""Folders that peft wrote."""

from __future__ import annotations

import functools
import shutil

import pytest

from support.peft_boundary import kept
from support.peft_models import saved


@pytest.fixture(scope="session")
def written_by_peft(tmp_path_factory):
    """name -> base model, peft's model, scaling, and the directory that peft wrote."""

    @functools.cache
    def make(name):
        build, model, scaling = kept(name)
        return build, model, scaling, saved(model, tmp_path_factory.mktemp("peft"))

    return make


@pytest.fixture
def plain(written_by_peft, tmp_path):
    """A plain adapter that peft saved: 4 modules of rank 4 and alpha 8, no heads. For edits that must be refused."""
    return shutil.copytree(written_by_peft("list")[-1], tmp_path / "plain")
