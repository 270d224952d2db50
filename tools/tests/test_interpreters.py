"""Interpreters are asked, not believed."""

import sys

from chapbook import interpreters

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def script(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_a_shim_that_fails_is_passed_over(tmp_path, monkeypatch):
    script(tmp_path / "shims", "python3.99", "echo 'pyenv: python3.99: command not found' >&2; exit 127")
    right = script(tmp_path / "bin", "python3.99", "echo 3.99")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'bin'}")
    assert interpreters.find("3.99") == right


def test_the_versions_of_pyenv_are_found_without_being_active(tmp_path, monkeypatch):
    (tmp_path / "versions" / "3.99.1").mkdir(parents=True)
    right = script(tmp_path / "versions" / "3.99.1" / "bin", "python3.99", "echo 3.99")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert interpreters.find("3.99") == right


def test_an_interpreter_of_another_version_is_passed_over(tmp_path):
    assert not interpreters.answers(script(tmp_path, "python3.13", "echo 3.12"), "3.13")


def test_one_that_cannot_be_started_is_passed_over(tmp_path):
    assert not interpreters.answers(tmp_path / "nowhere", "3.13")


def test_the_running_version_is_found_outside_the_environment():
    found = interpreters.find(HERE)
    assert found is not None
    assert interpreters.answers(found, HERE)
    assert not str(found).startswith(sys.prefix) or sys.prefix == sys.base_prefix


def test_a_version_that_nobody_has_is_none():
    assert interpreters.find("3.99") is None
