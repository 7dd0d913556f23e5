"""Finding a benchmark's files from the path that the user gives."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError


def files_by_subject(path: Path, suffix: str) -> dict[str, Path]:
    """The files `<subject><suffix>` of a folder, or the one file that the path names, by subject in order of names.

    Raises:
        UserError: there is no such path, or no such file in the folder.
    """
    if path.is_file():
        if not path.name.endswith(suffix):
            raise UserError(
                f"--task-data-path: {path} is named otherwise than <subject>{suffix}. Give such a file or a folder."
            )
        return {path.name.removesuffix(suffix): path}
    if not path.is_dir():
        raise UserError(f"--task-data-path: {path} does not exist. Give the folder with the files <subject>{suffix}.")
    # What archives of macOS leave beside each file begins with a dot.
    files = [file for file in sorted(path.glob(f"*{suffix}")) if file.is_file() and not file.name.startswith(".")]
    found = {file.name.removesuffix(suffix): file for file in files}
    if not found:
        raise UserError(
            f"--task-data-path: no file <subject>{suffix} in {path}. {_where_to_look(path, (f'*{suffix}',))}"
        )
    return found


def one_file(path: Path, names: tuple[str, ...]) -> Path:
    """The file that the path names, or the one of the folder that fits; of several patterns the first that fits counts.

    Raises:
        UserError: there is no such path, no file fits, or several fit.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"--task-data-path: {path} does not exist. Give a file or folder with {' or '.join(names)}.")
    for name in names:
        found = sorted(file for file in path.glob(name) if not file.name.startswith("."))
        if len(found) > 1:
            listed = ", ".join(file.name for file in found)
            raise UserError(
                f"--task-data-path: several files of {path} fit {name}: {listed}. Give the one that is meant."
            )
        if found:
            return found[0]
    raise UserError(f"--task-data-path: {path} holds no file {' or '.join(names)}. {_where_to_look(path, names)}")


def _where_to_look(path: Path, names: tuple[str, ...]) -> str:
    """What to give instead: folders below that hold such files, if there are any."""
    found = {file.parent for name in names for file in path.glob(f"*/{name}") if not file.name.startswith(".")}
    # In dev/ are examples for prompts, named as questions are in some benchmarks.
    below = sorted(folder for folder in found if folder.name != "dev") or sorted(found)
    if not below:
        return "Give the folder that holds them."
    return f"Such files are in {' and '.join(map(str, below[:3]))}: give that folder."


def dev_file(test_file: Path, name: str) -> Path:
    """The file with the examples for the prompt: `../dev/<name>` as seen from the folder of the test file.

    Raises:
        UserError: it is not there.
    """
    file = test_file.absolute().parent.parent / "dev" / name
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: the examples in the prompts of {test_file} come from there. "
            "Put the benchmark's dev folder beside its test folder."
        )
    return file
