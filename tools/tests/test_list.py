"""`chapbook list`: from metadata alone, and into the README."""

import pytest

from chapbook.catalogue import BEGIN, END, Entry, markdown, paper_title, with_catalogue

ENTRY = Entry(
    package="a-loss",
    version="0.1.0",
    method="A|B loss",
    use="a use",
    paper="On Losses",
    paper_url="https://example.org",
    install="pip install a-loss",
    summary="A|B loss: a use",
)
README = "# a-loss\n\n```bibtex\n@inproceedings{x,\n  title = {{On} the {3D} Case,\n  in Two Lines},\n  year = {2025}\n}\n```\n"


def test_a_package_is_listed_without_being_imported(chapbook, install):
    # Its __init__ raises: see the fixture.
    path = install("a-loss", "", description="Topo: a loss: really", readme=README)
    done = chapbook("list", "--json", path=path)
    assert done.code == 0, done.err
    [entry] = [entry for entry in done.json if entry["package"] == "a-loss"]
    assert entry == {
        "package": "a-loss",
        "version": "1.2.3",
        "method": "Topo",
        "use": "a loss: really",
        "paper": "On the 3D Case, in Two Lines",
        "paper_url": "https://example.org/paper",
        "install": "pip install a-loss",
        "summary": "Topo: a loss: really",
    }


def test_the_table_names_package_and_install_line(chapbook, install):
    done = chapbook("list", path=install("a-loss", "", description="Topo: a loss"))
    assert "a-loss" in done.out
    assert "pip install a-loss" in done.out


@pytest.mark.parametrize(
    ("bibtex", "title"),
    [
        ("title = {Plain}", "Plain"),
        ("title={{All of It}}", "All of It"),
        ('title = "Quoted {B}races"', "Quoted Braces"),
        ("booktitle = {A Conference},\n title = {The Paper}", "The Paper"),
        ("year = {2025}", ""),
    ],
)
def test_the_title_of_the_paper(bibtex, title):
    assert paper_title(f"```bibtex\n@article{{key,\n {bibtex}\n}}\n```\n") == title


def test_no_citation_no_title():
    assert paper_title("# a readme\n```python\ntitle = 3\n```\n") == ""


def test_a_bar_in_a_cell_does_not_break_the_table():
    row = markdown([ENTRY]).splitlines()[2]
    assert row == (
        r"| [a-loss](packages/a-loss) | A\|B loss: [On Losses](https://example.org) | a use | `pip install a-loss` | 0.1.0 |"
    )


def test_only_the_text_between_the_markers_changes():
    fresh = with_catalogue(f"before\n{BEGIN}\nold\n{END}\nafter\n", [ENTRY])
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    assert "old" not in fresh
    assert with_catalogue(fresh, [ENTRY]) == fresh


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="has no place for the catalogue"):
        with_catalogue("# nothing here\n", [ENTRY])


def test_check_says_out_of_date_until_written(chapbook, workspace):
    readme = workspace.root / "README.md"
    readme.write_text(f"# shelf\n{BEGIN}\n{END}\n", encoding="utf-8")
    stale = chapbook("list", "--check", cwd=workspace.root)
    assert stale.code == 1
    assert "chapbook list --readme" in stale.err
    assert readme.read_text(encoding="utf-8") == f"# shelf\n{BEGIN}\n{END}\n"
    assert chapbook("list", "--readme", cwd=workspace.root).code == 0
    assert chapbook("list", "--check", cwd=workspace.root).code == 0


def test_outside_a_workspace_check_is_wrong_use(chapbook):
    done = chapbook("list", "--check")
    assert done.code == 2
    assert "lies in no chapbook workspace" in done.err
